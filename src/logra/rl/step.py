"""One batch of rollouts -> gradients (or sketches): log-probs, loss, backward, microbatch by microbatch.

Shape legend: B rollouts, C completion columns, N tokens of them, V vocabulary. Weights of the batch hold the one global
denominator of the optimizer step, so microbatch losses simply add up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra.errors import NonFiniteError
from logra.head import Head, let_go, plain_head, token_logprobs
from logra.region import region
from logra.rl.batch import TrainBatch
from logra.rl.layout import layout
from logra.rl.losses import importance_weights, k3_kl, policy_loss, weighted_loss
from logra.rl.packing import packable, packed_states, padded_states, worth_packing


@dataclass(frozen=True)
class LossSettings:
    """See the fields of the same names in `logra.config.Algorithm`; temperature is the sampling temperature.

    head_chunk: tokens whose logits exist at once; None: as many as fit (`logra.head.chunk_size`), 0: all.
    packed: compute packed rows where that saves work (`logra.rl.packing`).
    """

    kind: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance_cap: float | None = 2.0
    importance_level: str = "token"
    kl_coef: float = 0.0
    temperature: float = 1.0
    autocast: bool = False
    head_chunk: int | None = None
    packed: bool = True


def policy_logprobs(
    model: nn.Module, batch: TrainBatch, settings: LossSettings, mask_BC: Tensor, *, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probs (B, C) of the completion tokens, entropies (B, C) without gradient), nats, float32; 0 where mask_BC is False.

    Only the masked-in tokens reach the output head, a few at a time (`logra.head`): prompts and padding cost nothing there.
    The result is connected to the graph even if no token is in. packed: the model is within `logra.rl.packing.packable`.
    """
    device = batch.completion_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=settings.autocast), region("activations"):
        head = plain_head(model)
        if head is None:
            logp_N, entropy_N = _from_whole_logits(model, batch, settings, mask_BC)
        else:
            hidden_NH = _predicting_states(head, batch, mask_BC, packed)
            with region("logits"):
                logp_N, entropy_N = token_logprobs(
                    hidden_NH, head.linear.weight, head.linear.bias, batch.completion_ids[mask_BC],
                    temperature=settings.temperature, chunk=settings.head_chunk,
                )  # fmt: skip
    empty = torch.zeros(mask_BC.shape, dtype=logp_N.dtype, device=logp_N.device)
    return empty.masked_scatter(mask_BC, logp_N), empty.masked_scatter(mask_BC, entropy_N)


def _predicting_states(head: Head, batch: TrainBatch, mask_BC: Tensor, packed: bool) -> Tensor:
    """The states (N, H) that predict the masked-in tokens, in the mask's order."""
    if packed:
        at = layout(batch, mask_BC)
        if worth_packing(head, at, batch):
            return at.predicting(packed_states(head, at))
    return padded_states(head, batch)[mask_BC]


