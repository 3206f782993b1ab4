"""Acknowledgements: where a subscriber stands, and what of an Update reached its weights."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from logra.errors import UpdateError
from logra.files import write_atomic

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024
MAX_LISTED = 20  # names in a list; the counts are always whole
MAX_SUBSCRIBERS = 64
_MAX_TEXT = 2000
_MAX_LISTED_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True)
class Acknowledgement:
    """One subscriber's word.

    run, session: of the log it answers. version: its policy. digest: of its weights at that version, where it is known
    without computing it anew. applied: how many matrices the last Update (or anchor) set. missing: targets of the log that
    the subscriber lacks; unexpected: what it holds and the log never moves (counts, and the first names). error: why it
    stopped, if it did.
    """

    name: str
    run: str
    session: str
    version: int
    digest: str | None = None
    applied: int = 0
    missing_count: int = 0
    missing: tuple[str, ...] = ()
    unexpected_count: int = 0
    unexpected: tuple[str, ...] = ()
    error: str | None = None

    def to_json(self) -> bytes:
        """As a JSON object; at most `MAX_BYTES`."""
        return json.dumps(asdict(self), ensure_ascii=True).encode()

    @staticmethod
    def from_json(data: bytes) -> Acknowledgement:
        """Read and check: it comes from another process. Raises `UpdateError`."""
        if len(data) > MAX_BYTES:
            raise UpdateError(f"an acknowledgement has {len(data)} bytes: at most {MAX_BYTES} are read")
        try:
            values = json.loads(data)
            if not isinstance(values, dict) or values.keys() - {f.name for f in fields(Acknowledgement)}:
                raise ValueError("unknown fields, or no object")
            lists: dict[str, Any] = {name: _names(values.get(name, [])) for name in ("missing", "unexpected")}
            ack = Acknowledgement(**values | lists)
            _check(ack)
        except (ValueError, TypeError, RecursionError) as error:
            raise UpdateError(f"an acknowledgement is malformed: {error}") from error
        return ack

    def describe(self) -> str:
        """One line for messages."""
        parts = [f"{self.name} at version {self.version}"]
        if self.missing_count:
            parts.append(f"lacks {self.missing_count} of the log's targets ({', '.join(self.missing[:3])})")
        if self.unexpected_count:
            parts.append(f"holds {self.unexpected_count} that the log does not move ({', '.join(self.unexpected[:3])})")
        if self.error:
            parts.append(f"reports: {self.error}")
        return ", ".join(parts)


def shorten(names: Sequence[str]) -> tuple[str, ...]:
    """The first names of a long list, for an acknowledgement."""
    return tuple(name[:_MAX_LISTED_NAME] for name in sorted(names)[:MAX_LISTED])


def shorten_text(text: str) -> str:
    """An error's text, cut to what an acknowledgement may carry."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def check_name(name: str) -> str:
    """A subscriber's name; it becomes a file name, so only letters, digits, _ and - are allowed."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UpdateError(
            f"a subscriber's name is 1 to 64 letters, digits, _ or -, beginning with a letter or digit: not {name!r:.80}"
        )
    return name


class Board:
    """The last acknowledgement of each subscriber. Thread-safe; bounded, since names come from outside."""

    def __init__(self, limit: int = MAX_SUBSCRIBERS) -> None:
        self._limit = limit
        self._acks: dict[str, Acknowledgement] = {}
        self._lock = threading.Lock()

    def put(self, ack: Acknowledgement) -> None:
        with self._lock:
            check_room(ack.name, self._acks.keys(), self._limit)
            self._acks[ack.name] = ack

    def all(self) -> dict[str, Acknowledgement]:
        with self._lock:
            return dict(sorted(self._acks.items()))


class AckFolder:
    """The last acknowledgement of each subscriber as `NAME.json` in a folder that they may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, ack: Acknowledgement) -> None:
        """Raises `UpdateError` if it cannot be written, or for one subscriber too many."""
        try:
            self.folder.mkdir(exist_ok=True)
            check_room(ack.name, {path.stem for path in self.folder.glob("*.json")})
            write_atomic(self.folder / f"{check_name(ack.name)}.json", ack.to_json())
        except OSError as error:
            raise UpdateError(
                f"{ack.name} cannot acknowledge in {self.folder}: {error}. It must be allowed to write there"
            ) from error

    def clear(self) -> None:
        """Forget all: a new session begins, and those who still follow speak again."""
        for path in self.folder.glob("*.json"):
            path.unlink(missing_ok=True)

    def all(self) -> dict[str, Acknowledgement]:
        """By name. A file that is no acknowledgement is logged and left out."""
        found = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                ack = Acknowledgement.from_json(path.read_bytes())
            except (OSError, UpdateError) as error:
                logger.warning("%s is not read: %s", path, error)
                continue
            if ack.name == path.stem:
                found[ack.name] = ack
        return found


def check_room(name: str, known: Any, limit: int = MAX_SUBSCRIBERS) -> None:
    """Raise `UpdateError` if `name` would be one subscriber too many."""
    if name not in known and len(known) >= limit:
        raise UpdateError(f"{name} is one subscriber too many: there are {len(known)} already, the most there may be")


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_LISTED:
        raise ValueError(f"a list of names has no more than {MAX_LISTED}")
    if not all(isinstance(name, str) and 0 < len(name) <= _MAX_LISTED_NAME for name in value):
        raise ValueError("a name is no text, or too long")
    return tuple(value)


def _check(ack: Acknowledgement) -> None:
    check_name(ack.name)
    for field in ("run", "session", "digest"):
        value = getattr(ack, field)
        if not (value is None and field == "digest") and (not isinstance(value, str) or _HEX.fullmatch(value) is None):
            raise ValueError(f"{field} is {value!r:.80}")
    for field in ("version", "applied", "missing_count", "unexpected_count"):
        value = getattr(ack, field)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
            raise ValueError(f"{field} is {value!r:.80}")
    if ack.error is not None and (not isinstance(ack.error, str) or len(ack.error) > _MAX_TEXT):
        raise ValueError("error is no text, or too long")
