"""The optimizers of `logra.optim` in `logra train`: resumed as uninterrupted, and no step without signal."""

import copy
from pathlib import Path

import pytest
import torch

from logra import config as cfg
from logra.build import build_run
from logra.errors import CheckpointError, ConfigError
from logra.optim.registry import OPTIMIZERS
from logra.rl.run_dir import read_metrics
from logra.sketch.block import digest

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
REFRESHING = {"galore", "galore_8bit", "apollo", "apollo_mini", "fira"}


def build(folder, name, **flags):
    base = {
        "output_dir": str(folder), "train.steps": 4, "eval": None, "checkpoint.every": 1, "log.completions": False,
        "method.name": name, "method.rank": 4, "rollout.prompts_per_step": 4, "rollout.max_new_tokens": 6,
    }  # fmt: skip
    if name in REFRESHING:
        base["method.options"] = {"update_proj_gap": 2}
    return build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_stopped_and_resumed_equals_uninterrupted(name, tmp_path):
    straight = build(tmp_path / "straight", name)
    straight.fit()
    straight.close()
    stopped = build(tmp_path / "stopped", name)
    stopped.trainer.plan = copy.copy(stopped.trainer.plan)
    object.__setattr__(stopped.trainer.plan, "steps", 2)
    stopped.fit()
    stopped.close()
    resumed = build(tmp_path / "stopped", name, resume="auto")
    resumed.fit()
    resumed.close()
    assert digest(resumed.trainer.method.model) == digest(straight.trainer.method.model)
    ours, theirs = (read_metrics(tmp_path / n / "metrics.jsonl") for n in ("stopped", "straight"))
    assert [r["reward"] for r in ours] == [r["reward"] for r in theirs]
    assert any(r["grad_norm"] > 0 for r in theirs)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_batch_without_signal_changes_nothing(name, tmp_path):
    run = build(tmp_path / "run", name)
    try:
        trainer = run.trainer
        rolled = trainer.rollout([trainer.prompts[i] for i in trainer.sampler.next_batch()])
        batch = trainer.batch(rolled, trainer.advantages(rolled, trainer.rewards.score_rollouts(rolled)))
        trainer.update(batch)
        before = digest(trainer.method.model), copy.deepcopy(trainer.method.state())
        assert trainer.update(batch.with_advantages(torch.zeros(len(batch))))["updates"] == 0
        tensors, numbers = trainer.method.state()
        assert digest(trainer.method.model) == before[0] and numbers == before[1][1]
        assert all(torch.equal(tensors[k], v) for k, v in before[1][0].items())
        assert {"weights", "gradients", "optimizer"} == set(trainer.method.held())
    finally:
        run.close()


def test_options_are_checked_by_name(tmp_path):
    with pytest.raises(ConfigError, match="update_proj_gap"):
        build(tmp_path / "run", "galore", **{"method.options": {"update_gap": 3}})
    with pytest.raises(ConfigError, match="options"):
        build(tmp_path / "run", "dense", **{"method.options": {"scale": 1.0}})


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    run = build(tmp_path / "run", "galore", **{"train.steps": 1})
    run.fit()
    run.close()
    with pytest.raises(CheckpointError):
        build(tmp_path / "run", "galore_8bit", resume="auto")
