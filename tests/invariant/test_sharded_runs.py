"""`torchrun -m logra train`: the run of one rank, on two and three; resumed on other numbers of ranks; ended when a rank dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import logra
from logra import config as cfg
from logra.build import build_run
from logra.rl.run_dir import read_metrics
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.sketch.block import blocks_of
from logra.sync.journal import Journal
from logra.sync.replay import bring_to
from logra.sync.replica import Replica

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
COMMON = {
    "train": {"steps": 3, "microbatch_size": 12},
    "rollout": {"max_new_tokens": 5, "prompts_per_step": 5, "rollouts_per_prompt": 4},
    "trust": {"probe_rollouts": 4}, "eval": {"num_prompts": 7, "every": 0, "temperature": 1.0}, "checkpoint": {"every": 2},
    "journal": {"digest_every": 1},
}  # fmt: skip
LOW_RANK = {"galore": 1e-3, "fira": 1e-3, "apollo": 1e-3, "lora_pre": 1e-3, "muon": 1e-3, "blockllm": 1e-3}
SCENARIOS = {
    "random": {"trust": {"probe_rollouts": 3}},
    "anchors": {
        "method": {"basis": "aligned", "optimizer": "adam", "lr": 1e-3}, "journal": {"anchor_every": 2},
        "train": {"packed": False},
    },
    "aligned": {  # whole prompts to each rank and microbatch: then bases, too, are those of one rank
        "method": {"basis": "aligned", "optimizer": "adam", "lr": 1e-3}, "rollout": {"prompts_per_step": 6},
    },
    "dense": {"method": {"name": "dense", "lr": 1e-3, "basis": None, "max_grad_norm": 0.5}},
    **{
        name: {"method": {"name": name, "lr": lr, "rank": 4, "basis": None}, "rollout": {"prompts_per_step": 6}}
        for name, lr in LOW_RANK.items()
    },
    "lora": {"method": {"name": "lora", "lr": 1e-2, "basis": None}, "algorithm": {"kl_coef": 0.01}},
    "several": {
        "method": {"dense_params": ["norms", "head"]}, "algorithm": {"kl_coef": 0.01, "updates_per_step": 2},
        "rollout": {"prompts_per_step": 6}, "model": {"gradient_checkpointing": True},
    },
    "split": {
        "method": {"weights": "split", "dense_params": ["norms"]}, "model": {"dtype": "bfloat16"},
        "algorithm": {"kl_coef": 0.01},
    },
}  # fmt: skip
# bfloat16 sums depend on what is computed together; Muon makes rounding errors large, where a gradient has no direction
EXACT = [name for name in SCENARIOS if name not in ("split", "muon")]
SCRIPT = """
import json, os, sys
import torch
from logra import config as cfg
from logra.build import build_run
torch.set_num_threads(1)
for data in json.loads(open(sys.argv[1]).read()):
    run = build_run(cfg.make_config(data))
    try:
        run.fit()
    finally:
        run.close()
