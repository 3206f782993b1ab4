"""The arithmetic of plans: more layers, more devices, what does not fit. Bytes by kind in, bytes by kind out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from logra.memory.fake import Phase

Bytes = dict[str, int]
# Rows of a plan's table: the kinds of a rehearsal under the names people know, and what only accelerators or several have.
ROWS = {
    "weights": "weights", "residual": "residual", "sketch": "sketch", "basis": "basis", "optimizer": "optimizer state",
    "gradients": "gradients", "activations": "activations", "logits": "logits workspace", "gathered": "all-gather buffers",
    "kv_cache": "KV cache", "sync": "sync buffers", "workspace": "workspace", "engine": "rollout engine", "runtime": "runtime",
}  # fmt: skip
_ROW_OF = {"proposal": "sync", "other": "workspace"}  # kinds that share another's row


@dataclass(frozen=True)
class PhasePlan:
    """Bytes by row on one device: at the peak of a phase, and on average over its time. weight: how long it lasts (relative)."""

    peak: Bytes
    mean: Bytes
    weight: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def mean_bytes(self) -> int:
        return sum(self.mean.values())


@dataclass(frozen=True)
class Fault:
    """What does not fit first: `kind` is the row with which the sum of rows goes over the limit."""

    phase: str
    kind: str
    missing: int


def at_layers(few: Mapping[int, Mapping[str, Phase]], count: int) -> dict[str, Phase]:
    """Phases of `count` layers from those of two numbers of layers, the second a period of theirs after the first.

    At each place of the code the most bytes, their mean and the time are linear in the number of layers.
    """
    (first, before), (second, last) = sorted(few.items())
    steps = (count - second) // (second - first)
    return {name: _further(before[name], phase, steps) for name, phase in last.items()}


def _further(before: Phase, last: Phase, steps: int) -> Phase:
    result = Phase(last.name)
    for place in last.tops.keys() & before.tops.keys():
        result.tops[place] = _line(before.tops[place], last.tops[place], steps)  # type: ignore[assignment]
    for place in last.spent.keys() & before.spent.keys():
        a, b = before.spent[place], last.spent[place]
        result.spent[place] = spent = max(0.0, b + steps * (b - a))
        means = _line(_per(before.times[place], a), _per(last.times[place], b), steps)
        result.times[place] = _per(means, 1 / spent) if spent else {}
    return result


def _line(a: Mapping[str, float], b: Mapping[str, float], steps: int) -> dict[str, float]:
    """`steps` further than b, on the line from a."""
    return {kind: max(0, b.get(kind, 0) + steps * (b.get(kind, 0) - a.get(kind, 0))) for kind in {*a, *b}}


def _per(kinds: Mapping[str, float], divisor: float) -> dict[str, float]:
    return {kind: size / divisor for kind, size in kinds.items()}


@dataclass(frozen=True)
class Ledger:
    """What becomes of a rehearsal's kinds on one device. factors: by kind, default 1, 0 for what lives elsewhere. added: bytes by
    row, in every phase; with_gradients: in those named."""

    factors: Mapping[str, float] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    with_gradients: Mapping[str, int] = field(default_factory=dict)
    phases_with_gradients: Collection[str] = ("gradient",)

    def plan(self, phase: Phase) -> PhasePlan:
        """The peak is looked for again: after sharding, another moment may be it."""
        moments = [self._rows(moment, phase.name) for moment in phase.tops.values()]
        peak = max(moments, key=lambda rows: sum(rows.values()))
        mean, most = self._rows(phase.mean, phase.name), sum(peak.values())
        excess = max(1.0, sum(mean.values()) / max(1, most))  # means may come from a rough extrapolation
        return PhasePlan(peak, {row: int(size / excess) for row, size in mean.items()}, phase.weight)

    def _rows(self, kinds: Mapping[str, float], phase: str) -> Bytes:
        rows: dict[str, float] = dict.fromkeys(ROWS, 0.0)
        for kind, size in kinds.items():
            row = _ROW_OF.get(kind, kind)
            if row in rows:
                rows[row] += size * self.factors.get(kind, 1.0)
        extra = [self.added] + [self.with_gradients] * (phase in self.phases_with_gradients)
        for added in extra:
            for kind, size in added.items():
                rows[kind] += size
        return {kind: round(size) for kind, size in rows.items() if size >= 0.5}


def first_fault(phases: Mapping[str, PhasePlan], limit: int | None) -> Fault | None:
    """The first phase above the limit, and the row that takes it there; None if all fit or there is no limit."""
    for name, plan in phases.items():
        if limit is not None and plan.peak_bytes > limit:
            total, broken = 0, "workspace"
            for kind in ROWS:
                total += plan.peak.get(kind, 0)
                if total > limit:
                    broken = kind
                    break
            return Fault(name, broken, plan.peak_bytes - limit)
    return None


def shard_of(shapes: Sequence[tuple[int, ...]], parts: int) -> float:
    """The share of all elements on the fullest of `parts` devices, rows dealt out evenly (FSDP2: dimension 0, rounded up)."""
    whole = mine = 0
    for rows, *rest in shapes:
        columns = math.prod(rest)
        whole += rows * columns
        mine += -(-rows // parts) * columns
    return mine / max(1, whole)
