"""Time of `step()` of each optimizer on SmolLM2-135M's matrices, side by side with the reference implementation, in one process.

    python benchmarks/optimizer_time.py [--layers 30] [--refresh-layers 2] [--rank 128] [--rounds 5] [--only galore fira]

References: galore-torch (float32 beside our 8 bits too: its own need CUDA), apollo-torch, fira, torch.optim.Muon; LoRA-Pre has no
published code and BlockLLM no package, so torch's AdamW stands beside them. Two measurements: an ordinary step (no basis is
made), and a step that makes the basis of every matrix anew.
Contenders take turns within a round, in an order that changes each round; ratios (ours / reference) are of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn

from logra.optim.registry import OPTIMIZERS, takes_rank

# q, k, v, o, gate, up, down of one layer, (out, in)
LAYER = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
NEVER, ALWAYS = 1_000_000, 1
Parameters = list[nn.Parameter]
Make = Callable[[Parameters, int, int], torch.optim.Optimizer]  # (parameters, rank, steps between bases)
REFERENCE = {
    "galore": "galore-torch", "galore range": "galore-torch", "galore_8bit": "galore-torch", "apollo": "apollo-torch",
    "apollo_mini": "apollo-torch mini", "fira": "fira", "fira range": "fira", "muon": "torch Muon", "lora_pre": "torch AdamW",
    "lora_pre_muon": "torch Muon", "blockllm": "torch AdamW",
}  # fmt: skip
REFRESHING = ("galore", "galore range", "galore_8bit", "apollo", "apollo_mini", "fira", "fira range")


def ours(label: str) -> Make:
    name, _, projection = label.partition(" ")

    def make(parameters: Parameters, rank: int, gap: int) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"rank": rank} if takes_rank(name) else {}
        if label in REFRESHING:
            options["update_proj_gap"] = gap
        if name == "blockllm":
            options["trigger"] = "interval"  # there is no loss here
        if projection:
            options["projection"] = projection
        return OPTIMIZERS[name]([(f"layer.{i}", p) for i, p in enumerate(parameters)], 1e-4, **options)

    return make


def theirs(label: str) -> Make:
    def make(parameters: Parameters, rank: int, gap: int) -> torch.optim.Optimizer:
        if label == "torch AdamW":
            return torch.optim.AdamW(parameters, 1e-4)
        if label == "torch Muon":
            return torch.optim.Muon(parameters, 1e-4, weight_decay=0.0)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            module = importlib.import_module(label.removesuffix(" mini").replace("-", "_"))
            group: dict[str, Any] = {"params": parameters, "rank": rank, "update_proj_gap": gap, "proj_type": "std"}
            if label == "fira":
                return module.FiraAdamW([{**group, "alpha": 0.25}], lr=1e-4)
            if label == "galore-torch":
                return module.GaLoreAdamW([{**group, "scale": 0.25}], lr=1e-4)
            mini = {"rank": 1, "scale": 128.0, "scale_type": "tensor"} if label.endswith("mini") else {}
            return module.APOLLOAdamW(
                [{**group, "scale": 1.0, "scale_type": "channel", "proj": "random", **mini}], lr=1e-4
            )

    return make


class Contender:
    """One optimizer on its own copy of the matrices, with fixed gradients."""

    def __init__(self, make: Make, layers: int, rank: int, gap: int):
        generator = torch.Generator().manual_seed(0)
        shapes = LAYER * layers
        self.parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        for p in self.parameters:
            p.grad = 1e-3 * torch.randn(p.shape, generator=generator)
        self.optimizer = make(self.parameters, rank, gap)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start


def measure(labels: Sequence[str], layers: int, gap: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """ours label -> seconds of ours and of the reference in each round, and their ratio."""
    result: dict[str, dict[str, Any]] = {}
    for label in labels:  # one pair at a time: all copies at once would not fit a small machine
        pair = {
            "ours": Contender(ours(label), layers, options.rank, gap),
            "reference": Contender(theirs(REFERENCE[label]), layers, options.rank, gap),
        }
        for contender in pair.values():
            contender.seconds()  # the first step makes state and bases
        rounds: dict[str, list[float]] = {key: [] for key in pair}
        for number in range(options.rounds):
            for key in sorted(pair, reverse=bool(number % 2)):
                rounds[key].append(pair[key].seconds())
        ratios = [a / b for a, b in zip(rounds["ours"], rounds["reference"], strict=True)]
        result[label] = {"reference": REFERENCE[label], "seconds": rounds, "ratio": statistics.median(ratios)}
        del pair
        gc.collect()
    return result


def show(title: str, found: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title, box=SIMPLE)
    for head in ("optimizer", "reference", "ours ms", "reference ms", "ours / reference", "range"):
        table.add_column(head, justify="left" if head in ("optimizer", "reference") else "right")
    for label, one in found.items():
        mine, other = (statistics.median(one["seconds"][key]) * 1e3 for key in ("ours", "reference"))
        ratios = [a / b for a, b in zip(one["seconds"]["ours"], one["seconds"]["reference"], strict=True)]
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(label, one["reference"], f"{mine:.0f}", f"{other:.0f}", f"{one['ratio']:.2f}", span)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 30), ("refresh-layers", 2), ("rank", 128), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=tuple(REFERENCE), default=list(REFERENCE), metavar="OPTIMIZER")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    labels = [label for label in options.only if label.split()[0] in OPTIMIZERS]
    config = {k: getattr(options, k) for k in ("layers", "refresh_layers", "rank", "rounds", "threads")}
    begun = (
        None
        if options.no_record
        else begin_record(name="optimizer_time", config={**config, "optimizers": labels}, seed=0)
    )
    console = Console(highlight=False)
    ordinary = measure(labels, options.layers, NEVER, options)
    console.print(show(f"an ordinary step, {options.layers} layers, rank {options.rank}", ordinary))
    refresh = measure([label for label in labels if label in REFRESHING], options.refresh_layers, ALWAYS, options)
    console.print(show(f"a step that makes every basis anew, {options.refresh_layers} layers", refresh))
    if begun is not None:
        finish_record(options.record, begun, {"ordinary": ordinary, "refresh": refresh})
    return 0


if __name__ == "__main__":
    sys.exit(main())