torch.distributed.barrier()
os._exit(0)  # as the command does
"""


def merged(base, *others):
    result = json.loads(json.dumps(base))
    for other in others:
        for key, value in other.items():
            result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def settings(model, folder, *others):
    return merged(
        cfg.read_yaml(str(RECIPE)), COMMON, {"output_dir": str(folder), "model": {"name_or_path": str(model)}}, *others
    )


def torchrun(ranks, *command, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    return subprocess.Popen(
        [*launcher, "--rdzv-endpoint", "localhost:0", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True, **options,
    )  # fmt: skip


def finish(process, timeout=300):
    """(exit code, output); nothing of it is left running."""
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model in files, of which each rank reads its rows."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", seed=7, spread=0.1).to(torch.bfloat16).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """The scenarios on one rank ("1") and two ("2"): folders of runs."""
    folder = tmp_path_factory.mktemp("runs")
    todo = [settings(model, folder / "2" / name, own) for name, own in SCENARIOS.items()]
    (folder / "todo.json").write_text(json.dumps(todo))
    (folder / "script.py").write_text(SCRIPT)
    code, output = finish(torchrun(2, folder / "script.py", folder / "todo.json"))
    assert code == 0, output[-4000:]
    assert "whole model" not in output  # nobody fell back to loading it whole
    for name, own in SCENARIOS.items():
        run = build_run(cfg.make_config(settings(model, folder / "1" / name, own)))
        try:
            run.fit()
        finally:
            run.close()
    return folder


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_make_the_run_of_one(runs, name):
    alone, ranks = (read_metrics(runs / n / name / "metrics.jsonl") for n in "12")
    assert len(alone) == len(ranks)
    for one, two in zip(alone, ranks, strict=True):
        assert one.get("reward") == two.get("reward") and one.get("num_tokens") == two.get("num_tokens")
        assert one.get("eval/pass@1") == two.get("eval/pass@1")
        for key in ("loss", "grad_norm", "entropy", "kl", "trust/predicted_kl", "trust/scale", "mismatch/kl"):
            if key in one:
                assert two[key] == pytest.approx(one[key], rel=2e-3, abs=1e-6), key
    mine, theirs = weights(runs / "1" / name / "final"), weights(runs / "2" / name / "final")
    assert mine.keys() == theirs.keys()
    start = tiny_model("llama", seed=7, spread=0.1).state_dict()
    for key, value in mine.items():
        moved = (value - start[key].to(torch.bfloat16).float()).abs().max()
        assert (value - theirs[key]).abs().max() <= 0.02 * moved + 1e-6, key


def test_muon_learns_the_same(runs):
    alone, ranks = ([r for r in read_metrics(runs / n / "muon" / "metrics.jsonl") if "loss" in r] for n in "12")
    assert [r["step"] for r in alone] == [r["step"] for r in ranks]
    assert ranks[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-4)
    assert [r["grad_norm"] for r in ranks] == pytest.approx([r["grad_norm"] for r in alone], rel=0.1)


def test_split_weights_learn_the_same(runs):
    alone, ranks = (read_metrics(runs / n / "split" / "metrics.jsonl") for n in "12")
    assert [r["step"] for r in alone] == [r["step"] for r in ranks]
    first = [next(r for r in records if "loss" in r) for records in (alone, ranks)]
    assert first[0]["reward"] == first[1]["reward"] and first[0]["kl"] == first[1]["kl"] == 0.0
    assert first[1]["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=0.05)


@pytest.mark.parametrize("name", ["random", "anchors", "several", "split"])
def test_a_subscriber_of_the_journal_holds_what_the_ranks_hold(runs, model, name):
    exported = replayed(model, runs / "2" / name)
    assert exported


def replayed(model, run):
    """Follow a run's journal from the base model, comparing every digest on the way and the final export at the end."""
    follower = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with Journal.open(run / "journal") as journal:
        info = journal.info()
        blocks = blocks_of(follower, [name for name, _, _ in info.targets])
        replica = Replica(blocks, version=0, run=info.run, base=info.base)
        version = bring_to(journal, replica)
        assert version == info.next > 0
    final = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    assert logra.digest(final, list(blocks)) == replica.digest()
    others = {n: p for n, p in follower.named_parameters() if n not in blocks}
    assert all(torch.equal(p, dict(final.named_parameters())[n]) for n, p in others.items())
    return replica.digest()


def test_checkpoints_hold_a_model_that_loads_anywhere(runs):
    path = runs / "2" / "random" / "checkpoints" / "step_2" / "model"
    assert sorted(p.suffix for p in path.iterdir() if "safetensors" in p.name) == [".safetensors"]
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert weights(path).keys() == weights(runs / "1" / "random" / "checkpoints" / "step_2" / "model").keys()
    assert not [p for p in (runs / "2" / "random" / "checkpoints").iterdir() if p.name.startswith(".model")]


def prompts_of(run):
    import pyarrow.parquet

    files = sorted((run / "completions").glob("step_*.parquet"))
    return [pyarrow.parquet.read_table(file).column("prompt").to_pylist() for file in files]


def command(model, folder, steps, *more):
    return [
        "-m", "logra", "train", RECIPE, "--output_dir", folder, "--model.name_or_path", model, "--plain",
        "--rollout.prompts_per_step", "3", "--rollout.rollouts_per_prompt", "3", "--rollout.max_new_tokens", "4",
        "--eval.num_prompts", "3", "--train.steps", steps, "--checkpoint.every", "3", "--journal.digest_every", "1", *more,
    ]  # fmt: skip


