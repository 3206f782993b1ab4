"""Sizes of memory as people write them: `24GiB`, `80GB`, `512MiB`, or a number of bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str | int) -> int:
    """Bytes. GB is 10^9, GiB is 2^30. Raises `ValueError` that shows the form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size of memory: write 24GiB, 80GB or 512MiB")
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    if size <= 0:
        raise ValueError(f"{text!r} is no size of memory: it must be above 0")
    return size
