"""The tiny recipe learns: a reward that the untrained policy is nowhere near, by every method, and by LoGRA in every seed."""

from pathlib import Path

import pytest

from logra import config as cfg
from logra.build import build_run
from logra.rl.run_dir import read_metrics

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


def mean_rewards(folder, **flags):
    """(mean reward of the first two steps, of the last five)."""
    base = {"output_dir": str(folder), "eval": None, "checkpoint.every": 0, "log.completions": False}
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))
    try:
        run.fit()
    finally:
        run.close()
    rewards = [record["reward"] for record in read_metrics(Path(folder) / "metrics.jsonl")]
    return sum(rewards[:2]) / 2, sum(rewards[-5:]) / 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_logra_learns(seed, tmp_path):
    before, after = mean_rewards(tmp_path / "run", seed=seed)
    assert before < 0.35 and after > 0.55


OTHERS = [{"method.name": "dense"}, {"method.name": "lora"}, {"method.variant": "paper"}, {"method.basis": "aligned"}]


@pytest.mark.slow
@pytest.mark.parametrize("flags", OTHERS)
def test_the_other_methods_learn(flags, tmp_path):
    flags = {"method.lr": 1.0 if "method.variant" in flags else 3e-3, "method.update_ratio": 3e-2} | flags
    before, after = mean_rewards(tmp_path / "run", **flags)
    assert before < 0.35 and after > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo", "reinforce"])
def test_every_loss_learns_with_several_updates_a_step(loss, tmp_path):
    flags = {
        "algorithm.loss": loss,
        "algorithm.updates_per_step": 2,
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.3,
    }
    before, after = mean_rewards(tmp_path / "run", **flags)
    assert before < 0.35 and after > 0.5
