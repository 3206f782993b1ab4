"""What travels between data, engines, rewards and the train step. Token ids are carried end to end, never re-tokenised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One task.

    id: its index in the data set, stable over shuffling and resuming.
    content: a string, or a list of chat messages, as reward functions see it.
    token_ids: the templated prompt (special tokens added exactly once).
    columns: every other column of the row; the reference answer is under "answer" whatever its column was called.
    """

    id: int
    content: str | list[Message]
    token_ids: tuple[int, ...]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How to sample. Only the temperature shapes the distribution: train-time log-probs must be able to match it.

    temperature 0 means greedy (evaluation only). `seed` and `step` key the random numbers of each rollout together with
    the prompt's id and the rollout's index, so batch size and order never change what is sampled (beyond float rounding).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    token_ids: the sampled ids, the end-of-sequence id included when it was sampled.
    logprobs: log-probability of each of them under the rollout policy at the sampling temperature (nats).
    stop: "eos" if an end-of-sequence id was sampled, else "length". Never derived from token values later.
    version: number of updates in the policy that sampled it.
    """

    prompt: Prompt
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: Literal["eos", "length"]
    text: str
    version: int
