"""Bytes of live tensor storages by kind, seen by a dispatch mode: exact on the CPU, and on fake tensors, which plans run on.

A storage counts once, from the operation that made it to its release, under the kind it was registered as, or else the region
(`logra.region`) it was made in. What torch does not allocate as a tensor (the interpreter, kernels' own scratch) is not seen.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Reading:
    """peak: most bytes at once. by_kind: what was alive then. mean: over time, or over the weights of the operations."""

    peak: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    mean: float = 0.0


class _Track:
    """Peak and mean of one stretch."""

    def __init__(self) -> None:
        self.peak, self.by_kind, self.weighted, self.weight = -1, {}, 0.0, 0.0

    def see(self, total: int, live: Mapping[str, int]) -> None:
        if total > self.peak:
            self.peak, self.by_kind = total, dict(live)

    def pass_time(self, total: int, weight: float) -> None:
        self.weighted += total * weight
        self.weight += weight

    def reading(self) -> Reading:
        shown = {kind: count for kind, count in self.by_kind.items() if count}
        return Reading(
            max(self.peak, 0), shown, self.weighted / self.weight if self.weight else float(max(self.peak, 0))
        )


class Meter(TorchDispatchMode):
    """Use as a context manager around what is to be measured, in the thread that runs it.

    weigh: how long an operation counts towards the mean; None: the wall clock. timeline: keep (phase, bytes by kind, weight)
    after every operation in `events`.
    """

    def __init__(self, *, weigh: Weigh | None = None, timeline: bool = False) -> None:
        super().__init__()
        self.weigh = weigh
        self.live: dict[str, int] = {}
        self.total = 0
        self.events: list[tuple[str, dict[str, int], float]] | None = [] if timeline else None
        self._held: dict[int, tuple[weakref.ref[Any], str, int]] = {}  # id of a storage -> (reference, kind, bytes)
        self._whole = _Track()
        self._track: _Track | None = None  # of the phase
        self._tracks: dict[str, _Track] = {"": self._whole}
        self._phase = ""
        self._last = time.perf_counter()
        self._handles: list[Any] = []

    # -- what is known beforehand -------------------------------------------------------------------------------------

    def register(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Count these storages as `kind`, whether they exist already or were seen as another."""
        for tensor in tensors:
            if tensor is not None:
                self._hold(tensor, kind, move=True)
        self._see()

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count each parameter's gradient as `gradients` from the moment it is accumulated."""

        def note(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._hold(parameter.grad, "gradients", move=True)

        for parameter in parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))
                note(parameter)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Also keep peak and mean of this stretch on their own (several of one name add up)."""
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
        if isinstance(output, Tensor):
            self._hold(output, None)
        elif isinstance(output, (tuple, list)):
            for part in output:
                if isinstance(part, Tensor):
                    self._hold(part, None)
        self._see()
        self._pass(None if self.weigh is None else self.weigh(func, args, kwargs or {}, output))
        return output

    def _hold(self, tensor: Tensor, kind: str | None, move: bool = False) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # no storage of its own: a subclass whose parts are seen by themselves
        key = id(storage)
        known = self._held.get(key)
        if known is not None and known[0]() is storage:
            if move and kind is not None and known[1] != kind:
                self._count(known[1], -known[2])
                self._count(kind, known[2])
                self._held[key] = (known[0], kind, known[2])
            return
        name = current_region("other") if kind is None else kind
        size = storage.nbytes()
        self._held[key] = (weakref.ref(storage, lambda gone, key=key: self._release(key, gone)), name, size)
        self._count(name, size)

    def _release(self, key: int, gone: weakref.ref[Any]) -> None:
        known = self._held.get(key)
        if known is not None and known[0] is gone:
            del self._held[key]
            self._count(known[1], -known[2])

    def _count(self, kind: str, size: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + size
        self.total += size

    def _see(self) -> None:
        total = self.total
        if total > self._whole.peak:
            self._whole.see(total, self.live)
        if self._track is not None and total > self._track.peak:
            self._track.see(total, self.live)

    def _pass(self, weight: float | None = None) -> None:
        """Time has gone by since the last operation: as much as `weight`, or by the clock."""
        now = time.perf_counter()
        if weight is None:
            weight = now - self._last if self.weigh is None else 0.0
        self._last = now
        self._whole.pass_time(self.total, weight)
        if self._track is not None:
            self._track.pass_time(self.total, weight)
        if self.events is not None:
            self.events.append((self._phase, dict(self.live), weight))
