"""The memory of one training step: measured tensor by tensor on the CPU, asked of the allocator on an accelerator.

On the CPU the update (forward, backward, step) runs under a `Meter`. Rollouts do so only in steps whose timeline is kept, since
watching each of their many small operations slows them. On CUDA the allocator knows the peak of every phase, and kinds are those
of the tensors that the method keeps; the rest is activations and workspace.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import UserError
from logra.files import write_atomic
from logra.memory.meter import Meter, Timeline
from logra.region import region

Held = Callable[[], Mapping[str, Iterable[Tensor]]]
ROLLOUT, GRADIENT, UPDATE = PHASES = ("rollout", "gradient", "update")
_REGIONS = {ROLLOUT: "kv_cache", GRADIENT: "activations", UPDATE: "workspace"}
_POINTS = 2000  # of a timeline


class StepGauge:
    """Of each step: `begin`, then `phase` around its parts and `watch` around its update, `metrics` afterwards.

    held: what the method keeps between steps, by kind. parameters: those whose gradients are to be known as such. folder: where
    the timelines of the steps in `timelines` go. enabled: False measures nothing but the resident size of the process.
    watch_rollouts: whether rollouts are operations of this process, so that a timeline can show them.
    """

    def __init__(
        self,
        device: torch.device,
        held: Held,
        parameters: Callable[[], Iterable[nn.Parameter]],
        *,
        enabled: bool = True,
        folder: Path | None = None,
        timelines: Collection[int] = (),
        watch_rollouts: bool = True,
    ):
        self.device, self.parameters = device, parameters
        self.enabled, self.folder, self.timelines = enabled, folder, frozenset(timelines)
        self.watch_rollouts = watch_rollouts
        self._held, self._beside = held, dict[str, list[Tensor]]()
        self._number = 0
        self._meter: Meter | None = None
        self._timeline: Timeline | None = None
        self._found: dict[str, float] = {}
        self._kinds: dict[str, int] = {}  # at the peak

    def keep(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count these too as `kind`; they live as long as the run (a reference model)."""
        self._beside.setdefault(kind, []).extend(tensors)

    def held(self) -> dict[str, list[Tensor]]:
        """Everything that is known to be kept, by kind."""
        found = {kind: list(tensors) for kind, tensors in self._held().items()}
        for kind, tensors in self._beside.items():
            found.setdefault(kind, []).extend(tensors)
        return found

    def begin(self, number: int) -> None:
        """Step `number` (1-based) begins."""
        self._number, self._found, self._kinds = number, {}, {}
        is_kept = self._is_metered and self.folder is not None and number in self.timelines
        self._timeline = Timeline(_POINTS) if is_kept else None

    @property
    def _is_metered(self) -> bool:
        return self.enabled and self.device.type == "cpu"

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """The part of the step that is followed tensor by tensor on the CPU."""
        if not self._is_metered:
            yield
            return
        with self._metering() as meter:
            yield
        whole = meter.reading()
        self._found |= {"memory/peak_bytes": whole.peak, "memory/mean_bytes": round(whole.mean)}
        self._kinds = whole.by_kind
        if self._timeline is not None and self.folder is not None:
            write_timeline(self.folder / f"step_{self._number:06d}.json", self._timeline)
            self._timeline = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One of `PHASES`; what is allocated in it and labelled nowhere else is of its kind."""
        with region(_REGIONS[name]):
            if self.enabled and self.device.type == "cuda":
                with self._asking(name):
                    yield
            elif self._meter is not None:
                with self._meter.phase(name):
                    yield
            elif name == ROLLOUT and self.watch_rollouts and self._timeline is not None:
                with self._metering() as meter, meter.phase(name):
                    yield
            else:
                yield

    def metrics(self) -> dict[str, float]:
        """Of the step that has just been made, in bytes; see docs/metrics.md."""
        kinds = {f"memory/{kind}_bytes": size for kind, size in self._kinds.items() if size}
        return {**self._found, **kinds, "memory/rss_bytes": resident_bytes()}

    @contextlib.contextmanager
    def _metering(self) -> Iterator[Meter]:
        with Meter(timeline=self._timeline) as meter:
            for kind, tensors in self.held().items():
                meter.register(kind, tensors)
            meter.watch_gradients(self.parameters())
            self._meter = meter
            try:
                yield meter
            finally:
                self._meter = None
        self._found |= {f"memory/{name}_peak_bytes": reading.peak for name, reading in meter.phases().items()}

    @contextlib.contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """What the method keeps is taken before and after: gradients come in one phase and go in the next."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = self._held_sizes()
        yield
        peak = torch.cuda.max_memory_allocated(self.device)
        key = f"memory/{name}_peak_bytes"
        self._found[key] = max(peak, self._found.get(key, 0))
        self._found["memory/reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        if peak > self._found.get("memory/peak_bytes", -1):
            after = self._held_sizes()
            kinds = {kind: max(before.get(kind, 0), size) for kind, size in after.items()}
            self._kinds = {**kinds, "activations": max(0, peak - sum(kinds.values()))}
            self._found["memory/peak_bytes"] = peak

    def _held_sizes(self) -> dict[str, int]:
        return {kind: held_bytes(tensors, self.device) for kind, tensors in self.held().items()}


def held_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of these tensors' storages on one device, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == device.type
    }
    return sum(storages.values())


def resident_bytes() -> int:
    """Resident size of this process now (the largest so far where the system does not tell)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Bytes by kind over one step, the greatest moment among them. `seconds`: measured time until the end of the point.

    Raises UserError if the disk is full.
    """
    seconds, points = 0.0, []
    for moment in timeline.moments:
        seconds += moment.duration
        shown = {kind: size for kind, size in moment.live.items() if size}
        points.append({"phase": moment.phase, "seconds": round(seconds, 6), "bytes": shown})
    written: dict[str, Any] = {"made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "points": points}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(written) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"cannot write the memory timeline {path}: {error}. Free some space and resume the run, or set "
            "log.memory_timelines=[]"
        ) from error
