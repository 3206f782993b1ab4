"""Sketch optimizers: from the sketch S (d x r) to a direction D (d x r), as free functions on tensors.

RowAdam keeps one second moment a row (methods.md 1.3). The two published variants give the same direction per layer and
differ in how layer magnitudes and the overall step are set:

- `simplified` (NVIDIA-NeMo RL research/logra): D = S / (sqrt(v_hat) + eps), scaled by an ordinary learning rate.
- `paper` (the authors' fork): per-row scales with the layer's sketch norm restored, then one global normalisation to
  `update_ratio` times the weight norm.

`adam` (ours, for a basis that stays: aligned, or fixed) keeps both moments of every element of S; `row_adam` takes a first
moment too there. Where the basis is refreshed, moments follow by the overlap T = A_old A_new^T (design 2.2).

All leave W unchanged and return the moments' next values; the caller commits them when the step is applied.
Legend: d rows of all given targets stacked, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NAMES = ("row_adam", "adam", "sgd")
VARIANTS = ("simplified", "paper")


def row_second_moment(sketch_dr: Tensor, moment_d1: Tensor, step: int, beta2: float) -> tuple[Tensor, Tensor]:
    """v <- beta2 v + (1 - beta2) mean_r(S^2); returns (v, v / (1 - beta2^step)), both (d, 1) float32. `step` is 1-based."""
    mean_square = torch.linalg.vector_norm(sketch_dr, dim=1, keepdim=True).square_().div_(sketch_dr.shape[1])
    moment = torch.lerp(mean_square, moment_d1, beta2)
    return moment, moment / (1.0 - beta2**step)


def element_second_moment(sketch_dr: Tensor, moment_dr: Tensor, step: int, beta2: float) -> tuple[Tensor, Tensor]:
    """v <- beta2 v + (1 - beta2) S^2, element by element; returns (v, v / (1 - beta2^step)). `step` is 1-based."""
    moment = (moment_dr * beta2).addcmul_(sketch_dr, sketch_dr, value=1.0 - beta2)
    return moment, moment / (1.0 - beta2**step)


def first_moment(sketch_dr: Tensor, moment_dr: Tensor, step: int, beta1: float) -> tuple[Tensor, Tensor]:
    """m <- beta1 m + (1 - beta1) S; returns (m, m / (1 - beta1^step)), both (d, r) float32."""
    moment = torch.lerp(sketch_dr, moment_dr, beta1)
    return moment, moment / (1.0 - beta1**step)


def carry_first(moment_dr: Tensor, overlap_rr: Tensor) -> Tensor:
    """m T: what of a mean gradient known in the old basis the new basis sees (T = A_old A_new^T)."""
    return moment_dr @ overlap_rr


def carry_second(
    moment_dr: Tensor, overlap_rr: Tensor, first_dr: Tensor | None, step: int, betas: tuple[float, float]
) -> Tensor:
    """v after a change of basis, after update number `step` (1-based); first: the first moment, carried already, if any.

    v (T*T) is the second moment in the new basis if the old coordinates were uncorrelated; of what a new direction has
    outside the old span nothing is known: it takes the row's mean. The mean of a gradient that pointed along a diagonal of
    the old basis adds up in one new coordinate, up to r-fold in the square, which v (T*T) does not know. But no second
    moment is below the square of its mean (Jensen), so v_hat >= m_hat^2 is kept: a refresh does not spike the step.
    """
    beta1, beta2 = betas
    shares_rr = overlap_rr.square()
    unseen_r = (1.0 - shares_rr.sum(0)).clamp(min=0.0)
    carried = torch.addcmul(moment_dr @ shares_rr, moment_dr.mean(1, keepdim=True), unseen_r)
    if first_dr is None:
        return carried
    return torch.maximum(carried, first_dr.square() * ((1.0 - beta2**step) / (1.0 - beta1**step) ** 2))


def row_adam_direction(sketch_dr: Tensor, corrected: Tensor, eps: float) -> Tensor:
    """Simplified variant: D = S / (sqrt(v_hat) + eps), v_hat (d, 1), or (d, r) for `adam`.

    With a random basis rms(D A) is about 1 an element in steady state, with an orthonormal one sqrt(r / k).
    """
    return sketch_dr / (corrected.sqrt() + eps)


def row_adam_paper_direction(sketch_dr: Tensor, corrected_d1: Tensor, eps: float) -> Tensor:
    """Paper variant for one layer: rows scaled by c = min(den)/den brought to RMS 1, then the layer norm of S restored.

    den = sqrt(v_hat) + max(eps * mean(sqrt(v_hat)), tiny): eps is relative here. A zero sketch gives a zero direction.
    """
    root = corrected_d1.sqrt()
    tiny = torch.finfo(torch.float32).tiny
    denominator = root + torch.clamp(eps * root.mean(), min=tiny)
    scale = denominator.min() / denominator
    scale = scale / scale.square().mean().sqrt()
    direction = scale * sketch_dr
    norm = torch.linalg.vector_norm(direction)
    return direction * torch.where(norm > 0, torch.linalg.vector_norm(sketch_dr) / norm.clamp(min=tiny), 0.0)


def update_ratio_factor(weight_square: float, update_square: float, update_ratio: float) -> float:
    """rho * sqrt(sum ||W||^2 / sum ||D A||^2) over all targets together; 0 if the direction is zero."""
    return update_ratio * (weight_square / update_square) ** 0.5 if update_square > 0 else 0.0


def reconstructed_square(factor_dr: Tensor, gram_rr: Tensor) -> Tensor:
    """||F A||_F^2 = <F (A A^T), F> from the r x r Gram matrix, without forming F A; float64 scalar."""
    return torch.sum((factor_dr @ gram_rr).double() * factor_dr.double())


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)), torch's own rule for clipping a gradient norm."""
    return min(1.0, max_norm / (norm + 1e-6))


def squares(blocks: Sequence[Tensor]) -> float:
    """Sum of squares of all elements, accumulated in float64 over float32 norms."""
    return sum(float(torch.linalg.vector_norm(block)) ** 2 for block in blocks)
