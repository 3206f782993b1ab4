"""What a run has once, seen from all of its ranks: rollouts, scores, the journal. See `logra.rl.world`.

Each class stands where the trainer expects the thing itself; every rank calls it at the same place, rank 0 (or, for rollouts
made by the trainer's own model, every rank its part) does the work, and all get the result or the error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from logra.rl.engines.base import Engine, engine_metrics
from logra.rl.rewards.pool import RewardPool
from logra.rl.rewards.result import RewardResult
from logra.rl.rollouts import Batch, Source
from logra.rl.types import Prompt, Rollout, Sampling
from logra.rl.world import World


class SharedEngine:
    """An engine that rank 0 alone talks to. engine: None on the other ranks."""

    def __init__(self, world: World, engine: Engine | None) -> None:
        self.world, self.engine = world, engine
        # known here without asking: whoever only looks at a property must not need the other ranks
        self.pad_token_id, self.version = self._ask(lambda engine: (engine.pad_token_id, engine.version))

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        return self._ask(lambda engine: engine.generate(prompts, num_rollouts, sampling))

    def publish(self, version: int, update: object | None) -> None:
        self._ask(lambda engine: engine.publish(version, update))
        self.version = version

    def check_lengths(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        self._ask(lambda engine: engine.check_lengths(prompts, max_new_tokens))

    def metrics(self) -> dict[str, float]:
        """Of the first rank's engine, if it has any; nothing elsewhere."""
        return engine_metrics(self.engine)

    @property
    def own(self) -> Engine:
        """The engine itself, on the first rank."""
        assert self.engine is not None
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        return self.world.share(lambda: call(self.engine))


class SpreadEngine:
    """The trainer's own model samples, sharded or not: each rank the responses to its share of the prompts.

    engine: of this rank. gathered: within it the model is whole on every rank, and no rank needs another for a forward pass.
    """

    def __init__(self, world: World, engine: Engine, gathered: Callable[[], AbstractContextManager[None]]) -> None:
        self.world, self.engine, self.gathered = world, engine, gathered
        self.pad_token_id = engine.pad_token_id

    @property
    def version(self) -> int:
        return self.engine.version

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """As `Engine.generate`; what is sampled does not depend on the number of ranks, beyond float rounding."""
        ids = [prompt.id for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda i: ids[i])  # repeats of a prompt stay on one rank
        share = -(-len(prompts) // self.world.size)
        owner = {place: number // share for number, place in enumerate(order)}
        for first, second in itertools.pairwise(order):
            if ids[first] == ids[second]:
                owner[second] = owner[first]
        mine = [place for place in range(len(prompts)) if owner[place] == self.world.rank]
        with self.gathered():
            own = self.engine.generate([prompts[i] for i in mine], num_rollouts, sampling) if mine else []
        groups = [own[i * num_rollouts : (i + 1) * num_rollouts] for i in range(len(mine))]
        found = {
            place: group
            for part in self.world.gather(dict(zip(mine, groups, strict=True)))
            for place, group in part.items()
        }
        return [rollout for place in range(len(prompts)) for rollout in found[place]]

    def publish(self, version: int, update: object | None) -> None:
        self.engine.publish(version, update)

    def check_lengths(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        self.engine.check_lengths(prompts, max_new_tokens)

    def close(self) -> None:
        self.engine.close()


class SharedSource:
    """A source of rollouts with a thread of its own, on rank 0. source: None on the other ranks."""

    def __init__(self, world: World, source: Source | None) -> None:
        self.world, self.source = world, source

    def take(self, step: int) -> Batch:
        return self._ask(lambda source: source.take(step))

    def publish(self, version: int, message: object | None) -> None:
        self._ask(lambda source: source.publish(version, message))

    def finish(self, step: int) -> None:
        self._ask(lambda source: source.finish(step))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._ask(lambda source: stack.enter_context(source.exclusive()))
            yield

    def state(self) -> dict[str, Any]:
        return self._ask(lambda source: source.state())

    def close(self) -> None:
        if self.source is not None:
            self.source.close()

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        return self.world.share(lambda: call(self.source))


class SharedRewards:
    """Scores are made once. pool: None on the other ranks."""

    def __init__(self, world: World, pool: RewardPool | None) -> None:
        self.world, self.pool = world, pool

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> RewardResult:
        return self.world.share(lambda: self.pool.score_rollouts(rollouts))  # type: ignore[union-attr]
