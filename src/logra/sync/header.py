"""The header of a journal: what all its Updates have in common, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logra.errors import UpdateError, UserError
from logra.files import write_atomic
from logra.sync.log import Targets, check_targets
from logra.sync.packet import check_hex
from logra.sync.sealed import seal, unseal

FORMAT = 1
NAME = "header.json"


class Header:
    """`header.json` of a folder. run, base, origin, targets, model: as in `LogInfo`. origin_step: the trainer's step at the
    origin. first: the oldest Update kept. session: of the writer's last start."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.run = self.base = self.session = ""
        self.origin = self.origin_step = self.first = 0
        self.targets: tuple[tuple[str, int, int], ...] = ()
        self.model: dict[str, Any] = {}
        self._stamp: tuple[int, int] | None = None

    def fill(self, run: str, base: str, targets: Targets, model: Mapping[str, Any] | None) -> None:
        """For a new journal; raises `UpdateError` for values that cannot be."""
        check_hex("run", run)
        check_hex("base", base)
        self.run, self.base, self.targets, self.model = run, base, check_targets(targets), dict(model or {})

    def read(self) -> None:
        """Raises `UserError` if the file is not what was written."""
        try:
            status = self.path.stat()  # before reading: a change in between is then seen the next time
            content = unseal(self.path.read_bytes())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}, this logra reads {FORMAT}: use the same release")
            self.fill(content["run"], content["base"], content["targets"], content["model"])
            self.first, self.session = int(content["first"]), str(content["session"])
            self.origin, self.origin_step = int(content["origin"]), int(content["origin_step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is unreadable: {error}") from error
        self._stamp = (status.st_ino, status.st_mtime_ns)

    def read_if_changed(self) -> bool:
        """Whether it had changed."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise UserError(f"the journal is gone: {error}") from error
        changed = (status.st_ino, status.st_mtime_ns) != self._stamp
        if changed:
            self.read()
        return changed

    def write(self) -> None:
        """Replace the file. Raises `UpdateError`; the older one then stays."""
        content = {
            "format": FORMAT,
            "run": self.run,
            "base": self.base,
            "session": self.session,
            "origin": self.origin,
            "origin_step": self.origin_step,
            "first": self.first,
            "model": self.model,
            "targets": [list(entry) for entry in self.targets],
        }
        try:
            write_atomic(self.path, seal(content))
        except OSError as error:
            raise UpdateError(f"cannot write {self.path}: {error}. Make room") from error
