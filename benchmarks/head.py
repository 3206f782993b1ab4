"""The output head in chunks against whole logits: values, gradients, peak bytes and time, side by side in one process.

    python benchmarks/head.py [--vocabulary 49152] [--tokens 2048] [--hidden 576] [--rounds 7]

Both compute log-probs, entropies and the gradient of the hidden states, as a training step does; the head is frozen. Peaks are
bytes of tensors above what was there before (logra.memory.meter). The two take turns; the ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import begin_record, finish_record
from torch import Tensor

from logra.cli.allocator import keep_freed_memory
from logra.head import token_logprobs
from logra.memory.meter import Meter

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def whole(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a straightforward trainer does: all logits, their log-normalisers, the entropy without gradient."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    normaliser = torch.logsumexp(logits, dim=-1)
    with torch.no_grad():
        entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return logits.gather(-1, ids[:, None]).squeeze(-1) - normaliser, entropy


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs(hidden, weight, None, ids)


def run(step: Step, hidden: Tensor, weight: Tensor, ids: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaf = hidden.detach().requires_grad_()
    logp, entropy = step(leaf, weight, ids)
    (gradient,) = torch.autograd.grad((logp * upstream).sum(), leaf)
    return logp.detach(), entropy, gradient


def measure(options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(options.seed)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator)
    weight = torch.randn(options.vocabulary, options.hidden, generator=generator) * 0.05
    ids = torch.randint(0, options.vocabulary, (options.tokens,), generator=generator)
    inputs = (hidden, weight, ids, torch.linspace(-1, 1, options.tokens))
    steps: dict[str, Step] = {"whole": whole, "chunked": chunked}
    results, peaks = {}, {}
    for name, step in steps.items():
        with Meter() as meter:
            meter.register("weights", inputs)
            before = meter.total
            results[name] = run(step, *inputs)
            peaks[name] = meter.reading().peak - before
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(options.rounds):
        for name in sorted(steps, reverse=bool(index % 2)):
            start = time.perf_counter()
            run(steps[name], *inputs)
            times[name].append(time.perf_counter() - start)
    ratios = [c / w for c, w in zip(times["chunked"], times["whole"], strict=True)]
    differences = [float((a - b).abs().max()) for a, b in zip(results["chunked"], results["whole"], strict=True)]
    scale = float(results["whole"][2].abs().max())
    return {
        "largest_difference": dict(zip(("logprobs", "entropies", "gradients"), differences, strict=True)),
        "largest_gradient": scale,
        "peak_bytes": peaks,
        "peak_ratio": peaks["whole"] / peaks["chunked"],
        "seconds": times,
        "time_ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 49152), ("tokens", 2048), ("hidden", 576), ("rounds", 7), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", type=Path, help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    config = {k: getattr(options, k) for k in ("vocabulary", "tokens", "hidden", "rounds")}
    begun = begin_record(name="head", config=config, seed=options.seed)
    found = measure(options)
    peaks, ratio = found["peak_bytes"], found["time_ratio"]
    print(f"largest differences {found['largest_difference']} (largest gradient {found['largest_gradient']:.3g})")
    whole_mib, chunked_mib = (peaks[name] / 2**20 for name in ("whole", "chunked"))
    print(f"peak MiB: whole {whole_mib:.0f}, chunked {chunked_mib:.0f}: {found['peak_ratio']:.1f} times lower")
    print(f"time chunked / whole: median {ratio['median']:.3f} ({ratio['min']:.3f}..{ratio['max']:.3f})")
    if not options.no_record:
        finish_record(options.record, begun, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
