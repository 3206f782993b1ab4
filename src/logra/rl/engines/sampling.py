"""Choosing tokens from logits with random numbers that belong to a rollout, not to a batch.

Shapes: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from logra.hashing import derive_key

# Bounds the float64 workspace of one block of rows (128 MiB), whatever the batch and the vocabulary.
_BLOCK_ELEMENTS = 1 << 24


def rollout_uniforms(seed: int, step: int, prompt_id: int, index: int, count: int) -> np.ndarray:
    """The first `count` uniforms in [0, 1) of one rollout: (count,) float64, one a position, from Philox.

    A longer draw begins with the shorter one, so `max_new_tokens` does not change what is sampled before it.
    """
    key = derive_key("sample", seed, step, prompt_id, index)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """One id a row and its log-probability: (B,) int64 and (B,) float32.

    The id is the inverse of the cumulative softmax(logits / temperature), in id order, at that row's uniform
    (float64); at temperature 0 it is the argmax, scored at temperature 1. The log-probability is that of the
    full softmax also when `top_p` narrows the choice. A row with NaN or +inf logits gets a log-probability
    that is not finite; an id of probability zero is never chosen.
    """
    num_rows = max(1, _BLOCK_ELEMENTS // logits_BV.shape[-1])
    blocks = zip(logits_BV.split(num_rows), uniform_B.to(logits_BV.device).split(num_rows), strict=True)
    picked = [_choose_block(logits, uniform, temperature, top_p) for logits, uniform in blocks]
    return torch.cat([ids for ids, _ in picked]), torch.cat([logp for _, logp in picked])


def _choose_block(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    scaled_BV = logits_BV.float()
    if temperature not in (0.0, 1.0):
        scaled_BV = scaled_BV / temperature
    norm_B = scaled_BV.logsumexp(-1)
    if temperature == 0.0:
        ids_B = scaled_BV.argmax(-1)
    else:
        prob_BV = (scaled_BV - norm_B[:, None]).exp_()
        if top_p < 1.0:
            prob_BV = keep_top_p(prob_BV, top_p)
        ids_B = _invert(prob_BV, uniform_B)
    return ids_B, scaled_BV.gather(-1, ids_B[:, None])[:, 0] - norm_B


def keep_top_p(prob_BV: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the fewest most likely ids (ties: lower id first) whose mass reaches `top_p`.

    The rest is not renormalised. At least one id stays.
    """
    sorted_BV, order_BV = prob_BV.sort(dim=-1, descending=True, stable=True)
    mass_before_BV = sorted_BV.cumsum(-1, dtype=torch.float64) - sorted_BV
    return torch.zeros_like(prob_BV).scatter_(-1, order_BV, sorted_BV.where(mass_before_BV < top_p, 0.0))


def _invert(prob_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Smallest id whose cumulative probability exceeds uniform * total: its own is then above zero.

    uniform * total < total for every float64 uniform below 1, so some id always qualifies; the clamp is for
    rows of NaN.
    """
    total_BV = prob_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniform_B * total_BV[:, -1])[:, None]
    return torch.searchsorted(total_BV, target_B1, right=True)[:, 0].clamp_(max=prob_BV.shape[-1] - 1)
