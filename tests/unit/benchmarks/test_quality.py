"""The quality benchmark: its tuning rule, its store, its claims, its rewards and one real run. No result is asserted."""

import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from logra.errors import NonFiniteError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
record = importlib.import_module("record")
tasks = importlib.import_module("quality_tasks")
runs = importlib.import_module("quality_runs")
quality = importlib.import_module("quality")

GIT = {"commit": "0" * 40, "dirty": False}
QUIET = Console(quiet=True)
TRIALS = 4  # one that depends on the first three


@pytest.fixture(autouse=True)
def provenance(monkeypatch):
    monkeypatch.setattr(record, "git_state", lambda: dict(GIT))
    monkeypatch.setattr(sys, "argv", ["benchmarks/quality.py"])
    monkeypatch.setitem(tasks.TASKS["tiny"], "lr", dict.fromkeys(tasks.ARMS, 1e-3))
    monkeypatch.setitem(tasks.TASKS["tiny"], "trials", TRIALS)


@pytest.fixture
def options(tmp_path):
    arguments = ["--task", "tiny", "--arms", "dense", "random-16", "--seeds", "2", "--updates", "3"]
    return quality.parse([*arguments, "--store", str(tmp_path / "store"), "--record", str(tmp_path / "record.json")])


def outcome(spec, reward=None):
    """What `execute` would return: the reward is a parabola over the lr with its top at `TOP[arm]`."""
    value = 1 - abs(spec.lr - TOP[spec.arm]) * 100 + spec.seed / 100 if reward is None else reward
    held_out = {"0": {"pass@1": 0.0, "score": 0.1}} if spec.is_first_trial else {}
    held_out[str(spec.updates)] = {"pass@1": value / 2, "score": value}
    curves = {name: [value] * spec.updates for name in runs.CURVES}
    return {
        "key": spec.key, "seed": spec.seed, "updates": spec.updates, "curves": curves, "held_out": held_out, "wall_s": 1.0,
        "git": GIT,
    }  # fmt: skip


TOP = {"dense": 1e-3, "random-16": 4e-3}


@pytest.fixture
def done(monkeypatch):
    """The specs that were executed, in order."""
    specs = []

    def fake(spec, threads):
        specs.append(spec)
        return outcome(spec)

    monkeypatch.setattr(runs, "execute", fake)
    return specs


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, [0.0, -1.0, 1.0]),
        ({0.0: 1.0}, [-1.0, 1.0]),
        ({-1.0: 1.0, 0.0: 2.0, 1.0: 3.0}, [2.0]),
        ({-1.0: 3.0, 0.0: 2.0, 1.0: 1.0}, [-2.0]),
        ({-1.0: 1.0, 0.0: 3.0, 1.0: 2.0}, [0.5]),
        ({-1.0: 2.0, 0.0: 3.0, 1.0: 1.0}, [-0.5]),
        ({-1.0: 1.0, 0.0: 3.0, 0.5: 4.0, 1.0: 2.0}, [0.25]),
        ({-1.0: -1e9, 0.0: -1e9, 1.0: -1e9}, [-2.0]),  # everything diverged: lower
    ],
)
def test_the_next_lr(scores, expected):
    assert runs.next_lr(scores) == expected


def test_every_arm_gets_the_same_number_of_trials_and_seeds_of_its_own(options, done):
    quality.work(options, QUIET)
    for arm in options.arms:
        own = [s for s in done if s.arm == arm]
        trials = [s.lr for s in own if s.seed == tasks.TUNING_SEED]
        assert len(trials) == len(set(trials)) == TRIALS
        best = max(trials, key=lambda lr: -abs(lr - TOP[arm]))
        assert [(s.lr, s.seed) for s in own if s.seed != tasks.TUNING_SEED] == [(best, 1), (best, 2)]
    assert {s.lr for s in done if s.arm == "random-16"} == {5e-4, 1e-3, 2e-3, 4e-3}  # the grid moved to the best end


def test_held_out_results_do_not_choose_the_lr(options, monkeypatch):
    def fake(spec, threads):
        run = outcome(spec)
        run["held_out"][str(spec.updates)] = {"pass@1": 1 - run["curves"]["reward"][0], "score": 0.0}
        return run

    monkeypatch.setattr(runs, "execute", fake)
    quality.work(options, QUIET)
    assert runs.choose("tiny", "dense", options).best == 1e-3


