"""The total over several functions, and the books of one call."""

import math
import statistics

import pytest

from logra.errors import RewardError
from logra.rl.rewards.call import Call, check_columns
from logra.rl.rewards.load import Batch
from logra.rl.rewards.result import combine, total
from logra.rl.rewards.spec import RewardSpec, Score

A, B, LOG = RewardSpec("f.a", weight=2.0), RewardSpec("f.b", weight=-0.5), RewardSpec("f.log", weight=0.0)
NONE, ERROR, TIMEOUT = Score(None, "abstain"), Score(None, "error", "why"), Score(None, "timeout")


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([Score(1.0), Score(3.0), Score(9.0)], 0.5),
        ([Score(1.0), NONE, NONE], 2.0),
        ([NONE, Score(3.0), NONE], -1.5),
        ([NONE, NONE, Score(9.0)], None),  # a function that is only logged gives no reward
        ([NONE, NONE, NONE], None),
        ([Score(1.0), ERROR, Score(9.0)], None),  # a broken verifier must not look like a low reward
        ([TIMEOUT, Score(3.0), Score(9.0)], None),
        ([Score(1.0), Score(3.0), ERROR], 0.5),
    ],
)
def test_total(scores: list[Score], expected: float | None) -> None:
    assert total([A, B, LOG], scores) == expected


def test_metrics_ignore_missing_values() -> None:
    scores = [[Score(1.0), Score(4.0), NONE, ERROR], [NONE] * 4]
    result = combine([A, B], scores, {0: "why"})
    assert result.total == [2.0, 8.0, None, None]
    assert result.per_function == {"a": [1.0, 4.0, None, None], "b": [None] * 4}
    assert all(sum(counts.values()) == 4 for counts in result.counts.values())
    assert result.messages == {"a": "why"}
    metrics = result.metrics()
    assert metrics["rewards/a/mean"] == 2.5
    assert metrics["rewards/a/std"] == pytest.approx(statistics.stdev([1.0, 4.0]))
    assert metrics["rewards/a/error"] == 0.25
    assert metrics["rewards/b/abstain"] == 1.0
    assert "rewards/b/mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def batch(count: int) -> Batch:
    return Batch(["q"] * count, ["a"] * count, [[1]] * count, {})


def planned(specs: list[RewardSpec], count: int, error_limit: float = 1.0) -> Call:
    call = Call(specs, batch(count), error_limit)
    call.plan(2)
    return call


def test_every_rollout_is_planned_once_and_whole_batches_come_first() -> None:
    call = planned([RewardSpec("numeric_match"), RewardSpec("f.a"), RewardSpec("f.b", chunk=40)], 100)
    for spec in range(3):
        assert sorted(i for task in call.pending if task.spec == spec for i in task.rollouts) == list(range(100))
    sizes = [(task.spec, len(task.rollouts)) for task in call.pending]
    assert sizes[:4] == [(1, 100), (2, 40), (2, 40), (2, 20)]
    assert max(size for spec, size in sizes if spec == 0) <= 16


def test_a_lost_worker_costs_one_rollout_of_a_builtin_and_the_rest_goes_on() -> None:
    call = planned([RewardSpec("numeric_match")], 64)
    task = call.pending.popleft()
    call.record(task, 0, [Score(1.0)] * 3)
    call.fail(task, 3, "timeout", "slow")
    assert call.pending[0].rollouts == task.rollouts[4:]
    for rest in call.pending:
        call.record(rest, 0, [Score(0.0)] * len(rest.rollouts))
    values = call.result().per_function["numeric_match"]
    assert values[:3] == [1.0] * 3 and values[3] is None and values[4:] == [0.0] * 60


@pytest.mark.parametrize(("failures", "stops"), [(5, False), (6, True)])
def test_the_run_stops_once_more_than_the_limit_failed(failures: int, stops: bool) -> None:
    call = planned([RewardSpec("f.a")], 10, error_limit=0.5)
    scores = [ERROR] * failures + [Score(1.0)] * (10 - failures)
    if not stops:
        call.record(call.pending[0], 0, scores)
        return
    with pytest.raises(RewardError, match=r"'a' failed on 6 of 10(.|\n)*why"):
        call.record(call.pending[0], 0, scores)


def test_a_worker_that_dies_before_reading_is_tried_again_but_not_forever() -> None:
    call = planned([RewardSpec("f.a")], 2)
    for _ in range(2):
        call.retry(call.pending.popleft())
    call.retry(call.pending.popleft())
    assert not call.pending
    assert call.result().counts["a"]["error"] == 2


def test_missing_and_clashing_columns_are_named() -> None:
    with pytest.raises(RewardError, match="'a' needs the column 'tests'; the data has: answer, level"):
        check_columns([A], [["tests"]], {"level", "answer"})
    with pytest.raises(RewardError, match="may not be called 'completions'"):
        check_columns([A], [[]], {"completions"})
