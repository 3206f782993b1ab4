"""Running code on tensors without data, so that a plan is what the code really allocates.

torch's FakeTensorMode gives every operation's shapes and types without memory or arithmetic. What needs a value (`float(norm)`,
`if x.any()`, `x[mask]`) has none there; it is answered as in a healthy run in the worst case: numbers are 1, conditions true,
masks full. The meter then sees the same allocations as in a real run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from logra.memory.meter import Meter

_aten = torch.ops.aten
# A round device: how long an operation takes is the larger of its arithmetic and its traffic. Used for means only.
_FLOPS, _BYTES = 3e14, 2e12
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
Place = tuple[Hashable, ...]


@dataclass
class Phase:
    """One phase of a step: bytes by kind where its peak may be, and on average over its operations.

    tops: for every place (what operation, called by which line of ours, forwards or backwards) the bytes by kind at the moment
    with most of them. Places are the same in a model with more layers, so their bytes can be followed as layers are added.
    spent: the time at every place, and times: bytes by kind, each times that time.
    """

    name: str
    tops: dict[Place, dict[str, int]] = field(default_factory=dict)
    spent: dict[Place, float] = field(default_factory=dict)
    times: dict[Place, dict[str, float]] = field(default_factory=dict)

    @property
    def peak(self) -> dict[str, int]:
        return max(self.tops.values(), key=_sum)

    @property
    def weight(self) -> float:
        """How long it lasts."""
        return sum(self.spent.values())

    @property
    def mean(self) -> dict[str, float]:
        """Bytes by kind over its time."""
        found: dict[str, float] = {}
        for kinds in self.times.values():
            for kind, value in kinds.items():
                found[kind] = found.get(kind, 0.0) + value
        return {kind: value / self.weight for kind, value in found.items()} if self.weight else {}

    def add(self, live: Mapping[str, int], total: int, weight: float, place: Place) -> None:
        if weight:
            times = self.times.setdefault(place, {})
            for kind, size in live.items():
                times[kind] = times.get(kind, 0.0) + size * weight
            self.spent[place] = self.spent.get(place, 0.0) + weight
        known = self.tops.get(place)
        if known is None or total > _sum(known):
            self.tops[place] = dict(live)


class FakeMeter(Meter):
    """A meter that answers what fake tensors cannot, and keeps the phases of a plan.

    filled: the share of a mask that is true where it selects elements. first: the answer to where the first true is (argmax).
    """

    def __init__(self) -> None:
        super().__init__(weigh=_no_time)
        self.filled, self.first = 1.0, 0
        self._place_of_most: weakref.ref[Tensor] | None = None
        self._times = 1.0
        self.planned: dict[str, Phase] = {}
        self._planning: Phase | None = None

    @contextlib.contextmanager
    def plan_phase(self, name: str) -> Iterator[None]:
        """Keep what is allocated within as phase `name`."""
        outer, self._planning = self._planning, self.planned.setdefault(name, Phase(name))
        self._planning.add(self.live, self.total, 0.0, ())
        try:
            yield
        finally:
            self._planning = outer

    @contextlib.contextmanager
    def repeated(self, times: float) -> Iterator[None]:
        """What is done within stands for so many of its kind, which takes as much longer."""
        outer, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asks a tensor for its device: nothing runs
            return func(*args, **(kwargs or {}))
        if func is _aten._local_scalar_dense.default:
            if self._place_of_most is not None and self._place_of_most() is args[0]:
                return self.first
            return _answer(args[0].dtype)
        if func is _aten.index.Tensor and _is_mask(args[1]):
            rows = args[0].flatten(0, args[1][0].ndim - 1)
            func, args = _aten.clone.default, (rows[: math.ceil(self.filled * len(rows))],)
        elif func is _aten.masked_select.default:
            func, args = _aten.clone.default, (args[0].expand(args[1].shape).flatten(),)
        elif func is _aten.nonzero.default:
            func, kwargs = _aten.zeros.default, {"dtype": torch.int64, "device": args[0].device}
            args = ([args[0].numel(), args[0].ndim],)
        elif func in (_aten.index_put_.default, _aten.index_put.default) and _is_mask(args[1]):
            return args[0] if func is _aten.index_put_.default else args[0].clone()
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _aten.argmax.default:
            self._place_of_most = weakref.ref(output)
        if self._planning is not None and not getattr(func, "is_view", False):
            place = _place(func, output)
            seconds = self._times * _duration(func, args, kwargs or {}, output)
            self._planning.add(self.live, self.total, seconds, place)
        return output


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeMeter]:
    """Within it every new tensor is fake, and the meter given sees it."""
    meter = FakeMeter()
    with _FakeMode(allow_non_fake_inputs=True), meter:
        yield meter


class _FakeMode(FakeTensorMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in Meter: a tenth of the time


def _answer(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _is_mask(indices: Any) -> bool:
    first: Any = indices[0] if indices else None
    return isinstance(first, Tensor) and first.dtype == torch.bool and all(i is None for i in indices[1:])


def _sum(kinds: Mapping[str, int]) -> int:
    return sum(kinds.values())


def _no_time(*_: Any) -> float:
    return 0.0  # the phases of a plan keep time themselves


def _place(func: Any, output: Any) -> Place:
    """Where in the code: the operation with the kind of tensor it makes (without sizes that grow with the layers, which are
    those of vectors and of leading dimensions), the nearest line of this package, and whether a backward pass runs."""
    first: Any = output[0] if isinstance(output, tuple | list) and output else output
    kind: Place = ()
    if isinstance(first, Tensor):
        kind = (first.dtype, first.ndim, first.shape[-1] if first.ndim > 1 else 0)
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_HERE):
            return (func, *kind, name, frame.f_lineno, torch._C._current_graph_task_id() >= 0)
        frame = frame.f_back
    return (func, *kind)


def _duration(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
    """Seconds on the round device."""
    count: Any = flop_registry.get(getattr(func, "_overloadpacket", None))
    flops = count(*args, **kwargs, out_val=output) if count is not None else 0
    outputs = output if isinstance(output, tuple | list) else (output,)
    size = sum(t.numel() * t.element_size() for t in (*args, *outputs) if isinstance(t, Tensor))
    return max(flops / _FLOPS, size / _BYTES)
