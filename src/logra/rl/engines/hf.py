"""In-process rollouts with a transformers model: the trainer's own modules, so nothing to synchronise.

A decode loop of our own instead of `model.generate`, because it
- draws each token with a random number keyed by its rollout, so results do not depend on the batch;
- inherits nothing from the model's generation config but its end-of-sequence ids;
- runs each distinct prompt once and copies its cache for the group, and drops finished rows from the batch.

The model must be a decoder that accepts `position_ids` and `logits_to_keep` and returns a cache that can be
reordered. No cache outlives a call, so none can be stale. Shapes: B rows of a batch, D distinct prompts, T
tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra.errors import ConfigError, DataError, ModelError, NonFiniteError
from logra.head import quiet
from logra.region import region
from logra.rl.engines.base import check_sampling
from logra.rl.engines.sampling import choose, rollout_uniforms
from logra.rl.types import Prompt, Rollout, Sampling

# Rows are dropped once this share of the batch has finished: a drop copies the cache, as every token does.
_DROP_SHARE = 0.25


@dataclass
class _Row:
    """One rollout while it is being sampled."""

    prompt: Prompt
    index: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Literal["eos", "length"] | None = None


@dataclass
class _Batch:
    """The model's side of the rows being decoded: logits of the next id, cache, and where each row stands."""

    logits_BV: Tensor
    cache: Any
    mask_BT: Tensor
    positions_B: Tensor

    def select(self, keep: list[int]) -> None:
        """Keeps these rows, in this order; a row may be taken more than once."""
        index = torch.tensor(keep, device=self.mask_BT.device)
        self.cache.reorder_cache(index)
        self.logits_BV = self.logits_BV[index.to(self.logits_BV.device)]
        self.mask_BT, self.positions_B = self.mask_BT[index], self.positions_B[index]


