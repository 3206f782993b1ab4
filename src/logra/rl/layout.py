"""Where the tokens of a microbatch lie in its packed row (`logra.rl.packing`).

Legend: B rollouts, U different prompts, N rollouts with tokens in the row, P and R the columns of prompts and of rollouts, T
tokens of the row, C completion columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate as running_sums

import torch
from torch import Tensor

from logra.rl.batch import TrainBatch

SCORES = 1 << 24  # of rollouts whose attention is computed in one call, a head


@dataclass(frozen=True, eq=False)
class Layout:
    """A packed row.

    ids, positions (1, T) int64. prompt_at (U, P), rollout_at (N, R) int64: places in the row, 0 in padding, which is at the
    right. seen (N, P) bool: the tokens of each rollout's prompt. back (T,): where the row's tokens lie in the two, flattened.
    prompts, rollouts: lengths. owner: the rollouts' prompts, in order.

    Of the tokens that are asked for: ends (U,) the places of the prompts' last tokens; firsts: the prompts of the rollouts whose
    first token is asked for; others: places that predict later tokens; order: from firsts and others to the mask's order.
    """

    ids: Tensor
    positions: Tensor
    prompt_at: Tensor
    rollout_at: Tensor
    seen: Tensor
    back: Tensor
    ends: Tensor
    others: Tensor
    order: Tensor
    prompts: tuple[int, ...]
    rollouts: tuple[int, ...]
    owner: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens of the row."""
        return self.ids.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout with its prompt."""
        own = [self.prompts[u] + n for u, n in zip(self.owner, self.rollouts, strict=True)]
        return max([*self.prompts, *own])

    @cached_property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """(rollouts whose attention is computed in one call, the mask (n, 1, R, P + R) of what they see); made once a row."""
        width, columns = self.prompt_at.shape[1], self.rollout_at.shape[1]
        own = torch.arange(columns, device=self.ids.device)
        below, found = own <= own[:, None], []
        size = max(1, SCORES // max(1, columns * (width + columns)))
        for start in range(0, len(self.owner), size):
            seen = self.seen[start : start + size, None]
            mask = torch.cat([seen.expand(-1, columns, -1), below.expand(len(seen), -1, -1)], dim=2)
            found.append((slice(start, start + size), mask[:, None]))
        return found

    def predicting(self, states_TH: Tensor) -> Tensor:
        """The states (tokens, H) that predict the tokens that were asked for, in the mask's order."""
        ends = states_TH.index_select(0, self.ends)
        return torch.cat([*spread(ends, self.firsts), states_TH.index_select(0, self.others)]).index_select(
            0, self.order
        )


def spread(states: Tensor, owner: Sequence[int]) -> list[Tensor]:
    """Prompts' states (U, ...) for each of their rollouts, in pieces. Not by index, whose backward pass would add where two
    places meet, in any order; rollouts of a prompt that lie together share a sum."""
    runs: list[tuple[int, int]] = []
    for prompt in owner:
        again = bool(runs) and runs[-1][0] == prompt
        runs[-1:] = [(prompt, runs[-1][1] + 1)] if again else [*runs[-1:], (prompt, 1)]
    return [states[prompt : prompt + 1].expand(count, *states.shape[1:]) for prompt, count in runs]


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
    inputs = {row: batch.completion_ids[row, : ends[row] - 1].cpu() for row in wanted if ends[row] > 1}
    lengths, own = [len(prompt) for prompt in numbers], [len(part) for part in inputs.values()]
    starts = list(running_sums([*lengths, *own], initial=0))
    first = dict(zip(inputs, starts[len(lengths) :], strict=False))
    prompt_at, prompts_back = _places(starts[: len(lengths)], lengths)
    rollout_at, rollouts_back = _places(list(first.values()), own)
    owners = [owner[row] for row in inputs]
    positions = [*map(torch.arange, lengths), *(lengths[u] + torch.arange(n) for u, n in zip(owners, own, strict=True))]
    columns = [mask[row].nonzero().squeeze(1) for row in wanted]  # that are asked for
    is_first = torch.cat(columns) == 0
    others = [first.get(row, 0) - 1 + asked for row, asked in zip(wanted, columns, strict=True)]
    tensors = {
        "ids": torch.cat([*map(torch.tensor, numbers), *inputs.values()])[None],
        "positions": torch.cat(positions)[None],
        "prompt_at": prompt_at,
        "rollout_at": rollout_at,
        "seen": torch.arange(prompt_at.shape[1]) < torch.tensor(lengths)[owners, None],
        "back": torch.cat([prompts_back, rollouts_back + prompt_at.numel()]),
        "ends": torch.tensor(starts[1 : len(lengths) + 1]) - 1,
        "others": torch.cat(others)[~is_first],
        "order": torch.where(is_first, is_first.cumsum(0) - 1, is_first.sum() + (~is_first).cumsum(0) - 1),
    }
    device = batch.prompt_ids.device
    return Layout(
        **{name: tensor.to(device) for name, tensor in tensors.items()}, prompts=tuple(lengths), rollouts=tuple(own),
        owner=tuple(owners), firsts=tuple(owner[row] for row in wanted if mask[row, 0]),
    )  # fmt: skip


def _places(starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(places (rows, longest) in the packed row, 0 in padding; the flat indices of the real ones in it, in the row's order)."""
    columns = torch.arange(max(lengths, default=0))
    real = columns < torch.tensor(lengths, dtype=torch.int64)[:, None]
    places = torch.where(real, torch.tensor(starts, dtype=torch.int64)[:, None] + columns, 0)
    return places, real.flatten().nonzero().squeeze(1)
