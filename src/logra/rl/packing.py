"""Packed rows: the tokens of a microbatch in one row without padding, each prompt once however many rollouts it has.

In a group of G rollouts a batch of rows computes the prompt G times, though a causal model gives the same states each time, and
computes padding. Here only the attention sees rollouts: every other layer works on a flat row of the tokens that are needed,

    prompt 1 | prompt 2 | ... | rollout 1 | rollout 2 | ...

and the gradient of a prompt's states is the sum over its rollouts, by the chain rule. Log-probs, gradients and sketches are
those of padded rows up to the rounding of sums in another order. The last token of a rollout predicts nothing and is left out.

A model takes part through transformers' registry of attention functions (`AttentionInterface`): ours lays the flat row out as
prompts (U, P) and rollouts (N, P + R) and leaves the attention itself to the registry's `sdpa`. Nothing is added up by index
where two places could meet, so a device gives the same sums every time.

Legend: B rollouts, U different prompts, N rollouts with tokens in the row, P and R the columns of prompts and of rollouts, T
tokens of the row, C completion columns, H heads, D numbers of a head.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from logra.head import Head, let_go, quiet
from logra.rl.batch import TrainBatch

logger = logging.getLogger(__name__)

NAME = "logra_packed"  # in transformers' registry
LARGEST_SHARE = 0.85  # of the padded tokens: above it padded rows are not slower, and never take more memory
SCORES = 1 << 24  # of rollouts whose attention is computed in one call, a head
KINDS = {"full_attention", "sliding_attention"}  # of layers (`layer_types`): others do not keep to the mask alone
WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of a microbatch lie in its packed row.

    ids, positions (1, T) int64. prompt_at (U, P), rollout_at (N, R) int64: places in the row, 0 in padding, which is at the
    right. seen (N, P) bool: the tokens of each rollout's prompt. back (T,): where the row's tokens lie in the two, flattened.
    sources: places whose states predict the tokens that were asked for, in the mask's order. prompts, rollouts: lengths. owner:
    the rollouts' prompts, in order.
    """

    ids: Tensor
    positions: Tensor
    prompt_at: Tensor
    rollout_at: Tensor
    seen: Tensor
    back: Tensor
    sources: Tensor
    prompts: tuple[int, ...]
    rollouts: tuple[int, ...]
    owner: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens of the row."""
        return self.ids.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout with its prompt."""
        own = [self.prompts[u] + n for u, n in zip(self.owner, self.rollouts, strict=True)]
        return max([*self.prompts, *own])


def layout(batch: TrainBatch, mask_BC: Tensor) -> Layout:
    """The packed row that gives the log-probs of the completion tokens in mask_BC (B, C) bool.

    Rollouts without such a token are left out, so are tokens after the last one; the first prompt is there in any case.
    """
    mask = mask_BC.cpu()
    ends = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1).tolist()
    wanted = [row for row, end in enumerate(ends) if end] or [0]
    prompt_ids, widths = batch.prompt_ids.cpu(), batch.prompt_mask.sum(1).tolist()
    numbers: dict[tuple[int, ...], int] = {}
    owner = {row: numbers.setdefault(tuple(prompt_ids[row, -widths[row] :].tolist()), len(numbers)) for row in wanted}
    prompts = [torch.tensor(prompt) for prompt in numbers]
    inputs = {row: batch.completion_ids[row, : ends[row] - 1].cpu() for row in wanted if ends[row] > 1}
    lengths, own = [len(prompt) for prompt in prompts], [len(part) for part in inputs.values()]
    starts = list(running_sums([*lengths, *own], initial=0))
    first = dict(zip(inputs, starts[len(lengths) :], strict=False))
    prompt_at, prompts_back = _places(starts[: len(lengths)], lengths)
    rollout_at, rollouts_back = _places(list(first.values()), own)
    owners, widest = [owner[row] for row in inputs], torch.arange(prompt_at.shape[1])
    tensors = {
        "ids": torch.cat([*prompts, *inputs.values()])[None],
        "positions": torch.cat(
            [*map(torch.arange, lengths), *(lengths[u] + torch.arange(n) for u, n in zip(owners, own, strict=True))]
        )[None],
        "prompt_at": prompt_at,
        "rollout_at": rollout_at,
        "seen": widest < torch.tensor(lengths)[owners, None],
        "back": torch.cat([prompts_back, rollouts_back + prompt_at.numel()]),
        "sources": torch.cat(
            [_before(mask[row], starts[owner[row]] + lengths[owner[row]], first.get(row, 0)) for row in wanted]
        ),
    }
    device = batch.prompt_ids.device
    return Layout(
        **{name: tensor.to(device) for name, tensor in tensors.items()}, prompts=tuple(lengths), rollouts=tuple(own),
        owner=tuple(owners),
    )  # fmt: skip


def _before(mask_C: Tensor, prompt_end: int, first: int) -> Tensor:
    """Places of the tokens before those of a rollout that are asked for: the first has the prompt's last token before it."""
    places = torch.arange(len(mask_C)) + (first - 1)
    places[0] = prompt_end - 1
    return places[mask_C]


