"""The in-process transport."""

from __future__ import annotations

import io
import secrets
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from torch import Tensor

from logra.errors import UpdateError, UpdateOrderError
from logra.sketch.block import Block
from logra.sync.acknowledge import Acknowledgement, Board
from logra.sync.anchors import Anchor, AnchorInfo, encode_tensors
from logra.sync.log import LogInfo, NotYetError, Targets, check_next, check_targets, gone
from logra.sync.packet import Packet, check_hex


class MemoryLog:
    """The in-process transport. Thread-safe.

    consumes: what the publisher appends. waits for: `read` waits for an append. unblocked by: `append`, its timeout.
    produces: packets, in order, as often as they are asked for.

    keep: at most this many of the newest packets are held (None: all), older ones count as compacted.
    """

    def __init__(
        self, *, run: str, base: str, targets: Targets, model: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> None:
        check_hex("run", run)
        check_hex("base", base)
        if keep is not None and keep < 1:
            raise UpdateError(f"keep must be at least 1 packet, not {keep}")
        self._run, self._base, self._model, self._keep = run, base, dict(model or {}), keep
        self._targets = check_targets(targets)
        self._session = secrets.token_hex(8)
        self._first = 0
        self._packets: list[bytes] = []
        self._step = 0
        self._anchors: dict[int, tuple[AnchorInfo, bytes]] = {}
        self._board = Board()
        self._head = base
        self._changed = threading.Condition()

    def info(self) -> LogInfo:
        with self._changed:
            return LogInfo(
                run=self._run,
                base=self._base,
                session=self._session,
                first=self._first,
                next=self._first + len(self._packets),
                head=self._head,
                targets=self._targets,
                anchors=tuple(info for _, (info, _) in sorted(self._anchors.items())),
                packet_bytes=sum(map(len, self._packets)) // max(1, len(self._packets)),
                model=self._model,
            )

    @property
    def head(self) -> str:
        with self._changed:
            return self._head

    def append(self, packet: Packet | bytes) -> None:
        packet = packet if isinstance(packet, Packet) else Packet.from_bytes(packet)
        with self._changed:
            check_next(packet, self.info())
            self._packets.append(packet.to_bytes())
            self._head, self._step = packet.checksum, packet.step
            if self._keep is not None and len(self._packets) > self._keep:
                self._drop(len(self._packets) - self._keep)
            self._changed.notify_all()

    def read(self, index: int, timeout_s: float = 0.0) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: index < self._first + len(self._packets), timeout_s)
            if index < self._first:
                raise gone(index, self._first, list(self._anchors))
            if index >= self._first + len(self._packets):
                raise NotYetError(
                    f"update {index} is not there yet: the newest is {self._first + len(self._packets) - 1}"
                )
            return self._packets[index - self._first]

    def stream(self, index: int) -> tuple[BinaryIO, int]:
        data = self.read(index)
        return io.BytesIO(data), len(data)

    def write_anchor(self, version: int, masters: Mapping[str, Tensor | Block], digest: str) -> AnchorInfo:
        with self._changed:
            info = self.info()
            if version != info.next:
                raise UpdateOrderError(f"an anchor is taken at the newest version, {info.next}, not at {version}")
            file = io.BytesIO()
            sha256, size = encode_tensors(file, masters, self._targets)
            anchor = AnchorInfo(
                run=self._run,
                base=self._base,
                version=version,
                step=self._step,
                head=self.head,
                digest=digest,
                sha256=sha256,
                bytes=size,
            )
            self._anchors[version] = (anchor, file.getvalue())
            return anchor

    def read_anchor(self, version: int) -> Anchor:
        info, data = self._anchor(version)
        return Anchor.from_bytes(info, data)

    def stream_anchor(self, version: int) -> tuple[BinaryIO, int]:
        data = self._anchor(version)[1]
        return io.BytesIO(data), len(data)

    def compact(self, version: int) -> int:
        with self._changed:
            covering = [v for v in self._anchors if v <= version]
            if not covering:
                raise UpdateOrderError(f"no anchor at or below version {version}: nothing may be dropped")
            newest = max(covering)
            if newest > self._first:
                self._drop(newest - self._first)
            self._anchors = {v: anchor for v, anchor in self._anchors.items() if v >= newest}
            return self._first

    def acknowledge(self, ack: Acknowledgement) -> None:
        self._board.put(ack)

    def acknowledgements(self) -> dict[str, Acknowledgement]:
        return self._board.all()

    def _anchor(self, version: int) -> tuple[AnchorInfo, bytes]:
        with self._changed:
            if version not in self._anchors:
                raise UpdateOrderError(f"there is no anchor of version {version}: there are {sorted(self._anchors)}")
            return self._anchors[version]

    def _drop(self, count: int) -> None:
        self._first += count
        del self._packets[:count]