class HFEngine:
    """Samples from `model` where it is, under `torch.no_grad` and in eval mode, and leaves it as it was.

    batch_size: rollouts decoded at once (None: all of a call), left-padded to the longest prompt among them.
    eos_token_ids: ids that end a response; None takes those of the model's generation config and of the
        tokenizer. Empty: every response runs to `max_new_tokens`.
    pad_token_id: any id of the vocabulary; it fills masked places and is never looked at again.
    autocast: compute in bfloat16, as a policy trained under autocast does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        pad_token_id: int | None = None,
        autocast: bool = False,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"the engine's batch_size is {batch_size}; it must be at least 1, or null for no limit")
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.autocast = autocast
        self.eos_token_ids = frozenset(_eos_ids(model, tokenizer) if eos_token_ids is None else eos_token_ids)
        pad_ids = (pad_token_id, tokenizer.pad_token_id, *sorted(self.eos_token_ids), 0)
        self.pad_token_id = next(i for i in pad_ids if i is not None)
        self.version = 0

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`.

        Raises ConfigError for impossible settings, DataError for a prompt without ids, ModelError if a prompt
        and its response do not fit the model's positions, NonFiniteError if the logits are NaN or infinite.
        """
        check_sampling(sampling, num_rollouts)
        self.check_lengths(prompts, sampling.max_new_tokens)
        rows = _rows(prompts, num_rollouts, sampling)
        size = self.batch_size or max(1, len(rows))
        cast = torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16, enabled=self.autocast)
        with quiet(self.model), cast:
            for start in range(0, len(rows), size):
                self._decode(rows[start : start + size], sampling)
        return self._rollouts(rows)

    def publish(self, version: int, update: object | None) -> None:
        """The modules are shared, so the weights are already those of `version`: only the number changes."""
        self.version = version

    def close(self) -> None:
        """Nothing to free: the model belongs to the trainer."""

    def check_lengths(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Raise `ModelError` if a prompt and `max_new_tokens` do not fit the model's positions."""
        # Not every configuration has a limit (ALiBi, state-space models), so a missing one means none.
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for prompt in prompts:
            length = len(prompt.token_ids)
            if length == 0:
                raise DataError(f"prompt {prompt.id} has no token ids; drop it or give the template a BOS token")
            if limit is not None and length + max_new_tokens > limit:
                raise ModelError(
                    f"prompt {prompt.id} has {length} tokens; with max_new_tokens {max_new_tokens} that is "
                    f"{length + max_new_tokens}, above the model's max_position_embeddings {limit}: lower "
                    "rollout.max_new_tokens (eval.max_new_tokens)"
                    + (f", or set data.max_prompt_tokens to {limit - max_new_tokens}" if limit > max_new_tokens else "")
                )

    def _decode(self, rows: list[_Row], sampling: Sampling) -> None:
        """Samples all of `rows` to their end, in place."""
        batch = self._prefill(rows)
        width = batch.mask_BT.shape[1] - sampling.max_new_tokens
        for step in range(sampling.max_new_tokens):
            uniform_B = torch.tensor([row.uniforms[step] for row in rows], dtype=torch.float64)
            with region("logits"):
                ids_B, logp_B = choose(batch.logits_BV, uniform_B, sampling.temperature, sampling.top_p)
            self._record(rows, ids_B.tolist(), logp_B.tolist(), sampling.max_new_tokens)
            keep = [i for i, row in enumerate(rows) if row.stop is None]
            if not keep:
                return
            if len(rows) - len(keep) >= _DROP_SHARE * len(rows):
                batch.select(keep)
                ids_B = ids_B[torch.tensor(keep, device=ids_B.device)]
                rows = [rows[i] for i in keep]
            self._forward(batch, ids_B[:, None], width + step + 1)

    def _prefill(self, rows: list[_Row]) -> _Batch:
        """Runs each distinct prompt of the batch once, left-padded, and copies its cache to its rows."""
        distinct = {ids: i for i, ids in enumerate(dict.fromkeys(row.prompt.token_ids for row in rows))}
        width, count = max(map(len, distinct)), len(rows[0].uniforms)
        ids_DT = torch.full((len(distinct), width), self.pad_token_id)
        mask_DT = torch.zeros(len(distinct), width + count, dtype=torch.int64)
        for i, token_ids in enumerate(distinct):
            ids_DT[i, width - len(token_ids) :] = torch.tensor(token_ids)
            mask_DT[i, width - len(token_ids) :] = 1
        device = self.model.device
        positions_DT = (mask_DT[:, :width].cumsum(-1) - 1).clamp_(min=0).to(device)
        output = self.model(
            input_ids=ids_DT.to(device),
            attention_mask=mask_DT[:, :width].to(device),
            position_ids=positions_DT,
            use_cache=True,
            logits_to_keep=1,
        )
        if output.past_key_values is None:
            raise ModelError(f"{type(self.model).__name__} returns no key-value cache, so it cannot be sampled from")
        batch = _Batch(output.logits[:, -1], output.past_key_values, mask_DT.to(device), positions_DT[:, -1] + 1)
        batch.select([distinct[row.prompt.token_ids] for row in rows])
        return batch

    def _forward(self, batch: _Batch, ids_B1: Tensor, length: int) -> None:
        """Feeds each row's last id and leaves the logits of the next one in the batch."""
        output = self.model(
            input_ids=ids_B1.to(batch.mask_BT.device),
            attention_mask=batch.mask_BT[:, :length],
            position_ids=batch.positions_B[:, None],
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        batch.logits_BV, batch.cache = output.logits[:, -1], output.past_key_values
        batch.positions_B = batch.positions_B + 1

    def _record(self, rows: list[_Row], ids: list[int], logps: list[float], max_new_tokens: int) -> None:
        """Appends one id to each open row and closes those that reached an end."""
        for row, token_id, logp in zip(rows, ids, logps, strict=True):
            if row.stop is not None:
                continue
            if not math.isfinite(logp):
                raise NonFiniteError(
                    f"the logits of prompt {row.prompt.id}, rollout {row.index}, at response token "
                    f"{len(row.token_ids)} are NaN or infinite (policy version {self.version}); the weights "
                    "are damaged, overflow their dtype or have diverged: go back to an earlier checkpoint, lower "
                    "method.lr, or use model.dtype=float32"
                )
            row.token_ids.append(token_id)
            row.logprobs.append(logp)
            if token_id in self.eos_token_ids:
                row.stop = "eos"
            elif len(row.token_ids) == max_new_tokens:
                row.stop = "length"

    def _rollouts(self, rows: list[_Row]) -> list[Rollout]:
        return [
            Rollout(
                prompt=row.prompt,
                index=row.index,
                token_ids=tuple(row.token_ids),
                logprobs=tuple(row.logprobs),
                stop="eos" if row.stop == "eos" else "length",
                text=self._text(row),
                version=self.version,
            )
            for row in rows
        ]

    def _text(self, row: _Row) -> str:
        ids = row.token_ids[:-1] if row.stop == "eos" else row.token_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


def _rows(prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[_Row]:
    """Prompt-major rows. A prompt id that comes again in the call continues its random streams."""
    seen: Counter[int] = Counter()
    rows = []
    for prompt in prompts:
        for index in range(num_rollouts):
            stream = seen[prompt.id] * num_rollouts + index
            uniforms = rollout_uniforms(sampling.seed, sampling.step, prompt.id, stream, sampling.max_new_tokens)
            rows.append(_Row(prompt, index, uniforms))
        seen[prompt.id] += 1
    return rows


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every end-of-sequence id that the generation config or the tokenizer names; ModelError if none."""
    config = model.generation_config
    named = None if config is None else config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    found = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not found:
        raise ModelError(
            "neither the model's generation config nor the tokenizer names an end-of-sequence token, so no "
            "response could end; use a model whose tokenizer_config.json or "
            "generation_config.json names one (in Python: pass eos_token_ids)"
        )
    return found
