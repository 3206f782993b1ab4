"""Quality at equal updates and equal samples: dense AdamW, LoRA, LoGRA with random and with aligned bases on one RL task.

    python benchmarks/quality.py --task tiny|smol [--arms dense random-16 ...] [--seeds 3] [--jobs N] [--threads 1] [--trust]
    python benchmarks/quality.py --task tiny --summary        # the table, and the record once nothing is missing

Every arm gets the same number of trials (lrs) with the tuning seed, chosen by `next_lr`; the best by training reward, never by
the held-out prompts, is then run with every other seed, and those runs alone are reported. A finished run is one small file in
the store, named by a hash of all that shapes it: call again, or from several processes, to go on with what is missing. A
killed process loses the run it was doing and no claim. Arms and tasks: benchmarks/quality_tasks.py.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from quality_tasks import ARMS, TASKS, TRIALS, TUNING_SEED, materialise, split_rows  # noqa: E402
from record import RECORDS, begin_record, finish_record, provenance  # noqa: E402
from rich.box import SIMPLE  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from logra import config as cfg  # noqa: E402
from logra.build import build_run  # noqa: E402
from logra.cli.allocator import keep_freed_memory  # noqa: E402
from logra.errors import ConfigError, MismatchError, NonFiniteError  # noqa: E402
from logra.files import FileLock, write_atomic  # noqa: E402
from logra.rl.run_dir import read_metrics  # noqa: E402

STORE = RECORDS / "quality_runs"  # below the records, so that finished runs do not make the tree dirty
TRUST = {"enabled": True, "budget": "cosine", "start": 4e-2, "final": 2e-3, "probe_rollouts": 8}
LAST = 10  # updates whose mean training reward ranks the trials
POLL_S = 2.0
CURVES = {"reward": "reward", "entropy": "entropy", "step_s": "step_time", "grad_norm": "grad_norm"}


@dataclass(frozen=True)
class Spec:
    """One training run. Two specs with the same `key` are the same run."""

    task: str
    arm: str
    lr: float
    seed: int
    updates: int
    trust: bool

    @property
    def key(self) -> str:
        """Hex digest of everything that shapes the run: the task's rows and settings, the arm's, and the spec's own."""
        task = {k: v for k, v in TASKS[self.task].items() if k not in ("lr", "updates")}
        whole = {
            "task": task, "rows": rows_digest(task["rows"], task["held_out"]), "method": ARMS[self.arm], "lr": self.lr,
            "seed": self.seed, "updates": self.updates, "trust": TRUST if self.uses_trust else None,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def uses_trust(self) -> bool:
        return self.trust and ARMS[self.arm]["name"] == "logra"

    def path(self, store: Path) -> Path:
        return store / self.task / f"{self.arm}_lr{self.lr:g}_seed{self.seed}_{self.key}.json"

    def config(self, folder: Path, threads: int) -> cfg.Config:
        """The run's configuration, with its files in `folder`."""
        task = TASKS[self.task]
        sections: dict[str, Any] = {
            "output_dir": str(folder / "run"), "seed": self.seed, "threads": threads,
            "method": {**ARMS[self.arm], "lr": self.lr},
            "trust": {**TRUST, "steps": self.updates} if self.uses_trust else {"enabled": False},
            "checkpoint": {"every": 0}, "journal": {"enabled": False}, "log": {"completions": False},
        }  # fmt: skip
        for section, values in (*task["config"].items(), *materialise(task, folder).items()):
            sections[section] = {**sections.get(section, {}), **values}
        sections["train"]["steps"] = self.updates
        sections["eval"] |= {"before": self.is_first_trial, "temperature": 0.0}
        return cfg.make_config(sections)

    @property
    def is_first_trial(self) -> bool:
        """Whether this is the run that also evaluates the starting policy, which all arms share."""
        return self.arm == "dense" and self.seed == TUNING_SEED and self.lr == trial_lr(self.task, self.arm, 0.0)


@functools.cache
def rows_digest(kind: str, held_out: int) -> str:
    """Hex digest of the training and the held-out rows."""
    return hashlib.sha256(json.dumps(split_rows(kind, held_out)).encode()).hexdigest()


# -- which runs ----------------------------------------------------------------------------------------------------------------


def trial_lr(task: str, arm: str, exponent: float) -> float:
    return float(f"{TASKS[task]['lr'][arm] * 2**exponent:.3g}")


def next_lr(scores: Mapping[float, float]) -> list[float]:
    """The exponents (lr = centre * 2^exponent) to try next, given the score of each that was tried.

    First -1, 0 and 1, which may run at once. Then one at a time: one further where the best is at an end, else half a step from
    the best, towards its better neighbour. All arms get `TRIALS` of them, whatever the centre was.
    """
    first = [e for e in (0.0, -1.0, 1.0) if e not in scores]
    if first:
        return first
    tried = sorted(scores)
    best = max(tried, key=lambda e: (scores[e], -e))
    place = tried.index(best)
    if place in (0, len(tried) - 1):
        return [best - 1 if place == 0 else best + 1]
    neighbour = max(tried[place - 1], tried[place + 1], key=lambda e: (scores[e], -e))
    return [(best + neighbour) / 2]


@dataclass(frozen=True)
class Choice:
    """Where the tuning of one arm stands. scores: lr -> mean training reward of the last updates. wanted: runs still to do."""

    scores: dict[float, float]
    best: float | None
    wanted: list[Spec]


def choose(task: str, arm: str, options: argparse.Namespace) -> Choice:
    """Replays the tuning of an arm from the store."""
    by_exponent: dict[float, float] = {}
    scores: dict[float, float] = {}
    while len(by_exponent) < TRIALS:
        ahead = next_lr(by_exponent)[: TRIALS - len(by_exponent)]
        specs = [Spec(task, arm, trial_lr(task, arm, e), TUNING_SEED, options.updates, options.trust) for e in ahead]
        wanted = [s for s in specs if not s.path(options.store).exists()]
        found = {e: score(load(s, options.store)) for e, s in zip(ahead, specs, strict=True) if s not in wanted}
        by_exponent |= found
        scores |= {trial_lr(task, arm, e): value for e, value in found.items()}
        if wanted:
            return Choice(scores, None, wanted)
    best = max(scores, key=lambda lr: (scores[lr], -lr))
    finals = [Spec(task, arm, best, seed, options.updates, options.trust) for seed in seeds(options)]
    return Choice(scores, best, [s for s in finals if not s.path(options.store).exists()])


def seeds(options: argparse.Namespace) -> range:
    return range(TUNING_SEED + 1, TUNING_SEED + 1 + options.seeds)


def load(spec: Spec, store: Path) -> dict[str, Any]:
    return json.loads(spec.path(store).read_text())


def score(run: Mapping[str, Any]) -> float:
    """Mean training reward of the last updates; a failed run is below any other."""
    return statistics.fmean(run["curves"]["reward"][-LAST:]) if "curves" in run else -1e9


# -- doing them ----------------------------------------------------------------------------------------------------------------


def execute(spec: Spec, threads: int) -> dict[str, Any]:
    """Train and evaluate. A run that diverges is a result too: `failed` says how."""
    started = time.perf_counter()
    made_by = {k: v for k, v in provenance().items() if k != "command"}
    own = {k: getattr(spec, k) for k in ("task", "arm", "lr", "seed", "updates", "trust")}
    result: dict[str, Any] = {"key": spec.key, **own, "method": ARMS[spec.arm], "threads": threads, **made_by}
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        run = build_run(spec.config(Path(folder), threads))
        try:
            run.trainer.fit()
        except (MismatchError, NonFiniteError) as error:
            result["failed"] = f"{type(error).__name__} in update {run.trainer.step + 1}"
        finally:
            run.close()
        metrics = read_metrics(run.folder.metrics) if run.folder.metrics.exists() else []
    if "failed" not in result:
        result |= summarise_metrics(metrics)
    return result | {"wall_s": round(time.perf_counter() - started, 1)}


def summarise_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Curves over updates, and held-out results by step."""
    steps = [m for m in metrics if "reward" in m]
    curves = {name: [_short(m.get(key, 0.0)) for m in steps] for name, key in CURVES.items()}
    held_out = {
        str(m["step"]): {"pass@1": m["eval/pass@1"], "score": _short(m["eval/avg@1"])}
        for m in metrics
        if "eval/pass@1" in m
    }
    return {"curves": curves, "held_out": held_out, "skipped": steps[-1]["skipped_steps"]}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@contextmanager
def claimed(spec: Spec, store: Path) -> Iterator[bool]:
    """Whether this process has the run for itself. The claim is a lock of the operating system: it ends with its process."""
    folder = store / ".claims"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    lock = FileLock(folder / spec.key)
    try:
        lock.acquire()
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def work(options: argparse.Namespace, console: Console) -> None:
    """Do what is missing until nothing is; wait where others do what the rest depends on."""
    while wanted := [s for arm in options.arms for s in choose(options.task, arm, options).wanted]:
        if not any(attempt(spec, options, console) for spec in wanted):
            time.sleep(POLL_S)


def attempt(spec: Spec, options: argparse.Namespace, console: Console) -> bool:
    """Do one run if nobody else does, and if it is still missing; True if this changed what is wanted."""
    with claimed(spec, options.store) as mine:
        if not mine:
            return False
        path = spec.path(options.store)
        if path.exists():
            return True
        result = execute(spec, options.threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(result) + "\n").encode())
    end = result.get("failed") or f"reward {score(result):.3f}, pass@1 {final(result)['pass@1']:.3f}"
    console.print(f"{spec.task} {spec.arm} lr {spec.lr:g} seed {spec.seed}: {end}, {result['wall_s']:.0f} s")
    return True


def final(run: Mapping[str, Any]) -> dict[str, float]:
    return run["held_out"][str(run["updates"])]


def spawn(arguments: Sequence[str], jobs: int) -> int:
    """The same command in `jobs` processes, which share the work by their claims; the first exit code that is not 0."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--jobs", "1"]
    workers = [subprocess.Popen(command) for _ in range(jobs)]
    try:
        codes = [worker.wait() for worker in workers]
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    return next((code for code in codes if code), 0)


