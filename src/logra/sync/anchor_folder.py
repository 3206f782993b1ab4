"""Anchors in a journal's folder: `anchor_V.safetensors`, and `anchor_V.json`, written last, which makes it count."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError
from logra.files import fsync_path, write_atomic
from logra.sketch.block import Block
from logra.sync.anchors import Anchor, AnchorInfo, encode_tensors
from logra.sync.log import Targets
from logra.sync.sealed import seal, unseal

logger = logging.getLogger(__name__)

_JSON = re.compile(r"anchor_(\d{1,18})\.json")
_LEFTOVER = re.compile(r"anchor_(\d{1,18})\.safetensors|\.(anchor_\d+|header|state)\..*\.tmp-[0-9a-f]+")


class AnchorFolder:
    """The anchors in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reported: set[str] = set()

    def all(self) -> tuple[AnchorInfo, ...]:
        """Those that count, oldest first. One whose description is damaged does not; that is logged once."""
        found = []
        for name in os.listdir(self.folder):
            match = _JSON.fullmatch(name)
            info = self._info(name) if match else None
            if match and info is not None and info.version == int(match[1]):
                found.append(info)
        return tuple(sorted(found, key=lambda info: info.version))

    def find(self, version: int) -> AnchorInfo:
        """Raises `UpdateOrderError` if there is none of this version."""
        found = self.all()
        for info in found:
            if info.version == version:
                return info
        raise UpdateOrderError(f"there is no anchor of version {version}: there are {[info.version for info in found]}")

    def write(
        self,
        masters: Mapping[str, Tensor | Block],
        targets: Targets,
        describe: Callable[[str, int], AnchorInfo],
        version: int,
    ) -> AnchorInfo:
        """Write an anchor; describe: its description from sha256 and size. Raises `UpdateError`: then there is none."""
        path, json_path = self._path(version), self._json(version)
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            json_path.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                info = describe(*encode_tensors(file, masters, targets))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_path(self.folder)
            write_atomic(json_path, seal(info.to_dict()))
        except OSError as error:
            raise UpdateError(
                f"anchor {version} could not be written to {self.folder}: {error}. It does not count. Make room"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
            if not json_path.exists():
                path.unlink(missing_ok=True)
        return info

    def read(self, version: int) -> Anchor:
        """Open an anchor after verifying its hash, which reads the whole file. Raises `DamagedUpdateError`."""
        info = self.find(version)
        try:
            return Anchor.from_file(info, self._path(version))
        except FileNotFoundError as error:
            raise DamagedUpdateError(f"the file of anchor {version} in {self.folder} is gone") from error

    def stream(self, version: int) -> tuple[BinaryIO, int]:
        """The file of an anchor, open, and its size. Not verified."""
        info = self.find(version)
        try:
            return self._path(version).open("rb", buffering=0), info.bytes  # type: ignore[return-value]
        except FileNotFoundError as error:
            raise DamagedUpdateError(f"the file of anchor {version} in {self.folder} is gone") from error

    def drop(self, doomed: Callable[[int], bool]) -> None:
        """Delete the anchors whose version `doomed` picks; the description first."""
        for info in self.all():
            if doomed(info.version):
                self._json(info.version).unlink(missing_ok=True)
                self._path(info.version).unlink(missing_ok=True)

    def drop_leftovers(self) -> None:
        """Delete what killed writers left behind: temporary files, anchors without a description."""
        for name in os.listdir(self.folder):
            match = _LEFTOVER.fullmatch(name)
            if match and (match[1] is None or not self._json(int(match[1])).exists()):
                (self.folder / name).unlink(missing_ok=True)

    def _info(self, name: str) -> AnchorInfo | None:
        try:
            return AnchorInfo.from_dict(unseal((self.folder / name).read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if name not in self._reported:
                self._reported.add(name)
                logger.warning("%s is unreadable, its anchor is not used: %s", self.folder / name, error)
            return None

    def _path(self, version: int) -> Path:
        return self.folder / f"anchor_{version}.safetensors"

    def _json(self, version: int) -> Path:
        return self.folder / f"anchor_{version}.json"