def test_resumed_on_other_numbers_of_ranks(model, tmp_path):
    """2 -> 1 -> 3 ranks: the weights go on bit for bit (every digest in the journal is the replay's), and so do the data."""
    run = tmp_path / "run"
    for ranks, steps in (
        (2, 4),
        (1, 5),
        (3, 7),
    ):  # step 4 lies beyond the checkpoint of step 3: the journal leads there
        code, output = finish(torchrun(ranks, *command(model, run, steps, "--resume", "auto")))
        assert code == 0, output[-3000:]
    replayed(model, run)
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r] == [1, 2, 3, 4, 5, 6, 7]
    alone = tmp_path / "alone"
    code, output = finish(torchrun(1, *command(model, alone, 7)))
    assert code == 0, output[-3000:]
    assert prompts_of(run) == prompts_of(alone)


RESUMED = """
from logra.build import model, placing
def whole(*arguments, **options):
    raise AssertionError("a rank loaded a model whole")
placing.build_model = model.build_model = model.load_model = whole
"""


def test_a_resumed_run_never_has_its_reference_whole(model, tmp_path):
    """The reference is the base model, which the checkpoint does not hold; its KL goes on as that of a run on one rank."""
    base = tmp_path / "base"
    shutil.copytree(model, base)
    (tmp_path / "script.py").write_text(RESUMED + SCRIPT)

    def run(steps):
        todo = [settings(base, tmp_path / "run", SCENARIOS["several"], {"train": {"steps": steps}, "resume": "auto"})]
        (tmp_path / "todo.json").write_text(json.dumps(todo))
        return finish(torchrun(2, tmp_path / "script.py", tmp_path / "todo.json"))

    for steps in (2, 4):
        code, output = run(steps)
        assert code == 0, output[-3000:]
    alone = build_run(
        cfg.make_config(settings(base, tmp_path / "alone", SCENARIOS["several"], {"train": {"steps": 4}}))
    )
    try:
        alone.fit()
    finally:
        alone.close()
    kl = [[r["kl"] for r in read_metrics(tmp_path / n / "metrics.jsonl") if "kl" in r] for n in ("run", "alone")]
    assert len(kl[0]) == 4 and kl[0][2] > 0 and kl[0] == pytest.approx(kl[1], rel=5e-3, abs=1e-7)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][7] += 0.5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    code, output = run(5)
    assert code != 0 and "is not the model this run began with" in output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_with_a_message_and_it_resumes(model, tmp_path, victim):
    run = tmp_path / "run"
    process = torchrun(2, *command(model, run, 400))
    try:
        wait_for_step(run, 3, process)
        os.kill(ranks_below(process.pid)[victim], signal.SIGKILL)
        killed = time.monotonic()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    code, output = finish(process, timeout=60)
    assert code != 0 and time.monotonic() - killed < 60
    assert "another rank of this run ended" in output and "--resume auto" in output
    done = max(r["step"] for r in read_metrics(run / "metrics.jsonl"))
    code, output = finish(torchrun(2, *command(model, run, done + 2, "--resume", "auto")))
    assert code == 0, output[-3000:]
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r] == list(range(1, done + 3))
    replayed(model, run)


def wait_for_step(run, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.is_file() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached (exit code {process.poll()})")


def ranks_below(pid):
    """Process ids of the ranks, rank 0 first."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        rank = next((e[5:] for e in environment if e.startswith(b"RANK=")), None)
        if parent == pid and rank is not None:
            found[int(rank)] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def test_what_cannot_fit_is_refused_once(model, tmp_path):
    code, output = finish(torchrun(2, *command(model, tmp_path / "run", 2), "--memory.limit", "1MiB"))
    assert code != 0 and output.count("this run needs") == 1, output
    assert not (tmp_path / "run").exists()


def test_fewer_rollouts_than_ranks_are_refused_once(model, tmp_path):
    few = ("--rollout.prompts_per_step", "1", "--rollout.rollouts_per_prompt", "2")
    code, output = finish(torchrun(3, *command(model, tmp_path / "run", 2), *few))
    assert code != 0 and output.count("fewer than the 3 ranks") == 1, output
