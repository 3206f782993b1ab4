"""Packed rows: the tokens of a microbatch in one row without padding, each prompt once however many rollouts it has.

In a group of G rollouts a batch of rows computes the prompt G times, though a causal model gives the same states each time, and
computes padding. Here only the attention sees rollouts: every other layer works on a flat row of the tokens that are needed,

    prompt 1 | prompt 2 | ... | rollout 1 | rollout 2 | ...

and the gradient of a prompt's states is the sum over its rollouts, by the chain rule. Log-probs, gradients and sketches are
those of padded rows up to the rounding of sums in another order. The last token of a rollout predicts nothing and is left out.

A model takes part through transformers' registry of attention functions (`AttentionInterface`): ours lays the flat row out as
prompts (U, P) and rollouts (N, P + R) and leaves the attention itself to the registry's `sdpa`. Nothing is added up by index
where two places could meet, so a device gives the same sums every time.

Legend: U different prompts, N rollouts with tokens in the row, P and R the columns of prompts and of rollouts, T tokens of the
row, D numbers of a head.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from logra.head import Head, let_go, plain_head, quiet
from logra.rl.batch import TrainBatch
from logra.rl.layout import Layout, layout, spread

logger = logging.getLogger(__name__)

NAME = "logra_packed"  # in transformers' registry
# Of the padded tokens: above it padded rows are no slower and take no more memory; they do well if nothing is padding
LARGEST_SHARE, LARGEST_SHARE_FULL = 0.85, 0.7
CLOSE, CLOSE_BF16 = 1e-3, 0.05  # of the effect of another prompt: by how much states may differ
# Layers (`layer_types`) that keep to the mask alone, rotary frequencies that depend on how many tokens a pass has, models whose
# attention is not what the registry gives
KINDS = {"full_attention", "sliding_attention"}
CHANGING_ROPE = {"dynamic", "longrope"}
OWN_ATTENTION = {"nemotron", "moshi", "doge"}
WINDOWS = ("sliding_window", "attention_chunk_size")


# -- attention -----------------------------------------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    logra_layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, states (1, heads, T, D) to (1, T, heads, D); without a layout that of `sdpa`.

    Every query of a rollout sees its prompt and what is before it in its own rollout. Raises `ValueError` for a mask or bias of
    the model's own.
    """
    if logra_layout is None:
        return _sdpa()(module, query, key, value, attention_mask, **options)
    if attention_mask is None or attention_mask.numel() > 1 or options.get("position_bias") is not None:
        raise ValueError("its attention has a mask or a bias of its own")
    at = logra_layout
    rows = tuple(states.transpose(1, 2)[0] for states in (query, key, value))  # (T, heads, D)
    q, k, v = (_laid_out(states, at.prompt_at) for states in rows)
    found = [_sdpa()(module, q, k, v, None, **options | {"is_causal": True})[0].flatten(0, 1)]
    if at.rollouts:
        found += _of_rollouts(module, at, rows, (k, v), options | {"is_causal": False})
    return torch.cat(found).index_select(0, at.back)[None], None


def _of_rollouts(
    module: nn.Module,
    at: Layout,
    rows: tuple[Tensor, Tensor, Tensor],
    prompts: tuple[Tensor, Tensor],
    options: dict[str, Any],
) -> list[Tensor]:
    """Pieces of (N R, heads, D)."""
    q, k, v = (_laid_out(states, at.rollout_at) for states in rows)
    found = []
    for part, mask in at.parts:
        before = [torch.cat(spread(states, at.owner[part])) for states in prompts]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (k[part], v[part]), strict=True))
        found.append(_sdpa()(module, q[part], keys, values, mask, **options)[0].flatten(0, 1))
    return found


def _laid_out(states: Tensor, places: Tensor) -> Tensor:
    """(T, heads, D) -> (rows, heads, columns, D). Every place but the padding's, which gets no gradient, is read once."""
    return states.index_select(0, places.flatten()).unflatten(0, tuple(places.shape)).transpose(1, 2)


def _sdpa() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"]


# -- models --------------------------------------------------------------------------------------------------------------------

_verified: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def packed_states(head: Head, at: Layout) -> Tensor:
    """The decoder's last states (T, hidden) of a packed row; the model must be within `packable`."""
    done = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.ids.device)  # a mask that the model does not touch
    return head.hidden(input_ids=at.ids, position_ids=at.positions, attention_mask=done, logra_layout=at)[0]


def padded_states(head: Head, batch: TrainBatch) -> Tensor:
    """The decoder's last states (B, C, hidden) that predict each completion column, of padded rows."""
    return head.hidden(**batch.inputs)[:, -batch.completion_ids.shape[1] - 1 : -1]


