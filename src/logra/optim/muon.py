"""Muon: momentum whose matrix is brought to (nearly) equal singular values before it is added (Jordan et al. 2024).

    M <- M + (1 - mu) (G - M);   U = (1 - mu) G + mu M if nesterov else M
    X = five Newton-Schulz steps from U / |U|_F, in bfloat16: about U (U^T U)^(-1/2), singular values in [0.65, 1.2]
    W <- (1 - lr wd) W - lr f X,   f = sqrt(max(1, p / q)) ("original") or 0.2 sqrt(max(p, q)) ("match_rms_adamw")

For W (p, q). The rule is torch.optim.Muon's, by torch's own functions, and its parameters and results are the same bit for bit
in float32; but all of a model goes into one optimizer: what is not a matrix, and the groups with rank=None (embeddings, the
output head), are stepped by AdamW with that group's lr and betas. Note that with "original" the lr of the matrices is some 20
times AdamW's: give the others their own (`param_groups(model, others={"lr": 3e-4})`); with "match_rms_adamw" one lr does for all.

Where we leave torch (`Muon(groups, **Muon.FAITHFUL)` is torch's to the letter):
1. `zero_gradient="skip"`: see `logra.optim.base`. On zero gradients torch goes on at full length, in the last direction.
2. `ns_eps` = 1e-15 beside |U|_F. At torch's 1e-7 a matrix with |U|_F = 1e-8 (gradients of about 1e-10 a number, on 1536 x 576)
   moves 0.4 times as far, and elsewhere; above 1e-7 there is no difference.
3. Momentum is float32 (torch: the gradient's dtype), weight decay 0 unless asked for (torch: 0.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _adjust_lr, _zeropower_via_newtonschulz

from logra.errors import ConfigError
from logra.optim import options
from logra.optim.base import Layout, LowRankOptimizer
from logra.optim.batch import Batch, Dense, Move

_MOMENTUM = "momentum_buffer"  # torch's name


class Muon(LowRankOptimizer):
    """Muon for matrices, AdamW for the rest. State of a matrix: its momentum, p q float32.

    momentum, nesterov, ns_steps, adjust_lr_fn: as in torch.optim.Muon. betas, eps: AdamW's. rank: None makes a group AdamW's; any
    number (such as `param_groups` sets) means Muon, which has no rank. Other switches: see the module.
    """

    FAITHFUL: ClassVar[Mapping[str, Any]] = {"zero_gradient": "step", "ns_eps": 1e-7}
    DECAYS_FIRST = True
    CORRECTS_BEFORE_EPS = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        rank: int | None = 1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_eps: float = 1e-15,
        adjust_lr_fn: str | None = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        zero_gradient: str = "skip",
        seed: int = 42,
    ):
        super().__init__(
            params, lr=lr, rank=rank, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, ns_eps=ns_eps,
            adjust_lr_fn=adjust_lr_fn, betas=betas, eps=eps, weight_decay=weight_decay, zero_gradient=zero_gradient,
            seed=seed,
        )  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        check_muon(group)
        options.check_choice(group, "nesterov", (True, False))

    def _clamp(self, group: dict[str, Any]) -> None:
        """Nothing to say: no rank is used."""

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        return {_MOMENTUM: (shape, torch.float32)}

    def _moves(self, batch: Batch) -> list[list[Move]]:
        group, moves = batch.group, []
        for buffer, gradient in zip(batch.states(_MOMENTUM), batch.gradients, strict=True):
            moves.append([muon_move(momentum_update(buffer, gradient, group["momentum"], group["nesterov"]), group)])
        return moves


def check_muon(group: Mapping[str, Any]) -> None:
    """The options that this optimizer and LoRA-Pre's Muon have."""
    options.check_number(group, "momentum", 0.0)
    if group["momentum"] >= 1.0:
        raise ConfigError(f"momentum must be below 1, got {group['momentum']!r}")
    options.check_number(group, "ns_steps", 1, 99)
    if int(group["ns_steps"]) != group["ns_steps"]:
        raise ConfigError(f"ns_steps must be a whole number, got {group['ns_steps']!r}")
    options.check_number(group, "ns_eps", 0.0)
    options.check_choice(group, "adjust_lr_fn", ("original", "match_rms_adamw", None))


def momentum_update(buffer_pq: Tensor, gradient_pq: Tensor, momentum: float, nesterov: bool) -> Tensor:
    """Advance the momentum in place; what is to be orthogonalised: the buffer itself, or a new (p, q) tensor."""
    buffer_pq.lerp_(gradient_pq, 1.0 - momentum)
    return gradient_pq.lerp(buffer_pq, momentum) if nesterov else buffer_pq


def muon_move(momentum_pq: Tensor, group: Mapping[str, Any]) -> Dense:
    """The move -lr f X of the orthogonalised X; bfloat16 as torch has it, `merge` adds it in float32."""
    lr = _adjust_lr(float(group["lr"]), group["adjust_lr_fn"], momentum_pq.shape)
    return Dense(orthogonalise(momentum_pq, int(group["ns_steps"]), float(group["ns_eps"])), -lr)


def orthogonalise(momentum_pq: Tensor, ns_steps: int = 5, ns_eps: float = 1e-15) -> Tensor:
    """Newton-Schulz, (p, q) bfloat16. Workspace: about two such matrices and two of the smaller side squared."""
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    # contiguous, or the order of its sums would depend on how the gradient happens to be stored; torch divides what it is
    # given in place if that is bfloat16, so float32 goes in
    return _zeropower_via_newtonschulz(momentum_pq.contiguous(), coefficients, ns_steps, ns_eps)