def test_finished_runs_are_not_done_again(options, done):
    quality.work(options, QUIET)
    count = len(done)
    quality.work(options, QUIET)
    assert len(done) == count == 2 * (TRIALS + 2)
    options.seeds = 3
    quality.work(options, QUIET)
    assert [(s.arm, s.seed) for s in done[count:]] == [("dense", 3), ("random-16", 3)]
    files = list(options.store.glob("tiny/*.json"))
    assert len(files) == len(done) and all(json.loads(f.read_text())["key"] in f.name for f in files)


def test_a_killed_run_is_done_again_and_the_others_are_not(options, monkeypatch):
    specs = []

    def dies(spec, threads):
        specs.append(spec)
        if len(specs) == 3:
            raise KeyboardInterrupt
        return outcome(spec)

    monkeypatch.setattr(runs, "execute", dies)
    with pytest.raises(KeyboardInterrupt):
        quality.work(options, QUIET)
    quality.work(options, QUIET)
    assert specs[2] == specs[3] and len(specs) == len(set(specs)) + 1


def test_workers_share_the_runs(options, monkeypatch):
    """Threads stand for processes: each takes locks of its own."""
    specs, both = [], threading.Barrier(2, timeout=10)

    def fake(spec, threads):
        specs.append(spec)
        if len(specs) <= 2:
            both.wait()  # passes only if the two runs go on at once
        return outcome(spec)

    monkeypatch.setattr(runs, "execute", fake)
    monkeypatch.setattr(quality, "POLL_S", 0.01)
    workers = [threading.Thread(target=quality.work, args=(options, QUIET)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert len(specs) == len(set(specs)) == 2 * (TRIALS + 2)


HOLDER = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from logra.files import FileLock
lock = FileLock(__import__("pathlib").Path(sys.argv[3]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(options):
    spec = runs.choose("tiny", "dense", options).wanted[0]
    with runs.claimed(spec, options.store) as mine:
        assert mine
    source = BENCHMARKS.parent / "src"
    command = [sys.executable, "-c", HOLDER, str(source), str(BENCHMARKS), str(options.store / ".claims" / spec.key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with runs.claimed(spec, options.store) as mine:
            assert not mine
        holder.kill()
        holder.wait()
        with runs.claimed(spec, options.store) as mine:
            assert mine


def test_the_key_covers_what_shapes_a_run_and_nothing_else(monkeypatch):
    def spec(**changes):
        return runs.Spec(
            **{"task": "tiny", "arm": "random-16", "lr": 1e-3, "seed": 1, "updates": 5, "trust": "off"} | changes
        )

    first = spec().key
    assert first == spec().key
    changes = ({"arm": "random-64"}, {"lr": 2e-3}, {"seed": 2}, {"updates": 6}, {"trust": "small"}, {"task": "smol"})
    assert len({first, *(spec(**c).key for c in changes)}) == 1 + len(changes)
    assert spec(arm="dense", trust="large").key == spec(arm="dense").key  # dense has no trust region
    other = {**tasks.TASKS["tiny"], "lr": {}, "updates": 9}  # the centre of the grid and the default length
    monkeypatch.setitem(tasks.TASKS, "tiny", other)
    assert spec().key == first
    monkeypatch.setitem(tasks.TASKS, "tiny", {**other, "held_out": 10})
    assert spec().key != first


def test_summary_names_what_is_missing_and_writes_no_record(options, done, capsys):
    options.no_record = False
    console = Console(width=200)
    assert quality.report(options, console) == 1
    quality.work(options, QUIET)
    lost = next(iter(options.store.glob("tiny/random-16_lr0.004_seed2_*.json")))
    lost.unlink()
    assert quality.report(options, console) == 1
    assert "missing: random-16 lr 0.004 seed 2" in capsys.readouterr().out
    assert not options.record.exists()


def test_the_record_holds_every_run_its_mean_and_its_spread(options, done, capsys):
    quality.work(options, QUIET)
    assert quality.report(options, Console(width=200)) == 0
    written = json.loads(options.record.read_text())
    assert written["name"] == "quality_tiny" and written["config"]["trials"] == TRIALS
    assert written["results"]["before"] == {"pass@1": 0.0, "score": 0.1}
    dense = written["results"]["arms"]["dense"]
    assert dense["best_lr"] == 1e-3 and not dense["best_is_at_an_end"] and len(dense["trials"]) == TRIALS
    assert [run["seed"] for run in dense["runs"]] == [1, 2]
    assert dense["reward"] == pytest.approx({"mean": 1.015, "min": 1.01, "max": 1.02, "std": 0.005 * 2**0.5})
    assert dense["whole_curve"] == dense["reward"]
    assert dense["pass@1"]["mean"] == pytest.approx(1.015 / 2)
    assert written["results"]["arms"]["random-16"]["best_is_at_an_end"]
    assert "0.001" in capsys.readouterr().out


def test_a_run_that_diverges_is_a_result(options, monkeypatch, capsys):
    def diverges_above(spec, threads):
        return (
            outcome(spec)
            if spec.lr <= 1e-3
            else {**outcome(spec), "failed": "NonFiniteError in update 2"} | {"curves": None}
        )

    def fake(spec, threads):
        run = diverges_above(spec, threads)
        return {k: v for k, v in run.items() if v is not None}

    monkeypatch.setattr(runs, "execute", fake)
    quality.work(options, QUIET)
    assert runs.choose("tiny", "random-16", options).best == 1e-3
    assert quality.report(options, Console(width=200)) == 0
    assert "failed" in capsys.readouterr().out


def test_execute_reports_a_divergence(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, config):
            self.trainer, self.folder = self, self
            self.step, self.metrics = 4, tmp_path / "none.jsonl"

        def fit(self):
            raise NonFiniteError("NaN")

        def close(self):
            pass

    monkeypatch.setattr(runs, "build_run", Broken)
    spec = runs.Spec("tiny", "dense", 1.0, 1, 9, False)
    result = runs.execute(spec, 1)
    assert result["failed"] == "NonFiniteError in update 5" and runs.score(result) < 0


@pytest.mark.parametrize("arm", ["dense", "random-16"])
def test_a_real_run(arm, monkeypatch):
    small = tasks.TASKS["tiny"]
    rollout = {**small["config"]["rollout"], "prompts_per_step": 4}
    small = {**small, "held_out": 8, "model": {"hidden": 32}, "config": {**small["config"], "rollout": rollout}}
    monkeypatch.setitem(tasks.TASKS, "tiny", small)
    result = runs.execute(
        runs.Spec("tiny", arm, 1e-3, tasks.TUNING_SEED, 2, "off" if arm == "dense" else "annealed"), 1
    )
    assert [len(curve) for curve in result["curves"].values()] == [2] * len(runs.CURVES)
    assert set(result["held_out"]) == ({"0", "2"} if arm == "dense" else {"2"})  # lr 1e-3 is the centre of dense
    assert all(0 <= e["pass@1"] <= e["score"] <= 1 for e in result["held_out"].values())
    assert result["git"] == GIT and result["wall_s"] > 0
    assert not [text for text in json.dumps(result).split('"') if text.startswith("/")]


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_the_data_of_a_task(task):
    settings = tasks.TASKS[task]
    train, held_out = tasks.split_rows(settings["rows"], settings["held_out"])
    prompts = [row["prompt"] for row in (*train, *held_out)]
    assert len(held_out) == settings["held_out"] and len(prompts) == len(set(prompts))
    assert (train, held_out) == tasks.split_rows(settings["rows"], settings["held_out"])
    assert settings["lr"].keys() == tasks.ARMS.keys()
    rollout = settings["config"]["rollout"]
    assert len(train) >= rollout["prompts_per_step"]


def test_equal_bits():
    codes = tasks.CODE_ALPHABET
    assert tasks.equal_bits(["0", "v", "1", "w", "", "0v"], answer=["0", "0", "0", "0", "0", "0"]) == [
        1,
        0,
        0.8,
        0,
        0,
        1,
    ]
    for constant in codes:  # no constant reply does better than another
        assert sum(tasks.equal_bits([constant] * 32, answer=codes)) == pytest.approx(16)
    assert len({row["answer"] for row in tasks.code_rows()}) == 32


@pytest.mark.parametrize(
    "wrong", [["--task", "none"], ["--task", "tiny", "--arms", "x"], ["--task", "tiny", "--seeds", "0"]]
)
def test_bad_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        quality.parse(wrong)
    assert stop.value.code == 2 and "usage" in capsys.readouterr().err
