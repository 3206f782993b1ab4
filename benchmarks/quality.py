"""Quality at equal updates and equal samples: dense AdamW, LoRA, LoGRA with random and with aligned bases on one RL task.

    python benchmarks/quality.py --task tiny|smol [--arms dense random-16 ...] [--seeds 3] [--jobs N] [--threads 1]
    python benchmarks/quality.py --task tiny --arms aligned-16 --trust off|large|small|annealed    # the KL budget ablation
    python benchmarks/quality.py --task tiny --summary        # the table, and the record once nothing is missing

Every arm gets the same number of trials (lrs) with the tuning seed, chosen by `next_lr`; the best by training reward, never by
the held-out prompts, is then run with every other seed, and those runs alone are reported. A finished run is one small file in
the store, named by a hash of all that shapes it: call again, or from several processes, to go on with what is missing. A
killed process loses the run it was doing and no claim. Arms and tasks: benchmarks/quality_tasks.py.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import quality_runs
from quality_runs import BUDGETS, LAST, Spec, choose, final, load, score, seeds, short, trial_lr
from quality_tasks import ARMS, BY_DEFAULT, TASKS, TUNING_SEED
from record import RECORDS, begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from logra.cli.allocator import keep_freed_memory
from logra.errors import ConfigError

STORE = RECORDS / "quality_runs"  # below the records, so that finished runs do not make the tree dirty
POLL_S = 2.0


def work(options: argparse.Namespace, console: Console) -> None:
    """Do what is missing until nothing is; wait where others do what the rest depends on."""
    while wanted := [s for arm in options.arms for s in choose(options.task, arm, options).wanted]:
        if not any(attempt(spec, options, console) for spec in wanted):
            time.sleep(POLL_S)


def attempt(spec: Spec, options: argparse.Namespace, console: Console) -> bool:
    """Do one run if nobody else does, and if it is still missing; True if this changed what is wanted."""

    def say(result: Mapping[str, Any]) -> None:
        end = result.get("failed") or f"reward {score(result):.3f}, pass@1 {final(result)['pass@1']:.3f}"
        console.print(f"{spec.task} {spec.arm} lr {spec.lr:g} seed {spec.seed}: {end}, {result['wall_s']:.0f} s")

    return quality_runs.attempt(spec, options.store, lambda: quality_runs.execute(spec, options.threads), say)


def spawn(arguments: Sequence[str], jobs: int, script: Path = Path(__file__)) -> int:
    """The same command in `jobs` processes, which share the work by their claims; the first exit code that is not 0."""
    command = [sys.executable, str(script.resolve()), *arguments, "--jobs", "1"]
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
        trials = {f"{lr:g}": short(value) for lr, value in sorted(choice.scores.items())}
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
        found["whole_curve"] = spread([statistics.fmean(run["curves"]["reward"]) for run in good])
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
    heads = (
        "arm",
        "lr",
        "trials",
        "held-out pass@1",
        "min..max",
        "std",
        f"reward, last {LAST}",
        "reward, all",
        "failed",
    )
    table = Table(*heads, title=title, box=SIMPLE, pad_edge=False)
    for arm, found in arms.items():
        trials = " ".join(
            f"{lr}:{'failed' if value < 0 else format(value, '.3f')}" for lr, value in found["trials"].items()
        )
        best = found["best_lr"]
        mark = " (end)" if found.get("best_is_at_an_end") else ""
        cells = [arm, f"{best:g}{mark}" if best else "", trials]
        if "pass@1" in found:
            passed, rewards = found["pass@1"], (found["reward"], found["whole_curve"])
            cells += [f"{passed['mean']:.3f}", f"{passed['min']:.3f}..{passed['max']:.3f}", f"{passed['std']:.3f}"]
            cells += [f"{reward['mean']:.3f} +- {reward['std']:.3f}" for reward in rewards]
            cells.append(str(found["failed"] or ""))
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
    task = {k: v for k, v in TASKS[options.task].items() if k not in ("updates", "trials")}
    config = {k: getattr(options, k) for k in ("task", "arms", "seeds", "updates", "trust")}
    config |= {
        "settings": task,
        "trials": TASKS[options.task]["trials"],
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
        "--arms", nargs="+", choices=tuple(ARMS), default=list(BY_DEFAULT), metavar="ARM", help=" ".join(ARMS)
    )
    for name, default, text in (
        ("seeds", 3, "seeds at the best lr"), ("jobs", 1, "processes"), ("threads", 1, "torch threads of each"),
        ("updates", None, "default: the task's"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument(
        "--trust",
        choices=tuple(BUDGETS),
        default="off",
        help="the KL budget of the arms of logra (the published ablation)",
    )
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