# -- what came of it -----------------------------------------------------------------------------------------------------------


def summarise(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """(arm -> what is known of it, descriptions of the runs that are missing)."""
    arms, missing = {}, []
    for arm in options.arms:
        choice = choose(options.task, arm, options)
        missing += [f"{s.arm} lr {s.lr:g} seed {s.seed}" for s in choice.wanted]
        if choice.best is None:
            missing.append(f"{arm}: further trials, then {options.seeds} seeds")
        trials = {f"{lr:g}": _short(value) for lr, value in sorted(choice.scores.items())}
        arms[arm] = {"method": ARMS[arm], "trials": trials, "best_lr": choice.best}
        if choice.best is not None:
            arms[arm] |= of_seeds(options, arm, choice.best)
            arms[arm]["best_is_at_an_end"] = choice.best in (min(choice.scores), max(choice.scores))
    return arms, missing


def of_seeds(options: argparse.Namespace, arm: str, lr: float) -> dict[str, Any]:
    """The runs of the reported seeds: each one's, and their mean and spread."""
    specs = [Spec(options.task, arm, lr, seed, options.updates, options.trust) for seed in seeds(options)]
    runs = [load(s, options.store) for s in specs if s.path(options.store).exists()]
    good = [run for run in runs if "failed" not in run]
    found: dict[str, Any] = {
        "runs": [{k: run[k] for k in ("seed", "curves", "held_out", "failed", "wall_s") if k in run} for run in runs],
        "failed": len(runs) - len(good),
        "commits": sorted({run["git"]["commit"] for run in runs}),
        "any_dirty": any(run["git"]["dirty"] for run in runs),
    }
    if good:
        found["pass@1"] = spread([final(run)["pass@1"] for run in good])
        found["held_out_score"] = spread([final(run)["score"] for run in good])
        found["reward"] = spread([score(run) for run in good])
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, range and sample standard deviation (0 for one value)."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values), "std": deviation}


def starting_policy(options: argparse.Namespace) -> dict[str, float] | None:
    """Held-out results before training, from the one run that looked."""
    spec = Spec(
        options.task, "dense", trial_lr(options.task, "dense", 0.0), TUNING_SEED, options.updates, options.trust
    )
    return load(spec, options.store).get("held_out", {}).get("0") if spec.path(options.store).exists() else None


def show(arms: Mapping[str, Any], before: Mapping[str, float] | None, options: argparse.Namespace) -> Table:
    start = f"; before training pass@1 {before['pass@1']:.3f}" if before else ""
    title = f"{options.task}: {options.updates} updates, {options.seeds} seeds{start}"
    heads = ("arm", "lr", "trials", "held-out pass@1", "min..max", "std", f"reward, last {LAST}", "failed")
    table = Table(*heads, title=title, box=SIMPLE, pad_edge=False)
    for arm, found in arms.items():
        trials = " ".join(
            f"{lr}:{'failed' if value < 0 else format(value, '.3f')}" for lr, value in found["trials"].items()
        )
        best = found["best_lr"]
        mark = " (end)" if found.get("best_is_at_an_end") else ""
        cells = [arm, f"{best:g}{mark}" if best else "", trials]
        if "pass@1" in found:
            passed, reward = found["pass@1"], found["reward"]
            cells += [f"{passed['mean']:.3f}", f"{passed['min']:.3f}..{passed['max']:.3f}", f"{passed['std']:.3f}"]
            cells += [f"{reward['mean']:.3f} +- {reward['std']:.3f}", str(found["failed"] or "")]
        table.add_row(*cells)
    return table


def report(options: argparse.Namespace, console: Console) -> int:
    """Print the table; write the record if nothing is missing, else say what is. Exit code 0 or 1."""
    arms, missing = summarise(options)
    before = starting_policy(options)
    console.print(show(arms, before, options))
    if missing:
        console.print(f"no record yet, missing: {'; '.join(missing)}")
        return 1
    if options.no_record:
        return 0
    task = {k: v for k, v in TASKS[options.task].items() if k != "updates"}
    config = {k: getattr(options, k) for k in ("task", "arms", "seeds", "updates", "trust")}
    config |= {
        "settings": task,
        "trials": TRIALS,
        "tuning_seed": TUNING_SEED,
        "ranked_by": f"training reward, last {LAST}",
    }
    begun = begin_record(name=f"quality_{options.task}", config=config, seed=TUNING_SEED)
    finish_record(options.record, begun, {"before": before, "arms": arms})
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), required=True)
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS), metavar="ARM", help=" ".join(ARMS)
    )
    for name, default, text in (
        ("seeds", 3, "seeds at the best lr"), ("jobs", 1, "processes"), ("threads", 1, "torch threads of each"),
        ("updates", None, "default: the task's"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--trust", action="store_true", help="the trust region for the arms of logra")
    parser.add_argument("--store", type=Path, default=STORE, help="folder of finished runs")
    parser.add_argument("--summary", action="store_true", help="run nothing: table, and record if all is there")
    parser.add_argument("--record", type=Path, help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    options.updates = TASKS[options.task]["updates"] if options.updates is None else options.updates
    options.arms = list(dict.fromkeys(options.arms))
    if min(options.seeds, options.jobs, options.threads, options.updates) < 1:
        parser.error("--seeds, --jobs, --threads and --updates must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: all there; 1: runs are missing (--summary); 2: something to mend."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options, console = parse(arguments), Console(width=160, highlight=False)
    if options.summary:
        return report(options, console)
    if options.jobs > 1:
        return spawn(arguments, options.jobs)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    keep_freed_memory()
    try:
        work(options, console)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
