"""Segment files of a journal: packets one after another, each behind a small head with a checksum of its own.

    record: magic "LGRR" | index u64 | trainer step u64 | packet length u64 | crc32 of the 28 bytes before | packet

The head's checksum tells damage from a torn tail: a length that was hit by a flipped bit must not make the rest of the file
look unfinished. A file is only ever appended to; each opening for writing, and each failed append, begins a new one, so a
reader that remembers offsets is never misled.

Torn tail: with one write in flight and everything before it flushed, a crash leaves a record that ends too early, or has
blocks of zeros that never reached the disk (the test is etcd's `isTornEntry`). Anything else that fails its checksum is damage.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from logra.errors import DamagedUpdateError, UpdateError
from logra.files import fsync_path
from logra.sync.packet import CHECKSUM

MAGIC = b"LGRR"
HEAD = struct.Struct("<4sQQQI")
_SECTOR = 512
_READ = 1 << 22
_NAME = re.compile(r"segment_(\d{12})_[0-9a-f]{8}\.log")


@dataclass(frozen=True)
class Record:
    """Where packet `index` lies: `length` bytes from `offset` of the segment's file, behind its head."""

    index: int
    step: int
    offset: int
    length: int

    @property
    def start(self) -> int:
        """Offset of the head."""
        return self.offset - HEAD.size


@dataclass
class Segment:
    """What is known of one file. end: where the next record will begin. torn: bytes of an unfinished record behind `end`."""

    path: Path
    first: int
    records: list[Record] = field(default_factory=list)
    end: int = 0
    torn: int = 0
    problem: str | None = None

    @property
    def next(self) -> int:
        return self.first + len(self.records)


def segment_name(first: int) -> str:
    """A file name that was never used before."""
    return f"segment_{first:012d}_{os.urandom(4).hex()}.log"


def first_of(name: str) -> int | None:
    """The first index of a segment file; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def pack_head(index: int, step: int, length: int) -> bytes:
    body = HEAD.pack(MAGIC, index, step, length, 0)[:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def scan(segment: Segment) -> None:
    """Read the heads from `segment.end` on, and note what follows the last whole record. Packets are not read.

    Raises FileNotFoundError if the file is gone. A file shorter than what was scanned before is scanned anew.
    """
    handle = os.open(segment.path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        if size < segment.end:
            segment.records, segment.end = [], 0
        segment.torn, segment.problem = 0, None
        while segment.end < size:
            record = _record(handle, segment, size)
            if record is None:
                return
            segment.records.append(record)
            segment.end = record.offset + record.length
    finally:
        os.close(handle)


def _record(handle: int, segment: Segment, size: int) -> Record | None:
    """The record at `segment.end`; None, with `torn` or `problem` set, if there is no whole one."""
    start, index = segment.end, segment.next
    if size - start < HEAD.size:
        segment.torn = size - start
        return None
    found = parse_head(os.pread(handle, HEAD.size, start))
    if found is None and _unwritten(handle, start, start + HEAD.size) and not _later_head(handle, start + 1, index):
        segment.torn = size - start
    elif found is None:
        segment.problem = f"the head of update {index} at byte {start} of {segment.path.name} is damaged"
    elif found[0] != index:
        segment.problem = f"at byte {start} of {segment.path.name} stands update {found[0]} instead of {index}"
    elif start + HEAD.size + found[2] > size:
        segment.torn = size - start
    else:
        return Record(index, found[1], start + HEAD.size, found[2])
    return None


def parse_head(data: bytes) -> tuple[int, int, int] | None:
    """(index, step, packet length), or None if the bytes are no whole head."""
    if len(data) < HEAD.size:
        return None
    magic, index, step, length, crc = HEAD.unpack_from(data)
    return (index, step, length) if magic == MAGIC and crc == zlib.crc32(data[: HEAD.size - 4]) else None


def is_intact(handle: int, record: Record) -> bool:
    """Whether the packet's own checksum holds. Reads the whole packet, a piece at a time."""
    digest, position, stop = (
        hashlib.blake2b(digest_size=CHECKSUM),
        record.offset,
        record.offset + record.length - CHECKSUM,
    )
    while position < stop:
        piece = os.pread(handle, min(_READ, stop - position), position)
        if not piece:
            return False
        digest.update(piece)
        position += len(piece)
    return os.pread(handle, CHECKSUM, stop) == digest.digest()


