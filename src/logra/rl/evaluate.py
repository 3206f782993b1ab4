"""Evaluation: pass@k, avg@k and lengths of an engine's policy on a fixed list of prompts.

pass@k is the unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code"
(arXiv 2107.03374), eq. 1. Shapes: P prompts, N rollouts a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real

from logra.errors import ConfigError, DataError, RewardError
from logra.hashing import derive_key
from logra.rl.engines.base import Engine, check_sampling
from logra.rl.types import Prompt, Rollout, Sampling

Scorer = Callable[[list[Rollout]], Sequence[float | None]]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of n samples, c of them correct, hold a correct one: 1 - C(n - c, k) / C(n, k).

    In the paper's product form, 1 - prod_{i = n-c+1}^{n} (1 - k / i), which never forms a large binomial.
    """
    if not 1 <= k <= num_samples:
        raise ConfigError(f"pass@{k} needs k between 1 and the number of samples, which is {num_samples}")
    if not 0 <= num_correct <= num_samples:
        raise ConfigError(f"num_correct is {num_correct}; it must be between 0 and num_samples {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found, with the rollouts (prompt-major) and their scores (None: abstained).

    pass_at: mean over prompts of pass@k, by k. mean_score: mean over all rollouts, None counting as 0.
    mean_length: ids a response, its end-of-sequence id included. clipped_ratio: share stopped by length.
    version: the policy that was evaluated, as stamped on its rollouts.
    """

    version: int
    num_prompts: int
    num_rollouts: int
    pass_at: dict[int, float]
    mean_score: float
    mean_length: float
    clipped_ratio: float
    unscored_ratio: float
    rollouts: list[Rollout]
    scores: list[float | None]

    def metrics(self) -> dict[str, float]:
        """Scalars under their logged names: eval/pass@k, eval/avg@N, eval/mean_length, ..."""
        return {
            **{f"eval/pass@{k}": value for k, value in self.pass_at.items()},
            f"eval/avg@{self.num_rollouts}": self.mean_score,
            "eval/mean_length": self.mean_length,
            "eval/clipped_ratio": self.clipped_ratio,
            "eval/unscored_ratio": self.unscored_ratio,
            "eval/num_prompts": self.num_prompts,
            "eval/version": self.version,
        }


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: Scorer,
    *,
    num_rollouts: int,
    ks: Sequence[int] = (1,),
    sampling: Sampling,
    success_threshold: float = 1.0,
    max_prompts: int | None = None,
) -> EvalResult:
    """Samples `num_rollouts` responses of each of the first `max_prompts` prompts and scores them.

    A response is correct if its score is at least `success_threshold`; None is not correct. `sampling` is
    evaluation's own; its seed is moved to a stream that training never uses. Keep `sampling.step` fixed over
    a run: equal random numbers make two evaluations differ by the policy alone.

    Raises ConfigError for impossible k or sampling, DataError without prompts, RewardError for unusable
    scores.
    """
    check_sampling(sampling, num_rollouts)
    _check_request(num_rollouts, ks, sampling, max_prompts)
    prompts = list(prompts[:max_prompts])
    if not prompts:
        raise DataError("there are no prompts to evaluate; give evaluation a data set with at least one usable prompt")
    own_sampling = replace(sampling, seed=derive_key("eval", sampling.seed) >> 1)  # fits a signed 64-bit seed
    rollouts = engine.generate(prompts, num_rollouts, own_sampling)
    scores = _checked(reward(rollouts), len(rollouts))
    return summarise(rollouts, scores, num_rollouts, ks, success_threshold)


def summarise(
    rollouts: list[Rollout],
    scores: list[float | None],
    num_rollouts: int,
    ks: Sequence[int],
    success_threshold: float,
) -> EvalResult:
    """The statistics of prompt-major rollouts (P * N of them, P > 0) and their scores; pure."""
    correct = [score is not None and score >= success_threshold for score in scores]
    counts = [sum(correct[i : i + num_rollouts]) for i in range(0, len(correct), num_rollouts)]
    total = len(rollouts)
    return EvalResult(
        version=rollouts[0].version,
        num_prompts=len(counts),
        num_rollouts=num_rollouts,
        pass_at={k: math.fsum(pass_at_k(num_rollouts, c, k) for c in counts) / len(counts) for k in ks},
        mean_score=math.fsum(score or 0.0 for score in scores) / total,
        mean_length=sum(len(rollout.token_ids) for rollout in rollouts) / total,
        clipped_ratio=sum(rollout.stop == "length" for rollout in rollouts) / total,
        unscored_ratio=sum(score is None for score in scores) / total,
        rollouts=rollouts,
        scores=scores,
    )


def _check_request(num_rollouts: int, ks: Sequence[int], sampling: Sampling, max_prompts: int | None) -> None:
    bad = [k for k in ks if not 1 <= k <= num_rollouts]
    if bad:
        raise ConfigError(
            f"pass@{bad[0]} needs k between 1 and num_rollouts, which is {num_rollouts}; raise num_rollouts"
        )
    if sampling.temperature == 0.0 and num_rollouts > 1:
        raise ConfigError(
            f"temperature 0 is greedy, so all {num_rollouts} rollouts of a prompt would be equal; "
            "set num_rollouts to 1 or a temperature above 0"
        )
    if max_prompts is not None and max_prompts < 1:
        raise ConfigError(f"max_prompts is {max_prompts}; it must be at least 1, or null for all")


def _checked(scores: Sequence[float | None], count: int) -> list[float | None]:
    """Scores as floats or None; RewardError if their number, type or value is unusable."""
    if len(scores) != count:
        raise RewardError(f"the reward returned {len(scores)} scores for {count} rollouts; return one score a rollout")
    checked: list[float | None] = []
    for i, score in enumerate(scores):
        if score is not None and not (isinstance(score, Real) and math.isfinite(score)):
            raise RewardError(f"the reward of rollout {i} is {score!r}; return a finite number, or None to abstain")
        checked.append(None if score is None else float(score))
    return checked
