"""The books of one scoring call: what is to do, what has come back, when to give up. No processes here."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from logra.errors import RewardError
from logra.rl.rewards.load import FIXED, Batch
from logra.rl.rewards.result import RewardResult, combine
from logra.rl.rewards.spec import FAILED, RewardSpec, Score, Status

MAX_CHUNK = 16


@dataclass(frozen=True)
class Task:
    """Rollouts for one function. num_lost: how often a worker died before it could begin."""

    spec: int
    rollouts: tuple[int, ...]
    num_lost: int = 0


class Call:
    """batch: the B rollouts. `record` and `fail` raise RewardError once more than error_limit * B failed."""

    def __init__(self, specs: Sequence[RewardSpec], batch: Batch, error_limit: float) -> None:
        self.pending: deque[Task] = deque()
        self._specs = specs
        self._batch = batch
        self._error_limit = error_limit
        self._scores: list[list[Score | None]] = [[None] * len(batch.prompts) for _ in specs]
        self._num_failed = [0] * len(specs)
        self._messages: dict[int, str] = {}

    def plan(self, num_workers: int) -> None:
        """Queue every rollout for every function: whole-batch functions first, they take longest."""
        count = len(self._batch.prompts)
        small = max(1, min(MAX_CHUNK, count // (4 * num_workers)))
        for index in sorted(range(len(self._specs)), key=lambda i: self._specs[i].is_per_rollout):
            spec = self._specs[index]
            size = small if spec.is_per_rollout else spec.chunk or max(count, 1)
            for start in range(0, count, size):
                self.pending.append(Task(index, tuple(range(start, min(start + size, count)))))

    def request(self, task: Task) -> bytes:
        """The task as a worker reads it. RewardError if the data cannot be sent."""
        batch, rows = self._batch, task.rollouts
        part = Batch(
            [batch.prompts[i] for i in rows],
            [batch.completions[i] for i in rows],
            [batch.completion_ids[i] for i in rows],
            {name: [values[i] for i in rows] for name, values in batch.columns.items()},
        )
        try:
            return pickle.dumps((task.spec, part))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(f"a column holds values that cannot be sent to the reward workers: {error}") from error

    def record(self, task: Task, start: int, scores: Sequence[Score]) -> None:
        """Enter the scores of the task's rollouts from position `start` on."""
        for i, score in zip(task.rollouts[start : start + len(scores)], scores, strict=True):
            self._scores[task.spec][i] = score
            if score.status in FAILED:
                self._num_failed[task.spec] += 1
                self._messages.setdefault(task.spec, score.message)
        self._check_limit(task.spec)

    def fail(self, task: Task, start: int, status: Status, message: str) -> None:
        """The worker was lost at position `start`: that rollout failed (all of them in a whole-batch call),
        the rest is queued again."""
        rows = task.rollouts[start:]
        num_failed = 1 if self._specs[task.spec].is_per_rollout else len(rows)
        if rest := rows[num_failed:]:
            self.pending.appendleft(Task(task.spec, rest))
        self.record(task, start, [Score(None, status, message)] * num_failed)

    def retry(self, task: Task) -> None:
        """The worker was gone before it read the task."""
        if task.num_lost >= 2:
            self.fail(task, 0, "error", "reward workers keep dying between calls")
        else:
            self.pending.appendleft(Task(task.spec, task.rollouts, task.num_lost + 1))

    def result(self) -> RewardResult:
        assert all(score is not None for column in self._scores for score in column)
        return combine(self._specs, [[s for s in column if s is not None] for column in self._scores], self._messages)

    def _check_limit(self, index: int) -> None:
        count, failed = len(self._batch.prompts), self._num_failed[index]
        if failed > self._error_limit * count:
            raise RewardError(
                f"reward {self._specs[index].name!r} failed on {failed} of {count} rollouts, "
                f"more than error_limit={self._error_limit:g} allows: mend it, or raise reward.timeout_s if slow.\n"
                f"First failure:\n{self._messages[index]}"
            )


def check_columns(specs: Sequence[RewardSpec], needs: Sequence[Sequence[str]], names: set[str]) -> None:
    """RewardError if a function needs a column that is not there, or a column is named like an argument."""
    if clash := sorted(names & set(FIXED)):
        raise RewardError(f"a column may not be called {clash[0]!r}, which reward functions get anyway: rename it")
    for spec, needed in zip(specs, needs, strict=True):
        if missing := [name for name in needed if name not in names]:
            there = ", ".join(sorted(names)) or "no columns"
            raise RewardError(f"reward {spec.name!r} needs the column {missing[0]!r}; the data has: {there}")
