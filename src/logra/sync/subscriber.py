"""The subscriber: it keeps a replica up with any source, and reports what reached the weights."""

from __future__ import annotations

import contextlib
import threading

from logra.errors import UpdateError
from logra.sync.acknowledge import Acknowledgement, check_name, shorten, shorten_text
from logra.sync.log import LogInfo, NotYetError, Source
from logra.sync.replay import Replay
from logra.sync.replica import Replica


class Subscriber:
    """Keeps `replica` up with `source`. Not thread-safe: one thread calls `sync` or `follow`.

    consumes: packets and anchors. waits for: packets that are not made yet. unblocked by: the publisher, timeouts.
    produces: acknowledgements under `name`.
    """

    def __init__(self, source: Source, replica: Replica, name: str) -> None:
        self.source = source
        self.replica = replica
        self.name = check_name(name)
        self._replay = Replay(source, replica)

    @property
    def version(self) -> int:
        return self.replica.version

    @property
    def rejoined(self) -> int:
        """How often an anchor was loaded because the trainer had gone back and taken another way."""
        return self._replay.rejoined

    def sync(self, version: int | None = None, timeout_s: float = 60.0) -> Acknowledgement:
        """Bring the replica to `version`, waiting for it up to `timeout_s`; None: to the newest there is, without waiting.

        A late joiner, and a replica on a branch that the trainer left, starts from an anchor. Whatever happens is
        acknowledged. Raises `NotYetError` at the timeout (the replica is then at an earlier version), and `UpdateError` of the
        kind that says what is wrong.
        """
        info = None
        try:
            info = self.source.info()
            self._replay.advance(info, version, timeout_s)
        except NotYetError:
            self._acknowledge(info)
            raise
        except UpdateError as error:
            with contextlib.suppress(UpdateError):  # the first error is the one to tell
                self._acknowledge(info, error)
            raise
        return self._acknowledge(info)

    def follow(
        self, stop: threading.Event | None = None, until: int | None = None, wait_s: float = 2.0
    ) -> Acknowledgement:
        """Apply Updates as they come, until `stop` is set or version `until` is reached. wait_s: how long one wait lasts,
        after which `stop`, and a restart of the trainer, are noticed. Raises as `sync`."""
        ack = self.sync()
        while not (stop is not None and stop.is_set()) and (until is None or self.version < until):
            with contextlib.suppress(NotYetError):
                ack = self.sync(self.version + 1, wait_s)
        return ack

    def rejoin(self, version: int | None = None) -> Acknowledgement:
        """Load the newest anchor (at or below `version`) whatever the replica holds, poisoned or not, and sync from there."""
        info = self.source.info()
        self._replay.load(info, info.next if version is None else version, f"{self.name} was asked to rejoin")
        return self.sync(version)

    def _acknowledge(self, info: LogInfo | None, error: Exception | None = None) -> Acknowledgement:
        missing, unexpected = self._replay.surprises(info) if info is not None else ([], [])
        ack = Acknowledgement(
            name=self.name,
            run=info.run if info is not None else self.replica.run or self.replica.base,
            session=info.session if info is not None else "0",
            version=self.replica.last_version,
            digest=self.replica.known_digest if error is None else None,
            applied=self._replay.applied,
            missing_count=len(missing),
            missing=shorten(missing),
            unexpected_count=len(unexpected),
            unexpected=shorten(unexpected),
            error=None if error is None else shorten_text(f"{type(error).__name__}: {error}"),
        )
        self.source.acknowledge(ack)
        return ack
