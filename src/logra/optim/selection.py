"""Which blocks BlockLLM trains, and when it chooses anew: names and numbers only, no tensor (see `logra.optim.blockllm`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from logra import hashing


@dataclass
class Choice:
    """What is trained, and what is known of the blocks, by name.

    visits: times chosen. norms: last measured. measured: at which update. losses: the last of this choice, as many as a trigger
    looks at; loss_sum, loss_count: of all of them. updates: in all; since: under this choice.
    """

    selected: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    visits: dict[str, int] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    updates: int = 0
    since: int = 0

    def note_loss(self, loss: float, patience: int) -> None:
        self.losses.append(loss)
        del self.losses[: -2 * patience]
        self.loss_sum += loss
        self.loss_count += 1

    def start(self, names: list[str]) -> None:
        """A new choice is in force."""
        self.selected = sorted(names)
        for name in names:
            self.visits[name] += 1
        self.losses, self.loss_sum, self.loss_count, self.since = [], 0.0, 0, 0


def shuffled(names: Iterable[str], seed: int, purpose: str, update: int) -> list[str]:
    """An order by chance that depends on the arguments only, not on the order of the names."""
    return sorted(names, key=lambda name: (hashing.derive_key(seed, purpose, name, update), name))


def ranked(choice: Choice, by_chance: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """All blocks by norm / (1 + times chosen), the most rewarding first; equals in the order given.

    One that was never measured counts as if its one gradient had no zero: as the root of its size.
    """

    def score(name: str) -> float:
        return choice.norms.get(name, math.sqrt(sizes[name])) / (1 + choice.visits[name])

    return sorted(by_chance, key=score, reverse=True)


def ranked_as_code(choice: Choice, by_chance: Sequence[str]) -> tuple[list[str], list[str]]:
    """The measured blocks by the published score, and the others."""
    shares = max(sum(choice.visits.values()), 1)

    def score(name: str) -> float:
        return choice.norms[name] / math.exp(choice.visits[name] / shares / max(choice.updates, 1))

    measured = [name for name in by_chance if name in choice.norms]
    return sorted(measured, key=score, reverse=True), [name for name in by_chance if name not in choice.norms]


def fill(order: Sequence[str], sizes: Mapping[str, int], budget: float) -> list[str]:
    """The first, and of the others in order those that still fit."""
    chosen, total = list(order[:1]), sum(sizes[name] for name in order[:1])
    for name in order[1:]:
        if total + sizes[name] <= budget:
            chosen.append(name)
            total += sizes[name]
    return chosen


def fill_as_code(best: Sequence[str], rest: Sequence[str], sizes: Mapping[str, int], budget: int) -> list[str]:
    """The published rule: stop at the first that does not fit; only if all fitted, go on by chance past the budget."""
    chosen, total = [], 0
    for name in best:
        total += sizes[name]
        if total >= budget:
            return chosen or [name]  # the code crashes on an empty choice
        chosen.append(name)
    for name in rest:
        if total >= budget:
            break
        chosen.append(name)
        total += sizes[name]
    return chosen


def choose(choice: Choice, sizes: Mapping[str, int], group: Mapping[str, Any]) -> list[str]:
    """The blocks to train next. sizes: numbers in each block. group: the options."""
    share, total = 1.0 - group["sparsity"], sum(sizes.values())
    by_chance = shuffled(sizes, group["seed"], "choose", choice.updates)
    if group["selection"] != "code":
        return fill(ranked(choice, by_chance, sizes), sizes, share * total * (1.0 + 1e-9))  # 1 - 0.9 is below 0.1
    if choice.updates == 0:
        return by_chance[: max(1, int(share * len(by_chance)))]
    return fill_as_code(*ranked_as_code(choice, by_chance), sizes, int(share * total))


def is_due(choice: Choice, group: Mapping[str, Any]) -> bool:
    """Does training on these blocks no longer pay?"""
    trigger, every, patience = group["trigger"], int(group["update_freq"]), int(group["patience"])
    losses = choice.losses
    if trigger == "interval":
        return choice.since >= every
    if trigger == "plateau":
        full = choice.since % every == 0 and len(losses) == 2 * patience
        return full and _mean(losses[patience:]) >= _mean(losses[:patience])
    if trigger == "paper":
        return len(losses) >= patience and losses[-1] >= _mean(losses[-patience:])
    full = choice.updates % every == 0 and choice.loss_count > patience
    return full and choice.loss_sum / choice.loss_count < _mean(losses[-patience:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
