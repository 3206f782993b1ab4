"""Per-token policy losses, importance weights, the KL estimate, and the weights that add microbatches up.

Shape legend: B rollouts, T completion tokens, P prompts.

Sources: ppo arXiv 1707.06347 eq. 7, its separate bounds arXiv 2503.14476, its dual clip arXiv 1912.09729;
gspo arXiv 2507.18071 eq. 5 and 7; cispo arXiv 2506.13585 eq. 4 and 5; k3 as in arXiv 2402.03300 eq. 4;
truncated importance sampling between rollout engine and trainer as TRL 1.16 has it.

Departures:
1. Every log-ratio is bounded by LOG_RATIO_BOUND before exp. Bounding the result instead leaves NaN in the
   gradient.
2. Masked slots are replaced before any arithmetic: inf and NaN in them reach neither the loss nor the
   gradient.
3. cispo follows the paper: the weight is clipped to [1 - clip_low, 1 + clip_high]. The paper's experiments
   have no lower bound, which is clip_low >= 1. (TRL 1.16 calls the upper bound itself, not its distance from
   1, epsilon_high.)
4. No loss divides by anything. Denominators are in `token_weights`, computed once for the whole optimizer
   step, so microbatch losses add up to the same step loss and gradient however the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logra.errors import ConfigError

LOG_RATIO_BOUND = 20.0
# Only an infinite log-ratio needs a bound from below in k3: there the estimate is linear, with slope -1.
KL_LOG_RATIO_MIN = -1e4

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class _Clip:
    low: float
    high: float
    dual: float | None


def policy_loss(
    kind: str,
    logp_BT: Tensor,
    old_logp_BT: Tensor | None,
    advantage_B: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Loss of each token, (B, T), float32 (float64 stays); where the mask is False, 0 with gradient 0.

    logp_BT: log-probability of each token under the policy being trained, at the sampling temperature (nats).
    old_logp_BT: the same under the policy at the start of the step; no gradient. None: the policy has not
    moved since.
    advantage_B: one per rollout. mask_BT: bool, the tokens in the loss.
    The step loss is sum_bt loss_bt * w_b with w from `token_weights` (see `weighted_loss`).

    Metrics, int64 sums over masked-in tokens that add over microbatches (divide by the number of tokens in
    the loss): clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean, and clip_ratio/dual_mean if
    dual_clip is given. ppo and gspo count tokens whose gradient the clip removes; gspo counts all tokens of a
    clipped rollout; cispo counts tokens whose weight is clipped, whatever the sign of the advantage;
    reinforce has none.
    """
    if kind not in LOSSES:
        raise ConfigError(f"unknown loss {kind!r}: use one of {', '.join(LOSSES)}")
    clip = _checked_clip(kind, clip_low, clip_high, dual_clip)
    _check_shapes(mask_BT, logp_BT, old_logp_BT)
    mask_BT = mask_BT.bool()
    logp_BT = _fill_masked(logp_BT, mask_BT)
    old_logp_BT = logp_BT.detach() if old_logp_BT is None else _fill_masked(old_logp_BT.detach(), mask_BT)
    advantage_BT = advantage_B.detach().to(logp_BT.dtype)[:, None].expand_as(logp_BT)
    loss_BT, clipped = LOSSES[kind](logp_BT, logp_BT - old_logp_BT, advantage_BT, mask_BT, clip)
    metrics = {f"clip_ratio/{name}_mean": (flags_BT & mask_BT).sum() for name, flags_BT in clipped.items()}
    return torch.where(mask_BT, loss_BT, 0.0), metrics


def _ppo(
    logp_BT: Tensor, log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, clip: _Clip
) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r the token's ratio."""
    return _clipped_surrogate(_bounded_exp(log_ratio_BT), advantage_BT, clip)


def _gspo(
    logp_BT: Tensor, log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, clip: _Clip
) -> tuple[Tensor, Metrics]:
    """-min(s A, clip(s) A) on every token, s = exp(mean over the rollout's tokens of the log-ratio).

    With the weights of `token_weights("sequence", ...)` the sum over tokens is the paper's objective.
    """
    length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    ratio_B1 = _bounded_exp(log_ratio_BT.sum(-1, keepdim=True) / length_B1)
    return _clipped_surrogate(ratio_B1.expand_as(log_ratio_BT), advantage_BT, clip)