def _from_whole_logits(
    model: nn.Module, batch: TrainBatch, settings: LossSettings, mask_BC: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, of a model that cannot be taken apart; its last positions alone reach the head."""
    logits = model(**batch.inputs, use_cache=False, logits_to_keep=mask_BC.shape[1] + 1).logits
    logits_NV = logits[:, -mask_BC.shape[1] - 1 : -1][mask_BC].float() / settings.temperature
    normaliser_N = torch.logsumexp(logits_NV, dim=-1)
    logp_N = logits_NV.gather(-1, batch.completion_ids[mask_BC][:, None]).squeeze(-1) - normaliser_N
    with torch.no_grad():
        entropy_N = normaliser_N - (torch.softmax(logits_NV, dim=-1) * logits_NV).sum(-1)
    return logp_N, entropy_N


@torch.no_grad()
def logprobs_of(model: nn.Module, batch: TrainBatch, size: int, settings: LossSettings) -> Tensor:
    """Log-probs (B, C) of a whole batch without gradient, `size` rows at a time; 0 in padding."""
    result = torch.zeros_like(batch.rollout_logprobs)
    with _packing(model, settings, batch.prompt_ids.device) as packed:
        for start in range(0, len(batch), size):
            rows = range(start, min(start + size, len(batch)))
            part = batch.slice(rows)
            logp, _ = policy_logprobs(model, part, settings, part.completion_mask, packed=packed)
            result[rows.start : rows.stop, : logp.shape[1]] = logp
    let_go(model)
    return result


class Tally:
    """Sums over microbatches that become means at the end."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.maxima: dict[str, float] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        self.sums[name] += float(value)

    def peak(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def mean(self, name: str, count: str) -> float:
        return self.sums[name] / max(1.0, self.sums[count])


def accumulate(
    model: nn.Module,
    batch: TrainBatch,
    size: int,
    settings: LossSettings,
    *,
    old_logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
    tally: Tally,
) -> None:
    """Backward of the whole batch in microbatches of `size`; statistics go into `tally`.

    old_logp (B, C): the policy's log-probs at the start of the step, None if it has not moved since (the ratio is then 1 and
    no second forward pass is needed). Raises `NonFiniteError` before the backward pass of a loss that is not finite.
    """
    with _packing(model, settings, batch.prompt_ids.device) as packed:
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            part = batch.slice(range(*rows.indices(len(batch))))
            old, ref = (
                None if logp is None else logp[rows, : part.completion_ids.shape[1]]
                for logp in (old_logp, reference_logp)
            )
            _backward(model, part, settings, old, ref, tally, packed)


@contextmanager
def _packing(model: nn.Module, settings: LossSettings, device: torch.device) -> Iterator[bool]:
    """Within it passes may be packed, if it gives True."""
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
        head = plain_head(model) if settings.packed else None
    with packable(model, head, device, autocast=settings.autocast) as packed:
        yield packed


def _backward(
    model: nn.Module,
    part: TrainBatch,
    settings: LossSettings,
    old: Tensor | None,
    ref: Tensor | None,
    tally: Tally,
    packed: bool,
) -> None:
    """Both passes of one microbatch."""
    logp, entropy = policy_logprobs(model, part, settings, part.loss_mask, packed=packed)
    loss = _loss(part, logp, old, ref, settings, tally)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the loss is {value} (prompts {sorted(set(part.group_ids.tolist()))}); nothing was applied: "
            "check the model's dtype, the rewards and the learning rate"
        )
    _note(part, logp.detach() if old is None else old, entropy, tally)
    tally.add("loss", value)
    with region("activations"):
        loss.backward()


def _loss(
    part: TrainBatch,
    logp: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    settings: LossSettings,
    tally: Tally,
) -> Tensor:
    mask = part.loss_mask
    per_token, clipped = policy_loss(
        settings.kind, logp, old, part.advantages, mask,
        clip_low=settings.clip_low, clip_high=settings.clip_high, dual_clip=settings.dual_clip,
    )  # fmt: skip
    for name, value in clipped.items():
        tally.add(name, value)
    if settings.importance_cap is not None:
        trainer = logp.detach() if old is None else old
        weights = importance_weights(
            trainer, part.rollout_logprobs, mask, cap=settings.importance_cap, level=settings.importance_level
        )
        per_token = per_token * weights
    if ref is not None:
        kl = k3_kl(logp, ref, mask)
        tally.add("kl", kl.detach().sum())
        per_token = per_token + settings.kl_coef * kl
    return weighted_loss(per_token, part.weights)


def _note(part: TrainBatch, trainer: Tensor, entropy: Tensor, tally: Tally) -> None:
    """Entropy and the gap between the log-probs of rollout engine and trainer, over the tokens in the loss."""
    mask = part.loss_mask
    gap = torch.where(mask, part.rollout_logprobs - trainer, 0.0)
    tally.add("tokens", mask.sum())
    tally.add("entropy", torch.where(mask, entropy, 0.0).sum())
    ended = mask & part.terminated[:, None]
    tally.add("terminated_gap", torch.where(ended, gap, 0.0).sum())
    tally.add("terminated_tokens", ended.sum())
    tally.add("gap_abs", gap.abs().sum())
    tally.peak("gap_abs", float(gap.abs().max()))
    ratio = torch.where(mask, torch.exp((-gap).clamp(-20.0, 20.0)), 1.0)
    tally.add("mismatch_kl", (ratio - 1.0 + gap).sum())  # k3 estimate of KL(engine || trainer)
    tally.peak("ratio", float(ratio.max()))
    tally.peak("minus_ratio", -float(ratio.min()))
