"""An engine that does not hold the trainer's policy is found before a step is taken on its rollouts."""

import copy
import dataclasses
from pathlib import Path

import pytest

from logra import config as cfg
from logra.build import build_run
from logra.cli.main import main
from logra.errors import MismatchError
from logra.rl.engines.hf import HFEngine
from logra.sketch.block import apply_update

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


class CopyEngine(HFEngine):
    """An engine with weights of its own that follows by Updates, as one elsewhere does.

    drop: the update (by index) that never arrives. honest: whether versions count what was applied, or what was published.
    """

    def __init__(self, engine, drop=None, honest=True):
        super().__init__(copy.deepcopy(engine.model), engine.tokenizer)
        for module in self.model.modules():
            module._forward_hooks.clear()
        self.drop, self.honest = drop, honest

    def publish(self, version, packet):
        update = packet and packet.update
        if update is not None and update.index == self.drop:
            self.version = version - self.honest
            return
        if update is not None:
            apply_update(self.model, update)
        self.version = version if not self.honest or update is None else self.version + 1


def run_with(folder, engine=None, steps=4, **flags):
    base = {"output_dir": str(folder), "train.steps": steps, "eval": None, "checkpoint.every": 0, "method.lr": 3e-2}
    base |= {"trust.enabled": False}
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))
    if engine is not None:
        run.trainer.engine = engine(run.trainer.engine)
    return run


def test_an_engine_that_follows_by_updates_gives_the_same_run(tmp_path):
    digests = []
    for name, engine in (("shared", None), ("copy", CopyEngine)):
        run = run_with(tmp_path / name, engine)
        try:
            run.trainer.fit()
            digests.append(run.trainer.method.digest())
        finally:
            run.close()
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("honest", "words"), [(True, "sampled from version 1 .* trainer is at 2"), (False, "log-probs")]
)
def test_a_missed_update_is_found_before_its_rollouts_are_used(tmp_path, honest, words):
    """By its version; and, if the engine claims the right version, by its log-probs."""
    run = run_with(tmp_path / "run", lambda e: CopyEngine(e, drop=1, honest=honest), **{"rollout.mismatch_limit": 0.01})
    try:
        with pytest.raises(MismatchError, match=words):
            run.trainer.fit()
        assert run.trainer.step == 2 and run.trainer.method.num_updates == 2  # nothing came of the third step
        before = run.trainer.method.digest()
        assert run.history.journal.next == 2 and before == run.trainer.method.digest()
    finally:
        run.close()


def test_the_limit_looks_at_the_first_update_of_a_step_only(tmp_path):
    """Later updates of the same rollouts come from a policy that has moved on purpose."""
    flags = {"algorithm.updates_per_step": 2, "rollout.mismatch_limit": 1e-4}
    run = run_with(tmp_path / "run", steps=2, **flags)
    try:
        run.trainer.fit()
        assert run.trainer.method.num_updates >= 3
    finally:
        run.close()


def test_no_limit(tmp_path):
    run = run_with(tmp_path / "run", lambda e: CopyEngine(e, drop=1, honest=False), **{"rollout.mismatch_limit": None})
    try:
        run.trainer.fit()
        assert run.trainer.step == 4
    finally:
        run.close()


def test_the_command_ends_with_2(tmp_path, capsys, monkeypatch):
    def wrong(self, prompts, num_rollouts, sampling, generate=HFEngine.generate):
        return [dataclasses.replace(r, version=r.version + 7) for r in generate(self, prompts, num_rollouts, sampling)]

    monkeypatch.setattr(HFEngine, "generate", wrong)
    flags = ["--output_dir", str(tmp_path / "run"), "--eval", "null", "--plain"]
    assert main(["train", str(RECIPE), *flags]) == 2
    assert "an update was lost or applied twice" in capsys.readouterr().err
