"""Bytes of live tensor storages by kind, seen by a dispatch mode: exact on the CPU, and on fake tensors, which plans run on.

A storage counts once, from the operation that made it to its release, under the kind it was registered as, or else the region
(`logra.region`) it was made in. What was there before and is neither registered nor written to does not count, nor does what
torch does not allocate as a tensor (the interpreter, kernels' own scratch).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from logra.region import current_region

# What memory is for, in the order tables show it. `other` is what was made outside every region.
KINDS = (
    "weights", "residual", "basis", "sketch", "optimizer", "gradients", "activations", "offloaded", "logits", "kv_cache",
    "workspace", "other",
)  # fmt: skip
Weigh = Callable[
    [Any, tuple[Any, ...], Mapping[str, Any], Any], float
]  # (operation, args, kwargs, output) -> its duration
# By its schema a view, but its input is what `torch.tensor` has just made without any operation.
_FRESH = torch.ops.aten.lift_fresh.default


@dataclass(frozen=True)
class Reading:
    """peak: most bytes at once. by_kind: what was alive then. mean: over time, or over the weights of the operations."""

    peak: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    mean: float = 0.0


class Moment(NamedTuple):
    """One point of a timeline: the moment with most bytes among those it stands for, and how long these lasted together."""

    phase: str
    total: int
    live: dict[str, int]
    duration: float


class Timeline:
    """At most `limit` moments of a stretch of any length, the greatest among them: neighbours merge as it grows."""

    def __init__(self, limit: int = 2000) -> None:
        self.limit = limit
        self.moments: list[Moment] = []
        self._width, self._filled = 1, 0  # operations a moment stands for; those in the last one

    def add(self, phase: str, total: int, live: Mapping[str, int], duration: float) -> None:
        if 0 < self._filled < self._width:
            last = self.moments[-1]
            if total > last.total:
                self.moments[-1] = Moment(phase, total, dict(live), last.duration + duration)
            else:
                self.moments[-1] = last._replace(duration=last.duration + duration)
            self._filled += 1
            return
        if len(self.moments) >= self.limit:
            self._halve()
        self.moments.append(Moment(phase, total, dict(live), duration))
        self._filled = 1

    def _halve(self) -> None:
        pairs = [self.moments[i : i + 2] for i in range(0, len(self.moments), 2)]
        tops = [(max(pair, key=lambda m: m.total), sum(m.duration for m in pair)) for pair in pairs]
        self.moments = [top._replace(duration=duration) for top, duration in tops]
        self._width *= 2


class _Track:
    """Peak and mean of one stretch."""

    def __init__(self) -> None:
        self.peak, self.by_kind, self.weighted, self.weight = -1, {}, 0.0, 0.0

    def see(self, total: int, live: Mapping[str, int]) -> None:
        if total > self.peak:
            self.peak, self.by_kind = total, dict(live)

    def reading(self) -> Reading:
        shown = {kind: count for kind, count in self.by_kind.items() if count}
        peak = max(self.peak, 0)
        return Reading(peak, shown, self.weighted / self.weight if self.weight else float(peak))


class _Holder(weakref.ref):
    """A storage that is counted."""

    __slots__ = ("key", "kind", "size")
    key: int
    kind: str
    size: int


class Meter(TorchDispatchMode):
    """Use as a context manager around what is to be measured, in the thread that runs it; once.

    weigh: how long an operation counts towards the mean; None: the wall clock. timeline: takes the moments.
    """

    def __init__(self, *, weigh: Weigh | None = None, timeline: Timeline | None = None) -> None:
        super().__init__()
        self.weigh, self.timeline = weigh, timeline
        self.live: dict[str, int] = {}
        self.total = 0
        self._held: dict[int, _Holder] = {}  # by the storage's id
        self._whole = _Track()
        self._track: _Track | None = None  # of the phase
        self._tracks: dict[str, _Track] = {"": self._whole}
        self._phase = ""
        self._last = time.perf_counter()
        self._handles: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap every call into dynamo's, which costs twice what the meter does, and import the compiler."""
        return False

    # -- what is known beforehand -------------------------------------------------------------------------------------

    def register(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Count these storages as `kind`, whether they exist already or were seen as another."""
        for tensor in tensors:
            if tensor is not None:
                self._hold(tensor, kind)
        self._see()

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count each parameter's gradient as `gradients` from the moment it is accumulated."""

        def note(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._hold(parameter.grad, "gradients")

        for parameter in parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))
                note(parameter)
        self._see()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Also keep peak and mean of this stretch on their own (several of one name add up)."""
        self._pass()
        outer = self._phase, self._track
        self._phase, self._track = name, self._tracks.setdefault(name, _Track())
        self._see()
        try:
            yield
        finally:
            self._pass()
            self._phase, self._track = outer

    def reading(self, phase: str = "") -> Reading:
        """Of one phase, or of everything."""
        return self._tracks[phase].reading()

    def phases(self) -> dict[str, Reading]:
        return {name: track.reading() for name, track in self._tracks.items() if name}

    # -- the dispatch mode --------------------------------------------------------------------------------------------

    def __enter__(self) -> Meter:
        self._last = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._pass()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held.clear()  # what lives on is no longer followed

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        if getattr(func, "is_view", False) and func is not _FRESH:
            return output  # of a storage that is known, or was there before
        if isinstance(output, Tensor):
            self._hold(output, None)
        elif isinstance(output, (tuple, list)):
            for part in output:
                if isinstance(part, Tensor):
                    self._hold(part, None)
        self._see()
        self._pass(None if self.weigh is None else self.weigh(func, args, kwargs or {}, output))
        return output

    def _hold(self, tensor: Tensor, kind: str | None) -> None:
        """Count the tensor's storage if it is not yet, as `kind` if given; take in its new size if it has one."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # no storage of its own: a subclass whose parts are seen by themselves
        key, size = id(storage), storage.nbytes()
        holder = self._held.get(key)
        if holder is not None and holder() is storage:
            if holder.size == size and (kind is None or holder.kind == kind):
                return
            self._count(holder.kind, -holder.size)
        else:
            holder = self._held[key] = _Holder(storage, self._release)
            holder.key, holder.kind = key, current_region("other")
        holder.kind, holder.size = kind or holder.kind, size
        self._count(holder.kind, size)

    def _release(self, gone: weakref.ref[Any]) -> None:
        if isinstance(gone, _Holder) and self._held.get(gone.key) is gone:
            del self._held[gone.key]
            self._count(gone.kind, -gone.size)

    def _count(self, kind: str, size: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + size
        self.total += size

    def _see(self) -> None:
        """Is this the most so far? A phase's peak is never above that of the whole."""
        track = self._track or self._whole
        if self.total > track.peak:
            track.see(self.total, self.live)
            self._whole.see(self.total, self.live)

    def _pass(self, weight: float | None = None) -> None:
        """Time has gone by since the last operation: as much as `weight`, or by the clock."""
        now = time.perf_counter()
        if weight is None:
            weight = now - self._last if self.weigh is None else 0.0
        self._last = now
        weighted = self.total * weight
        self._whole.weighted += weighted
        self._whole.weight += weight
        if self._track is not None:
            self._track.weighted += weighted
            self._track.weight += weight
        if self.timeline is not None:
            self.timeline.add(self._phase, self.total, self.live, weight)
