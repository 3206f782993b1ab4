"""Integer factors: U (d x r, float32) -> q (signed integers) and a power-of-two scale a row, by unbiased stochastic rounding.

U_ij is about q_ij 2^e_i with |q_ij| <= 2^(bits-1) - 1. The scale is a power of two, so every partial sum of the product
with an integer basis is an integer times 2^e_i, exact in float32 in any order while it stays below 2^24 (design 2.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from logra import hashing
from logra.errors import NonFiniteError, UpdateError

BITS = {8: torch.int8, 15: torch.int16}
MIN_EXPONENT = -126  # of a normal float32: products stay out of the subnormal range, where devices differ
EXACT_LIMIT = 1 << 24
MAX_EXPONENT = 127 - 24  # sums below 2^24 then stay finite; a step that large is a divergence, not a step
_CHUNK = 1 << 19  # elements: the generator works on 8-byte words, an eighth as many, which then stay in cache


def largest(bits: int) -> int:
    """The largest integer of a factor: 127 for 8 bits, 16383 for 15."""
    if bits not in BITS:
        raise UpdateError(f"bits={bits} is not supported: use one of {sorted(BITS)}")
    return (1 << (bits - 1)) - 1


def check_exact(bits: int, basis_largest: int, rank: int) -> None:
    """Raise `UpdateError` unless max|q_u| max|q_a| r < 2^24, the bound of exactness."""
    if largest(bits) * basis_largest * rank >= EXACT_LIMIT:
        raise UpdateError(
            f"rank {rank} with {bits}-bit factors and a basis up to {basis_largest} exceeds 2^24, the limit of exact sums; "
            f"use bits=8 or a rank below {EXACT_LIMIT // (largest(bits) * basis_largest)}"
        )


def row_exponents(factor_dr: Tensor, bits: int) -> Tensor:
    """The smallest e per row (int8) with max|U_i| <= largest(bits) 2^e; -126 for a zero row."""
    top = factor_dr.abs().amax(dim=1)
    if not bool(torch.isfinite(top).all()):
        raise NonFiniteError("the step has a NaN or infinite factor; it was not applied")
    quantum = top / largest(bits)
    _, exponent = torch.frexp(quantum)  # wrong for subnormal numbers, which all take the least exponent
    return torch.where(quantum >= 2.0**MIN_EXPONENT, exponent, MIN_EXPONENT).to(torch.int8)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^e in float32 from its bit pattern (exact on every device, which pow is not); e in [-126, 127]."""
    return (exponent.to(torch.int32) + 127).bitwise_left_shift(23).view(torch.float32)


def quantize(
    factor_dr: Tensor,
    bits: int,
    key: int,
    stream_d: Tensor,
    row_d: Tensor,
    scale: float = 1.0,
    fold: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Stochastic rounding of scale * factor: (q (d, r) int8 or int16, exponent (d,) int8), E[q 2^e] = U to 2^-17 of a quantum.

    stream_d, row_d: which row of which target each row is (int64), so that a shard of rows rounds as the whole matrix does.
    fold: (table (n, r) float32, place (d,) int64): row i of the factor is first multiplied by row place[i] of the table.
    """
    rank, top = factor_dr.shape[1], largest(bits)
    rounded = torch.empty(factor_dr.shape, dtype=BITS[bits], device=factor_dr.device)
    exponent = torch.empty(len(factor_dr), dtype=torch.int8, device=factor_dr.device)
    step = max(1, _CHUNK // rank)
    for start in range(0, len(factor_dr), step):
        rows = slice(start, start + step)
        scaled = factor_dr[rows] * scale if fold is None else (factor_dr[rows] * fold[0][fold[1][rows]]).mul_(scale)
        exponent[rows] = row_exponent = row_exponents(scaled, bits)
        inverse = power_of_two(-row_exponent.clamp(max=126)) * torch.where(row_exponent > 126, 0.5, 1.0)
        noise = hashing.uniforms16(key, stream_d[rows], row_d[rows], rank)
        rounded[rows] = noise.addcmul_(scaled, inverse[:, None]).floor_().clamp_(-top, top)
    return rounded, exponent
