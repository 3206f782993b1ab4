"""The state of every global random number generator, as tensors and JSON (no pickle)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logra.errors import CheckpointError

PREFIX = "rng."


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of python's, numpy's and torch's global generators, and of every CUDA device in use.

    Returns (tensors, state): `rng.python` and `rng.numpy` int64, `rng.torch` and `rng.cuda.N` uint8; `state`
    is JSON-able. Both go back into `restore_rng`. Generator objects that a program holds itself are not
    covered.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        f"{PREFIX}python": torch.tensor(words, dtype=torch.int64),
        f"{PREFIX}numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        f"{PREFIX}torch": torch.get_rng_state(),
    }
    # A device that was never touched has no state worth a CUDA context.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device, words_of_device in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"{PREFIX}cuda.{device}"] = words_of_device
    state = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {
            "name": name,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    return tensors, state


def restore_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[str]:
    """Put back what `rng_state` returned; other tensors in `tensors` are ignored.

    Returns one sentence for each CUDA device whose state has no device here (resuming on fewer devices is
    allowed).
    Raises CheckpointError, with nothing changed, if a part is missing or malformed.
    """
    before = _capture()
    try:
        words = tuple(tensors[f"{PREFIX}python"].tolist())
        random.setstate((state["python"]["version"], words, state["python"]["gauss"]))
        keys = tensors[f"{PREFIX}numpy"].numpy().astype(np.uint32)
        numpy_state = state["numpy"]
        np.random.set_state(
            (
                numpy_state["name"],
                keys,
                numpy_state["position"],
                numpy_state["has_gauss"],
                numpy_state["cached"],
            )
        )
        torch.set_rng_state(tensors[f"{PREFIX}torch"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        _put_back(before)
        raise CheckpointError(
            f"the random number state of the checkpoint is incomplete ({type(error).__name__}: {error}): "
            f"resume from another checkpoint"
        ) from error
    return _restore_cuda(tensors)


def _restore_cuda(tensors: Mapping[str, Tensor]) -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = []
    for name in sorted(name for name in tensors if name.startswith(f"{PREFIX}cuda.")):
        device = int(name.rsplit(".", 1)[1])
        if device < count:
            torch.cuda.set_rng_state(tensors[name], device)
        else:
            missing.append(f"the checkpoint has the random number state of CUDA device {device}, which is not here")
    return missing


def _capture() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()


def _put_back(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
