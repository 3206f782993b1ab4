"""The memory of one training step: measured tensor by tensor on the CPU, asked of the allocator on an accelerator.

On the CPU the update (forward, backward, step) runs under a `Meter`; rollouts do not, since watching each of their many small
operations would slow them. On CUDA the allocator knows the peak of every phase, and kinds are those of the tensors that the
method keeps; the rest is activations and workspace.
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

from logra.files import write_atomic
from logra.memory.meter import Meter
from logra.region import region

Held = Callable[[], Mapping[str, Iterable[Tensor]]]
ROLLOUT, GRADIENT, UPDATE = PHASES = ("rollout", "gradient", "update")
_REGIONS = {ROLLOUT: "kv_cache", GRADIENT: "activations", UPDATE: "workspace"}
_POINTS = 1000  # of a timeline


class StepGauge:
    """Call `begin`, then `watch` around the update and `phase` around parts of the step, `metrics` afterwards.

    held: what the method keeps between steps, by kind. parameters: those whose gradients are to be known as such. folder: where
    the timelines of the steps in `timelines` go. enabled: False measures nothing but the resident size of the process.
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
    ):
        self.device, self.held, self.parameters = device, held, parameters
        self.enabled, self.folder, self.timelines = enabled, folder, frozenset(timelines)
        self._meter: Meter | None = None
        self._found: dict[str, float] = {}

    def begin(self) -> None:
        """A new step begins."""
        self._found = {}

    @contextlib.contextmanager
    def watch(self, number: int) -> Iterator[None]:
        """The part of step `number` that is followed tensor by tensor on the CPU."""
        if not self.enabled or self.device.type != "cpu":
            yield
            return
        is_kept = self.folder is not None and number in self.timelines
        with Meter(timeline=is_kept) as meter:
            self._meter = meter
            try:
                for kind, tensors in self.held().items():
                    meter.register(kind, tensors)
                meter.watch_gradients(self.parameters())
                yield
                self._read(meter)
            finally:
                self._meter = None
        if is_kept and self.folder is not None:
            write_timeline(self.folder / f"step_{number:06d}.json", meter)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One of `PHASES`; what is allocated in it and labelled nowhere else is of its kind."""
        is_cuda = self.enabled and self.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        inner = self._meter.phase(name) if self._meter is not None else contextlib.nullcontext()
        with inner, region(_REGIONS[name]):
            yield
        if is_cuda:
            self._ask_allocator(name)

    def metrics(self) -> dict[str, float]:
        """Of the step that has just been made, in bytes; see docs/metrics.md."""
        return {**self._found, "memory/rss_bytes": resident_bytes()}

    def _read(self, meter: Meter) -> None:
        whole = meter.reading()
        self._found |= {"memory/peak_bytes": whole.peak, "memory/mean_bytes": round(whole.mean)}
        self._found |= {f"memory/{name}_peak_bytes": reading.peak for name, reading in meter.phases().items()}
        self._found |= {f"memory/{kind}_bytes": size for kind, size in whole.by_kind.items()}

    def _ask_allocator(self, name: str) -> None:
        peak = torch.cuda.max_memory_allocated(self.device)
        key = f"memory/{name}_peak_bytes"
        self._found[key] = max(peak, self._found.get(key, 0))
        self._found["memory/reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        if peak > self._found.get("memory/peak_bytes", -1):
            kinds = {kind: held_bytes(tensors, self.device) for kind, tensors in self.held().items()}
            shown = {f"memory/{kind}_bytes": size for kind, size in kinds.items() if size}
            rest = max(0, peak - sum(kinds.values()))
            self._found |= {"memory/peak_bytes": peak, **shown, "memory/activations_bytes": rest}


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


def write_timeline(path: Path, meter: Meter) -> None:
    """Bytes by kind over one step: at most `_POINTS` moments, of each stretch the one with most bytes, so the peak is there."""
    events = meter.events or []
    width = max(1, -(-len(events) // _POINTS))
    seconds, points = 0.0, []
    for start in range(0, len(events), width):
        stretch = events[start : start + width]
        phase, live, _ = max(stretch, key=lambda event: sum(event[1].values()))
        seconds += sum(weight for *_, weight in stretch)
        points.append({"phase": phase, "seconds": round(seconds, 6), "bytes": {k: v for k, v in live.items() if v}})
    written: dict[str, Any] = {"made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "points": points}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(written) + "\n").encode())
