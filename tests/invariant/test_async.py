"""Rollouts ahead of the trainer, through a whole run: what is exact, what is stale, how a run resumes."""

import copy
import random
import threading
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from logra import config as cfg
from logra.build import build_run
from logra.errors import UpdateError
from logra.rl.engines.base import Interrupted
from logra.rl.engines.hf import HFEngine
from logra.rl.run_dir import read_metrics
from logra.sketch.block import apply_update

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
TIMES = {"step_time", "time/rollout", "time/rollout_wait"}
LARGE = {"method.lr": 1e-2, "trust.start": 1e-2, "trust.final": 1e-2}  # steps that show in the log-probs


class SlowEngine(HFEngine):
    """Weights of its own, which follow by Updates; random waits; may fail at a step."""

    publishes_midway = False

    def __init__(self, engine, delay=0.0, seed=0, fails_at=None):
        super().__init__(copy.deepcopy(engine.model), engine.tokenizer)
        for module in self.model.modules():
            module._forward_hooks.clear()
        self.delay, self.random, self.fails_at = delay, random.Random(seed), fails_at
        self.stop, self.threads = threading.Event(), set()

    def generate(self, prompts, num_rollouts, sampling):
        self.threads.add(threading.current_thread().name)
        if sampling.step == self.fails_at:
            raise UpdateError("the engine is gone: start it again")
        rollouts = super().generate(prompts, num_rollouts, sampling)
        time.sleep(self.delay * self.random.random())
        if self.stop.is_set():
            self.stop.clear()
            raise Interrupted
        return rollouts

    def publish(self, version, packet):
        if packet is None and version != self.version:
            self.load(version)
        elif packet is not None:
            assert packet.version == version == self.version + 1
            apply_update(self.model, packet.update)
        self.version = version

    def abort(self):
        self.stop.set()


def train(folder, ahead, *, on_update="finish", stop=None, delay=0.0, seed=0, fails_at=None, steps=6, **flags):
    base = {"output_dir": str(folder), "train.steps": steps, "eval.num_prompts": 8, "checkpoint.every": 0} | LARGE
    base |= {"threads": 1, "rollout.prompts_per_step": 4, "eval.every": 2, "log.memory": False}
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))
    trainer = run.trainer
    began = trainer.step
    try:
        hf = trainer.engine
        engine = trainer.engine = SlowEngine(hf, delay, seed, fails_at)
        engine.began = began
        engine.load = lambda version: engine.model.load_state_dict(hf.model.state_dict())
        evaluate = HFEngine.generate
        hf.generate = lambda *arguments: evaluate(engine, *arguments)  # the evaluator has the engine that was built
        for name, value in {"ahead": ahead, "on_update": on_update, "steps": stop or steps}.items():
            object.__setattr__(trainer.plan, name, value)
        try:
            trainer.fit()
        except UpdateError as error:
            assert "the engine is gone" in str(error)
        assert trainer.source is None
        return trainer.method.digest(), trainer.step, trainer.sampler.state_dict(), engine
    finally:
        run.close()


def records(folder):
    lines = read_metrics(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMES and not k.startswith("memory/")} for line in lines]


def steps_of(folder):
    return [line for line in records(folder) if "reward" in line]


def prompts_of(folder, count):
    files = [Path(folder) / "completions" / f"step_{step:06d}.parquet" for step in range(1, count + 1)]
    return [parquet.read_table(file).column("prompt_id").to_pylist() for file in files]


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_same_seed_gives_the_same_run_whatever_the_timing(ahead, tmp_path):
    digests = set()
    for seed, delay in enumerate((0.0, 0.08, 0.08)):
        digest, _, _, engine = train(tmp_path / str(seed), ahead, delay=delay, seed=seed)
        digests.add(digest)
        assert engine.threads == {"rollouts-ahead"}
    assert len(digests) == 1
    assert records(tmp_path / "0") == records(tmp_path / "1") == records(tmp_path / "2")
    steps = steps_of(tmp_path / "0")
    assert [r["staleness/max"] for r in steps] == [r["staleness/mean"] for r in steps]
    assert [r["staleness/max"] for r in steps] == [min(t, ahead) for t in range(6)]
    evaluations = [r for r in records(tmp_path / "0") if "eval/version" in r]
    assert [r["eval/version"] for r in evaluations] == [0, 2, 4, 6]  # always the newest


