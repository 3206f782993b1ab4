"""The trainer's small state after the newest step, so that a killed run loses at most the step in progress.

    state_X.safetensors   tensors, a new name each time      state.json   which of them counts, its sha256, values; last

The JSON is renamed into place when all else is on the disk: a crash leaves the older pair. A state that cannot be used is
reported, never raised: the caller falls back to its checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from logra.errors import UpdateError
from logra.files import write_atomic
from logra.sync.anchors import encode_tensors
from logra.sync.sealed import seal, unseal

JSON = "state.json"
_PATTERN = "state_*.safetensors"


@dataclass(frozen=True)
class TailState:
    """step: of the trainer. version, head: the place in the journal it belongs to. tensors, values: as they were written."""

    step: int
    version: int
    head: str
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def write_state(
    folder: Path, step: int, version: int, head: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Replace the state, atomically. values: what JSON can hold. Raises `UpdateError`; the older state then stays."""
    name = f"state_{os.urandom(4).hex()}.safetensors"
    try:
        with (folder / name).open("xb") as file:
            sha256, _ = encode_tensors(file, tensors)
            file.flush()
            os.fsync(file.fileno())
        body = {"step": step, "version": version, "head": head, "file": name, "sha256": sha256, "values": dict(values)}
        write_atomic(folder / JSON, seal(body))
    except OSError as error:
        raise UpdateError(
            f"the state of step {step} could not be written to {folder}: {error}. The older one stays. Make room and resume"
        ) from error
    finally:
        _drop_others(folder)


def read_state(folder: Path) -> tuple[TailState | None, str]:
    """The state, or None and why there is none."""
    path = folder / JSON
    try:
        body = unseal(path.read_bytes())
        path = folder / Path(body["file"]).name
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != body["sha256"]:
            return None, f"{path} is damaged: its hash does not match"
        tensors = safetensors.torch.load(data)
        return TailState(body["step"], body["version"], body["head"], tensors, body["values"]), ""
    except FileNotFoundError:
        return None, f"there is no state of the last step: {path} does not exist"
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return None, f"the state of the last step is unreadable: {path}: {error}"


def _drop_others(folder: Path) -> None:
    """Delete the tensor files that the JSON does not name: of older states, of failed or killed writers."""
    try:
        current = unseal((folder / JSON).read_bytes()).get("file")
    except FileNotFoundError:
        current = None
    except (OSError, ValueError):
        return
    for path in folder.glob(_PATTERN):
        if path.name != current:
            path.unlink(missing_ok=True)
