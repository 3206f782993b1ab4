"""Bring a replica to a version of a log: by Updates, and by an anchor where they do not lead on or cost more bytes.

What a subscriber does each time, and what resuming and `logra checkout` do once.
"""

from __future__ import annotations

import logging
import time

from logra.errors import DamagedUpdateError, MissingBasisError, UpdateError, UpdateOrderError, WrongBaseError
from logra.sync.anchors import AnchorInfo
from logra.sync.log import LogInfo, Source, gone
from logra.sync.packet import Packet
from logra.sync.replica import ForkedError, Replica

logger = logging.getLogger(__name__)


def bring_to(source: Source, replica: Replica, version: int | None = None, timeout_s: float = 0.0) -> int:
    """Bring `replica` to `version` of `source` (None: the newest there is); returns the version reached.

    Raises `NotYetError` if it is not there within `timeout_s` seconds, and `UpdateError` of the kind that says what is wrong.
    """
    replay = Replay(source, replica)
    replay.advance(source.info(), version, timeout_s)
    return replica.version


class Replay:
    """The work of `bring_to`, and what it saw.

    applied: matrices that the last Update or anchor set. rejoined: how often an anchor was loaded because the trainer had gone
    back and taken another way.
    """

    def __init__(self, source: Source, replica: Replica) -> None:
        self.source = source
        self.replica = replica
        self.applied = 0
        self.rejoined = 0
        self.mended = -1  # the Update that was refused before an anchor was loaded for it

    def advance(self, info: LogInfo, version: int | None, timeout_s: float) -> None:
        """Go to `version`; info: the log's, just asked for."""
        deadline = time.monotonic() + timeout_s
        self.check(info)
        self._approach(info, version)
        goal = info.next if version is None else version
        while self.replica.version < goal:
            self._step(info, goal, deadline)
        if info.problem and version is None:
            raise DamagedUpdateError(f"the log is damaged behind version {info.next}: {info.problem}")

    def check(self, info: LogInfo) -> None:
        """Raise `WrongBaseError` unless log and replica are of one run, base and model."""
        if self.replica.run is not None and info.run != self.replica.run:
            raise WrongBaseError(f"this log is of run {info.run}, the replica follows run {self.replica.run}")
        if info.base != self.replica.base:
            raise WrongBaseError(
                f"this log is for weights that began as {info.base}, the replica's began as {self.replica.base}: another base "
                "model"
            )
        missing, unexpected = self.surprises(info)
        if missing or unexpected:
            raise WrongBaseError(
                f"the replica does not fit this log: it lacks {len(missing)} targets ({', '.join(missing[:3])}) and holds "
                f"{len(unexpected)} that the log does not move ({', '.join(unexpected[:3])}): another model, or other targets"
            )

    def surprises(self, info: LogInfo) -> tuple[list[str], list[str]]:
        """(missing, unexpected): names that only the log, or only the replica, has."""
        table, held = {name for name, _, _ in info.targets}, self.replica.blocks.keys()
        return sorted(table - held), sorted(held - table)

    def load(self, info: LogInfo, goal: int, why: str) -> None:
        """Load the newest usable anchor from which Updates lead on to `goal`. why: for the error if there is none."""
        failures = []
        for anchor in reversed([a for a in info.anchors if info.first <= a.version <= goal]):
            try:
                self._load_one(anchor)
                return
            except DamagedUpdateError as error:
                logger.warning("anchor %d is not used: %s", anchor.version, error)
                failures.append(str(error))
        raise UpdateOrderError(
            f"{why}; and there is no usable anchor to start from{''.join(f' ({f})' for f in failures)}. Load the base model "
            "again, or have the trainer write an anchor"
        )

    def _approach(self, info: LogInfo, version: int | None) -> None:
        """Load an anchor where Updates alone do not lead on, or cost more bytes."""
        current, goal = self.replica.version, info.next if version is None else min(version, info.next)
        if current > info.next or (current == info.next and self.replica.head not in (None, info.head)):
            self.load(info, goal, f"the replica is at version {current} of a branch that the trainer left")
            self.rejoined += 1
        elif version is not None and version < current:
            raise UpdateOrderError(f"the replica is at version {current} already and cannot go back to {version}")
        elif current < info.first:
            self.load(info, goal, str(gone(current, info.first, [a.version for a in info.anchors])))
        else:
            better = [a for a in info.anchors if current < a.version <= goal]
            if better and better[-1].bytes < (better[-1].version - current) * info.packet_bytes:
                try:
                    self._load_one(better[-1])
                except DamagedUpdateError as error:  # the Updates lead there too
                    logger.warning("anchor %d is not used: %s", better[-1].version, error)

    def _step(self, info: LogInfo, goal: int, deadline: float) -> None:
        index = self.replica.version
        data = self.source.read(index, max(0.0, deadline - time.monotonic()))
        try:
            packet = Packet.from_bytes(data)
        except DamagedUpdateError as error:
            raise DamagedUpdateError(f"update {index} arrived damaged: {error}") from error
        if packet.run != info.run:
            raise WrongBaseError(f"update {index} belongs to run {packet.run}, its log to run {info.run}")
        try:
            self.replica.apply(packet)
            self.mended = -1
        except ForkedError as error:
            self._mend(index, self.source.info(), goal, error)
            self.rejoined += 1
        except MissingBasisError as error:  # its weights came without the bases in force: an anchor further on has them
            if not any(index <= anchor.version <= goal for anchor in info.anchors):
                raise
            self._mend(index, info, goal, error)
        self.applied = len(packet.update.names)

    def _mend(self, index: int, info: LogInfo, goal: int, error: UpdateError) -> None:
        """Load an anchor because Update `index` was refused; if that was done for it before, raise the refusal."""
        if self.mended == index:
            raise error
        self.load(info, goal, str(error))
        self.mended = index

    def _load_one(self, info: AnchorInfo) -> None:
        with self.source.read_anchor(info.version) as anchor:
            self.replica.load_anchor(anchor)
        self.applied = len(self.replica.blocks)
