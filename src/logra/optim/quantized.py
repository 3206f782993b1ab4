"""Moments in a byte a number: blocks with a float32 scale each (8-bit optimizers, Dettmers et al., arXiv 2110.02861).

Codes are the nearest on a fixed scale over [-1, 1] (first moment) or [0, 1] (second moment, which is never negative), spaced
as x = u^4 with u uniform: seven orders of magnitude below a block's largest number, like the paper's map, but in closed
form, so that CPU and CUDA run the same few tensor operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def quantize(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8 of the values' shape, scales (blocks,) float32: each block's largest |x|)."""
    flat = values.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = (
        padded.abs().amax(1).clamp(max=torch.finfo(torch.float32).max)
    )  # an infinite second moment stays huge, not NaN
    unit = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    roots = unit.abs().clamp_(max=1.0).sqrt_().sqrt_()
    codes = roots.mul_(127.0).copysign_(unit).add_(128.0) if is_signed else roots.mul_(255.0)
    return codes.round_().to(torch.uint8).view(-1)[: len(flat)].view(values.shape), scales


def dequantize(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """float32 of the codes' shape."""
    flat = codes.reshape(-1).to(torch.float32)
    unit = flat.sub_(128.0).div_(127.0) if is_signed else flat.div_(255.0)
    for _ in range(2):
        unit = unit * unit.abs()
    padded = torch.nn.functional.pad(unit, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).view(-1)[: len(flat)].view(codes.shape)
