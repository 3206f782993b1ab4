"""Counter-based random bits, keyed by (seed, purpose, name, index): the same on every device and for every block.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written with int64
tensor operations only, so that any block of rows and columns of a random matrix can be drawn anywhere without the rest of
it. Keys come from blake2b. Nothing here has state, and nothing depends on the order of calls.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def derive_key(*parts: str | int) -> int:
    """A 64-bit key from strings and integers; each part is tagged and length-prefixed, so ("ab", 1) differs from ("a", "b1")."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(b"i" if isinstance(part, int) else b"s")
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def philox(counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: int) -> Words:
    """Philox4x32-10: four 32-bit words (as int64 tensors in [0, 2^32)) for each broadcast counter.

    counter: four broadcastable int64 tensors or integers in [0, 2^32). key: 64 bits.
    The products exceed 2^63 and wrap; only their bits are used, so the wrap is harmless.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*_on_one_device(counter))
    key_0, key_1 = key & MASK32, key >> 32
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> 32 & MASK32).bitwise_xor_(c1).bitwise_xor_(key_0)
        c2 = (product_0 >> 32 & MASK32).bitwise_xor_(c3).bitwise_xor_(key_1)
        c1, c3 = product_1.bitwise_and_(MASK32), product_0.bitwise_and_(MASK32)
        key_0, key_1 = (key_0 + _WEYL_0) & MASK32, (key_1 + _WEYL_1) & MASK32
    return c0, c1, c2, c3


def _on_one_device(counter: tuple[Tensor | int, ...]) -> list[Tensor]:
    tensors = [c for c in counter if not isinstance(c, int)]
    device = tensors[0].device if tensors else torch.device("cpu")
    return [torch.as_tensor(c, dtype=torch.int64, device=device) for c in counter]


def signs(key: int, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
    """Random signs -1 / +1 of a virtual matrix: (len(rows), len(columns)) int8, any block of it, the same everywhere.

    One 128-bit output holds the signs of 128 consecutive rows of one column: row i of column j is bit i % 32 of word
    (i % 128) // 32 of counter (j, i // 128, 0, 0). Ranges must have step 1.
    """
    if not rows or not columns:
        return torch.empty(len(rows), len(columns), dtype=torch.int8, device=device)
    first, last = rows.start // 128, (rows.stop - 1) // 128
    groups = torch.arange(first, last + 1, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=device)[None, :]
    words = torch.stack(philox((column, groups, 0, 0), key), dim=1)  # (groups, 4, columns)
    shifts = torch.arange(32, dtype=torch.int32, device=device)[None, None, :, None]
    low = torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)
    bits = (low[:, :, None, :] >> shifts).bitwise_and_(1).to(torch.int8)  # (groups, 4, 32, columns)
    block = bits.reshape(-1, len(columns))[rows.start - 128 * first : rows.stop - 128 * first]
    return block.mul(2).sub_(1)


def uniforms16(key: int, stream_N: Tensor, row_N: Tensor, columns: int) -> Tensor:
    """Uniform multiples of 2^-16 in [0, 1): (N, columns) float32, for stochastic rounding.

    Row n is the row `row_N[n]` of stream `stream_N[n]` (both int64, below 2^32): values depend on the key, the stream, the
    row and the column only, so a block of rows draws what the whole matrix would. Eight values per 128-bit output.
    """
    groups = torch.arange((columns + 7) // 8, dtype=torch.int64, device=row_N.device)[None, :]
    words = philox((row_N[:, None], groups, stream_N[:, None], 1), key)
    halves = torch.stack([part for word in words for part in (word & 0xFFFF, word >> 16)], dim=-1)
    return halves.reshape(len(row_N), -1)[:, :columns].to(torch.float32).mul_(2.0**-16)
