"""The publisher: the trainer's side. It writes packets to a log and minds what the subscribers say."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from logra.errors import UpdateError
from logra.sketch.update import Update
from logra.sync.acknowledge import Acknowledgement
from logra.sync.log import Log
from logra.sync.packet import Packet

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class SubscriberError(UpdateError):
    """A subscriber has not answered, reports an error, or holds other weights than the trainer."""


class Publisher:
    """Publishes one run's Updates to `log`, whose run and base they carry.

    consumes: Updates, in order. waits for: `wait_for` waits for acknowledgements. unblocked by: the subscribers, its timeout.
    produces: packets in the log.

    tolerant: only subscribers that `wait_for` has waited for can stop the publisher; trouble of any other is logged, once.
    """

    def __init__(self, log: Log, *, tolerant: bool = False) -> None:
        info = log.info()
        self.log, self.tolerant = log, tolerant
        self._required: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._run, self._base = info.run, info.base
        self._digests = {anchor.version: anchor.digest for anchor in info.anchors} | {info.origin: info.base}

    def publish(self, update: Update, step: int, digest: str | None = None) -> Packet:
        """Append the next Update; when this returns it is kept.

        An aligned basis travels only in the first Update that uses it (`Update.incremental`). step: the trainer's, from 1.
        digest: of everything that can move, after this Update: subscribers compare it.
        Raises `UpdateError` (nothing was appended), or `SubscriberError` (it was appended, and a subscriber is in trouble).
        """
        packet = Packet(update.incremental(), self._run, self._base, step, digest, self.log.head)
        self.log.append(packet)
        for version in [v for v in self._digests if v > packet.index]:
            del self._digests[version]  # of a branch that was left
        if digest is not None:
            self._digests[packet.version] = digest
        self.check()
        return packet

    def know(self, version: int, digest: str) -> None:
        """Tell the digest of a version that was published earlier, or of the one a resumed trainer starts from."""
        self._digests[version] = digest

    def acknowledgements(self) -> dict[str, Acknowledgement]:
        """The subscribers that have answered since this trainer started (or went back), by name."""
        return self._current(self.log.info().session)

    def _current(self, session: str) -> dict[str, Acknowledgement]:
        found = self.log.acknowledgements()
        return {n: a for n, a in found.items() if (a.run, a.session) == (self._run, session)}

    def check(self) -> None:
        """Raise `SubscriberError` if a subscriber reports an error, lacks a target, or has other weights at a known version."""
        newest = self.log.info().next
        for ack in self.acknowledgements().values():
            trouble = self._trouble(ack, newest)
            if trouble and (ack.name in self._required or not self.tolerant):
                raise SubscriberError(trouble)
            if trouble and (ack.name, trouble) not in self._told:
                self._told.add((ack.name, trouble))
                logger.warning("%s", trouble)

    def wait_for(self, subscribers: Iterable[str] | int, version: int = 0, timeout_s: float = 60.0) -> None:
        """Return when all of `subscribers` (names, or how many) have acknowledged `version` or a later one since this start.

        Version 0 before the first step (the resumed version after a resume): a broken path then fails at the start, and no
        rollout comes from other weights. Raises `SubscriberError` naming who has not, and what they reported.
        """
        names = None if isinstance(subscribers, int) else list(subscribers)
        self._required |= set(names or ())
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            newest, acks = self.log.info().next, self.acknowledgements()
            ready = {n for n, ack in acks.items() if ack.version >= version and not self._trouble(ack, newest)}
            late = [name for name in names or () if name not in ready]
            lacking = max(0, subscribers - len(ready)) if isinstance(subscribers, int) else len(late)
            if not lacking:
                self._required |= ready
                return
            if time.monotonic() >= deadline:
                who = (
                    "; ".join(self._last_word(name) for name in late) or f"{lacking} more of {subscribers} subscribers"
                )
                raise SubscriberError(
                    f"version {version} was not acknowledged within {timeout_s:g} s by: {who}. Check that they run and reach "
                    "this log"
                )
            time.sleep(_POLL_S)

    def drain(self, timeout_s: float) -> list[str]:
        """Give those who follow time to reach the newest version; the names of those who have not after `timeout_s`."""
        newest, deadline = self.log.info().next, time.monotonic() + timeout_s
        while True:
            late = [name for name, ack in self.acknowledgements().items() if ack.version < newest]
            if not late or time.monotonic() >= deadline:
                return late
            time.sleep(_POLL_S)

    def _trouble(self, ack: Acknowledgement, newest: int) -> str:
        """What is wrong with a subscriber; empty if nothing is."""
        expected = self._digests.get(ack.version)
        if ack.error or ack.missing_count or ack.unexpected_count:
            return f"a subscriber is in trouble: {ack.describe()}"
        if ack.version > newest:
            return f"{ack.name} is at version {ack.version}, but the newest is {newest}: it follows another branch"
        if expected is not None and ack.digest is not None and ack.digest != expected:
            return f"{ack.name} has diverged: at version {ack.version} its digest is {ack.digest}, the trainer's is {expected}"
        return ""

    def _last_word(self, name: str) -> str:
        ack = self.log.acknowledgements().get(name)
        if ack is None:
            return f"{name} (nothing heard)"
        current = name in self.acknowledgements()
        return f"{ack.describe()}" + ("" if current else ", said before this trainer started")
