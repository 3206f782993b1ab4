"""Predicted against measured KL on a real model, real rollouts and a real RL proposal, over a range of budgets.

    python benchmarks/predicted_kl.py [--recipe recipes/demo.yaml] [--prompts 8] [--record PATH | --no-record]

One batch is sampled by the recipe, one proposal made, and the step scaled to each budget by its prediction; the KL really
caused is measured on the same contexts. The ratio should be within 3 % below 1e-3. Weights are never changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from record import begin_record, finish_record  # noqa: E402

from logra import config as cfg  # noqa: E402
from logra import measure_kl, predict_kl  # noqa: E402
from logra.build import build_run  # noqa: E402
from logra.rl.step import Tally, accumulate  # noqa: E402

BUDGETS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def compare(recipe: str, prompts: int, folder: str) -> list[dict[str, float]]:
    """One row a budget: scale, predicted, measured, ratio."""
    flags = {"output_dir": folder, "rollout.prompts_per_step": prompts, "eval": None, "log.completions": False}
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(recipe), flags)))
    try:
        trainer = run.trainer
        sketcher, model = trainer.method.sketcher, trainer.method.model  # type: ignore[attr-defined]
        rollouts = trainer.rollout([trainer.prompts[i] for i in trainer.sampler.next_batch()])
        advantages = trainer.advantages(rollouts, trainer.rewards.score_rollouts(rollouts))
        batch = trainer.batch(rollouts, advantages)
        accumulate(model, batch, trainer.plan.microbatch_size, trainer.plan.loss, tally=Tally())
        proposal, probe = sketcher.propose(run.config.method.lr), trainer.probe(batch)
        at_one = predict_kl(model, sketcher, proposal, probe, mode="forward")
        rows = []
        for budget in BUDGETS:
            scale = (budget / at_one) ** 0.5
            measured = measure_kl(model, sketcher, proposal, probe, scale)
            rows.append({"scale": scale, "predicted": budget, "measured": measured, "ratio": budget / measured})
        return rows
    finally:
        run.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    config = {"recipe": options.recipe, "prompts": options.prompts}
    begun = None if options.no_record else begin_record(name="predicted_kl", config=config, seed=42)
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(options.recipe, options.prompts, f"{folder}/run")
    table = Table("scale", "predicted KL", "measured KL", "predicted / measured", box=None)
    for row in rows:
        table.add_row(f"{row['scale']:.3f}", f"{row['predicted']:.1e}", f"{row['measured']:.3e}", f"{row['ratio']:.4f}")
    Console().print(table)
    if begun is not None:
        finish_record(options.record, begun, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
