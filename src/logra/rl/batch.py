"""Rollouts as tensors: what the train step and the trust region read.

Shape legend: B rollouts, P prompt columns (padded left), C completion columns (padded right).

Masks come from lengths and stop reasons, never from token values: a tokenizer whose pad token is its
end-of-sequence token keeps its one sampled end-of-sequence token in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from logra.errors import ConfigError, DataError, NonFiniteError
from logra.rl.losses import token_weights
from logra.rl.types import Rollout


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """All rollouts of one optimizer step, or a slice of them.

    prompt_ids (B, P) int64, prompt_mask (B, P) bool: real tokens at the right end.
    completion_ids (B, C) int64, completion_mask (B, C) bool: real tokens at the left end; C is at least 1.
    rollout_logprobs (B, C) float32: under the rollout policy, nats, 0 in padding.
    advantages (B,) float32; weights (B,) float32, see `losses.token_weights`: computed over the whole step,
    so a slice keeps them as they are. group_ids (B,) int64: the prompt's id.
    dropped (B,) bool: not in the loss. A dropped or empty rollout has weight 0 but stays a row: its part of
    the loss is an exact 0 that is still connected to the graph, so a batch of only such rows can be sent
    through backward.
    terminated (B,) bool: stopped at an end-of-sequence token.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    group_ids: Tensor
    dropped: Tensor
    terminated: Tensor

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def input_ids(self) -> Tensor:
        """(B, P + C) int64; the logits of column P + c - 1 predict completion token c, in column P + c."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """(B, P + C) int64, 1 on real tokens."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1).long()

    @property
    def position_ids(self) -> Tensor:
        """(B, P + C) int64, 0 at the first real token. GPT-2 does not derive them from the attention mask."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What a model takes: `input_ids`, `attention_mask`, `position_ids`."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}

    @property
    def lengths(self) -> Tensor:
        """(B,) int64 completion lengths, dropped rollouts included."""
        return self.completion_mask.sum(dim=1)

    @property
    def loss_mask(self) -> Tensor:
        """(B, C) bool, the tokens in the loss: the completion mask without dropped rollouts."""
        return self.completion_mask & ~self.dropped[:, None]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens in the loss; the numbers of a batch's microbatches add up to its own."""
        return int(self.loss_mask.sum())

    @property
    def has_signal(self) -> bool:
        """Whether any rollout with tokens in the loss has an advantage other than 0. If not: no step."""
        return bool(((self.advantages != 0) & (self.weights != 0)).any())

    def with_advantages(
        self,
        advantages: Tensor,
        *,
        aggregation: str = "token",
        max_new_tokens: int | None = None,
        dropped: Tensor | None = None,
    ) -> TrainBatch:
        """The batch with its advantages (B,) and the weights of `token_weights(aggregation, ...)`.

        dropped: (B,) bool, rollouts to leave out beside those already dropped, as in
        `AdvantageResult.dropped`. Call it on the whole step's batch: weights of a slice would have the
        slice's denominators.
        """
        if advantages.shape != self.group_ids.shape:
            raise ValueError(f"advantages must be ({len(self)},), got {tuple(advantages.shape)}")
        device = self.group_ids.device
        if dropped is not None:
            dropped = dropped.to(device=device, dtype=torch.bool)
        all_dropped = self.dropped if dropped is None else self.dropped | dropped
        weights = token_weights(
            aggregation, self.lengths, self.group_ids, max_new_tokens=max_new_tokens, dropped=all_dropped
        )
        return replace(
            self,
            advantages=advantages.to(device=device, dtype=torch.float32),
            weights=weights.float(),
            dropped=all_dropped,
        )

    def slice(self, indices: Sequence[int] | Tensor) -> TrainBatch:
        """The rows `indices`, in that order, without the padding columns that none of them needs."""
        rows = torch.as_tensor(indices, dtype=torch.long, device=self.prompt_ids.device)
        first = self.prompt_ids.shape[1] - int(self.prompt_mask[rows].sum(1).max()) if len(rows) else 0
        last = max(int(self.completion_mask[rows].sum(1).max()), 1) if len(rows) else 1
        return TrainBatch(
            prompt_ids=self.prompt_ids[rows, first:],
            prompt_mask=self.prompt_mask[rows, first:],
            completion_ids=self.completion_ids[rows, :last],
            completion_mask=self.completion_mask[rows, :last],
            rollout_logprobs=self.rollout_logprobs[rows, :last],
            advantages=self.advantages[rows],
            weights=self.weights[rows],
            group_ids=self.group_ids[rows],
            dropped=self.dropped[rows],
            terminated=self.terminated[rows],
        )

    def rows(self, indices: Sequence[int]) -> TrainBatch:
        """The rows `indices` with all columns, so that parts of a batch have one length."""
        rows = torch.as_tensor(indices, dtype=torch.long, device=self.prompt_ids.device)
        return TrainBatch(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def without(self, indices: Sequence[int]) -> TrainBatch:
        """The same with some rows dropped from the loss, weights of the others as they are: padding of a rank's share."""
        if not indices:
            return self
        rows = torch.as_tensor(indices, dtype=torch.long, device=self.prompt_ids.device)
        return replace(
            self,
            dropped=self.dropped.index_fill(0, rows, True),
            weights=self.weights.index_fill(0, rows, 0.0),
            advantages=self.advantages.index_fill(0, rows, 0.0),
        )

    def microbatches(self, size: int) -> Iterator[TrainBatch]:
        """Slices of `size` rows (the last may be smaller), in order."""
        if size < 1:
            raise ConfigError(f"the microbatch size must be at least 1, got {size}")
        for start in range(0, len(self), size):
            yield self.slice(range(start, min(start + size, len(self))))

    def probe(self, num_rollouts: int | Sequence[int], max_tokens: int) -> TrainBatch:
        """The contexts on which the trust region predicts the KL.

        num_rollouts: the first so many usable rollouts; or the rows to take, unusable ones left out. Usable:
        at least one completion token lies within the first `max_tokens` tokens of prompt and completion
        together. Dropped rollouts are usable, the KL does not ask for a reward. Tokens beyond max_tokens are
        masked out and trimmed.
        """
        room_B = (max_tokens - self.prompt_mask.sum(1)).clamp(min=0)
        kept_B = torch.minimum(self.lengths, room_B)
        wanted = range(len(self)) if isinstance(num_rollouts, int) else num_rollouts
        kept = kept_B.tolist()
        rows = [row for row in wanted if kept[row] > 0]
        rows = rows[:num_rollouts] if isinstance(num_rollouts, int) else rows
        if not rows:
            raise DataError(
                f"no rollout has a completion token among its first {max_tokens} tokens, nothing to probe: "
                "raise the probe's token limit above the prompt length, or take more rollouts"
            )
        columns_C = torch.arange(self.completion_ids.shape[1], device=kept_B.device)
        mask_BC = columns_C < kept_B[:, None]
        shorter = replace(
            self, completion_mask=mask_BC, rollout_logprobs=torch.where(mask_BC, self.rollout_logprobs, 0.0)
        )
        return shorter.slice(rows)

    def to(self, device: torch.device | str) -> TrainBatch:
        return TrainBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def collate(
    rollouts: Sequence[Rollout],
    pad_id: int,
    mask_truncated: bool = False,
    device: torch.device | str = "cpu",
) -> TrainBatch:
    """Rollouts -> a batch in the same order; advantages 0, "token" weights until `with_advantages` is called.

    mask_truncated: rollouts that stopped at the length limit are dropped from the loss and its denominators.
    Raises DataError for no rollouts, an empty prompt (nothing predicts the first completion token) or a
    missing log-prob, NonFiniteError for a log-prob that is NaN or infinite. An empty completion is fine.
    """
    _check(rollouts)
    prompts = [torch.tensor(rollout.prompt.token_ids, dtype=torch.long) for rollout in rollouts]
    completions = [torch.tensor(rollout.token_ids, dtype=torch.long) for rollout in rollouts]
    logprobs = [torch.tensor(rollout.logprobs, dtype=torch.float32) for rollout in rollouts]
    prompt_ids, prompt_mask = _pad(prompts, pad_id, left=True)
    completion_ids, completion_mask = _pad(completions, pad_id, left=False)
    group_ids = torch.tensor([rollout.prompt.id for rollout in rollouts], dtype=torch.long)
    dropped = torch.tensor([mask_truncated and rollout.stop == "length" for rollout in rollouts])
    return TrainBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        rollout_logprobs=_pad(logprobs, 0.0, left=False)[0],
        advantages=torch.zeros(len(rollouts)),
        weights=token_weights("token", completion_mask, group_ids, dropped=dropped).float(),
        group_ids=group_ids,
        dropped=dropped,
        terminated=torch.tensor([rollout.stop == "eos" for rollout in rollouts]),
    ).to(device)


def _pad(rows: list[Tensor], fill: float, *, left: bool) -> tuple[Tensor, Tensor]:
    """1-D rows -> (B, longest, at least 1) and the bool mask of the real entries."""
    width = max(1, *(len(row) for row in rows))
    padded = torch.full((len(rows), width), fill, dtype=rows[0].dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        padded[index, where] = row
        mask[index, where] = True
    return padded, mask


def _check(rollouts: Sequence[Rollout]) -> None:
    if not rollouts:
        raise DataError("there is no rollout to make a batch of: check that the prompt filter left any prompt")
    for rollout in rollouts:
        name = f"rollout {rollout.index} of prompt {rollout.prompt.id}"
        if not rollout.prompt.token_ids:
            raise DataError(f"{name}: the prompt has no token: drop it, or use a tokenizer or template that adds one")
        if len(rollout.logprobs) != len(rollout.token_ids):
            raise DataError(
                f"{name}: {len(rollout.token_ids)} tokens but {len(rollout.logprobs)} log-probs: "
                "the engine must return one for each sampled token"
            )
        if not all(map(math.isfinite, rollout.logprobs)):
            raise NonFiniteError(f"{name}: the engine returned a log-prob that is NaN or infinite")
