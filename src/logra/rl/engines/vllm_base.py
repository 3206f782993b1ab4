"""What the two vLLM engines have in common, whatever carries their messages. No vLLM is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from logra.rl.engines.vllm_link import Link
from logra.rl.engines.vllm_requests import Answer, Request, check_lengths, end_token_ids, pad_id, to_rollout
from logra.rl.types import Prompt, Rollout


class LinkedEngine:
    """An engine whose weights a `Link` keeps at the trainer's version; subclasses set `link`.

    model: folder of the base weights, read for the ids that end a response. eos_token_ids: these ids; None takes those of the
    model folder and of the tokenizer.
    """

    link: Link

    def __init__(
        self, model: str | Path, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int] | None
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(end_token_ids(str(model), tokenizer) if eos_token_ids is None else eos_token_ids)
        self._pad_token_id = pad_id(tokenizer, self.eos_token_ids)

    @property
    def version(self) -> int:
        """Updates in the policy that vLLM samples."""
        return self.link.version

    @property
    def pad_token_id(self) -> int:
        """Any id of the vocabulary: it fills places that are masked."""
        return self._pad_token_id

    def check_lengths(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Raise `ModelError` if a prompt and `max_new_tokens` exceed vLLM's max_model_len."""
        check_lengths(prompts, max_new_tokens, self.link.max_model_len)

    def _rollouts(self, requests: Sequence[Request], answers: Iterable[Answer]) -> list[Rollout]:
        label = self.link.label()
        return [
            to_rollout(request, answer, self.version, label, self.eos_token_ids, self.tokenizer)
            for request, answer in zip(requests, answers, strict=True)
        ]