def read_record(handle: int, record: Record) -> bytes:
    """The packet of a record; shorter if the file ends before. One call reads no more than 2 GiB on Linux."""
    pieces, position, stop = [], record.offset, record.offset + record.length
    while position < stop:
        piece = os.pread(handle, min(1 << 30, stop - position), position)
        if not piece:
            break
        pieces.append(piece)
        position += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def is_unwritten(handle: int, record: Record) -> bool:
    """Whether a record has sectors of zeros, as a crash before the flush leaves them."""
    return _unwritten(handle, record.start, record.offset + record.length)


def _unwritten(handle: int, start: int, stop: int) -> bool:
    while start < stop:
        end = min(stop, (start // _SECTOR + 1) * _SECTOR)
        if not any(os.pread(handle, end - start, start)):
            return True
        start = end
    return False


def _later_head(handle: int, start: int, index: int) -> bool:
    """Whether a valid head of a later update follows: then what stands before it is damage, not a torn tail."""
    position, overlap = start, b""
    while piece := os.pread(handle, _READ, position):
        data = overlap + piece
        at = data.find(MAGIC)
        while at >= 0:
            found = parse_head(data[at : at + HEAD.size])
            if found is not None and found[0] > index:
                return True
            at = data.find(MAGIC, at + 1)
        position += len(piece)
        overlap = data[-(HEAD.size - 1) :]
    return False


class SegmentWriter:
    """Appends records to one file. One write and one flush a record; a failed one is taken back.

    broken: set when taking it back failed too, or a flush did (what is on the disk is then unknown): the journal must be opened
    again, which looks at the disk.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.broken = False
        self._handle = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        fsync_path(segment.path.parent)

    def append(self, step: int, packet: bytes) -> Record:
        """Write one record and flush it. Raises `UpdateError`; the file is then as before."""
        record = Record(self.segment.next, step, self.segment.end + HEAD.size, len(packet))
        if os.fstat(self._handle).st_size != self.segment.end:
            self.broken = True
            raise UpdateError(f"{self.segment.path} was changed by something else: open the journal again")
        try:
            _write_all(self._handle, [pack_head(record.index, step, len(packet)), packet])
            self._flush()
        except OSError as error:
            self._take_back()
            raise append_error(record.index, self.segment.path, error) from error
        except BaseException:
            self._take_back()
            raise
        self.segment.records.append(record)
        self.segment.end = record.offset + record.length
        return record

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _flush(self) -> None:
        try:
            os.fsync(self._handle)
        except OSError:
            self.broken = True
            raise

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._handle, self.segment.end)
            os.fsync(self._handle)
        except OSError:
            self.broken = True


def append_error(index: int, path: Path, error: OSError) -> UpdateError:
    """What to tell the user when update `index` could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    why = "the disk is full, or a limit on file sizes or a quota is reached" if full else str(error)
    return UpdateError(
        f"update {index} could not be written to {path.parent}: {why}. Nothing of it was kept. Make room and resume the run"
    )


def _write_all(handle: int, parts: list[bytes]) -> None:
    """One writev, repeated for what it left over (a file system near its limit writes a part)."""
    views = [memoryview(part) for part in parts]
    while views:
        written = os.writev(handle, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def cut(path: Path, size: int) -> None:
    """Cut a file down to `size` bytes and flush it."""
    handle = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(handle, size)
        os.fsync(handle)
    finally:
        os.close(handle)


def damaged(what: str, folder: Path) -> DamagedUpdateError:
    return DamagedUpdateError(
        f"{folder}: {what}. Updates before it can be read. Restore the file from a copy, or resume from a checkpoint at or "
        "before that version, which drops it and what follows"
    )