def _places(starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(places (rows, longest) in the packed row, 0 in padding; the flat indices of the real ones in it, in the row's order)."""
    columns = torch.arange(max(lengths, default=0))
    real = columns < torch.tensor(lengths, dtype=torch.int64)[:, None]
    places = torch.where(real, torch.tensor(starts, dtype=torch.int64)[:, None] + columns, 0)
    return places, real.flatten().nonzero().squeeze(1)


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

    Every query of a rollout sees its prompt and what is before it in its own rollout.
    """
    if logra_layout is None:
        return _sdpa()(module, query, key, value, attention_mask, **options)
    at = logra_layout
    rows = tuple(states.transpose(1, 2)[0] for states in (query, key, value))  # (T, heads, D)
    q, k, v = (_laid_out(states, at.prompt_at) for states in rows)
    found = [_sdpa()(module, q, k, v, None, **options | {"is_causal": True})[0].flatten(0, 1)]
    if at.rollouts:
        found.append(_of_rollouts(module, at, rows, (k, v), options).flatten(0, 1))
    return torch.cat(found).index_select(0, at.back)[None], None


def _of_rollouts(
    module: nn.Module,
    at: Layout,
    rows: tuple[Tensor, Tensor, Tensor],
    prompts: tuple[Tensor, Tensor],
    options: dict[str, Any],
) -> Tensor:
    """(N, R, heads, D) of rollouts, as many of them in one call as `SCORES` allows."""
    q, k, v = (_laid_out(states, at.rollout_at) for states in rows)
    width, columns = prompts[0].shape[2], q.shape[2]
    own = torch.arange(columns, device=q.device)
    below = own <= own[:, None]
    size, found = max(1, SCORES // (columns * (width + columns))), []
    for start in range(0, len(at.owner), size):
        part = slice(start, start + size)
        mask = torch.cat([at.seen[part, None].expand(-1, columns, -1), below.expand(len(at.seen[part]), -1, -1)], dim=2)
        before = [_repeated(states, at.owner[part]) for states in prompts]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (k[part], v[part]), strict=True))
        found.append(_sdpa()(module, q[part], keys, values, mask[:, None], **options | {"is_causal": False})[0])
    return torch.cat(found)


def _laid_out(states: Tensor, places: Tensor) -> Tensor:
    """(T, heads, D) -> (rows, heads, columns, D). Every place but the padding's is read once."""
    return states.index_select(0, places.flatten()).unflatten(0, tuple(places.shape)).transpose(1, 2)


def _repeated(states: Tensor, owner: Sequence[int]) -> Tensor:
    """The prompts' states (U, heads, P, D) for each of the rollouts; rollouts of a prompt that lie together share a sum."""
    runs: list[tuple[int, int]] = []
    for prompt in owner:
        again = bool(runs) and runs[-1][0] == prompt
        runs[-1:] = [(prompt, runs[-1][1] + 1)] if again else [*runs[-1:], (prompt, 1)]
    return torch.cat([states[prompt : prompt + 1].expand(count, -1, -1, -1) for prompt, count in runs])


def _sdpa() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"]


# -- models --------------------------------------------------------------------------------------------------------------------

_verified: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def packed_states(head: Head, at: Layout) -> Tensor:
    """The decoder's last states (T, hidden) of a packed row; the model must be within `packable`."""
    whole = torch.ones(
        1, 1, 1, 1, dtype=torch.bool, device=at.ids.device
    )  # a finished mask: the model makes none of its own
    return head.hidden(input_ids=at.ids, position_ids=at.positions, attention_mask=whole, logra_layout=at)[0]


def worth_packing(head: Head, at: Layout, batch: TrainBatch) -> bool:
    """Is the packed row clearly shorter than the padded rows, and within what this model's layers see at once?"""
    config: Any = getattr(head.decoder, "config", None)
    windows = [w for name in WINDOWS if (w := getattr(config, name, None)) is not None]
    return at.size <= LARGEST_SHARE * batch.prompt_ids.shape[0] * batch.input_ids.shape[1] and all(
        at.longest <= window for window in windows
    )


@contextlib.contextmanager
def packable(model: nn.Module, head: Head | None, *, autocast: bool = False) -> Iterator[bool]:
    """Within it, passes and their backward passes may be packed, if it gives True.

    False: a model whose attention is not transformers' `sdpa`, or that mixes tokens in another way. The latter is seen by running
    a few tokens through it (autocast: in bfloat16), once a model.
    """
    if head is None or not takes_part(head.decoder):
        yield False
        return
    with _registered(head.decoder):
        if model not in _verified:
            with torch.autocast(head.linear.weight.device.type, torch.bfloat16, enabled=autocast):
                _verified[model] = _is_same(model, head)
            if not _verified[model]:
                logger.warning("%s computes padded rows: packed ones give it other states", type(model).__name__)
        yield _verified[model]


def takes_part(decoder: nn.Module) -> bool:
    """May this decoder's rows be packed, as far as its parts tell?"""
    config: Any = getattr(decoder, "config", None)
    if config is None or not getattr(decoder, "_supports_attention_backend", False) or not _configs(decoder):
        return False
    mixes = any(isinstance(module, _ConvNd) for module in decoder.modules())
    return not mixes and set(getattr(config, "layer_types", None) or ()) <= KINDS


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


def _is_same(model: nn.Module, head: Head) -> bool:
    """Do two prompts with two rollouts each give the states of padded rows? Differences count against those of other prompts."""
    device = head.linear.weight.device
    batch, other = (_few_tokens(shift, head.linear.out_features) for shift in (0, 8))
    with quiet(model):
        plain, changed = (_padded_states(head, b.to(device))[batch.completion_mask.to(device)] for b in (batch, other))
        try:
            at = layout(batch.to(device), batch.completion_mask.to(device))
            packed = packed_states(head, at)[at.sources]
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            logger.info("%s takes no packed rows: %s", type(model).__name__, error)
            return False
        finally:
            let_go(model)
    wrong, effect = ((states - plain).float().norm() for states in (packed, changed))
    return bool(wrong <= 0.05 * effect)


def _padded_states(head: Head, batch: TrainBatch) -> Tensor:
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    return head.hidden(**inputs)[:, -batch.completion_ids.shape[1] - 1 : -1]


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
