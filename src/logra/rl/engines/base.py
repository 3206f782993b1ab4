"""What every rollout engine promises, and the checks on sampling settings that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from logra.errors import ConfigError
from logra.rl.types import Prompt, Rollout, Sampling


@runtime_checkable
class Engine(Protocol):
    """Samples responses of the policy at `version`.

    The contract, held by tests/contracts/test_engine.py for every implementation:

    - Ids are carried end to end: the prompt's ids go in as they are, the sampled ids come out, text is only
      derived.
    - `Rollout.logprobs` are log-probabilities (nats) of the sampled ids under softmax(logits / temperature),
      in float32, of the very policy that sampled them. Nothing but the temperature shapes the distribution,
      whatever the model's own generation defaults say; greedy sampling (temperature 0) reports them at
      temperature 1, and `top_p` (evaluation only) narrows the choice but not the log-probs.
    - `Rollout.stop` says why sampling ended; a sampled end-of-sequence id is kept as the last id. There is
      always at least one id, so an empty response is that one id.
    - Every rollout carries the version of the policy that sampled it.
    - What is sampled depends on (sampling.seed, sampling.step, prompt id, rollout index), not on the order of
      the prompts or on how they are batched (beyond float rounding). A prompt id that occurs more than once
      in a call gets fresh randomness each time.
    """

    @property
    def version(self) -> int:
        """Updates in the policy that is sampled now."""
        ...

    @property
    def pad_token_id(self) -> int:
        """Any id of the vocabulary: it fills places that are masked."""
        ...

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """`num_rollouts` rollouts of each prompt, prompt-major: all those of the first prompt come first."""
        ...

    def publish(self, version: int, update: object | None) -> None:
        """The policy is now `version`: apply `update`, an Update or a packet of one (None: whatever the trainer holds); drop
        caches."""
        ...

    def check_lengths(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Raise `ModelError` if a prompt and `max_new_tokens` do not fit the model."""
        ...

    def close(self) -> None:
        """Frees what the engine holds. May be called twice."""
        ...


def engine_metrics(engine: object) -> dict[str, float]:
    """What an engine has to log of the step that ends, under the names of docs/metrics.md: its `metrics()`, if it has that."""
    found = getattr(engine, "metrics", None)
    return {} if found is None else found()


class Interrupted(Exception):
    """`RemoteEngine.abort` ended this call of `generate`: nothing was sampled."""


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine that computes elsewhere, so that it can sample while the trainer computes (`logra.rl.rollouts`).

    One thread calls `generate` and `publish`; `abort`, and `publish` if `publishes_midway`, may come from another meanwhile.
    """

    @property
    def publishes_midway(self) -> bool:
        """Whether `publish` may come while `generate` runs: ids sampled before and after it are each of their own version with
        their own log-prob, and `Rollout.version` is the oldest of them."""
        ...

    def abort(self) -> None:
        """Make `generate`, in another thread, raise `Interrupted`: the call under way, or else the next one. Returns within
        seconds and raises nothing, also if what computes is gone."""
        ...


def check_sampling(sampling: Sampling, num_rollouts: int) -> None:
    """Refuses settings that no engine can sample with (ConfigError)."""
    if num_rollouts < 1:
        raise ConfigError(f"num_rollouts is {num_rollouts}; it must be at least 1")
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature is {sampling.temperature}; it must be 0 (greedy) or positive and finite")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")


def check_training_sampling(sampling: Sampling) -> None:
    """Refuses settings whose samples the loss cannot score (ConfigError): greedy and top-p."""
    check_sampling(sampling, 1)
    if sampling.temperature == 0.0:
        raise ConfigError(
            "temperature 0 samples greedily, so the rollouts of a prompt are all equal and give no signal; "
            "set a temperature above 0 for training (1.0 is usual)"
        )
    if sampling.top_p != 1.0:
        raise ConfigError(
            f"top_p is {sampling.top_p}, but training needs top_p 1.0: the loss scores the full softmax, and "
            "responses sampled from a truncated one make its ratios wrong; set top_p only for evaluation"
        )
