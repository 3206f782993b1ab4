"""Running means of matrices kept as products of two thin factors (LoRA-Pre, arXiv 2602.24283, theorem 3.1).

Legend: N matrices of a batch, (p, q) each; B (p, r) left and A (r, q) right factor, B A the running mean; X the target, here a
gradient or its absolute values, times `gain`; y the rate. One damped Newton step of |B A - X|^2 in each factor:

    B <- (1 - y) B + y X A^T (A A^T + d I)^-1
    A <- (1 - y) A + y (B^T B + d I)^-1 B^T X

`factors="together"`: both from the old factors, as published. Their product then moves by
-(1 - (1 - y)^2) B A + y (1 - y) (X P_A + P_B X) + y^2 X (B A)^+ X, whose last term is as large as X^2 / (B A): it overshoots
whenever the target has grown. `factors="in_turn"`: A's step sees the new B; then
B A <- (1 - y)^2 B A + y (1 - y) X P_A + y P_B X, which for X in the span is the running mean with decay (1 - y)^2 to the letter,
and never longer than it. (P: projectors on the row space of A, on the column space of B; ^+: pseudo-inverse.)

The factors are defined up to B C, C^-1 A. Nothing holds C: over thousands of steps it drifts until A A^T is below d, or
overflows. `gauge="orthonormal"` removes that freedom after every step, A A^T = I, without changing the product. B then carries
the scale, and what A is moved towards is kept within 2 |A| / y: a first step from B = 0 asks for half of that, and the overshoot
of "together" ends at 2 y X.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny
_REACH = 2.0  # |A| / y
_GAUGE_DAMPING = 1e-6  # of the trace: above the rounding of a float32 Gram matrix
# numbers of the target that are looked at together: what stays in a CPU's cache, and what is worth a launch elsewhere
_PART, _PART_ELSEWHERE = 1 << 17, 1 << 24


@dataclass(frozen=True)
class Rule:
    """How factors follow a target. decay: of the product, (1 - y)^2. damping: d, or times the trace ("relative")."""

    decay: float
    gain: float = 1.0
    damping: float = 1e-6
    damping_is: str = "relative"
    factors: str = "together"
    gauge: str = "orthonormal"

    @property
    def rate(self) -> float:
        """y"""
        return 1.0 - math.sqrt(self.decay)


def parts(shape: Sequence[int], device: torch.device) -> list[slice]:
    """Rows of a matrix, a part at a time: what is made of a part is small beside the matrix."""
    limit = _PART if device.type == "cpu" else _PART_ELSEWHERE
    count = max(1, limit // max(1, shape[1]))
    return [slice(start, start + count) for start in range(0, shape[0], count)]


def advance(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    targets: Sequence[Tensor],
    rule: Rule,
    *,
    magnitudes: bool = False,
) -> None:
    """One step of N pairs of factors of one shape, in place. magnitudes: the targets are the absolute values of `targets`."""
    is_in_turn = rule.factors == "in_turn"
    size_n, gram_nrr, seen_nrq = rights[0], rights[0], rights[0]
    if is_in_turn:
        seen_npr, _ = _seen((), rights, targets, magnitudes, "p")
    else:
        sized, size_n, gram_nrr = _sized(lefts, rule)
        seen_npr, seen_nrq = _seen(sized, rights, targets, magnitudes, "both")
    if rule.gauge == "free":
        seen_npr = _solve(torch.stack([a @ a.t() for a in rights]), seen_npr.mT, rule).mT
    torch._foreach_lerp_(list(lefts), list(seen_npr.mul_(rule.gain)), rule.rate)
    if is_in_turn:
        sized, size_n, gram_nrr = _sized(lefts, rule)
        _, seen_nrq = _seen(sized, rights, targets, magnitudes, "q")
    step_nrq = _within_reach(_solve(gram_nrr, seen_nrq, rule).mul_(rule.gain), size_n, rule)
    torch._foreach_lerp_(list(rights), list(step_nrq), rule.rate)
    if rule.gauge == "orthonormal":
        regauge(lefts, rights)


def _sized(lefts: Sequence[Tensor], rule: Rule) -> tuple[list[Tensor], Tensor, Tensor]:
    """B / b, b (N,), and the Gram matrices (N, r, r) of B / b. b: the largest number of each B, so that no square underflows.

    b = 1, and B itself comes back, where damping is absolute.
    """
    if rule.damping_is == "absolute":
        return list(lefts), lefts[0].new_ones(len(lefts)), torch.stack([b.t() @ b for b in lefts])
    left_npr = torch.stack(list(lefts))
    size_n = left_npr.abs().amax((-2, -1)).clamp_(min=_TINY)
    left_npr.div_(size_n[:, None, None])
    return list(left_npr), size_n, left_npr.mT @ left_npr


def _seen(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], targets: Sequence[Tensor], magnitudes: bool, which: str
) -> tuple[Tensor, Tensor]:
    """(X A^T, B^T X) of each matrix: (N, p, r), (N, r, q), the one that is not asked for empty. which: "p", "q" or "both"."""
    first, rank = targets[0], rights[0].shape[0]
    seen_npr = first.new_empty((len(targets), first.shape[0] if which != "q" else 0, rank))
    seen_nrq = first.new_empty((len(targets), rank, first.shape[1] if which != "p" else 0))
    for n, (a, x) in enumerate(zip(rights, targets, strict=True)):
        for i, rows in enumerate(parts(x.shape, x.device)):
            part = x[rows].abs() if magnitudes else x[rows]
            if which != "q":
                torch.mm(part, a.t(), out=seen_npr[n, rows])
            if which != "p":
                torch.addmm(seen_nrq[n], lefts[n][rows].t(), part, beta=1.0 if i else 0.0, out=seen_nrq[n])
    return seen_npr, seen_nrq


def _solve(gram_nrr: Tensor, seen: Tensor, rule: Rule) -> Tensor:
    """(Gram + d I)^-1 seen, by LU, without a wait for the device."""
    scale_n11 = gram_nrr.new_ones((len(gram_nrr), 1, 1))
    if rule.damping_is == "relative":
        scale_n11 = gram_nrr.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_(min=_TINY)[:, None, None]
        gram_nrr = gram_nrr / scale_n11
    gram_nrr.diagonal(dim1=-2, dim2=-1).add_(rule.damping)
    return torch.linalg.solve_ex(gram_nrr, seen).result.div_(scale_n11)


def _within_reach(step_nrq: Tensor, size_n: Tensor, rule: Rule) -> Tensor:
    """(B / b)^+ X / b, what A moves towards; with an orthonormal gauge no longer than 2 |A| / y = 2 sqrt(r) / y."""
    factor_n = 1.0 / size_n
    if rule.gauge == "orthonormal":
        most = _REACH * math.sqrt(step_nrq.shape[1]) / rule.rate
        length_n = torch.linalg.vector_norm(step_nrq, dim=(-2, -1)).clamp_(min=_TINY)
        factor_n = torch.minimum(factor_n, most / length_n)
    return step_nrq.mul_(factor_n[:, None, None])


def regauge(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
    """Make the rows of each A orthonormal and give B what that takes away, in place: B A stays.

    By Cholesky's factor of the Gram matrix of A's normed rows. Where rows are almost parallel they come out shorter than 1, and
    right after the next call.
    """
    rights_nrq = torch.stack(list(rights))
    norm_nr = torch.linalg.vector_norm(rights_nrq, dim=-1).clamp(min=_TINY)
    rights_nrq /= norm_nr[..., None]
    gram_nrr = rights_nrq @ rights_nrq.mT
    gram_nrr.diagonal(dim1=-2, dim2=-1).add_(_GAUGE_DAMPING * gram_nrr.shape[-1])
    lower_nrr, failed = torch.linalg.cholesky_ex(gram_nrr)
    plain = torch.eye(gram_nrr.shape[-1], dtype=gram_nrr.dtype, device=gram_nrr.device)
    lower_nrr = torch.where(failed[:, None, None] == 0, lower_nrr, plain)
    rights_nrq = torch.linalg.solve_triangular(lower_nrr, rights_nrq, upper=False)
    turn_nrr = norm_nr[..., None] * lower_nrr
    for b, a, turn_rr, right_rq in zip(lefts, rights, turn_nrr, rights_nrq, strict=True):
        b.copy_(b @ turn_rr)
        a.copy_(right_rq)
