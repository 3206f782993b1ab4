"""The journal: a run's Updates on disk. Base weights, or an anchor, and the Updates after it give the policy at any step.

    header.json            run, base digest, target table, first index, session; sealed with a hash
    segment_N_X.log        packets from index N on (logra.sync.segments)
    anchor_V.safetensors   float32 values at version V; anchor_V.json, written last, makes it count
    state.json, state_X    the trainer's small state after the newest step (logra.sync.state)
    acks/NAME.json         where each subscriber of the directory transport stands

One process writes and holds the lock. Any number of others open it read-only while it grows: that is the directory transport.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from logra.errors import UpdateError, UpdateOrderError, UserError
from logra.files import FileLock
from logra.sketch.block import Block
from logra.sync import segments, state
from logra.sync.acknowledge import AckFolder, Acknowledgement
from logra.sync.anchor_folder import AnchorFolder
from logra.sync.anchors import Anchor, AnchorInfo
from logra.sync.header import NAME as HEADER
from logra.sync.header import Header
from logra.sync.index import SegmentIndex
from logra.sync.log import LogInfo, NotYetError, Targets, check_next, gone
from logra.sync.packet import Packet, check_hex
from logra.sync.segments import Segment, SegmentWriter, damaged

logger = logging.getLogger(__name__)

ACKS = "acks"
SEGMENT_BYTES = 1 << 30
_POLL_S = (0.005, 0.1)  # first and longest pause between two looks at the folder


class JournalBusyError(UserError):
    """Another process writes this journal."""


class Journal:
    """A journal folder; make one with `Journal.create`, open one with `Journal.open`. A context manager. Thread-safe.

    consumes: what the publisher appends. waits for: `read` waits for a packet to appear. unblocked by: the writer's append,
    in this or another process; its timeout. produces: packets in order, as often as they are asked for.

    repaired: what opening for writing found unfinished and dropped; None if nothing.
    """

    def __init__(self, folder: Path, write: bool, segment_bytes: int) -> None:
        self.folder = folder
        self.repaired: str | None = None
        self._segment_bytes = segment_bytes
        self._lock = FileLock(folder / ".lock") if write else None
        self._mutex = threading.RLock()
        self._index = SegmentIndex(folder)
        self._anchors = AnchorFolder(folder)
        self._writer: SegmentWriter | None = None
        self._head: str | None = None
        self._header = Header(folder)
        self._acks = AckFolder(folder / ACKS)

    # --- making, opening, closing

    @classmethod
    def create(
        cls,
        folder: Path | str,
        *,
        run: str,
        base: str,
        targets: Targets,
        model: Mapping[str, Any] | None = None,
        origin: int = 0,
        origin_step: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Journal:
        """A new, empty journal, opened for writing.

        run, base: hex. targets: [name, out, in] of all that can move. model: a JSON object that says where the base weights come
        from. origin, origin_step: the version that it begins at, after which step of the trainer; base is the digest there.
        Where that is not 0, write an anchor at once: nothing else leads there. segment_bytes: size beyond which a new segment
        begins. Raises `UserError` if the folder holds a journal.
        """
        self = cls(Path(folder), True, segment_bytes)
        self._header.fill(run, base, targets, model)
        self._header.origin, self._header.origin_step, self._header.first = origin, origin_step, origin
        self._index.first = origin
        self.folder.mkdir(parents=True, exist_ok=True)
        self._acquire()
        try:
            if (self.folder / HEADER).exists():
                raise UserError(f"{folder} already holds a journal: open it to continue it, or choose another folder")
            if any(segments.first_of(path.name) is not None for path in self.folder.iterdir()):
                raise UserError(
                    f"{folder} holds a journal without its {HEADER}: restore that file, or choose another folder"
                )
            self._begin_session()
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def open(cls, folder: Path | str, *, write: bool = False, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """Open a journal. write: take the lock, drop a torn tail (see `repaired`), begin a new session.

        Raises `UserError` if there is none, its header is unreadable, or another process writes it. Damaged packets are no
        hindrance to opening: see `problem`.
        """
        self = cls(Path(folder), write, segment_bytes)
        if not (self.folder / HEADER).exists():
            raise UserError(f"{folder} holds no journal: {HEADER} is not there")
        self._acquire()
        try:
            self._header.read()
            self._index.look(self._header.first)
            if write:
                self.repaired = self._index.repair()
                self._anchors.drop_leftovers()
                self._begin_session()
        except OSError as error:
            self.close()
            raise UserError(f"cannot open the journal {folder}: {error}") from error
        except BaseException:
            self.close()
            raise
        if self.repaired:
            logger.warning("%s: dropped %s", self.folder, self.repaired)
        return self

    def close(self) -> None:
        """Close files and give the lock back."""
        with self._mutex:
            self._close_writer()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what there is

    @property
    def first(self) -> int:
        """The oldest Update that is still here."""
        with self._mutex:
            return self._index.first

    @property
    def oldest(self) -> int:
        """The oldest version that can be had from here."""
        with self._mutex:
            if self._index.first == self._header.origin:
                return self._index.first
            # compacted: nothing but an anchor leads there
            return min((a.version for a in self.anchors), default=self._index.next)

    @property
    def next(self) -> int:
        """The index the next Update will have, which is the newest version. Read-only journals: as of the last look."""
        with self._mutex:
            return self._index.next

    @property
    def problem(self) -> str | None:
        """The first damage found, in words; reading what comes from `next` on, and appending, raise it."""
        with self._mutex:
            return self._index.problem

    @property
    def head(self) -> str:
        """Checksum of the newest packet; the base digest if there is none."""
        with self._mutex:
            if self._head is None or self._lock is None:
                self._head = self.head_at(self._index.next)
            return self._head

    def head_at(self, version: int) -> str:
        """Checksum of the packet that led to `version`. Raises `UpdateOrderError` where that is not known."""
        with self._mutex:
            if version == self._header.origin:
                return self._header.base
            if self._index.first < version <= self._index.next:
                return self._index.checksum(version - 1)
            return self._anchors.find(version).head

    @property
    def anchors(self) -> tuple[AnchorInfo, ...]:
        """The anchors that count, oldest first."""
        return self._anchors.all()

    def info(self) -> LogInfo:
        with self._mutex:
            self._look()
            return LogInfo(
                run=self._header.run,
                base=self._header.base,
                session=self._header.session,
                origin=self._header.origin,
                first=self._index.first,
                next=self._index.next,
                head=self.head,
                targets=self._header.targets,
                anchors=self._anchors.all(),
                packet_bytes=self._index.mean_bytes(),
                problem=self._index.problem,
                model=self._header.model,
            )

    def steps(self) -> list[int]:
        """The trainer's step of each Update that is here, in order."""
        with self._mutex:
            self._look()
            return self._index.steps()

    def version_at(self, step: int) -> int:
        """The version after the trainer's step `step`: the number of Updates of steps up to it (a skipped step has none).

        Raises `UpdateOrderError` if that part of history was compacted away.
        """
        with self._mutex:
            self._look()
            first = self._index.first
            version = first + bisect_right(self._index.steps(), step)
            if version > first or self._step_at_first() <= step:
                return version
            raise UpdateOrderError(
                f"the policy after step {step} is not here, it was compacted away or came before: history begins with version "
                f"{first}"
            )

    # --- packets

    def append(self, packet: Packet | bytes) -> None:
        """Write the next packet and flush it. Raises `UpdateError` for a full disk and the like: nothing was then added."""
        with self._mutex:
            self._check_writable()
            packet = packet if isinstance(packet, Packet) else Packet.from_bytes(packet)
            check_next(packet, self.info())
            data = packet.to_bytes()
            writer = self._writer_for(packet.index)
            try:
                writer.append(packet.step, data)
            except BaseException:
                # No file grows over a record that a reader may have seen: the next append begins a new file.
                if not writer.broken:
                    self._close_writer()
                raise
            self._head = packet.checksum

    def read(self, index: int, timeout_s: float = 0.0) -> bytes:
        """Packet `index`, its checksum verified; waits up to `timeout_s` seconds for one that is not there yet.

        Raises `NotYetError`, `UpdateOrderError` (compacted), `DamagedUpdateError` naming index and place.
        """
        deadline, pause = time.monotonic() + timeout_s, _POLL_S[0]
        while True:
            data = self._try_read(index)
            if data is not None:
                return data
            if time.monotonic() >= deadline:
                raise NotYetError(f"update {index} is not there yet: the newest is {self.next - 1}")
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _POLL_S[1])

    def stream(self, index: int) -> tuple[BinaryIO, int]:
        """Packet `index` as a file at its first byte, and its size; not verified. Raises as `read`."""
        with self._mutex:
            try:
                if self._is_present(index):
                    return self._index.stream(index)
            except FileNotFoundError:
                self._look()
            raise NotYetError(f"update {index} is not there yet: the newest is {self._index.next - 1}")

    def truncate(self, version: int) -> None:
        """Go back: drop the Updates from `version` on, and the anchors beyond it; a resumed trainer does them again.

        Also the way past damage: what cannot be read goes too. Raises `UpdateOrderError` if `version` is not here.
        """
        with self._mutex:
            self._check_lock()
            oldest = self.oldest
            if not oldest <= version <= self._index.next:
                raise UpdateOrderError(
                    f"cannot go back to version {version}: {self.folder} has versions {oldest} to {self._index.next}"
                )
            self._close_writer()
            self._anchors.drop(lambda v: v > version)
            self._index.cut_at(version)
            self._head = None
            self._begin_session()  # answers about the dropped branch no longer count

    # --- anchors

    def write_anchor(self, version: int, masters: Mapping[str, Tensor | Block], digest: str) -> AnchorInfo:
        """Write an anchor of the newest version; it counts when this returns. The next Update begins a new segment.

        masters: float32 tensors (out, in), or whole blocks, of everything in the target table; blocks where Updates are of
        aligned bases, as they hold those in force. digest: of them.
        Raises `UpdateError` for a full disk: training can go on without it.
        """
        check_hex("digest", digest)
        with self._mutex:
            self._check_writable()
            if version != self._index.next:
                raise UpdateOrderError(
                    f"an anchor is taken at the newest version, {self._index.next}, not at {version}"
                )
            run, base, step, head = self._header.run, self._header.base, self._newest_step(), self.head

            def describe(sha256: str, size: int) -> AnchorInfo:
                return AnchorInfo(run, base, version, step, head, digest, sha256, size)

            info = self._anchors.write(masters, self._header.targets, describe, version)
            self._close_writer()
            return info

    def read_anchor(self, version: int) -> Anchor:
        """The anchor of `version`; its hash is verified, which reads the whole file. Raises `DamagedUpdateError`."""
        return self._anchors.read(version)

    def stream_anchor(self, version: int) -> tuple[BinaryIO, int]:
        """The file of an anchor and its size; not verified."""
        return self._anchors.stream(version)

    def compact(self, version: int) -> int:
        """Delete segments that the newest anchor at or below `version` covers, and older anchors; returns `first`.

        The anchor's hash is verified first: after this, history cannot be had without it. Raises `UpdateOrderError` if there is
        no such anchor.
        """
        with self._mutex:
            self._check_writable()
            covering = [a.version for a in self.anchors if a.version <= version]
            if not covering:
                raise UpdateOrderError(f"no anchor at or below version {version}: nothing may be dropped")
            anchor = covering[-1]
            self._anchors.read(anchor).close()
            first = self._index.first_kept(anchor)
            if first > self._index.first:
                self._close_writer()
                self._header.first = first
                self._header.write()
                self._index.drop_before(first)
            self._anchors.drop(lambda v: v < anchor)
            return first

    # --- the trainer's state

    def write_state(self, step: int, version: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Keep the trainer's small state, atomically. version: the newest one. values: a JSON object."""
        with self._mutex:
            self._check_writable()
            if version != self._index.next:
                raise UpdateOrderError(f"the state belongs to version {version}, the journal is at {self._index.next}")
            state.write_state(self.folder, step, version, self.head, tensors, values)

    def read_state(self) -> tuple[state.TailState | None, str]:
        """The state, or None and why it cannot be used. Updates after its version may exist: `truncate` or apply them."""
        with self._mutex:
            self._look()
            found, reason = state.read_state(self.folder)
            if found is None:
                return None, reason
            if found.version > self._index.next:
                return None, f"the state is of version {found.version}, the journal ends at {self._index.next}"
            try:
                head = self.head_at(found.version)
            except UpdateOrderError as error:
                return None, f"the state is of version {found.version}: {error}"
            if head != found.head:
                return None, f"the state of version {found.version} belongs to another branch of this run"
            return found, ""

    # --- acknowledgements

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Write `acks/NAME.json`. Raises `UpdateError` if that is not possible, or for one subscriber too many."""
        self._acks.put(ack)

    def acknowledgements(self) -> dict[str, Acknowledgement]:
        """By name. A file that is no acknowledgement is logged and left out."""
        return self._acks.all()

    # --- inner workings

    def _acquire(self) -> None:
        if self._lock is None:
            return
        try:
            self._lock.acquire()
        except BlockingIOError as error:
            raise JournalBusyError(
                f"the journal {self.folder} is being written by {error.strerror}: one writer only"
            ) from error
        except OSError as error:
            raise UserError(f"cannot write the journal {self.folder}: {error}") from error

    def _begin_session(self) -> None:
        self._header.session = secrets.token_hex(8)
        self._header.write()
        self._acks.clear()

    def _look(self) -> None:
        """See what another process has written. A writer knows better than the disk."""
        if self._lock is not None:
            return
        for _ in range(2):  # a compaction may come between header and files: then the header has changed too
            self._header.read_if_changed()
            self._index.look(self._header.first)
            if not self._index.problem or not self._header.read_if_changed():
                return

    def _try_read(self, index: int) -> bytes | None:
        with self._mutex:
            for _ in range(3):
                try:
                    return self._index.read(index) if self._is_present(index) else None
                except FileNotFoundError:  # compacted, or cut back by its writer, since we looked
                    self._look()
            return None

    def _is_present(self, index: int) -> bool:
        """False if the packet is not there yet; raises if it is gone, or lies behind damage."""
        if not self._index.first <= index < self._index.next:
            self._look()
        if index < self._index.first:
            raise gone(index, self._index.first, [a.version for a in self.anchors])
        if index >= self._index.next and self._index.problem:
            raise damaged(self._index.problem, self.folder)
        return index < self._index.next

    def _check_lock(self) -> None:
        if self._lock is None:
            raise UpdateError(f"{self.folder} was opened read-only")
        if not self._lock.held:
            raise UpdateError(f"the journal {self.folder} is closed")

    def _check_writable(self) -> None:
        self._check_lock()
        if self._index.problem:
            raise damaged(self._index.problem, self.folder)
        if self._writer is not None and self._writer.broken:
            raise UpdateError(
                f"{self.folder}: an earlier write failed and could not be taken back: open the journal again"
            )

    def _writer_for(self, index: int) -> SegmentWriter:
        if self._writer is not None and self._writer.segment.end >= self._segment_bytes:
            self._close_writer()
        if self._writer is None:
            segment = Segment(self.folder / segments.segment_name(index), index)
            try:
                self._writer = SegmentWriter(segment)
            except OSError as error:
                segment.path.unlink(missing_ok=True)
                raise segments.append_error(index, segment.path, error) from error
            self._index.segments.append(segment)
        return self._writer

    def _close_writer(self) -> None:
        if self._writer is None:
            return
        segment = self._writer.segment
        self._writer.close()
        if not segment.records and not self._writer.broken:
            segment.path.unlink(missing_ok=True)
            self._index.segments.remove(segment)
        self._writer = None

    def _newest_step(self) -> int:
        steps = self._index.steps()
        return steps[-1] if steps else self._step_at_first()

    def _step_at_first(self) -> int:
        """The trainer's step that led to version `first`; beyond all steps if that is not known any more."""
        if self._index.first == self._header.origin:
            return self._header.origin_step
        return next((a.step for a in self.anchors if a.version == self._index.first), 1 << 62)
