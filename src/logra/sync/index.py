"""All segments of a journal as one sequence of records: found by reading heads only, a few bytes an Update."""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path
from typing import BinaryIO

from logra.files import fsync_path
from logra.sync import segments
from logra.sync.packet import CHECKSUM, is_whole
from logra.sync.segments import Record, Segment

_ATTEMPTS = 3


class SegmentIndex:
    """The records of a folder's segments. problem: why those from `next` on cannot be read, if there are any.

    Not thread-safe. Readers call `look` again and again while another process writes; a writer looks once and keeps its own
    account.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first = 0
        self.segments: list[Segment] = []
        self.problem: str | None = None

    @property
    def next(self) -> int:
        return self.segments[-1].next if self.segments else self.first

    def look(self, first: int) -> None:
        """Take in what is new in the folder. first: the index at which the journal begins, by its header."""
        known = self.problem
        for _ in range(_ATTEMPTS):
            try:
                self._look(first)
            except FileNotFoundError:
                continue
            if self.problem == known:
                return
            self.segments = []  # a new problem: perhaps the writer was cutting back while we read; look afresh
            known = self.problem

    def _look(self, first: int) -> None:
        known = {segment.path.name: segment for segment in self.segments}
        found = []
        for name in os.listdir(self.folder):
            start = segments.first_of(name)
            if start is not None and start >= first:  # those before are leftovers of a compaction
                found.append(known.get(name) or Segment(self.folder / name, start))
        found.sort(key=lambda segment: (segment.first, segment.path.name))
        chain, expected, problem = [], first, None
        for segment in found:
            segments.scan(segment)
            if segment.first != expected:
                problem = f"updates {expected} to {segment.first - 1} are missing: their file is gone or cut short"
                if segment.first < expected:
                    problem = f"{segment.path.name} holds updates that another file holds too"
                break
            chain.append(segment)
            expected = segment.next
            if segment.problem:
                problem = segment.problem
                break
        self.first, self.segments, self.problem = first, chain, problem

    def locate(self, index: int) -> tuple[Segment, Record]:
        """Where packet `index`, first <= index < next, lies."""
        segment = self.segments[bisect_right(self.segments, index, key=lambda s: s.first) - 1]
        return segment, segment.records[index - segment.first]

    def read(self, index: int) -> bytes | None:
        """Packet `index`, verified; None if it has not reached the disk whole. Raises `DamagedUpdateError`."""
        segment, record = self.locate(index)
        handle = os.open(segment.path, os.O_RDONLY)
        try:
            if not self._is_there(handle, record):
                raise FileNotFoundError(segment.path)  # cut back since we looked
            data = segments.read_record(handle, record)
            if is_whole(data):
                return data
            newest = index == self.next - 1 and self.problem is None and not segment.torn
            if newest and segments.is_unwritten(handle, record):
                return None
        finally:
            os.close(handle)
        raise segments.damaged(_mismatch(segment, record), self.folder)

    def stream(self, index: int) -> tuple[BinaryIO, int]:
        """Packet `index` as a file at its first byte, and its length. Not verified."""
        segment, record = self.locate(index)
        file = segment.path.open("rb", buffering=0)
        if not self._is_there(file.fileno(), record):
            file.close()
            raise FileNotFoundError(segment.path)
        file.seek(record.offset)
        return file, record.length  # type: ignore[return-value]

    def checksum(self, index: int) -> str:
        """The checksum that ends packet `index`."""
        segment, record = self.locate(index)
        with segment.path.open("rb") as file:
            return os.pread(file.fileno(), CHECKSUM, record.offset + record.length - CHECKSUM).hex()

    def steps(self) -> list[int]:
        """The trainer's step of each record."""
        return [record.step for segment in self.segments for record in segment.records]

    def mean_bytes(self) -> int:
        lengths = [record.length for segment in self.segments for record in segment.records]
        return sum(lengths) // max(1, len(lengths))

    # --- for the one writer

    def repair(self) -> str | None:
        """Drop what a crash left unfinished; returns what that was. Damage is left alone: see `problem`."""
        dropped = None
        if self.problem is None and self.segments:
            last = self.segments[-1]
            if last.torn:
                dropped = f"{last.torn} bytes of update {last.next}, unfinished, at byte {last.end} of {last.path.name}"
            elif last.records:
                dropped = self._check_last(last)
            if dropped:
                segments.cut(last.path, last.end)
                last.torn = 0
        self._remove([s for s in self.segments if not s.records and s.problem is None])
        leftovers = [n for n in os.listdir(self.folder) if (segments.first_of(n) or 0) < self.first]
        for name in leftovers:
            if segments.first_of(name) is not None:
                (self.folder / name).unlink()
        return dropped

    def _check_last(self, last: Segment) -> str | None:
        """Take the last record off the index if its packet is not whole; returns what it was if it is a torn tail."""
        record = last.records[-1]
        handle = os.open(last.path, os.O_RDONLY)
        try:
            if segments.is_intact(handle, record):
                return None
            torn = segments.is_unwritten(handle, record)
        finally:
            os.close(handle)
        last.records.pop()
        last.end = record.start
        if torn:
            return f"update {record.index}, which had not reached the disk whole, at byte {record.start} of {last.path.name}"
        self.problem = _mismatch(last, record)
        return None

    def cut_at(self, version: int) -> None:
        """Drop the records from `version` on, and everything unreadable behind them; newest first, so that a crash leaves
        a shorter journal, never one with a hole."""
        keep = {s.path.name for s in self.segments if s.first < version}
        doomed = [(segments.first_of(name), name) for name in os.listdir(self.folder)]
        for _, name in sorted((d for d in doomed if d[0] is not None and d[1] not in keep), reverse=True):
            (self.folder / name).unlink()
        self.segments = [s for s in self.segments if s.first < version]
        if self.segments:
            last = self.segments[-1]
            del last.records[version - last.first :]
            last.end = last.records[-1].offset + last.records[-1].length if last.records else 0
            segments.cut(last.path, last.end)
            last.torn, last.problem = 0, None
        self.problem = None
        fsync_path(self.folder)

    def first_kept(self, version: int) -> int:
        """The first index that is left when whole segments below `version` are dropped."""
        kept = [s.first for s in self.segments if s.next > version]
        return kept[0] if kept else self.next

    def drop_before(self, first: int) -> None:
        """Delete the segments before `first`, which the header must name as the beginning by now."""
        self._remove([s for s in self.segments if s.first < first])
        self.first = first

    def _remove(self, doomed: list[Segment]) -> None:
        for segment in doomed:
            segment.path.unlink(missing_ok=True)
        self.segments = [s for s in self.segments if s not in doomed]
        fsync_path(self.folder)

    @staticmethod
    def _is_there(handle: int, record: Record) -> bool:
        head = segments.parse_head(os.pread(handle, segments.HEAD.size, record.start))
        return (
            head == (record.index, record.step, record.length)
            and os.fstat(handle).st_size >= record.offset + record.length
        )


def _mismatch(segment: Segment, record: Record) -> str:
    return (
        f"update {record.index} at byte {record.start} of {segment.path.name} is damaged: its checksum does not match"
    )
