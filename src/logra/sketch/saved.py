"""Reading saved state strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from logra.errors import UpdateError


def fitting(state: Mapping[str, Any], key: str, like: Tensor) -> Tensor:
    """The saved tensor `key`; `UpdateError` unless it has the shape and dtype of the one it is to fill."""
    saved: Any = state.get(key)
    if not isinstance(saved, torch.Tensor) or (saved.shape, saved.dtype) != (like.shape, like.dtype):
        raise UpdateError(f"the saved sketcher lacks a fitting {key!r} tensor of shape {tuple(like.shape)}")
    return saved
