"""Packed rows against padded rows: tokens, time and peak bytes of the gradient pass, side by side in one process.

    python benchmarks/packing.py [--model models/SmolLM2-135M-Instruct] [--rounds 5] [--shapes demo long full]

Each shape is one microbatch of random tokens: groups of rollouts of one prompt, with lengths drawn from 1 to the longest (skewed
to short ones, as answers are). The pass is that of `logra train`: log-probs, loss, backward, sketches of rank 64 of the seven
projections. The two take turns and the order turns from round to round; ratios are taken within a round. Peaks are bytes of
tensors above weights and sketches (logra.memory.meter).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record import begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import logra
from logra.cli.allocator import keep_freed_memory
from logra.memory.meter import Meter
from logra.rl.batch import TrainBatch, collate
from logra.rl.layout import layout
from logra.rl.models import load_model, prepare
from logra.rl.step import LossSettings, Tally, accumulate
from logra.rl.types import Prompt, Rollout
from logra.sketch.sketcher import Sketcher

# name -> prompts, rollouts of each, prompt tokens, the longest answer
SHAPES = {
    "demo": (2, 8, 59, 20),
    "reasoning": (1, 8, 128, 256),
    "long prompt": (1, 8, 512, 64),
    "alone": (8, 1, 64, 128),
}
ARMS = {"padded": LossSettings(packed=False), "packed": LossSettings()}


def batch_of(shape: tuple[int, int, int, int], vocabulary: int, seed: int) -> TrainBatch:
    prompts, group, width, longest = shape
    generator, rollouts = torch.Generator().manual_seed(seed), []
    for number in range(prompts):
        ids = tuple(torch.randint(0, vocabulary, (width,), generator=generator).tolist())
        for index in range(group):
            share = float(torch.rand((), generator=generator)) ** 2
            length = longest if number == index == 0 else 1 + int(share * (longest - 1))
            tokens = tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist())
            rollouts.append(Rollout(Prompt(number, "", ids), index, tokens, (-5.0,) * length, "eos", "", 0))
    return collate(rollouts, 0).with_advantages(torch.linspace(-1.0, 1.0, len(rollouts)))


def one_pass(sketcher: Sketcher, model: Any, batch: TrainBatch, settings: LossSettings) -> float:
    """Seconds; the sketches are those of this pass alone."""
    sketcher.zero()
    started = time.perf_counter()
    accumulate(model, batch, len(batch), settings, tally=Tally())
    return time.perf_counter() - started


def measure(
    model: Any, sketcher: Sketcher, shape: tuple[int, int, int, int], options: argparse.Namespace
) -> dict[str, Any]:
    batch = batch_of(shape, model.config.vocab_size, options.seed)
    peaks, sketches = {}, {}
    for name, settings in ARMS.items():
        one_pass(sketcher, model, batch, settings)  # warm, and the check whether the model may be packed
        with Meter() as meter:
            one_pass(sketcher, model, batch, settings)
            peaks[name] = meter.reading().peak
        sketches[name] = torch.cat([sketcher.sketch(n).flatten() for n in sketcher.names])
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for index in range(options.rounds):
        for name in sorted(ARMS, reverse=bool(index % 2)):
            times[name].append(one_pass(sketcher, model, batch, ARMS[name]))
    ratios = [a / b for a, b in zip(times["padded"], times["packed"], strict=True)]
    wrong = (sketches["packed"] - sketches["padded"]).norm() / sketches["padded"].norm()
    return {
        "shape": dict(zip(("prompts", "group", "prompt_tokens", "longest"), shape, strict=True)),
        "tokens": {"padded": batch.input_ids.numel(), "packed": layout(batch, batch.loss_mask).size},
        "seconds": times,
        "speedup": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "peak_bytes": peaks,
        "sketch_difference": float(wrong),
    }


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(box=SIMPLE)
    for column in ("shape", "tokens", "packed", "times faster", "peak MiB", "packed", "sketches differ by"):
        table.add_column(column, justify="right" if column != "shape" else "left")
    for name, of in found.items():
        speedup, tokens, peaks = of["speedup"], of["tokens"], of["peak_bytes"]
        table.add_row(
            name, str(tokens["padded"]), str(tokens["packed"]),
            f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})",
            f"{peaks['padded'] / 2**20:.0f}", f"{peaks['packed'] / 2**20:.0f}", f"{of['sketch_difference']:.1e}",
        )  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    for name, default in (("rounds", 5), ("rank", 64), ("threads", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--record", type=Path, help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "seed")}
    begun = None if options.no_record else begin_record(name="packing", config=config, seed=options.seed)
    model, _ = load_model(options.model)
    prepare(model, options.checkpointing)
    sketcher = logra.attach(model, rank=options.rank)
    found = {name: measure(model, sketcher, SHAPES[name], options) for name in options.shapes}
    show(found, Console())
    if begun is not None:
        finish_record(options.record, begun, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
