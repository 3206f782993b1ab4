"""What must not change a run: microbatching, a batch without signal, being killed and resumed."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from logra import config as cfg
from logra.build import build_run
from logra.errors import CheckpointError, NonFiniteError
from logra.rl.batch import collate
from logra.rl.methods.base import Schedule
from logra.rl.methods.dense import DenseMethod, LoraMethod
from logra.rl.methods.logra import LograMethod
from logra.rl.step import LossSettings, Tally, accumulate
from logra.rl.tiny import tiny_model
from logra.rl.types import Prompt, Rollout
from logra.sketch.block import digest
from logra.trust.region import TrustRegion

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
SPLIT = {"method.weights": "split", "model.dtype": "bfloat16"}
ALIGNED = {"method.basis": "aligned", "method.refresh_every": 2}
KINDS = {
    "logra": {},
    "aligned": ALIGNED,
    "aligned adam": ALIGNED | {"method.optimizer": "adam", "method.explore": 2},
    "aligned split": ALIGNED | SPLIT | {"method.residual": "cpu", "method.momentum": 0.9},
    "dense": {"method.name": "dense"},
    "lora": {"method.name": "lora"},
    "split": SPLIT,
    "split on the host": SPLIT | {"method.residual": "cpu"},
    "beside": {"method.dense_params": ["norms", "head"], "method.dense_lr": 1e-3},
    "split beside": SPLIT | {"method.dense_params": ["embeddings"], "method.dense_lr": 1e-3},
}
TIMES = {"step_time", "time/rollout", "time/rollout_wait"}  # and the memory of the process


def settings(folder, **flags):
    base = {"output_dir": str(folder), "train.steps": 4, "eval.num_prompts": 8, "checkpoint.every": 1}
    data = cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)
    return cfg.make_config(data)


def train(folder, **flags):
    run = build_run(settings(folder, **flags))
    try:
        run.fit()
        return run.trainer.method.model
    finally:
        run.close()


def records(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMES and not k.startswith("memory/")} for line in lines
    ]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def rollouts(lengths):
    generator = torch.Generator().manual_seed(1)
    made = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4, 51, (3 + index % 4 + length,), generator=generator).tolist()
        prompt = Prompt(index // 4, "x", tuple(ids[:-length] if length else ids), {})
        tokens = tuple(ids[len(ids) - length :]) if length else ()
        made.append(Rollout(prompt, index % 4, tokens, tuple([-3.0] * length), "eos" if index % 3 else "length", "", 0))
    return made


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_splitting_the_batch_gives_equal_sketches(arch, aggregation, basis):
    batch = collate(rollouts([1, 30, 2, 17, 5, 0, 40, 3]), pad_id=0)
    advantages = torch.linspace(-1, 1, 8, dtype=torch.float64)
    batch = batch.with_advantages(advantages, aggregation=aggregation, max_new_tokens=40)
    results = []
    for size in (8, 4, 2, 1):
        method = LograMethod(tiny_model(arch), Schedule(1e-3), rank=16, basis=basis)
        accumulate(method.model, batch, size, LossSettings(), tally=Tally())
        results.append(method.sketcher)
    for other in results[1:]:
        for name in other.names:
            expected = results[0].sketch(name)
            assert float((other.sketch(name) - expected).norm() / expected.norm()) < 2e-6, name


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_never_reaches_the_sketch(poison):
    """Log-probs in the padding of the rollout engine may hold anything."""
    batch = collate(rollouts([1, 9, 2, 4]), pad_id=0)
    batch = batch.with_advantages(torch.tensor([1.0, -1.0, 0.5, 2.0]))
    dirty = copy.copy(batch)
    object.__setattr__(dirty, "rollout_logprobs", batch.rollout_logprobs.masked_fill(~batch.completion_mask, poison))
    sketches = []
    for part in (batch, dirty):
        method = LograMethod(tiny_model(), Schedule(1e-3), rank=16)
        accumulate(method.model, part, 4, LossSettings(), tally=Tally())
        sketches.append(method.sketcher._sketches)
    assert torch.equal(*sketches)


def everything(trainer):
    tensors, state = trainer.method.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    return digest(trainer.method.model), tensors, copy.deepcopy(state), trainer.method.num_updates


@pytest.mark.parametrize("kind", ["logra", "aligned", "dense", "lora"])
@pytest.mark.parametrize("advantage", ["grpo", "running_baseline"])
def test_a_batch_without_signal_changes_no_byte(kind, advantage, tmp_path):
    """Every reward equal: weights, moments, basis, schedule, trust region and counters stay; the skip is counted."""
    flags = KINDS[kind] | {"algorithm.advantage": advantage, "method.weight_decay": 0.1}
    run = build_run(settings(tmp_path / "run", **flags))
    try:
        trainer = run.trainer
        prompts = [trainer.prompts[i] for i in trainer.sampler.next_batch()]
        rolled = trainer.rollout(prompts)
        first = trainer.batch(rolled, trainer.advantages(rolled, trainer.rewards.score_rollouts(rolled)))
        assert trainer.update(first)["updates"] == 1
        before = everything(trainer)
        baseline = copy.deepcopy(trainer.baseline.state_dict()) if trainer.baseline else None
        flat = first.with_advantages(torch.zeros(len(first)))
        metrics = trainer.update(flat)
        assert metrics["updates"] == 0 and trainer.num_skipped == 1
        if trainer.baseline is not None:
            trainer.commit(trainer.rewards.score_rollouts(rolled), metrics)
            assert trainer.baseline.state_dict() == baseline
        after = everything(trainer)
        assert before[0] == after[0] and before[2:] == after[2:]
        assert all(torch.equal(v, after[1][k]) for k, v in before[1].items())
    finally:
        run.close()


def test_a_run_of_constant_rewards_finishes_with_every_step_skipped(tmp_path):
    rewards = tmp_path / "constant.py"
    rewards.write_text("def one(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    functions = [{"function": f"{rewards}:one"}]
    model = train(tmp_path / "run", **{"reward.functions": functions, "eval": None})
    assert digest(model) == digest(tiny_model(seed=7, spread=0.1))
    assert [r["skipped_steps"] for r in records(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_every_step_and_resumed_equals_uninterrupted(kind, tmp_path):
    flags = KINDS[kind] | {"algorithm.advantage": "running_baseline", "rollout.prompts_per_step": 60}
    flags |= {"rollout.rollouts_per_prompt": 1, "method.schedule": "cosine", "method.warmup_steps": 2}
    straight = train(tmp_path / "straight", **flags)  # 4 steps of 60 of 200 prompts: over an epoch boundary
    for stop in (1, 2, 3):
        folder = tmp_path / f"stopped{stop}"
        run = build_run(settings(folder, **flags))
        run.trainer.plan = copy.copy(run.trainer.plan)
        object.__setattr__(run.trainer.plan, "steps", stop)
        object.__setattr__(run.trainer.plan, "eval_after", False)
        run.trainer.fit()
        run.close()
        resumed = train(folder, resume="auto", **flags)
        assert digest(resumed) == digest(straight), stop
        assert records(folder) == records(tmp_path / "straight")
        assert digest(load(folder / "final")) == digest(load(tmp_path / "straight" / "final"))


def test_resuming_under_other_settings_is_refused(tmp_path):
    train(tmp_path / "run", **{"train.steps": 1})
    with pytest.raises(CheckpointError, match=r"method\.lr was 0\.003"):
        build_run(settings(tmp_path / "run", resume="auto", **{"method.lr": 1e-4}))
    run = build_run(settings(tmp_path / "run", resume="auto", **{"train.steps": 6}))  # more steps is no other run
    assert run.trainer.step == 1
    run.close()


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    flags = {"train.steps": 2, "journal.enabled": False}
    train(tmp_path / "run", **flags)
    (tmp_path / "run" / "checkpoints" / "step_2" / "state.safetensors").write_bytes(b"half")
    run = build_run(settings(tmp_path / "run", resume="auto", **flags))
    assert run.trainer.step == 1 and run.folder.skipped
    run.close()


@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(basis, tmp_path):
    """SIGKILL of the real command, twice at random moments, then resumed to the end: weights and metrics bit for bit."""
    steps = 6
    flags = {"method.basis": basis, "method.refresh_every": 3}
    model = train(tmp_path / "straight", **{"train.steps": steps, "eval.every": 2} | flags)
    folder = tmp_path / "killed"
    command = [
        sys.executable, "-m", "logra", "train", str(RECIPE), "--output_dir", str(folder), "--resume", "auto",
        "--train.steps", str(steps), "--eval.num_prompts", "8", "--eval.every", "2", "--checkpoint.every", "1", "--plain",
        "--method.basis", basis, "--method.refresh_every", "3",
    ]  # fmt: skip
    chooser = random.Random(os.getpid())
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        wait_for_checkpoint_beyond(folder, newest(folder), process)
        time.sleep(chooser.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert digest(load(folder / "final")) == digest(model)
    assert records(folder) == records(tmp_path / "straight")


def newest(folder):
    return max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step_*") if p.name[5:].isdigit()), default=0)


def wait_for_checkpoint_beyond(folder, step, process):
    for _ in range(2400):
        if newest(folder) > step or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError("no new checkpoint in two minutes")


def test_a_non_finite_loss_stops_before_anything_moves(tmp_path):
    run = build_run(settings(tmp_path / "run"))
    try:
        trainer = run.trainer
        prompts = [trainer.prompts[i] for i in trainer.sampler.next_batch()]
        rolled = trainer.rollout(prompts)
        batch = trainer.batch(rolled, trainer.advantages(rolled, trainer.rewards.score_rollouts(rolled)))
        before = digest(trainer.method.model)
        object.__setattr__(batch, "advantages", batch.advantages.fill_(float("inf")))
        with pytest.raises(NonFiniteError, match="nothing was applied"):
            trainer.update(batch)
        assert digest(trainer.method.model) == before
    finally:
        run.close()


@pytest.mark.parametrize("build", [DenseMethod, LoraMethod, LograMethod])
def test_all_methods_train_the_same_matrices_and_report_them(build):
    method = build(tiny_model("gpt2"), Schedule(1e-3))
    chosen, skipped = method.describe()
    assert len(chosen) == 8 and ("transformer.h.0.attn.c_attn.weight", (192, 64)) in chosen
    assert {s.reason for s in skipped} >= {"embedding", "bias"}


def test_the_trust_region_keeps_the_predicted_kl_at_the_budget(tmp_path):
    train(
        tmp_path / "run",
        **{"trust.start": 1e-5, "trust.final": 1e-5, "trust.measure_every": 1, "trust.largest_scale": 100.0},
    )
    steps = [r for r in records(tmp_path / "run") if "trust/scale" in r]
    for record in steps:
        assert record["trust/predicted_kl"] == pytest.approx(record["trust/budget"], rel=1e-6)
        assert record["trust/measured_kl"] == pytest.approx(record["trust/predicted_kl"], rel=0.03)
    assert TrustRegion().kind == "cosine"
