"""A training step under the meter: the same bits as without, and nothing alive at the end of a phase but what is kept."""

import json
from pathlib import Path

import pytest
import torch

from logra import config as cfg
from logra.build import build_run
from logra.memory.gauge import GRADIENT, ROLLOUT, UPDATE
from logra.memory.meter import KINDS, Meter
from logra.region import region
from logra.rl.run_dir import read_metrics
from logra.rl.step import Tally, accumulate
from logra.sketch.block import digest

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.yaml"
SMALL = 4096  # bytes: scalars and per-token numbers that the loop still names
KINDS_OF_RUN = {
    "logra": {},
    "aligned": {"method.basis": "aligned", "method.optimizer": "adam", "algorithm.kl_coef": 0.01},
    "gpt2": {"model.name_or_path": "builtin:tiny-gpt2", "trust.mode": "finite_difference"},
    "checkpointed": {"model.gradient_checkpointing": True, "trust.mode": "forward", "trust.verify": True},
    "bfloat16": {"model.dtype": "bfloat16", "method.weights": "split", "method.residual": "cpu"},
    "beside": {"method.dense_params": ["norms"], "algorithm.updates_per_step": 2},
    "dense": {"method.name": "dense"},
    "lora": {"method.name": "lora", "model.gradient_checkpointing": True},
}


def start(folder, **flags):
    base = {
        "output_dir": str(folder), "eval": None, "checkpoint.every": 0, "rollout.prompts_per_step": 4,
        "rollout.rollouts_per_prompt": 4, "train.microbatch_size": 4, "train.steps": 2, "log.memory_timelines": [2],
        "trust.probe_rollouts": 2, "trust.measure_every": 2,
    }  # fmt: skip
    return build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))


def train(folder, **flags):
    run = start(folder, **flags)
    try:
        run.fit()
        tensors, _ = run.trainer.method.state()
        return digest(run.trainer.method.model), tensors, read_metrics(folder / "metrics.jsonl")
    finally:
        run.close()


def rolled_out(trainer):
    """A batch, and the engine's memory after it."""
    prompts = [trainer.prompts[i] for i in trainer.sampler.next_batch()]
    rollouts = trainer.rollout(prompts)
    advantages = torch.linspace(-1.0, 1.0, len(rollouts), dtype=torch.float64)
    result = trainer.advantages(rollouts, trainer.rewards.score_rollouts(rollouts))
    return trainer._weighted(trainer.batch(rollouts, result), advantages, torch.zeros(len(rollouts), dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS_OF_RUN)
def test_measuring_changes_no_bit(kind, tmp_path):
    runs = [train(tmp_path / str(on), **KINDS_OF_RUN[kind], **{"log.memory": on}) for on in (True, False)]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())
    measured, plain = (run[2] for run in runs)
    for a, b in zip(measured, plain, strict=True):
        assert {k: v for k, v in a.items() if k[:7] != "memory/" and "time" not in k} == {
            k: v for k, v in b.items() if k[:7] != "memory/" and "time" not in k
        }
        assert {k for k in b if k[:7] == "memory/"} == {"memory/rss_bytes"}
        peak = a["memory/peak_bytes"]
        assert peak == max(a["memory/gradient_peak_bytes"], a["memory/update_peak_bytes"]) >= a["memory/mean_bytes"] > 0
        assert sum(a.get(f"memory/{name}_bytes", 0) for name in KINDS) == peak
    own = {k for k in measured[0] if k[:7] == "memory/"}
    assert own | {"memory/rollout_peak_bytes"} >= {k for k in measured[1] if k[:7] == "memory/"}
    points = json.loads((tmp_path / "True" / "memory" / "step_000002.json").read_text())["points"]
    assert [p.name for p in (tmp_path / "True" / "memory").iterdir()] == ["step_000002.json"]
    assert not (tmp_path / "False" / "memory").exists() and len(points) <= 2000
    tops = {name: max(sum(p["bytes"].values()) for p in points if p["phase"] == name) for name in (ROLLOUT, GRADIENT)}
    assert tops[ROLLOUT] == measured[1]["memory/rollout_peak_bytes"]
    assert max(sum(p["bytes"].values()) for p in points if p["phase"] != ROLLOUT) == measured[1]["memory/peak_bytes"]
    assert any(p["bytes"].get("kv_cache") for p in points if p["phase"] == ROLLOUT)
    assert any(p["bytes"].get("activations") for p in points if p["phase"] == GRADIENT)


@pytest.mark.parametrize("kind", KINDS_OF_RUN)
def test_nothing_of_a_phase_outlives_it(kind, tmp_path):
    run = start(tmp_path / "run", **KINDS_OF_RUN[kind])
    try:
        trainer, method = run.trainer, run.trainer.method
        for _ in range(2):  # the first step makes what is then kept
            with Meter() as meter:
                for name, tensors in trainer.gauge.held().items():
                    meter.register(name, tensors)
                meter.watch_gradients(method.model.parameters())
                with region("kv_cache"):
                    batch = rolled_out(trainer)
                assert meter.live["kv_cache"] <= sum(t.nbytes for t in vars(batch).values()) + SMALL
                method.zero()
                with meter.phase(GRADIENT), region("activations"):
                    accumulate(method.model, batch, 4, trainer.plan.loss, tally=Tally())
                assert meter.live["activations"] <= SMALL and meter.live.get("logits", 0) <= SMALL
                assert meter.reading(GRADIENT).by_kind["activations"] > 20 * SMALL
                with meter.phase(UPDATE), region("workspace"):
                    message = method.step(lambda batch=batch: trainer.probe(batch), 1.0).message
                for name, tensors in trainer.gauge.held().items():
                    meter.register(name, tensors)
                trainer.engine.publish(method.num_updates, message)
                del message
                left = {k: meter.live.get(k, 0) for k in ("activations", "logits", "workspace", "gradients")}
                assert max(left.values()) <= SMALL, left
    finally:
        run.close()
