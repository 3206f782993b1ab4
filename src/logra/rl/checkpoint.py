"""Checkpoints on disk that are either whole or not there.

A checkpoint `step_N/` holds `state.safetensors`, `state.json`, what the caller writes into `model/`, and
`manifest.json` with size and sha256 of every other file. It is written as `step_N.tmp-...`, flushed, the
manifest last, and renamed. So a writer killed at any moment leaves the earlier checkpoints as they were.
safetensors and JSON only: loading runs no code from the file.

Names below `folder`: `step_N` a checkpoint; `step_N.tmp-x` being written; `step_N.old-x` replaced by a new
`step_N` (still the checkpoint of step N if the writer died between two renames); `step_N.del-x` being
deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from logra.errors import CheckpointError, ConfigError
from logra.files import (
    FileLock,
    copy_mode,
    fsync_path,
    fsync_tree,
    remove_tree,
    replace_folder,
    temporary_sibling,
    write_file,
)
from logra.rl.rng import restore_rng, rng_state

__all__ = [
    "STAGED",
    "Checkpoint",
    "CheckpointStore",
    "is_whole",
    "load_checkpoint",
    "move_files",
    "restore_rng",
    "rng_state",
]

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = "state.safetensors"
STATE = "state.json"
MODEL = "model"
STAGED = ".model"  # a sharded model on its way into a checkpoint

_NAME = re.compile(r"step_(\d+)(?:\.(old|tmp|del)-[0-9a-f]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `path / "model"` holds what `write_model` wrote, if it was given."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


class CheckpointStore:
    """The checkpoints of one run, in `folder`; the newest `keep` are kept (None: all)."""

    def __init__(self, folder: Path, keep: int | None = 2) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep must be at least 1 checkpoint, not {keep} (None keeps all)")
        self.folder = Path(folder)
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        write_model: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write `step_N`, then delete what is beyond `keep`. Returns its path.

        tensors: any dtype that safetensors knows, any device; views and shared storages are stored apart.
        state: JSON-able, string keys only (others would come back as strings). TypeError otherwise.
        write_model: writes files into the folder it is given.
        Raises CheckpointError if the disk is full or unwritable; whatever is raised, nothing of this
        checkpoint stays and the earlier ones are as they were.
        """
        text = json.dumps(_checked_json(dict(state)))
        target = self.folder / f"step_{step}"
        temporary = temporary_sibling(target)
        lock = self._lock()
        try:
            self._clean()
            temporary.mkdir()
            _write(temporary, step, tensors, text, write_model)
            old = replace_folder(temporary, target)
            fsync_path(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self._no_space(target, tensors, error)) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        else:
            _at("renamed")
            if old is not None:
                remove_tree(old)
            self._delete_beyond_keep(target)
            return target
        finally:
            lock.release()

    def steps(self) -> dict[int, Path]:
        """Every finished step folder by step, ascending; whether it is still whole is not checked."""
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match is None or match[2] in ("tmp", "del"):
                continue
            found.setdefault(int(match[1]), path)  # "step_N" sorts before "step_N.old-x"
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """The newest checkpoint whose files all have the size and hash of its manifest, or None."""
        return self.latest_with_report()[0]

    def latest_with_report(self) -> tuple[Path | None, list[str]]:
        """`latest()`, and one sentence for every newer step folder that was passed over: which, and why."""
        skipped = []
        for _, path in reversed(self.steps().items()):
            try:
                _verify(path)
            except CheckpointError as error:
                skipped.append(str(error))
            else:
                return path, skipped
        return None, skipped

    def load(self, path: Path, *, verify: bool = True) -> Checkpoint:
        """Read and verify a checkpoint. Raises CheckpointError naming the damaged file and what to do."""
        return load_checkpoint(path, verify=verify)

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints of later steps (when a run resumes from an earlier one); returns them."""
        later = {number: path for number, path in self.steps().items() if number > step}
        lock = self._lock()
        try:
            for path in later.values():
                _delete(path)
        finally:
            lock.release()
        return list(later)

    def _lock(self) -> FileLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / ".lock")
            lock.acquire()
        except BlockingIOError as error:
            raise CheckpointError(
                f"{error.strerror} is writing checkpoints into {self.folder}: let it finish or stop it first"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints into {self.folder}: {error}. Make it writable or name another"
            ) from error
        return lock

    def _clean(self) -> None:
        """Delete what dead writers left. The lock is held, so no living writer has a temporary folder."""
        steps = self.steps()
        for path in list(self.folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is not None and match[2] is not None and path not in steps.values():
                remove_tree(path)
        for step, path in steps.items():
            if path.name != f"step_{step}":
                os.rename(path, self.folder / f"step_{step}")

    def _delete_beyond_keep(self, written: Path) -> None:
        """Keep the one just written and the newest whole ones; delete other whole ones and what is older."""
        steps = self.steps()
        whole = {step: path for step, path in steps.items() if path != written and is_whole(path)}
        if self.keep is None or len(whole) < self.keep:
            return
        kept = [written, *reversed(whole.values())][: self.keep]
        oldest = min(step for step, path in steps.items() if path in kept)
        for step, path in steps.items():
            if path not in kept and (step in whole or step < oldest):
                try:
                    _delete(path)
                except OSError as error:
                    logger.warning("could not delete the old checkpoint %s: %s", path, error)
                _at("deleted")

    def _no_space(self, target: Path, tensors: Mapping[str, Tensor], error: Exception) -> str:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(self.folder).free
        return (
            f"checkpoint {target.name} could not be written into {self.folder}: {error}. Its tensors alone "
            f"need {needed:,} bytes, {free:,} are free there. Free some space, keep fewer checkpoints or use "
            f"another output_dir. Earlier checkpoints are untouched."
        )


def move_files(source: Path, target: Path) -> None:
    """Everything in one folder into another of the same file system; the first goes."""
    for path in source.iterdir():
        os.rename(path, target / path.name)
    source.rmdir()


def is_whole(path: Path) -> bool:
    """Whether the manifest is there and every file has its size. Hashes are not read."""
    try:
        _check_sizes(path, _read_manifest(path))
    except CheckpointError:
        return False
    return True


def load_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read one checkpoint folder, after checking size and sha256 of every file in its manifest.

    verify: False leaves the hashes out, for one that `latest_with_report` has just read whole.
    """
    path = Path(path)
    manifest = _verify(path) if verify else _read_manifest(path)
    try:
        state = json.loads((path / STATE).read_bytes())
        loaded = safetensors.torch.load_file(path / TENSORS)
    except (ValueError, SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    # Copies, since the loaded ones may be windows into the file, which is deleted when it is beyond `keep`.
    return Checkpoint(manifest["step"], {name: tensor.clone() for name, tensor in loaded.items()}, state, path)


def _verify(path: Path) -> dict[str, Any]:
    """The manifest, after checking size and sha256 of every file in it."""
    manifest = _read_manifest(path)
    _check_sizes(path, manifest)
    for name, entry in manifest["files"].items():
        if _sha256(path / name) != entry["sha256"]:
            raise _damaged(path, f"{name} has changed since it was written (sha256 differs)")
    return manifest


def _at(boundary: str) -> None:
    """Called at each boundary of a save; tests replace it to kill the writer or to make it fail there."""


def _write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: str,
    write_model: Callable[[Path], None] | None,
) -> None:
    _at("created")
    safetensors.torch.save_file(_storable(tensors), folder / TENSORS)
    _at(TENSORS)
    write_file(folder / STATE, state.encode())
    _at(STATE)
    if write_model is not None:
        (folder / MODEL).mkdir()
        write_model(folder / MODEL)
        _at(MODEL)
    copy_mode(folder, folder / STATE)
    files = {
        str(path.relative_to(folder).as_posix()): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    fsync_tree(folder)
    _at("flushed")
    manifest = {"format": FORMAT, "step": step, "files": files}
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    fsync_path(folder)
    _at(MANIFEST)


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies where needed: safetensors takes only contiguous tensors that share no memory."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        ready = tensor.detach().cpu().contiguous()
        storage = ready.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != ready.numel() * ready.element_size():
            ready = ready.clone()
        seen.add(ready.untyped_storage().data_ptr())
        out[name] = ready
    return out


def _checked_json(value: Any, where: str = "state") -> Any:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: only string keys survive JSON")
            _checked_json(entry, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _checked_json(entry, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise TypeError(f"{where} is a {type(value).__name__}: not JSON-able")
    return value


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}: name a step_N folder that exists, or use resume=auto")
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, step, files = manifest["format"], manifest["step"], manifest["files"]
        known = all(isinstance(entry["bytes"], int) and entry["sha256"] for entry in files.values())
    except FileNotFoundError as error:
        raise _damaged(path, f"{MANIFEST} is missing (the writer did not finish)") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{MANIFEST} is unreadable ({type(error).__name__}: {error})") from error
    if version != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {version}, this logra reads {FORMAT}: use the logra that wrote it"
        )
    match = _NAME.fullmatch(path.name)
    right_step = match is None or int(match[1]) == step  # a folder renamed by its user is fine
    if not known or not {TENSORS, STATE} <= files.keys() or not right_step:
        raise _damaged(path, f"{MANIFEST} does not describe this checkpoint")
    return manifest


def _check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise _damaged(path, f"{name} has {file.stat().st_size:,} bytes instead of {entry['bytes']:,}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} cannot be used: {what}. Delete this folder and resume from an earlier one (resume=auto)"
    )


def _delete(path: Path) -> None:
    doomed = temporary_sibling(path, "del")
    os.rename(path, doomed)
    _at("deleting")
    remove_tree(doomed)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
