"""APOLLO: Adam in a random subspace decides only by how much each channel of the raw gradient is scaled.

Zhu et al., arXiv 2412.05270; official code apollo-torch 1.0.3.

    every `update_proj_gap` steps: P drawn anew, entries N(0, 1/r)   (proj="svd": r leading singular directions of G)
    R = G P^T or P^T G;   m, v: Adam's moments of R;   N = m / (sqrt(v) + eps)
    s = ||N|| / (||R|| + 1e-8) along the rank, one of each row or column;  scale_type="tensor": one of the whole matrix
    X = s G;   norm-growth limiter on X;   X <- sqrt(scale) X   (scale_front: before the limiter)
    W <- W - lr sqrt(1 - b2^t) / (1 - b1^t) X;   then W <- (1 - lr wd) W

A channel of R has the norm of G's on average, but Adam's factor in r dimensions is about sqrt(r / min(p, q)) of that
in all of them; `scale` is there to make up for it (the step grows with its root).

Where we leave the code, each behind a switch (`ApolloAdamW(groups, **ApolloAdamW.FAITHFUL)` sets all to the code's ways):
1. `limiter="steady"`: the code's ("published") can stop a matrix for a thousand steps, see `logra.optim.limiter`; or "off".
2. `zero_gradient="skip"`: see `logra.optim.base`.
3. `refresh="staggered"`: each matrix at its own step, evenly spread; the code does all at once ("together").
And without a switch: P is drawn from (seed, the parameter's name, its step), in the code from the parameter's place in
the list, so that there to freeze one changes the others; rank is clamped to the smaller side; norms are taken along the
rank for every `proj_type` (the code fails where the larger side is projected); state is float32 (the code: the
gradient's dtype).

Moments at a refresh stay as they are (`on_refresh="keep"`), as in the code, unlike in our GaLore: only their norms
a channel count, and a new P keeps those on average. Final loss of a small decoder (rank 16 of 64, a refresh every 25
steps of 300; mean and range over 3 seeds, each way at its best lr of four):

                      keep                rotate              reset
    random            1.63 (1.62-1.65)    1.61 (1.58-1.64)    1.70 (1.66-1.73)    rotate: by the pseudo-inverse overlap
    Mini              1.80 (1.75-1.85)    1.80 (1.75-1.85)    1.87 (1.83-1.92)
    proj="svd"        1.62 (1.58-1.65)    1.62 (1.61-1.62)    1.70 (1.66-1.72)

"reset" makes steps three times as long for a while, as v starts at 0 without its bias correction; "rotate" of a random
basis, no better than "keep", is not offered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from logra import hashing
from logra.errors import ConfigError
from logra.optim import adam, options, subspace
from logra.optim import limiter as limiters
from logra.optim.batch import Batch, Move, Scaled, Slot
from logra.optim.galore import LimitedOptimizer


class ApolloAdamW(LimitedOptimizer):
    """APOLLO. Per matrix: moments 2 r max(p, q), P r min(p, q), and a number, float32.

    rank, scale, update_proj_gap (steps between bases), proj ("random" or "svd"), proj_type ("std": the smaller side;
    "reverse_std", "left", "right"), scale_type ("channel" or "tensor"), scale_front: as in the official code, whose
    disable_nl=True is limiter="off". projection: how proj="svd" finds its directions, see `GaLoreAdamW`. P is kept, as in the
    code: to draw it again at each step would save r min(p, q) numbers, but takes the CPU 3.6 ms for 256 x 4096.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        rank: int | None = 128,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj: str = "random",
        proj_type: str = "std",
        scale_type: str = "channel",
        scale_front: bool = False,
        limiter: str = "steady",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        projection: str = "svd",
        on_refresh: str = "keep",
        refresh: str = "staggered",
        zero_gradient: str = "skip",
        seed: int = 42,
    ):
        super().__init__(
            params, lr, rank=rank, update_proj_gap=update_proj_gap, proj_type=proj_type, betas=betas, eps=eps,
            weight_decay=weight_decay, projection=projection, on_refresh=on_refresh, refresh=refresh,
            zero_gradient=zero_gradient, seed=seed, scale=scale, proj=proj, scale_type=scale_type,
            scale_front=scale_front, limiter=limiter,
        )  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        options.check_number(group, "scale", 0.0)
        options.check_choice(group, "proj", ("random", "svd"))
        options.check_choice(group, "scale_type", ("channel", "tensor"))
        options.check_choice(group, "scale_front", (False, True))
        if group["proj"] == "random" and group["on_refresh"] == "rotate":
            raise ConfigError("on_refresh='rotate' is for proj='svd'; with proj='random' use 'keep' or 'reset'")

    def _leading(self, slot: Slot, gradient: Tensor, rank: int, where: str, step: int) -> Tensor | None:
        if slot.group["proj"] == "svd":
            return super()._leading(slot, gradient, rank, where, step)
        key = hashing.derive_key(slot.group["seed"], "apollo", slot.name, step)
        return random_basis(slot.shape, rank, where, key).to(gradient.device)

    def _moves(self, batch: Batch) -> list[list[Move]]:
        group, seen = batch.group, self._seen(batch)
        along = (0, 1) if group["scale_type"] == "tensor" else self._along(batch.slots[0])
        scales = [limiters.scaling(n, r, along) for n, r in zip(self._adam(batch, seen), seen, strict=True)]
        root = math.sqrt(group["scale"])
        front, behind = (root, 1.0) if group["scale_front"] else (1.0, root)
        if group["limiter"] != "off":
            torch._foreach_mul_(scales, front)
            least = limiters.worth(seen[0].shape, front)
            stored = batch.states("limiter")
            scales = limiters.limited(scales, batch.gradients, stored, group["limiter"], least, batch.step)
            front = 1.0
        factor = -adam.corrected_step(group, batch.step) * front * behind
        return [[Scaled(g, scale, factor)] for scale, g in zip(scales, batch.gradients, strict=True)]


class ApolloMini(ApolloAdamW):
    """APOLLO-Mini: rank 1 and one scale of the whole matrix. Per matrix: 2 max(p, q) + min(p, q) numbers and one, float32.

    The rank is 1 whatever a group says, if it is not None (AdamW): groups made for any other method will do.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        rank: int | None = 1,
        scale: float = 128.0,
        scale_type: str = "tensor",
        **others: Any,
    ):
        if rank not in (1, None):
            raise ConfigError(f"rank of ApolloMini is 1, got {rank}: take ApolloAdamW with scale_type='tensor'")
        super().__init__(params, lr, rank=rank, scale=scale, scale_type=scale_type, **others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        has_rank = param_group.get("rank") is not None
        super().add_param_group({**param_group, "rank": 1} if has_rank else param_group)


def random_basis(shape: tuple[int, ...], rank: int, where: str, key: int) -> Tensor:
    """P of a matrix of that shape with entries N(0, 1/r), drawn on the CPU: the same on every device."""
    whole = subspace.basis_shape(shape, rank, where)
    generator = torch.Generator().manual_seed(key >> 1)
    return torch.randn(whole, generator=generator).div_(math.sqrt(min(rank, *shape)))
