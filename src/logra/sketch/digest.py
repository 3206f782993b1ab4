"""A digest of weights that holders of shards can compute and add up: equal digests, equal weights to the last bit.

For a matrix with bit patterns w_ij (int32) and two pairs of odd 64-bit keys a_i, b_j, drawn from the matrix's name:

    s = sum_ij a_i b_j w_ij   (mod 2^64)

Integer sums wrap the same everywhere and in any order, so the parts of disjoint blocks add up to that of the whole matrix,
whatever the sharding. A single changed element always changes s (odd keys are units); for several, two independent sums leave
a chance below 2^-60 unless changes are confined to the top bits of few elements. It detects drift and mistakes, not malice.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from logra import hashing

Sums = tuple[int, int]
_CHUNK = 1 << 18  # elements: the 8-byte products of a row chunk stay in cache
_MASK64 = (1 << 64) - 1


def block_sums(value: Tensor, name: str, row_start: int = 0, column_start: int = 0) -> Sums:
    """The two sums, in [0, 2^64), of a float32 block (rows, columns) whose first element stands at the given place."""
    rows, columns = value.shape
    device = value.device
    row_keys = [k.to(device) for k in _keys(name, "row", row_start, rows)]
    column_keys = [k.to(device) for k in _keys(name, "column", column_start, columns)]
    totals = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    step = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, step):
        bits = value[start : start + step].view(torch.int32).to(torch.int64)
        for lane in range(2):
            weighted = (bits * column_keys[lane]).sum(1)
            totals[lane] += (weighted * row_keys[lane][start : start + step]).sum()
    return int(totals[0]) & _MASK64, int(totals[1]) & _MASK64


@functools.lru_cache(maxsize=2048)
def _keys(name: str, axis: str, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Two odd int64 keys for each of `count` places."""
    place = torch.arange(start, start + count, dtype=torch.int64)
    w0, w1, w2, w3 = hashing.philox((place, 0, 0, 0), hashing.derive_key("digest", axis, name))
    return (w0 + (w1 << 32)) | 1, (w2 + (w3 << 32)) | 1


def add_sums(*parts: Sums) -> Sums:
    """The sums of a matrix from those of disjoint blocks that cover it."""
    return sum(p[0] for p in parts) & _MASK64, sum(p[1] for p in parts) & _MASK64


def combine(parts: Mapping[str, tuple[tuple[int, int], Sums]]) -> str:
    """Hex digest (128 bits) of whole matrices: name -> (shape, sums)."""
    result = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        (rows, columns), (first, second) = parts[name]
        result.update(f"{len(name)}:{name}:{rows}x{columns}:{first:016x}{second:016x};".encode())
    return result.hexdigest()
