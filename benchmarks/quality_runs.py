"""The runs of benchmarks/quality.py: what one is, which are wanted, how one is done, claimed and stored."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quality_tasks import ARMS, TASKS, TUNING_SEED, materialise, split_rows
from record import provenance

from logra import config as cfg
from logra.build import build_run
from logra.errors import MismatchError, NonFiniteError
from logra.files import FileLock, write_atomic
from logra.rl.run_dir import read_metrics

# the KL budget as the only schedule: the largest scale is out of the way, so that the lr hardly matters
BUDGETS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "large": {"budget": "constant", "start": 4e-2},
    "small": {"budget": "constant", "start": 4e-3},
    "annealed": {"budget": "cosine", "start": 4e-2, "final": 2e-3},
}
PROBE = {"enabled": True, "largest_scale": 1000.0, "probe_rollouts": 8}
LAST = 10  # updates whose mean training reward ranks the trials
CURVES = {"reward": "reward", "entropy": "entropy", "step_s": "step_time", "grad_norm": "grad_norm"}


@dataclass(frozen=True)
class Spec:
    """One training run. Two specs with the same `key` are the same run."""

    task: str
    arm: str
    lr: float
    seed: int
    updates: int
    trust: str = "off"

    @property
    def key(self) -> str:
        """Hex digest of everything that shapes the run: the task's rows and settings, the arm's, and the spec's own."""
        task = {k: v for k, v in TASKS[self.task].items() if k not in ("lr", "updates", "trials")}
        whole = {
            "task": task, "rows": rows_digest(task["rows"], task["held_out"]), "method": ARMS[self.arm], "lr": self.lr,
            "seed": self.seed, "updates": self.updates, "trust": self.budget,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def budget(self) -> dict[str, Any] | None:
        """The settings of the trust region, which only logra has; None: off."""
        chosen = BUDGETS[self.trust] if ARMS[self.arm]["name"] == "logra" else None
        return None if chosen is None else {**PROBE, **chosen}

    def path(self, store: Path) -> Path:
        return store / self.task / f"{self.arm}_lr{self.lr:g}_seed{self.seed}_{self.key}.json"

    def config(self, folder: Path, threads: int) -> cfg.Config:
        """The run's configuration, with its files in `folder`."""
        task = TASKS[self.task]
        sections: dict[str, Any] = {
            "output_dir": str(folder / "run"), "seed": self.seed, "threads": threads,
            "method": {**ARMS[self.arm], "lr": self.lr},
            "trust": {"enabled": False} if self.budget is None else {**self.budget, "steps": self.updates},
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
    the best, towards its better neighbour. All arms of a task get the same number of them, whatever the centre was.
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
    trials = TASKS[task]["trials"]
    while len(by_exponent) < trials:
        ahead = next_lr(by_exponent)[: trials - len(by_exponent)]
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


def final(run: Mapping[str, Any]) -> dict[str, float]:
    """Held-out results after the last update."""
    return run["held_out"][str(run["updates"])]


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
    curves = {name: [short(m.get(key, 0.0)) for m in steps] for name, key in CURVES.items()}
    held_out = {
        str(m["step"]): {"pass@1": m["eval/pass@1"], "score": short(m["eval/avg@1"])}
        for m in metrics
        if "eval/pass@1" in m
    }
    return {"curves": curves, "held_out": held_out, "skipped": steps[-1]["skipped_steps"]}


def short(value: float) -> float:
    return float(f"{value:.4g}")


class Claimable(Protocol):
    """A run that several processes may want to do: its name, and the file of its result."""

    @property
    def key(self) -> str: ...

    def path(self, store: Path) -> Path: ...


def attempt(
    run: Claimable, store: Path, execute: Callable[[], dict[str, Any]], say: Callable[[dict[str, Any]], None]
) -> bool:
    """Do one run if nobody else does, and if it is still missing; True if this changed what is wanted."""
    with claimed(run, store) as mine:
        if not mine:
            return False
        path = run.path(store)
        if path.exists():
            return True
        result = execute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(result) + "\n").encode())
    say(result)
    return True


@contextmanager
def claimed(spec: Claimable, store: Path) -> Iterator[bool]:
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
