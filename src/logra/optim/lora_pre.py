"""LoRA-Pre: the moments of Adam, or Muon's momentum, as products of thin factors ("Taming Momentum", arXiv 2602.24283).

    m_B m_A tracks the mean of g with decay b1;   v_B v_A that of |g| with decay sqrt(b2), so that its square decays by b2
    m = b1 m_B m_A + (1 - b1) g;   v = b2 (v_B v_A)^2 + (1 - b2) g^2                (old factors; then the factors follow g, |g|)
    W <- (1 - lr wd) W - lr update_scale (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    Muon: m = mu m_B m_A + g, where m_B m_A tracks g / (1 - mu);   W <- (1 - lr wd) W - lr f NS(m), f as in `logra.optim.muon`

How factors follow: `logra.optim.factored`. There is no official code; the rule is the paper's algorithm, its ambiguities are
switches: `order="old"` forms m and v from the old factors, as the derivation implies, "new" from the new ones;
`factors="together"` steps both factors from the old ones, "in_turn" (the more exact) the right one after the left;
update_scale=0.25 is the multiplier that the paper's experiments mention.

Where we leave the paper (`LoRAPreAdamW(groups, **LoRAPreAdamW.FAITHFUL)` does not):
1. `damping_is="relative"`: 1e-6 of the Gram matrix's trace. The paper's is 1e-6 as it stands ("absolute"): the error of the mean
   grows from 0.4% at gradients of 1 to 5% at 1e-5 and 11% at 1e-6, and at 1e-9 nothing is learnt. Ours is the same at any scale.
2. `gauge="orthonormal"`: right factors have orthonormal rows, and a bound on how they move. Left alone ("free") they drift until
   damping or overflow ends it, and after one gradient of 1000 times the usual size m is 26 times too large for 40 steps.
3. `second_moment="corrected"`: the square of an average that starts at zero starts quadratically, and 1 / (1 - b2^t)
   ("published") leaves it some 5 times too small at step 10, 2 times at step 50.
4. `limit="adam"`: the step of no weight exceeds what Adam can reach with these betas. v_B v_A crosses zero where m_B m_A does
   not; when gradients get smaller the published rule ("none") then makes steps of thousands of learning rates.
5. `zero_gradient="skip"`: see `logra.optim.base`.
6. Where a side is no more than the rank the exact moments are smaller: AdamW (as the paper), and for LoRA-Pre's Muon, Muon.

State: Adam 2 r (p + q), Muon r (p + q), float32. Beside it, in a step: one whole float32 matrix for each of the batch, its move
(m; v is made some rows at a time), and thin ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from logra import hashing
from logra.optim import factored, muon, options
from logra.optim.base import Layout, LowRankOptimizer
from logra.optim.batch import Batch, Dense, Move, Slot

MEAN = ("mean_left", "mean_right")
ROOT = ("root_left", "root_right")
EXACT = "momentum_buffer"
_START = 0.02  # standard deviation of the first right factors
_PUBLISHED = {"order": "old", "factors": "together", "damping_is": "absolute", "gauge": "free", "zero_gradient": "step"}

Factors = tuple[list[Tensor], list[Tensor]]  # lefts, rights


class FactoredOptimizer(LowRankOptimizer):
    """Base of the two: options of the factors, their state, their start."""

    DECAYS_FIRST = True
    CORRECTS_BEFORE_EPS = True
    PRODUCTS: ClassVar[tuple[tuple[str, str], ...]] = (MEAN,)

    def _check(self, group: Mapping[str, Any]) -> None:
        options.check_number(group, "damping", 1e-12)  # without any the first solve is singular
        options.check_choice(group, "damping_is", ("relative", "absolute"))
        options.check_choice(group, "order", ("old", "new"))
        options.check_choice(group, "factors", ("together", "in_turn"))
        options.check_choice(group, "gauge", ("orthonormal", "free"))

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        rank, layout = group["rank"], {}
        for left, right in self.PRODUCTS:
            layout[left] = ((shape[0], rank), torch.float32)
            layout[right] = ((rank, shape[1]), torch.float32)
        return layout

    def _begin(self, slot: Slot) -> None:
        for left, right in self.PRODUCTS:
            if right not in slot.state:
                return
            drawn = slot.state[right]
            key = hashing.derive_key(slot.group["seed"], "lora_pre", slot.name, right)
            generator = torch.Generator().manual_seed(key >> 1)
            drawn.copy_(torch.randn(drawn.shape, generator=generator).mul_(_START))
            if slot.group["gauge"] == "orthonormal":
                factored.regauge([slot.state[left]], [drawn])

    def _rule(self, group: Mapping[str, Any], decay: float, gain: float = 1.0) -> factored.Rule:
        return factored.Rule(
            decay, gain, float(group["damping"]), group["damping_is"], group["factors"], group["gauge"]
        )


def _factors(batch: Batch, keys: tuple[str, str]) -> Factors:
    return batch.states(keys[0]), batch.states(keys[1])


def _gradients(batch: Batch) -> list[Tensor]:
    """Contiguous, so that no rounding depends on how a gradient happens to be stored (Muon's bfloat16 would show it)."""
    return [g.contiguous() for g in batch.gradients]


class LoRAPreAdamW(FactoredOptimizer):
    """Adam with low-rank moments. Per matrix: four factors, 2 r (p + q) float32.

    rank, betas, eps, update_scale (times the step): see the module, as for the switches. damping: of the r x r solves.
    """

    FAITHFUL: ClassVar[Mapping[str, Any]] = {**_PUBLISHED, "second_moment": "published", "limit": "none"}
    PRODUCTS = (MEAN, ROOT)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        update_scale: float = 1.0,
        damping: float = 1e-6,
        damping_is: str = "relative",
        order: str = "old",
        factors: str = "together",
        gauge: str = "orthonormal",
        second_moment: str = "corrected",
        limit: str = "adam",
        zero_gradient: str = "skip",
        seed: int = 42,
    ):
        super().__init__(
            params, lr=lr, rank=rank, betas=betas, eps=eps, weight_decay=weight_decay, update_scale=update_scale,
            damping=damping, damping_is=damping_is, order=order, factors=factors, gauge=gauge,
            second_moment=second_moment, limit=limit, zero_gradient=zero_gradient, seed=seed,
        )  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        options.check_number(group, "update_scale", 0.0)
        options.check_choice(group, "second_moment", ("corrected", "published"))
        options.check_choice(group, "limit", ("adam", "none"))

    def _takes(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> bool:
        return min(shape) > group["rank"]

    def _at_most(self) -> str:
        return "they are stepped by AdamW"

    def _moves(self, batch: Batch) -> list[list[Move]]:
        group, (beta1, beta2) = batch.group, batch.group["betas"]
        mean, root, gradients = _factors(batch, MEAN), _factors(batch, ROOT), _gradients(batch)
        if group["order"] == "new":
            self._follow(group, mean, root, gradients)
        num_followed = batch.step if group["order"] == "new" else batch.step - 1
        of_square = square_weights(beta2, batch.step, num_followed, group["second_moment"] == "corrected")
        bound = largest_direction(beta1, beta2, batch.step) if group["limit"] == "adam" else math.inf
        moves = []
        for g, *pairs in zip(gradients, *mean, *root, strict=True):
            direction = adam_direction(g, pairs, mean_weights(beta1, batch.step), of_square, group["eps"], bound)
            moves.append([Dense(direction, -float(group["lr"]) * group["update_scale"])])
        if group["order"] == "old":
            self._follow(group, mean, root, gradients)
        return moves

    def _follow(self, group: Mapping[str, Any], mean: Factors, root: Factors, gradients: Sequence[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        factored.advance(*mean, gradients, self._rule(group, beta1))
        factored.advance(*root, gradients, self._rule(group, math.sqrt(beta2)), magnitudes=True)


class LoRAPreMuon(FactoredOptimizer):
    """Muon with low-rank momentum. Per matrix: two factors, r (p + q) float32 (the whole momentum where that is less).

    rank, damping: as in LoRA-Pre's Adam. momentum, ns_steps, ns_eps, adjust_lr_fn: as in `Muon`. betas, eps: AdamW's.
    """

    FAITHFUL: ClassVar[Mapping[str, Any]] = {**_PUBLISHED, "ns_eps": 1e-7}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        momentum: float = 0.95,
        ns_steps: int = 5,
        ns_eps: float = 1e-15,
        adjust_lr_fn: str | None = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        damping: float = 1e-6,
        damping_is: str = "relative",
        order: str = "old",
        factors: str = "together",
        gauge: str = "orthonormal",
        zero_gradient: str = "skip",
        seed: int = 42,
    ):
        super().__init__(
            params, lr=lr, rank=rank, momentum=momentum, ns_steps=ns_steps, ns_eps=ns_eps, adjust_lr_fn=adjust_lr_fn,
            betas=betas, eps=eps, weight_decay=weight_decay, damping=damping, damping_is=damping_is, order=order,
            factors=factors, gauge=gauge, zero_gradient=zero_gradient, seed=seed,
        )  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        muon.check_muon(group)

    def _at_most(self) -> str:
        return "they keep their whole momentum"

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        if min(shape) <= group["rank"]:
            return {EXACT: (shape, torch.float32)}
        return super()._layout(shape, group)

    def _moves(self, batch: Batch) -> list[list[Move]]:
        group, momentum, gradients = batch.group, float(batch.group["momentum"]), _gradients(batch)
        if EXACT in batch.slots[0].state:
            pairs = zip(batch.states(EXACT), gradients, strict=True)
            return [[muon.muon_move(muon.momentum_update(m, g, momentum, False), group)] for m, g in pairs]
        mean, rule = _factors(batch, MEAN), self._rule(group, momentum, 1.0 / (1.0 - momentum))
        if group["order"] == "new":
            factored.advance(*mean, gradients, rule)
        moves: list[list[Move]] = []
        for g, left, right in zip(gradients, *mean, strict=True):
            moves.append([muon.muon_move(torch.addmm(g, left, right, alpha=momentum), group)])
        if group["order"] == "old":
            factored.advance(*mean, gradients, rule)
        return moves


# -- math of one step -------------------------------------------------------------------------------------------------------


def mean_weights(beta1: float, step: int) -> tuple[float, float]:
    """Weights of m_B m_A and of g in m / (1 - b1^t)."""
    seen = 1.0 - beta1**step
    return beta1 / seen, (1.0 - beta1) / seen


def square_weights(beta2: float, step: int, num_followed: int, corrected: bool) -> tuple[float, float]:
    """Weights of (v_B v_A)^2 and of g^2 in v / (1 - b2^t). num_followed: steps that the factors have made.

    corrected: the product, an average of |g| with decay sqrt(b2) that started at zero, is divided by the weight it has seen,
    and its square has the share of v that is not g's.
    """
    seen = 1.0 - beta2**step
    own = (1.0 - beta2) / seen
    if not corrected:
        return beta2 / seen, own
    if step == 1 or num_followed == 0:
        return 0.0, own
    return (1.0 - own) / (1.0 - math.sqrt(beta2) ** num_followed) ** 2, own


def largest_direction(beta1: float, beta2: float, step: int) -> float:
    """The largest |m / sqrt(v)| (bias-corrected) that Adam can reach: Cauchy and Schwarz on its weights a of m and b of v.

    sqrt(sum a^2 / b); 1.16 in the long run for betas (0.9, 0.95), 7.3 for (0.9, 0.999). A rounding's width is allowed.
    """
    ratio = beta1**2 / beta2 if beta2 else (math.inf if beta1 else 0.0)
    if ratio > 1.0 and step > 1 and (ratio == math.inf or step * math.log(ratio) > 600.0):
        return math.inf
    total = step if ratio == 1.0 else 1.0 if step == 1 else (1.0 - ratio**step) / (1.0 - ratio)
    weight = (1.0 - beta1) / (1.0 - beta1**step)
    return weight * math.sqrt((1.0 - beta2**step) / (1.0 - beta2) * total) * (1.0 + 1e-6)


def adam_direction(
    g: Tensor,
    factors: Sequence[Tensor],
    of_mean: tuple[float, float],
    of_square: tuple[float, float],
    eps: float,
    bound: float,
) -> Tensor:
    """Corrected m / (sqrt(v) + eps), (p, q), no more than `bound`. factors: m_B, m_A, v_B, v_A."""
    mean_b, mean_a, root_b, root_a = factors
    direction = torch.addmm(g, mean_b, mean_a, beta=of_mean[1], alpha=of_mean[0])
    of_root = math.sqrt(of_square[0])
    for rows in factored.parts(g.shape, g.device):
        part, own = direction[rows], g[rows]
        root = torch.addmm(own, root_b[rows], root_a, beta=0.0, alpha=of_root)
        root.square_().addcmul_(own, own, value=of_square[1])
        part.div_(root.sqrt_().add_(eps))
        if bound < math.inf:
            part.clamp_(-bound, bound)
    return direction