def _cispo(
    logp_BT: Tensor, log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, clip: _Clip
) -> tuple[Tensor, Metrics]:
    """-stop_gradient(clip(r, 1 - low, 1 + high)) A logp: every token keeps a gradient."""
    ratio_BT = _bounded_exp(log_ratio_BT.detach())
    low_BT, high_BT = ratio_BT < 1 - clip.low, ratio_BT > 1 + clip.high
    weight_BT = ratio_BT.clamp(1 - clip.low, 1 + clip.high)
    return -weight_BT * advantage_BT * logp_BT, {"low": low_BT, "high": high_BT, "region": low_BT | high_BT}


def _reinforce(
    logp_BT: Tensor, log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, clip: _Clip
) -> tuple[Tensor, Metrics]:
    """-A logp: no ratio, no clip."""
    return -advantage_BT * logp_BT, {}


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, _Clip], tuple[Tensor, Metrics]]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "reinforce": _reinforce,
}


def _clipped_surrogate(ratio_BT: Tensor, advantage_BT: Tensor, clip: _Clip) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r) A); with a dual clip c, where A < 0 the objective is not below c A."""
    low_BT = (ratio_BT < 1 - clip.low) & (advantage_BT < 0)
    high_BT = (ratio_BT > 1 + clip.high) & (advantage_BT > 0)
    clipped = {"low": low_BT, "high": high_BT, "region": low_BT | high_BT}
    limited_BT = ratio_BT.clamp(1 - clip.low, 1 + clip.high)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, limited_BT * advantage_BT)
    if clip.dual is not None:
        clipped["dual"] = (ratio_BT > clip.dual) & (advantage_BT < 0)
        loss_BT = torch.where(clipped["dual"], -clip.dual * advantage_BT, loss_BT)
    return loss_BT, clipped


def importance_weights(
    old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor, *, cap: float = 2.0, level: str = "token"
) -> Tensor:
    """Truncated importance weights, engine to trainer: min(p_trainer / p_engine, cap), (B, T), no gradient.

    old_logp_BT: the trainer's log-probs before the update; rollout_logp_BT: the engine's. level "token": the
    ratio of each token; "sequence": the product over the rollout's tokens, the same on each of them. 0 where
    the mask is False.
    """
    if cap <= 0:
        raise ConfigError(f"the importance sampling cap must be positive, got {cap}")
    if level not in ("token", "sequence"):
        raise ConfigError(f"unknown importance sampling level {level!r}: use 'token' or 'sequence'")
    _check_shapes(mask_BT, old_logp_BT, rollout_logp_BT)
    mask_BT = mask_BT.bool()
    log_ratio_BT = _fill_masked(old_logp_BT.detach(), mask_BT) - _fill_masked(rollout_logp_BT.detach(), mask_BT)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    return torch.where(mask_BT, _bounded_exp(log_ratio_BT).clamp(max=cap), 0.0)


def k3_kl(logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) at each token: e^x - x - 1, x = ref - logp; (B, T), nats, >= 0.

    x is bounded from above by LOG_RATIO_BOUND before exp: beyond it the value stays and the gradient is 0. A
    policy that has become far more certain than the reference (x far below 0) keeps its gradient. 0 where the
    mask is False.
    """
    _check_shapes(mask_BT, logp_BT, ref_logp_BT)
    mask_BT = mask_BT.bool()
    x_BT = _fill_masked(ref_logp_BT.detach(), mask_BT) - _fill_masked(logp_BT, mask_BT)
    x_BT = x_BT.clamp(KL_LOG_RATIO_MIN, LOG_RATIO_BOUND)
    return torch.expm1(x_BT) - x_BT


def weighted_loss(loss_BT: Tensor, weight_B: Tensor) -> Tensor:
    """sum_bt loss_bt * w_b: a microbatch's share of the step loss. Call backward on it; divide by nothing."""
    return (loss_BT * weight_B[:, None].to(loss_BT.dtype)).sum()


