"""Running code on tensors without data, so that a plan is what the code really allocates.

torch's FakeTensorMode gives every operation's shapes and types without memory or arithmetic. What needs a value (`float(norm)`,
`if x.any()`, `x[mask]`) has none there; it is answered as in a healthy run in the worst case: numbers are 1, conditions true,
masks full. The meter then sees the same allocations as in a real run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from logra.memory.meter import Meter

_aten = torch.ops.aten
# A round device: how long an operation takes is the larger of its arithmetic and its traffic. Used for means only.
_FLOPS, _BYTES = 3e14, 2e12
_KEEP = 0.7  # moments with at least this share of a phase's peak are kept: after sharding, another may be the peak


@dataclass
class Phase:
    """One phase of a step: bytes by kind at the moments that may be its peak, and on average over its operations."""

    name: str
    moments: list[dict[str, int]] = field(default_factory=list)
    weighted: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0

    @property
    def mean(self) -> dict[str, float]:
        return {kind: value / self.weight for kind, value in self.weighted.items()} if self.weight else {}

    def add(self, live: Mapping[str, int], total: int, weight: float) -> None:
        for kind, size in live.items():
            self.weighted[kind] = self.weighted.get(kind, 0.0) + size * weight
        self.weight += weight
        top = sum(self.moments[-1].values()) if self.moments else 0
        if total > top:  # moments are in ascending order, the last is the peak so far
            self.moments = [m for m in self.moments if sum(m.values()) >= _KEEP * total]
            self.moments.append(dict(live))
        elif total >= _KEEP * top and not any(all(m.get(k, 0) >= v for k, v in live.items()) for m in self.moments):
            self.moments.insert(0, dict(live))
            self.moments.sort(key=lambda moment: sum(moment.values()))


class FakeMeter(Meter):
    """A meter that answers what fake tensors cannot, and keeps the phases of a plan."""

    def __init__(self) -> None:
        super().__init__(weigh=_duration)
        self.planned: dict[str, Phase] = {}
        self._planning: Phase | None = None

    @contextlib.contextmanager
    def plan_phase(self, name: str) -> Iterator[None]:
        """Keep what is allocated within as phase `name`."""
        outer, self._planning = self._planning, self.planned.setdefault(name, Phase(name))
        self._planning.add(self.live, self.total, 0.0)
        try:
            yield
        finally:
            self._planning = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            return _answer(args[0].dtype)
        if func is _aten.index.Tensor and _is_mask(args[1]):
            func, args = _aten.clone.default, (args[0].flatten(0, args[1][0].ndim - 1),)
        elif func is _aten.masked_select.default:
            func, args = _aten.clone.default, (args[0].expand(args[1].shape).flatten(),)
        elif func is _aten.nonzero.default:
            func, kwargs = _aten.zeros.default, {"dtype": torch.int64, "device": args[0].device}
            args = ([args[0].numel(), args[0].ndim],)
        elif func in (_aten.index_put_.default, _aten.index_put.default) and _is_mask(args[1]):
            return args[0] if func is _aten.index_put_.default else args[0].clone()
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self._planning is not None:
            self._planning.add(self.live, self.total, _duration(func, args, kwargs or {}, output))
        return output


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeMeter]:
    """Within it every new tensor is fake, and the meter given sees it."""
    with FakeTensorMode(allow_non_fake_inputs=True), FakeMeter() as meter:
        yield meter


def _answer(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _is_mask(indices: Any) -> bool:
    first = indices[0] if indices else None
    return isinstance(first, Tensor) and first.dtype == torch.bool and all(i is None for i in indices[1:])


def _duration(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
    """Seconds on the round device."""
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    flops = count(*args, **kwargs, out_val=output) if count is not None else 0
    tensors = [
        t for t in (*args, *(output if isinstance(output, tuple | list) else (output,))) if isinstance(t, Tensor)
    ]
    if getattr(func, "is_view", False):
        return 0.0
    return max(flops / _FLOPS, sum(t.numel() * t.element_size() for t in tensors) / _BYTES)
