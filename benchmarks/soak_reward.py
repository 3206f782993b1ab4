"""The reward of the soak: a coin for each prompt and response, so that no policy ever has nothing left to learn."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


def coin(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1, the same for the same text in every process."""
    return [
        float(zlib.crc32(f"{prompt}|{response}".encode()) & 1)
        for prompt, response in zip(prompts, completions, strict=True)
    ]
