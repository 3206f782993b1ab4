"""Would ranks by layer, chosen by the energy that each captures under one budget, see more of the gradient than one rank?

    python benchmarks/allocation.py [--ranks 16] [--past 4] [--later 2] [--record PATH | --no-record]

Takes the data of benchmarks/fidelity.py. The budget is what the first of `--ranks` costs everywhere, sum r (d + k) numbers.
Directions are taken one by one, always the one with the most expected gradient energy a number: its share of the inputs'
second moment (weighted by the output gradient) times the target's gradient energy in the past. Both allocations use exact
principal directions of the past, and are judged on later batches: by the mean cosine over targets, and by the cosine of all
gradients taken together.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import tempfile
from collections.abc import Mapping, Sequence

import torch
from fidelity import Batches, Trackers, check, open_run, parse_common, show
from record import begin_record, finish_record
from rich.console import Console
from torch import Tensor

SMALLEST, LARGEST = 2, 128


def allocate(gains: Mapping[str, Sequence[float]], costs: Mapping[str, int], budget: int) -> dict[str, int]:
    """Ranks by name: greedily the best next gain a cost, at least SMALLEST and at most LARGEST each. gains: descending."""
    ranks = {name: min(SMALLEST, len(some)) for name, some in gains.items()}
    left = budget - sum(ranks[name] * costs[name] for name in ranks)
    queue = [(-some[ranks[name]] / costs[name], name) for name, some in gains.items() if ranks[name] < len(some)]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        if costs[name] > left:
            continue
        ranks[name] += 1
        left -= costs[name]
        if ranks[name] < min(LARGEST, len(gains[name])):
            heapq.heappush(queue, (-gains[name][ranks[name]] / costs[name], name))
    return ranks


def captured(
    gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor], ranks: Mapping[str, int]
) -> dict[str, float]:
    """Mean cosine over targets, and cosine of everything together."""
    inside = {n: float((g @ directions[n][:, : ranks[n]]).norm()) ** 2 for n, g in gradients.items()}
    whole = {n: float(g.norm()) ** 2 for n, g in gradients.items()}
    mean = sum((inside[n] / whole[n]) ** 0.5 for n in whole) / len(whole)
    return {"mean_cosine": mean, "cosine_together": (sum(inside.values()) / sum(whole.values())) ** 0.5}


def compare(batches: Batches, options: argparse.Namespace) -> list[dict[str, object]]:
    trackers = Trackers(batches.targets, options)
    batches.gradients.listeners = [trackers.take]
    energy = dict.fromkeys(trackers.covariances, 0.0)
    for _ in range(options.past):
        batches.backward()
        trackers.refresh()
        for target in batches.targets:
            energy[target.name] += float(batches.true(target).norm()) ** 2
        batches.move()
    batches.gradients.listeners = []
    gains, directions, costs = {}, {}, {}
    for target in batches.targets:
        values, vectors = torch.linalg.eigh(trackers.covariances[target.name].double())
        shares = values.clamp(min=0.0).flip(0) / values.clamp(min=0.0).sum()
        gains[target.name] = (shares[:LARGEST] * energy[target.name]).tolist()
        directions[target.name] = vectors.flip(1)[:, :LARGEST].float()
        costs[target.name] = target.out_features + target.in_features
    budget = options.ranks[0] * sum(costs.values())
    allocations = {"uniform": dict.fromkeys(gains, options.ranks[0]), "by_energy": allocate(gains, costs, budget)}
    rows: list[dict[str, object]] = []
    for number in range(options.later):
        batches.backward()
        gradients = {target.name: batches.true(target) for target in batches.targets}
        for name, ranks in allocations.items():
            spread = sorted(ranks.values())
            rows.append(
                {
                    "batch": number,
                    "allocation": name,
                    **captured(gradients, directions, ranks),
                    "ranks": f"{spread[0]} {spread[len(spread) // 2]} {spread[-1]}",
                    "numbers": sum(ranks[n] * costs[n] for n in ranks),
                }
            )
        batches.move()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = check(parse_common(argparse.ArgumentParser(description=__doc__), ranks=[16]).parse_args(arguments))
    config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "seed")}
    begun = None if options.no_record else begin_record(name="allocation", config=config, seed=options.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(options, f"{folder}/run")
        try:
            rows = compare(Batches(run, options.lr), options)
        finally:
            run.close()
    show(rows, Console(width=160))
    if begun is not None:
        finish_record(options.record, begun, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
