"""pass@k against enumeration; evaluation with a scripted engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from logra.errors import ConfigError, DataError, RewardError
from logra.rl.engines.hf import HFEngine
from logra.rl.evaluate import EvalResult, evaluate, pass_at_k
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.rl.types import Prompt, Rollout, Sampling

PROMPTS = [Prompt(i, str(i), (5 + i,)) for i in range(3)]


class FakeEngine:
    """Answers with index + 1 ids, clipped from the third rollout on, and remembers what it was asked."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.calls: list[tuple[list[Prompt], int, Sampling]] = []

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        self.calls.append((list(prompts), num_rollouts, sampling))
        return [
            Rollout(
                prompt,
                i,
                (7,) * (i + 1),
                (-1.0,) * (i + 1),
                "length" if i >= 2 else "eos",
                "",
                self.version,
            )
            for prompt in prompts
            for i in range(num_rollouts)
        ]

    def publish(self, version: int, update: object | None) -> None:
        self.version = version

    def close(self) -> None:
        pass


def run(scores: Sequence[Any], **options: Any) -> EvalResult:
    options = {"num_rollouts": 4, "ks": (1, 2, 4), "sampling": Sampling(9), **options}
    return evaluate(FakeEngine(version=11), PROMPTS, lambda rollouts: scores, **options)


def test_pass_at_k_equals_enumeration_of_all_subsets() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_stable_for_large_counts() -> None:
    expected = 1 - math.comb(9_990, 1_000) / math.comb(10_000, 1_000)
    assert pass_at_k(10_000, 10, 1_000) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ConfigError):
        pass_at_k(n, c, k)


def test_statistics_by_hand() -> None:
    result = run([1, 0, 1, 0, 0.5, None, 0, 1.0, 0, 0, 0, None])
    assert result.pass_at[1] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert result.pass_at[2] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert result.pass_at[4] == pytest.approx(2 / 3)
    assert result.metrics() == {
        "eval/pass@1": result.pass_at[1],
        "eval/pass@2": result.pass_at[2],
        "eval/pass@4": result.pass_at[4],
        "eval/avg@4": pytest.approx(3.5 / 12),
        "eval/mean_length": 2.5,
        "eval/clipped_ratio": 0.5,
        "eval/unscored_ratio": pytest.approx(2 / 12),
        "eval/num_prompts": 3,
        "eval/version": 11,
    }
    assert result.scores[5] is None and len(result.rollouts) == 12


def test_success_threshold() -> None:
    scores = [0.5, 0.4, 0.6, 0.5] * 3
    assert run(scores).pass_at[1] == 0.0
    assert run(scores, success_threshold=0.5).pass_at[1] == pytest.approx(3 / 4)
    assert run([None] * 12, success_threshold=0.0).pass_at[1] == 0.0


def test_sampling_is_its_own_and_the_seed_is_moved() -> None:
    engine = FakeEngine()
    for seed in (0, 1):
        evaluate(engine, PROMPTS, lambda r: [0] * len(r), num_rollouts=2, sampling=Sampling(9, 0.7, 0.8, seed, 5))
    seeds = [sampling.seed for _, _, sampling in engine.calls]
    assert len({0, 1, *seeds}) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert engine.calls[0][2] == Sampling(9, 0.7, 0.8, seeds[0], 5)


def test_max_prompts_takes_the_first() -> None:
    engine = FakeEngine()
    result = evaluate(engine, PROMPTS, lambda r: [1] * len(r), num_rollouts=1, sampling=Sampling(9), max_prompts=2)
    assert engine.calls[0][0] == PROMPTS[:2] and result.num_prompts == 2


@pytest.mark.parametrize(
    "options",
    [
        {"ks": (1, 8)},
        {"ks": (0,)},
        {"sampling": Sampling(9, temperature=0.0)},
        {"max_prompts": 0},
        {"num_rollouts": 0},
        {"sampling": Sampling(9, top_p=0.0)},
    ],
)
def test_impossible_requests_are_refused_before_sampling(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run([], **options)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        evaluate(FakeEngine(), [], lambda r: [], num_rollouts=1, sampling=Sampling(9))


@pytest.mark.parametrize("scores", [[1.0] * 11, [1.0] * 13, [float("nan")] + [1.0] * 11, ["yes"] * 12])
def test_unusable_scores_are_refused(scores: list[Any]) -> None:
    with pytest.raises(RewardError):
        run(scores)


def test_with_a_real_engine() -> None:
    engine = HFEngine(tiny_model(), char_tokenizer())
    engine.publish(3, None)
    options: dict[str, Any] = {"num_rollouts": 4, "ks": (1, 4), "sampling": Sampling(6, 0.7, 0.7)}
    result = evaluate(engine, PROMPTS, lambda r: [float("1" in x.text) for x in r], **options)
    again = evaluate(engine, PROMPTS, lambda r: [float("1" in x.text) for x in r], **options)
    assert result == again and result.version == 3
    assert result.pass_at[4] >= result.pass_at[1] == pytest.approx(result.mean_score)