def worth_packing(head: Head, at: Layout, batch: TrainBatch) -> bool:
    """Is the packed row clearly shorter than the padded rows, and within what this model's layers see at once?"""
    config: Any = getattr(head.decoder, "config", None)
    windows = [window for name in WINDOWS if (window := getattr(config, name, None))]
    share = LARGEST_SHARE_FULL if bool(batch.attention_mask.all()) else LARGEST_SHARE
    return at.size <= share * batch.input_ids.numel() and all(at.longest <= window for window in windows)


def may_pack(model: nn.Module) -> bool:
    """Will this model's rows be packed where that saves work? (Before the first time, as far as its parts tell.)"""
    head = plain_head(model)
    return head is not None and takes_part(head.decoder) and _verified.get(model, True)


@contextlib.contextmanager
def packable(model: nn.Module, head: Head | None, device: torch.device, *, autocast: bool = False) -> Iterator[bool]:
    """Within it, passes and their backward passes may be packed, if it gives True.

    False: a model whose attention is not transformers' `sdpa`, or that mixes tokens in another way. The latter is seen by running
    a few tokens through it on `device` (autocast: in bfloat16), once a model.
    """
    if head is None or not takes_part(head.decoder):
        yield False
        return
    if model not in _verified:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            reason = _difference(model, head, device)
        _verified[model] = not reason
        if reason:
            logger.warning("%s computes padded rows: %s", type(model).__name__, reason)
    if not _verified[model]:
        yield False
        return
    with _registered(head.decoder):
        yield True


def takes_part(decoder: nn.Module) -> bool:
    """May this decoder's rows be packed, as far as its parts tell?"""
    config: Any = getattr(decoder, "config", None)
    if config is None or not getattr(decoder, "_supports_attention_backend", False) or not _configs(decoder):
        return False
    mixes = any(isinstance(module, _ConvNd) for module in decoder.modules())
    changes = bool(_rope_types(getattr(config, "rope_parameters", None)) & CHANGING_ROPE)
    is_known = set(getattr(config, "layer_types", None) or ()) <= KINDS and config.model_type not in OWN_ATTENTION
    return is_known and not mixes and not changes


def _rope_types(parameters: Any) -> set[str]:
    """Of one kind of layers, or of several by name."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def _configs(decoder: nn.Module) -> list[Any]:
    """What the decoder's attention layers read the name of their function from; empty if one is not `sdpa`."""
    found = {id(module.config): module.config for module in decoder.modules() if hasattr(module, "config")}
    return list(found.values()) if all(c._attn_implementation in ("sdpa", NAME) for c in found.values()) else []


@contextlib.contextmanager
def _registered(decoder: nn.Module) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    configs = _configs(decoder)
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _difference(model: nn.Module, head: Head, device: torch.device) -> str:
    """Why packed rows would not do; empty if two prompts with two rollouts each give the states of padded rows.

    Differences count against those that other prompts make.
    """
    batch, other = (_few_tokens(shift, head.linear.out_features).to(device) for shift in (0, 8))
    try:
        with quiet(model):
            plain, changed = (padded_states(head, b)[batch.completion_mask] for b in (batch, other))
            at = layout(batch, batch.completion_mask)
            with _registered(head.decoder):
                packed = at.predicting(packed_states(head, at))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and dist.is_initialized()):
            raise  # of this pass, not of the model; other ranks would wait
        return f"packed ones fail ({' '.join(str(error).split())[:200]})"
    finally:
        let_go(model)
    wrong, effect = (float((states - plain).float().norm()) for states in (packed, changed))
    is_bfloat16 = plain.dtype == torch.bfloat16 or torch.is_autocast_enabled(device.type)
    is_close = wrong <= (CLOSE_BF16 if is_bfloat16 else CLOSE) * effect
    return "" if is_close else f"packed ones give other states ({wrong:.2g} of {effect:.2g})"


def _few_tokens(shift: int, vocabulary: int) -> TrainBatch:
    """Two prompts of 3 and 4 tokens with two rollouts each; shift: of the prompts' ids."""
    prompts = (torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]) + shift) % vocabulary
    completions = torch.tensor([[4, 5, 1], [6, 2, 0], [1, 7, 3], [2, 2, 0]]) % vocabulary
    widths, lengths = torch.tensor([3, 3, 4, 4]), torch.tensor([3, 2, 3, 2])
    nothing = torch.zeros(4)
    return TrainBatch(
        prompt_ids=prompts, prompt_mask=torch.arange(4) >= 4 - widths[:, None], completion_ids=completions,
        completion_mask=torch.arange(3) < lengths[:, None], rollout_logprobs=torch.zeros(4, 3), advantages=nothing,
        weights=nothing, group_ids=torch.tensor([0, 0, 1, 1]), dropped=nothing.bool(), terminated=nothing.bool(),
    )  # fmt: skip
