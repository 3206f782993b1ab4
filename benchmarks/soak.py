"""A long run of tiny steps over two ranks in which something goes wrong every few steps: what is left must be exact.

    python benchmarks/soak.py [--steps 2000] [--every 50] [--seed 0] [--async K] [--output FOLDER] [--twin]

`torchrun -m logra train` on two ranks, an engine process that speaks vLLM's routes (`soak_engine.py`), and between them a proxy
(`soak_faults.py`). Every `--every` steps one fault, drawn by the seed: engine or rank killed with SIGKILL (by the clock, or in
the middle of a transfer), a request or its answer dropped, delayed, or sent twice. After a killed rank torchrun must end by
itself, and the same command goes on with `--resume auto`; after everything else the run must go on by itself, and where it does
not that is an unexpected stop. In the end (`soak_checks.py`) every step is there once, the journal replays from the base model
with all its digests, final model and engine have the digest of its end, and memory is flat. --twin: the same run without
faults, whose weights must be the same to the last bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from record import begin_record, finish_record
from soak_faults import KINDS, schedule
from soak_run import Soak, write_model

FLAT = 0.02  # growth of resident memory per 1,000 steps that is still called flat
LONG = 900  # steps of a life from which that is judged


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run under faults, and its twin without if that was asked for."""
    model = write_model(folder / "model")
    faults = schedule(options.steps, options.every, options.seed, options.kinds, options.delay)
    found = Soak(options, model, folder / "faults", faults).run()
    if options.twin:
        twin = Soak(options, model, folder / "twin", []).run()
        found["twin"] = {k: twin[k] for k in ("digests", "wall_s", "median_step_s", "failures", "memory")}
        found["twin"]["is_same"] = twin["digests"] == found["digests"]
        if not found["twin"]["is_same"]:
            found["failures"].append("the run without faults has other weights")
        found["failures"] += [f"without faults: {failure}" for failure in twin["failures"]]
    found["recovery_s"] = recoveries(found["faults"])
    memory = {
        **found["memory"],
        **{f"{who} without faults": m for who, m in found.get("twin", {}).get("memory", {}).items()},
    }
    found["failures"] += [f"memory of {who} grows: {m}" for who, m in memory.items() if m is not None and grows(m)]
    return found


def grows(memory: Mapping[str, Any]) -> bool:
    """Whether a life that is long enough to tell grew: one of hundreds of steps has its one-time costs in it."""
    is_long = memory["to_step"] - memory["from_step"] >= LONG
    return is_long and memory["bytes_per_1000_steps"] > FLAT * memory["first_bytes"]


def recoveries(faults: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and seconds: until the next step was finished, and lost (median, longest)."""
    found = {}
    for kind in sorted({fault["kind"] for fault in faults}):
        own = [fault for fault in faults if fault["kind"] == kind]
        next_s = [fault["recovery_s"] for fault in own if fault["recovery_s"] is not None]
        found[kind] = {"count": len(own), "recovered": len(next_s)}
        for name, values in (("next_step", next_s), ("lost", [fault["lost_s"] for fault in own])):
            found[kind] |= {
                f"{name}_median_s": statistics.median(values or [0.0]),
                f"{name}_longest_s": max(values or [0.0]),
            }
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{found['steps']} steps, {found['updates']} updates in {found['wall_s']:.0f} s; {found['starts']} starts")
    print(f"digests: {found['digests']}, {found['digests_compared']} compared in the journal")
    for kind, own in found["recovery_s"].items():
        print(
            f"  {kind}: {own['count']}, next step after {own['next_step_median_s']:.2f} s "
            f"(longest {own['next_step_longest_s']:.2f} s), lost {own['lost_median_s']:.2f} s "
            f"(longest {own['lost_longest_s']:.2f} s)"
        )
    for run in (found, found.get("twin", {"memory": {}})):
        for who, memory in run["memory"].items():
            print(f"  memory of {who}: {memory}")
    print(f"unexpected stops: {len(found['unexpected_stops'])}; failures: {found['failures'] or 'none'}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--async", type=int, default=0, dest="ahead", help="batches sampled ahead")
    parser.add_argument("--anchor-every", type=int, default=20, help="updates between anchors in the journal; 0: none")
    parser.add_argument("--checkpoint-every", type=int, default=200)
    parser.add_argument("--patience", type=float, default=60.0, help="rollout.vllm.patience_s")
    parser.add_argument("--delay", type=float, default=3.0, help="the longest delay, in seconds")
    parser.add_argument("--twin", action="store_true", help="also without faults: the same weights must come out")
    parser.add_argument("--output", type=Path, help="a folder for runs and logs that is kept; default: a temporary one")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    if not 1 <= options.every < options.steps:
        parser.error("--every must be at least 1 and below --steps")
    if options.twin and options.ahead:
        parser.error("--twin needs --async 0: a resumed run that samples ahead does not go on bit for bit")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, record. Exit code 2 for what the user can mend, 1 if something does not agree or has stopped, else 0."""
    options = parse(arguments)
    torch.set_num_threads(1)
    config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "seed")}
    try:
        begun = None if options.no_record else begin_record(name="soak", config=config, seed=options.seed)
        with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
            folder = options.output or Path(temporary)
            if (folder / "faults").exists():
                raise ValueError(f"{folder} holds a soak already: name another --output")
            found = soak(options, folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(found)
    if begun is not None:
        finish_record(options.record, begun, found)
    return 1 if found["failures"] or found["unexpected_stops"] else 0


if __name__ == "__main__":
    sys.exit(main())
