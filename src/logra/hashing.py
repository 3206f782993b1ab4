"""Counter-based random bits, keyed by (seed, purpose, name, index): the same on every device and for every block.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written with int64
tensor operations only, so that any block of rows and columns of a random matrix can be drawn anywhere without the rest of
it. Keys come from blake2b. Nothing here has state, and nothing depends on the order of calls.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

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


def philox(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: int | tuple[Tensor, Tensor]
) -> Words:
    """Philox4x32-10: four 32-bit words (as int64 tensors in [0, 2^32)) for each broadcast counter.

    counter: four broadcastable int64 tensors or integers in [0, 2^32). key: 64 bits, or its low and high halves as int64
    tensors that broadcast with the counter. The products exceed 2^63 and wrap; only their bits are used, so the wrap is
    harmless. Counters are broadcast as late as possible: the first rounds then work on rows and columns, not on their product.
    """
    c0, c1, c2, c3 = _on_one_device(counter)
    key_0, key_1 = (key & MASK32, key >> 32) if isinstance(key, int) else key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        # what lies above bit 31 of c1 and c3 is left there: the mask after the exclusive-or removes it
        c0 = ((product_1 >> 32) ^ c1 ^ key_0).bitwise_and_(MASK32)
        c2 = ((product_0 >> 32) ^ c3 ^ key_1).bitwise_and_(MASK32)
        c1, c3 = product_1, product_0
        key_0, key_1 = (key_0 + _WEYL_0) & MASK32, (key_1 + _WEYL_1) & MASK32
    return tuple(torch.broadcast_tensors(c0, c1 & MASK32, c2, c3 & MASK32))  # type: ignore[return-value]


def _on_one_device(counter: tuple[Tensor | int, ...]) -> list[Tensor]:
    tensors = [c for c in counter if not isinstance(c, int)]
    device = tensors[0].device if tensors else torch.device("cpu")
    return [torch.as_tensor(c, dtype=torch.int64, device=device) for c in counter]


def signs(key: int, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
    """Random signs -1 / +1 of a virtual matrix: (len(rows), len(columns)) int8, any block of it, the same everywhere.

    One 128-bit output holds the signs of 128 consecutive rows of one column: row i of column j is bit i % 32 of word
    (i % 128) // 32 of counter (j, i // 128, 0, 0). Ranges must have step 1.
    """
    return signs_of_many([key], rows, [columns], device)[0]


def signs_of_many(
    keys: Sequence[int], rows: range, columns: Sequence[range], device: torch.device | str = "cpu"
) -> list[Tensor]:
    """`signs` of several matrices in one go, the same bits: one pass over all columns costs far less than one a matrix."""
    sizes = [len(c) for c in columns]
    if not rows or not sum(sizes):
        return [torch.empty(len(rows), size, dtype=torch.int8, device=device) for size in sizes]
    counts = torch.tensor(sizes, device=device)
    low, high = ([key >> shift & MASK32 for key in keys] for shift in (0, 32))
    key_0, key_1 = (
        torch.tensor(h, dtype=torch.int64, device=device).repeat_interleave(counts, output_size=sum(sizes))
        for h in (low, high)
    )
    column = torch.cat([torch.arange(c.start, c.stop, dtype=torch.int64, device=device) for c in columns])[None, :]
    first, last = rows.start // 128, (rows.stop - 1) // 128
    groups = torch.arange(first, last + 1, dtype=torch.int64, device=device)[:, None]
    words = torch.stack(philox((column, groups, 0, 0), (key_0, key_1)), dim=1).flatten(0, 1)  # (4 groups, columns)
    words = words[rows.start // 32 - 4 * first : (rows.stop - 1) // 32 + 1 - 4 * first]
    octets = (words[:, None, :] >> torch.arange(0, 32, 8, device=device)[:, None]).bitwise_and_(255).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)[:, None]
    bits = (octets[:, :, None, :] >> shifts).bitwise_and_(1).view(torch.int8)  # (words, 4, 8, columns)
    skipped = rows.start % 32
    block = bits.flatten(0, 2)[skipped : skipped + len(rows)].mul_(2).sub_(1)
    return [part.contiguous() for part in block.split(sizes, dim=1)]


def uniforms16(key: int, stream_N: Tensor, row_N: Tensor, columns: int) -> Tensor:
    """Uniform multiples of 2^-16 in [0, 1): (N, columns) float32, for stochastic rounding.

    Row n is the row `row_N[n]` of stream `stream_N[n]` (both int64, below 2^32): values depend on the key, the stream, the
    row and the column only, so a block of rows draws what the whole matrix would. Eight values per 128-bit output.
    """
    groups = torch.arange((columns + 7) // 8, dtype=torch.int64, device=row_N.device)[None, :]
    words = philox((row_N[:, None], groups, stream_N[:, None], 1), key)
    packed = torch.stack([word.to(torch.int32) for word in words], dim=-1)  # (N, groups, 4); keeps the low 32 bits
    halves = packed.view(torch.uint16) if sys.byteorder == "little" else _halves(packed)
    return halves.reshape(len(row_N), -1)[:, :columns].to(torch.float32).mul_(2.0**-16)


def _halves(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xFFFF, packed >> 16 & 0xFFFF), dim=-1)
