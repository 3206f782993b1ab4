"""Adam's moments on lists of like-shaped tensors (Kingma and Ba, arXiv 1412.6980).

One form serves all methods: the direction N = m / (sqrt(v) + e) with e = eps as GaLore's code and its successors have it, or
e = eps sqrt(1 - beta2^t), which puts eps beside the corrected root as Adam's paper and torch have it; either way the weight
moves by -lr sqrt(1 - beta2^t) / (1 - beta1^t) N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def advance(
    means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor], betas: tuple[float, float]
) -> None:
    """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, in place; all float32 of one shape."""
    beta1, beta2 = betas
    means, squares, gradients = list(means), list(squares), list(gradients)
    torch._foreach_lerp_(means, gradients, 1.0 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)


def directions(means: Sequence[Tensor], squares: Sequence[Tensor], eps: float) -> list[Tensor]:
    """m / (sqrt(v) + eps), new tensors."""
    roots = torch._foreach_sqrt(list(squares))
    torch._foreach_add_(roots, eps)
    return list(torch._foreach_div(list(means), roots))


def corrected_step(group: dict[str, Any], step: int) -> float:
    """lr sqrt(1 - beta2^t) / (1 - beta1^t)."""
    beta1, beta2 = group["betas"]
    return float(group["lr"]) * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