def token_weights(
    kind: str,
    lengths: Tensor | Sequence[int],
    group_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int | None = None,
    dropped: Tensor | Sequence[bool] | None = None,
) -> Tensor:
    """Weight w_b of every token of rollout b, (B,) float64, over all rollouts of one optimizer step.

    lengths: (B,) tokens in the loss, or the (B, T) mask. group_ids: (B,), equal for one prompt. dropped: (B,)
    bool. A rollout that is dropped or has no token gets 0 and is counted in no denominator (all such: all
    weights 0). The rest:

      token      1 / total tokens                                  (DAPO, arXiv 2503.14476)
      sequence   1 / (rollouts * length)                           (GRPO, arXiv 2402.03300)
      prompt     1 / (prompts * tokens of the prompt's rollouts)   mean over prompts of each one's token mean
      constant   1 / (rollouts * max_new_tokens)                   (Dr. GRPO, arXiv 2503.20783)
    """
    if kind not in AGGREGATIONS:
        raise ConfigError(f"unknown aggregation {kind!r}: use one of {', '.join(AGGREGATIONS)}")
    length_B = torch.as_tensor(lengths)
    length_B = (length_B.sum(-1) if length_B.ndim == 2 else length_B).double()
    group_B = torch.as_tensor(group_ids, device=length_B.device)
    if length_B.ndim != 1 or group_B.shape != length_B.shape:
        raise ValueError(f"lengths and group_ids must both be (B,), got {length_B.shape} and {group_B.shape}")
    live_B = length_B > 0
    if dropped is not None:
        live_B = live_B & ~torch.as_tensor(dropped, dtype=torch.bool, device=length_B.device)
    weight_B = torch.zeros_like(length_B)
    if bool(live_B.any()):
        weight_B[live_B] = AGGREGATIONS[kind](length_B[live_B], group_B[live_B], max_new_tokens)
    return weight_B


def _token(length_N: Tensor, group_N: Tensor, max_new_tokens: int | None) -> Tensor:
    return torch.ones_like(length_N) / length_N.sum()


def _sequence(length_N: Tensor, group_N: Tensor, max_new_tokens: int | None) -> Tensor:
    return 1 / (length_N.numel() * length_N)


def _prompt(length_N: Tensor, group_N: Tensor, max_new_tokens: int | None) -> Tensor:
    ids_P, index_N = group_N.unique(return_inverse=True)
    tokens_P = length_N.new_zeros(ids_P.numel()).index_add_(0, index_N, length_N)
    return 1 / (ids_P.numel() * tokens_P[index_N])


def _constant(length_N: Tensor, group_N: Tensor, max_new_tokens: int | None) -> Tensor:
    if max_new_tokens is None or max_new_tokens < 1:
        raise ConfigError(f"aggregation 'constant' needs max_new_tokens >= 1, got {max_new_tokens}")
    return torch.ones_like(length_N) / (length_N.numel() * max_new_tokens)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int | None], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "prompt": _prompt,
    "constant": _constant,
}


def _fill_masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """At least float32, 0 where the mask is False; the gradient there is exactly 0."""
    values_BT = values_BT.to(torch.promote_types(values_BT.dtype, torch.float32))
    return torch.where(mask_BT, values_BT, 0.0)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _checked_clip(kind: str, low: float, high: float, dual: float | None) -> _Clip:
    if low < 0 or high < 0:
        raise ConfigError(f"clip_low and clip_high are distances from 1 and must not be negative, got {low} and {high}")
    if dual is not None and kind not in ("ppo", "gspo"):
        raise ConfigError(f"loss {kind!r} has no dual clip: leave dual_clip out, or use 'ppo' or 'gspo'")
    if dual is not None and dual <= 1:
        raise ConfigError(f"dual_clip must be above 1 (3.0 is usual), got {dual}")
    return _Clip(low, high, dual)


def _check_shapes(mask_BT: Tensor, *values: Tensor | None) -> None:
    for value in values:
        if value is not None and (value.ndim != 2 or value.shape != mask_BT.shape):
            raise ValueError(f"log-probs must be (B, T) like the mask {tuple(mask_BT.shape)}, got {tuple(value.shape)}")
