"""How a log leads vLLM's workers to a version: from an anchor of it or not, and by which Updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logra.errors import UpdateOrderError
from logra.sync.anchors import AnchorInfo
from logra.sync.log import Log, LogInfo
from logra.sync.packet import Packet


@dataclass(frozen=True)
class Route:
    """The anchor to load first (None: the workers' weights are a start), the Updates that follow, and where that leads.

    head: checksum of the last packet before the end. bytes: about how much is sent.
    """

    anchor: AnchorInfo | None
    updates: range
    head: str
    bytes: int


def plan_route(log: Log, stands: Sequence[Mapping[str, Any]], version: int) -> Route:
    """The smallest way to `version`. stands: the status of every worker.

    Raises `UpdateOrderError` if there is none: the workers are damaged or of a branch that was left, and the log has no anchor.
    """
    info = log.info()
    if version > info.next:
        raise UpdateOrderError(f"the log ends at version {info.next}: nothing leads to version {version}")
    place, why = _place(log, info, stands, version)
    anchors = [anchor for anchor in info.anchors if info.first <= anchor.version <= version]
    best = anchors[-1] if anchors else None
    if place is None and best is None:
        raise UpdateOrderError(f"{why}, and the log has no anchor to start from: restart that vLLM")
    if best is not None:
        size = best.bytes + (version - best.version) * info.packet_bytes
        if place is None or size < (version - place) * info.packet_bytes:
            return Route(best, range(best.version, version), _head_at(log, info, version), size)
    assert place is not None
    updates = range(place, version)
    return Route(None, updates, _head_at(log, info, version), len(updates) * info.packet_bytes)


def _place(log: Log, info: LogInfo, stands: Sequence[Mapping[str, Any]], version: int) -> tuple[int | None, str]:
    """The version that all workers are at, if Updates lead on from it; else None and why not."""
    places = {(stand["version"], stand["head"]) for stand in stands}
    problems = [stand["problem"] for stand in stands if stand["problem"] is not None]
    if problems or len(places) != 1:
        return (
            None,
            f"the workers are unusable ({problems[0]})" if problems else "the workers are at different versions",
        )
    ((place, head),) = places
    if not info.first <= place <= version:
        return None, f"the workers are at version {place}, from which the log does not lead to {version}"
    if head != _head_at(log, info, place):
        return None, f"the workers are at version {place} of a branch that the trainer left"
    return place, ""


def _head_at(log: Log, info: LogInfo, version: int) -> str:
    """The checksum of the Update that leads to `version`: the parent of the next one."""
    if version == info.origin:
        return info.base
    if version == info.next:
        return info.head
    return Packet.from_bytes(log.read(version)).parent or ""
