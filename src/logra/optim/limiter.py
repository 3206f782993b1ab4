"""What APOLLO (arXiv 2412.05270) has from Fira (arXiv 2410.01623): norm-based scaling and the norm-growth limiter.

    scaling:  s = ||N|| / (||R|| + 1e-8): what Adam makes of a gradient R seen in a subspace, as a factor a channel
    limiter:  at the first step store ||X||;   later l = max(||X|| / (stored + 1e-8), 1.01) / 1.01,   X <- X / l,
              store ||X||, now at most 1.01 times what was stored

As published ("published") one update that is zero or nearly so stops a matrix: its norm is stored, and from 1e-12 of
the usual size 1% a step takes 2000 steps. Such updates come from a gradient of zeros, from one far below Adam's eps and,
in Fira, from one of rank r or less at a refresh: the residual is then rounding error.

"steady", our default, is the same rule, and gives the same bits, while updates are at least `WORTH` of Adam's usual size
and at least `OUTLIER` of what is stored. Otherwise:
1. Nothing is stored, and nothing limited, before the first update of that size.
2. An update below `OUTLIER` of what is stored is not recorded: what is stored falls by 1%, as fast as it may rise. So n
   outliers cost at most n steps, and a size that has fallen for good is followed down in the end.
3. What is stored does not fall below the size of rule 1: no decline takes more than 463 steps to come back to Adam's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from logra.optim.factored import parts

KINDS = ("steady", "published", "off")
GROWTH = 1.01
# more than rounding leaves of a bfloat16 gradient of low rank: 2^-9 / sqrt(3) of it, times 3.2 at Adam's first step
WORTH = 0.01
# training a small decoder with APOLLO, Mini and Fira, no update fell below 0.27 of what was stored
OUTLIER = 0.1
_GUARD = 1e-8


def scaling(normed: Tensor, seen: Tensor, along: tuple[int, ...]) -> Tensor:
    """s = ||N|| / (||R|| + 1e-8), norms along the given dimensions, which are kept with size 1."""
    return norm(normed, along) / (norm(seen, along) + _GUARD)


def norm(x: Tensor, along: tuple[int, ...]) -> Tensor:
    """||x|| of a (p, q) matrix along the given dimensions, which are kept with size 1."""
    if along != (0,) or x.device.type != "cpu":
        return torch.linalg.vector_norm(x, dim=along, keepdim=True)
    # down the columns torch's CPU kernel takes three to nine times as long as these sums, which stay in the cache
    total_1q = x.new_zeros((1, x.shape[1]))
    for rows in parts(x.shape, x.device):
        total_1q += x[rows].square().sum(0)
    return total_1q.sqrt_()


def limited(
    scales: Sequence[Tensor], wholes: Sequence[Tensor], stored: Sequence[Tensor], kind: str, least: float, step: int
) -> list[Tensor]:
    """The scales of like updates X = scale * whole after the limiter; X itself is not formed.

    scales: (p, 1), (1, q) or (1, 1); wholes: (p, q). stored: () float32, 0 for nothing yet; brought up to date in place.
    least: the norm of rule 1, see `worth`. step: 1 at a matrix's first.
    """
    norms = torch.stack([scaled_norm(scale, whole) for scale, whole in zip(scales, wholes, strict=True)])
    before = torch.stack(list(stored))
    divisors, after = published(norms, before, step == 1) if kind == "published" else steady(norms, before, least)
    torch._foreach_copy_(list(stored), list(after.unbind()))
    return [scale / divisor for scale, divisor in zip(scales, divisors.unbind(), strict=True)]


def scaled_norm(scale: Tensor, whole: Tensor) -> Tensor:
    """||scale * whole||, () float32."""
    along = tuple(dim for dim in (0, 1) if scale.shape[dim] == 1)
    return torch.linalg.vector_norm(scale * norm(whole, along))


def worth(seen_shape: Sequence[int], scale: float = 1.0) -> float:
    """`WORTH` times the norm of ones in the subspace, Adam's size, which an update takes on. scale: multiplies updates."""
    return WORTH * math.sqrt(math.prod(seen_shape)) * scale


def published(norms: Tensor, stored: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
    """(what to divide each update by, what to store) of any number of updates."""
    if is_first:
        return torch.ones_like(norms), norms
    divisors = _divisors(norms, stored)
    return divisors, norms / divisors


def steady(norms: Tensor, stored: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """(what to divide each update by, what to store) of any number of updates; stored: 0 for nothing yet."""
    has_begun = stored > 0.0
    divisors = torch.where(has_begun, _divisors(norms, stored), 1.0)
    after = norms / divisors
    after = torch.where(after < OUTLIER * stored, stored / GROWTH, after).clamp(min=least)
    return divisors, torch.where(has_begun | (norms >= least), after, 0.0)


def _divisors(norms: Tensor, stored: Tensor) -> Tensor:
    growth = norms / (stored + _GUARD)
    return torch.where(growth > GROWTH, growth / GROWTH, 1.0)
