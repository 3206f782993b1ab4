"""The packet: an Update in its envelope. It is the one thing that is sent, stored and applied.

The envelope says which history the Update belongs to: run, base digest, the trainer's step, and the checksum of the packet
before it. This chain is what tells a replica that the trainer went back and took another way: index and base alone would let
an Update of the new branch onto weights of the old one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from logra.errors import DamagedUpdateError, UpdateError
from logra.sketch.update import Update
from logra.sketch.wire import decode_with_envelope

CHECKSUM = 16  # bytes at the end of the wire form
_HEX = re.compile(r"[0-9a-f]{1,64}")
_MAX_STEP = 1 << 62


@dataclass(frozen=True)
class Packet:
    """Update number `index`, which takes the policy of `run` from version `index` to `version`.

    run: hex id of the run. base: digest, at version 0, of everything that can move. step: the trainer's step, from 1.
    digest: of everything that can move after this Update, where the trainer gave one. parent: `checksum` of the packet
    before (the base digest for the first); None is not checked.
    """

    update: Update
    run: str
    base: str
    step: int
    digest: str | None = None
    parent: str | None = None

    def __post_init__(self) -> None:
        for name in ("run", "base"):
            check_hex(name, getattr(self, name))
        for name in ("digest", "parent"):
            if getattr(self, name) is not None:
                check_hex(name, getattr(self, name))
        if not isinstance(self.step, int) or isinstance(self.step, bool) or not 0 <= self.step < _MAX_STEP:
            raise UpdateError(f"the step of an Update is a number from 0, not {self.step!r:.40}")

    @property
    def index(self) -> int:
        """Number of the Update: the version it is applied to."""
        return self.update.index

    @property
    def version(self) -> int:
        """The version that applying it leads to."""
        return self.update.index + 1

    @cached_property
    def checksum(self) -> str:
        """Hex of the checksum that ends the wire form; the packet's name in the chain."""
        return self.to_bytes()[-CHECKSUM:].hex()

    def to_bytes(self) -> bytes:
        """The wire form (`logra.sketch.wire`), this envelope in its header; made once, and kept with the packet."""
        data: bytes | None = self.__dict__.get("data")
        if data is not None:
            return data
        envelope: dict[str, Any] = {"run": self.run, "base": self.base, "step": self.step}
        for name in ("digest", "parent"):
            if getattr(self, name) is not None:
                envelope[name] = getattr(self, name)
        data = self.update.to_bytes(envelope)
        self.__dict__.update(checksum=data[-CHECKSUM:].hex(), data=data)
        return data

    @staticmethod
    def from_bytes(data: bytes) -> Packet:
        """Read the wire form. Raises `DamagedUpdateError` for bytes that are no whole, unharmed packet."""
        update, envelope = decode_with_envelope(data)
        if envelope is None:
            raise DamagedUpdateError(
                f"update {update.index} comes without an envelope (run, base, step): it was not sent by a Publisher"
            )
        known = {"run", "base", "step", "digest", "parent"}
        if not {"run", "base", "step"} <= envelope.keys() <= known:
            raise DamagedUpdateError(
                f"update {update.index} has an envelope with the wrong keys: {sorted(envelope)[:8]}"
            )
        try:
            packet = Packet(update, **envelope)
        except UpdateError as error:
            raise DamagedUpdateError(f"the envelope of update {update.index} is malformed: {error}") from error
        data = bytes(data)
        packet.__dict__.update(checksum=data[-CHECKSUM:].hex(), data=data)
        return packet

    def table(self) -> list[list[Any]]:
        """[[name, out, in], ...] of all that it moves."""
        targets = [[f.name, f.out_features, f.in_features] for f in self.update.factors.values()]
        return targets + [[name, *value.shape] for name, value in self.update.dense.items()]


def check_hex(name: str, value: Any) -> None:
    """Raise `UpdateError` unless `value` is 1 to 64 hexadecimal digits in lower case."""
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise UpdateError(f"{name} must be hexadecimal digits in lower case, not {value!r:.80}")


def is_whole(data: bytes) -> bool:
    """Whether the checksum that ends a packet holds."""
    view = memoryview(data)
    return hashlib.blake2b(view[:-CHECKSUM], digest_size=CHECKSUM).digest() == view[-CHECKSUM:]
