"""Where packets are kept, in order: what a publisher writes and a subscriber reads.

`Source` is the reading side. `MemoryLog` (one process), `Journal` (a folder; read-only in other processes) and `HttpSource`
(another machine) all are sources and pass one contract suite; the first two are `Log`s, which can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Protocol

from torch import Tensor

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError, WrongBaseError
from logra.sketch.block import Block
from logra.sync.acknowledge import Acknowledgement
from logra.sync.anchors import Anchor, AnchorInfo
from logra.sync.packet import Packet, check_hex

Targets = Sequence[Sequence[Any]]  # [name, out, in] of all that can move


class NotYetError(UpdateOrderError):
    """The Update asked for has not been made yet, or has not arrived."""


@dataclass(frozen=True)
class LogInfo:
    """What a log holds: Updates `first` to `next - 1`, and anchors.

    run, base: as in every packet. targets: [name, out, in] of all that can move. session: new each time the trainer starts,
    so that acknowledgements of an earlier start are not taken for answers. head: checksum of the newest packet (the base digest
    if there is none). origin: the version that base is the digest of, 0 unless the log began later. packet_bytes: mean size.
    problem: why what comes after `next` cannot be read, if so. model: where the base weights come from, if the writer said so.
    """

    run: str
    base: str
    session: str
    first: int
    next: int
    head: str
    targets: tuple[tuple[str, int, int], ...]
    anchors: tuple[AnchorInfo, ...] = ()
    packet_bytes: int = 0
    origin: int = 0
    problem: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Any) -> LogInfo:
        """Read and check what came from another machine; raises `DamagedUpdateError`."""
        try:
            info = LogInfo(
                **values
                | {
                    "targets": check_targets(values["targets"]),
                    "anchors": tuple(AnchorInfo.from_dict(anchor) for anchor in values["anchors"]),
                }
            )
            for name in ("run", "base", "session", "head"):
                check_hex(name, getattr(info, name))
            for name in ("first", "next", "packet_bytes", "origin"):
                value = getattr(info, name)
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ValueError(f"{name} is {value!r:.80}")
            if not isinstance(info.model, dict) or not isinstance(info.problem, str | None):
                raise ValueError("model is no object, or problem no text")
        except (TypeError, KeyError, ValueError) as error:
            raise DamagedUpdateError(f"the description of a log is malformed: {error}") from error
        return info


class Source(Protocol):
    """The reading side of a log."""

    def info(self) -> LogInfo:
        """What there is now."""
        ...

    def read(self, index: int, timeout_s: float = 0.0) -> bytes:
        """Packet `index`, as written (its own checksum is the reader's to verify).

        Waits up to `timeout_s` seconds for one that is not there yet, then raises `NotYetError`; `UpdateOrderError` for one
        that was compacted away.
        """
        ...

    def read_anchor(self, version: int) -> Anchor:
        """The anchor of `version`, its hash verified. The caller closes it."""
        ...

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Tell the publisher where a subscriber stands."""
        ...


class Log(Source, Protocol):
    """A log that can be written, by one publisher."""

    def append(self, packet: Packet | bytes) -> None:
        """Add the next packet. When it returns, the packet is kept; when it raises, nothing was added."""
        ...

    def write_anchor(self, version: int, masters: Mapping[str, Tensor | Block], digest: str) -> AnchorInfo:
        """Keep the float32 values, at `version`, of everything that can move, and the aligned bases in force (of blocks)."""
        ...

    def compact(self, version: int) -> int:
        """Drop Updates that the newest anchor at or below `version` covers; returns the first that is left."""
        ...

    def acknowledgements(self) -> dict[str, Acknowledgement]:
        """The last word of each subscriber."""
        ...

    def stream(self, index: int) -> tuple[BinaryIO, int]:
        """Packet `index` as a file at its first byte, and its size: for sending without holding it in memory."""
        ...

    def stream_anchor(self, version: int) -> tuple[BinaryIO, int]:
        """The bytes of an anchor's file, likewise."""
        ...

    @property
    def head(self) -> str:
        """Checksum of the newest packet: the parent of the next."""
        ...


def check_targets(targets: Targets) -> tuple[tuple[str, int, int], ...]:
    """The target table as tuples; raises `UpdateError` where an entry is not [name, out, in] or a name comes twice."""
    try:
        table = tuple((str(name), int(rows), int(columns)) for name, rows, columns in targets)
    except (TypeError, ValueError) as error:
        raise UpdateError(f"a target table holds [name, out, in] for each target: {error}") from error
    if not table or len({name for name, _, _ in table}) != len(table):
        raise UpdateError("the target table is empty or names a target twice")
    return table


def check_next(packet: Packet, info: LogInfo) -> Packet:
    """Raise unless `packet` is the one that follows: what is written must be what readers will accept."""
    if (packet.run, packet.base) != (info.run, info.base):
        raise WrongBaseError(
            f"update {packet.index} belongs to run {packet.run} on base {packet.base}, this log to run {info.run} on "
            f"base {info.base}"
        )
    if packet.index != info.next:
        kind = "was appended before" if packet.index < info.next else "would leave a gap"
        raise UpdateOrderError(f"update {packet.index} {kind}: the next one is {info.next}")
    if packet.parent is not None and packet.parent != info.head:
        raise UpdateOrderError(
            f"update {packet.index} follows {packet.parent}, but the newest packet here is {info.head}: another branch"
        )
    if sorted(map(tuple, packet.table())) != sorted(info.targets):
        raise WrongBaseError(f"update {packet.index} moves other targets than this log's table names: another model?")
    return packet


def gone(index: int, first: int, anchors: Sequence[int]) -> UpdateOrderError:
    """The error for an Update that was compacted away."""
    start = f"anchor {min(anchors)}" if anchors else "nothing: there is no anchor"
    return UpdateOrderError(
        f"update {index} was compacted away: updates exist from {first} on, and history begins with {start}"
    )