def test_without_any_ahead_an_engine_of_its_own_gives_the_run_of_the_shared_one(tmp_path):
    digest, *_, engine = train(tmp_path / "own", 0)
    base = {
        "output_dir": str(tmp_path / "shared"),
        "train.steps": 6,
        "eval.num_prompts": 8,
        "checkpoint.every": 0,
    } | LARGE
    base |= {"threads": 1, "rollout.prompts_per_step": 4, "eval.every": 2, "log.memory": False}
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base)))
    run.fit()
    assert run.trainer.method.digest() == digest and engine.threads == {"MainThread"}
    run.close()
    mine = records(tmp_path / "own")
    assert [r["reward"] for r in mine if "reward" in r] == [r["reward"] for r in steps_of(tmp_path / "shared")]
    assert {r["staleness/max"] for r in steps_of(tmp_path / "shared")} == {0}


def test_stale_log_probs_are_no_mismatch(tmp_path):
    """The step that was taken since shows in the metrics; it neither stops the run nor lowers the trust region's budget."""
    flags = {"rollout.mismatch_limit": 1e-3, "trust.mismatch": True}
    train(tmp_path / "run", 1, **flags)
    fresh, *stale = steps_of(tmp_path / "run")
    assert fresh["sampling/sampling_logp_difference/mean"] < 1e-5
    assert all(r["sampling/sampling_logp_difference/mean"] > 1e-3 for r in stale)
    assert all(r["trust/mismatch"] < 1e-5 for r in (fresh, *stale))
    assert max(r["sampling/importance_sampling_ratio/max"] for r in stale) > 1.0


def test_a_resumed_run_takes_the_prompts_that_were_not_trained_on(tmp_path):
    """The journal holds the position of the finished step, not of what was drawn ahead; batches in flight are sampled anew."""
    train(tmp_path / "straight", 2)
    _, step, _, _ = train(tmp_path / "run", 2, delay=0.02, fails_at=4)
    assert step in (2, 3, 4)  # the error came with the next batch that was asked for, or with the evaluation
    _, done, position, engine = train(tmp_path / "run", 2, resume="auto")
    began = engine.began
    assert done == 6 and began in (step, step - (step % 2 == 0))  # a step is finished once it is evaluated
    assert prompts_of(tmp_path / "run", 6) == prompts_of(tmp_path / "straight", 6)
    found = [r["staleness/max"] for r in steps_of(tmp_path / "run")]
    assert found == [min(t, 2) for t in (*range(began), *range(6 - began))]
    assert position == train(tmp_path / "plain", 0)[2]


@pytest.mark.parametrize("k", [(1, 0), (0, 1)])
def test_how_far_ahead_may_change_on_resuming(k, tmp_path):
    train(tmp_path / "run", k[0], stop=3)
    _, step, position, _ = train(tmp_path / "run", k[1], resume="auto")
    assert step == 6 and position == train(tmp_path / "plain", 0)[2]
    assert [r["staleness/max"] for r in steps_of(tmp_path / "run")][3:] == [min(t, k[1]) for t in range(3)]


def test_restart_trains_on_nothing_older(tmp_path):
    _, step, position, _ = train(tmp_path / "run", 1, on_update="restart", delay=0.05)
    assert step == 6 and position == train(tmp_path / "plain", 0)[2]
    assert all(r["staleness/max"] <= 1 for r in steps_of(tmp_path / "run"))


def test_several_updates_a_step(tmp_path):
    train(tmp_path / "run", 1, **{"algorithm.updates_per_step": 2})
    steps = steps_of(tmp_path / "run")
    updates = [0] + [r["num_updates"] for r in steps]
    assert [r["staleness/max"] for r in steps] == [updates[t] - updates[max(0, t - 1)] for t in range(6)]
