"""Reward functions in killable processes: a hang, a crash or a fork in one never reaches the trainer."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from logra.errors import RewardError
from logra.rl.rewards.builtin import BUILTINS, nearest
from logra.rl.rewards.call import Call, check_columns
from logra.rl.rewards.crew import GRACE_S, Crew
from logra.rl.rewards.load import FIXED, Batch
from logra.rl.rewards.result import RewardResult
from logra.rl.rewards.spec import RewardSpec

if TYPE_CHECKING:
    from logra.rl.types import Rollout

NOT_COLUMNS = {*FIXED, "prompt", "completion"}


class RewardPool:
    """Scores rollouts with several functions in worker processes. Thread-safe; one call at a time. Unix only.

    specs: the functions; a string or a function stands for RewardSpec(it). Names must differ.
    workers: number of processes.
    timeout_s: wall-clock limit of one call of a function (one rollout for built-ins and verl functions). The
        process group that exceeds it is killed and replaced; the rollouts of that call count as "timeout",
        the others go on.
    error_limit: a scoring call in which a larger share of a function's rollouts ended in "error" or
        "timeout" stops with RewardError. 1 never stops.
    start_timeout_s: limit for a worker to load all functions.

    RewardError at once for a function that is not found, lacks a column, or returns something other than a
    list of numbers, bools and None of the right length.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec | str | Callable[..., Any]],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        error_limit: float = 0.5,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.specs = tuple(s if isinstance(s, RewardSpec) else RewardSpec(s) for s in specs)
        check_specs(self.specs)
        if workers < 1 or not timeout_s > 0 or not start_timeout_s > 0 or not 0 <= error_limit <= 1:
            raise RewardError("a reward pool needs workers >= 1, positive time limits and error_limit in [0, 1]")
        limits_s = [timeout_s if s.timeout_s is None else s.timeout_s for s in self.specs]
        self._workers = workers
        self._error_limit = error_limit
        self._known_columns: set[str] = set()
        self._lock = threading.Lock()
        self._crew = Crew(workers, pickle.dumps(self.specs), limits_s, start_timeout_s)
        self._finalizer = weakref.finalize(self, self._crew.shut_down)

    def warmup(self, columns: Iterable[str] | None = None) -> None:
        """Start every worker and load every function, so that a wrong path fails here and not at step 1.

        columns: the names of all columns of the data. If given, functions that need another one fail here
            too, and a
        batch in which no prompt has a column passes None for it.
        """
        with self._turn():
            needs = self._crew.load(everyone=True)
            if columns is not None:
                known = set(columns) - NOT_COLUMNS
                check_columns(self.specs, needs, known)
                self._known_columns = known

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        """Score B rollouts.

        prompts, completions: B strings, or B lists of chat messages. completion_ids: B sequences of token
            ids.
        columns: name -> B values; None where a prompt lacks the column.
        """
        count = len(prompts)
        given = {name: list(values) for name, values in (columns or {}).items()}
        for name, values in {**given, "completions": completions, "completion_ids": completion_ids}.items():
            if len(values) != count:
                raise RewardError(f"{len(values)} {name} for {count} prompts: every list needs one value a rollout")
        with self._turn():
            given |= {name: [None] * count for name in self._known_columns - given.keys()}
            if count:
                check_columns(self.specs, self._crew.load(everyone=False), set(given))
            batch = Batch(list(prompts), list(completions), [list(ids) for ids in completion_ids], given)
            call = Call(self.specs, batch, self._error_limit)
            call.plan(self._workers)
            self._crew.drive(call)
            return call.result()

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> RewardResult:
        """`score` of the engine's rollouts: chat prompts get chat completions, columns are the union over
        the prompts."""
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
        return self.score(
            [rollout.prompt.content for rollout in rollouts],
            [
                r.text if isinstance(r.prompt.content, str) else [{"role": "assistant", "content": r.text}]
                for r in rollouts
            ],
            [rollout.token_ids for rollout in rollouts],
            {n: [rollout.prompt.columns.get(n) for rollout in rollouts] for n in names if n not in NOT_COLUMNS},
        )

    def close(self) -> None:
        """End every worker and everything it started; the pool cannot be used afterwards. Repeating it does
        nothing."""
        with self._lock:
            if self._finalizer.detach():
                self._crew.shut_down(GRACE_S)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time; whatever interrupts it, no worker stays busy with an abandoned call."""
        with self._lock:
            if not self._finalizer.alive:
                raise RewardError("this reward pool is closed: make another one")
            try:
                yield
            except BaseException:
                self._crew.abort()
                raise


def check_specs(specs: Sequence[RewardSpec]) -> None:
    """RewardError for no function, an unknown built-in, a repeated name, or weights that are all zero."""
    if not specs:
        raise RewardError("no reward function: name at least one, for instance " + ", ".join(sorted(BUILTINS)))
    for spec in specs:
        if spec.is_builtin and spec.path not in BUILTINS:
            raise RewardError(
                f"no built-in reward {spec.path!r}; {nearest(spec.path, BUILTINS)} "
                "(for your own function write package.module.function or path/to/file.py:function)"
            )
    names = [spec.name for spec in specs]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise RewardError(f"two reward functions are called {twice[0]!r}: give one of them another name")
    if all(spec.weight == 0 for spec in specs):
        raise RewardError("every reward function has weight 0: give one of them another weight")
