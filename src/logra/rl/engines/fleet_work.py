"""How the requests of one call are shared among servers: pure bookkeeping, for one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from logra.errors import ModelError
from logra.rl.engines.vllm_requests import Request
from logra.rl.types import Rollout

T = TypeVar("T")

MOST_TRIES = 5  # servers that one request may see fail in one call, before it is taken for the cause


@dataclass(eq=False)
class Lane(Generic[T]):
    """A member's share in one call. owner: whose it is. concurrency: most requests at once. waiting: requests of the prompt it
    is at, which were not sent yet. running: those sent."""

    owner: T
    concurrency: int
    waiting: deque[int] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)


class Work:
    """The requests of one call, by prompts, and what has come of them."""

    def __init__(self, requests: Sequence[Request], group: int) -> None:
        self.requests = requests
        self._found: list[Rollout | None] = [None] * len(requests)
        self._num_missing = len(requests)
        self._tries = [0] * len(requests)
        self._groups = deque(deque(range(i, i + group)) for i in range(0, len(requests), group))

    @property
    def is_done(self) -> bool:
        return self._num_missing == 0

    def rollouts(self) -> list[Rollout]:
        """In the order of the requests."""
        return [rollout for rollout in self._found if rollout is not None]

    def put(self, index: int, rollout: Rollout) -> None:
        """The first answer counts; a late one of a member that was dropped may be the second."""
        if self._found[index] is None:
            self._found[index] = rollout
            self._num_missing -= 1

    def assign(self, lanes: Sequence[Lane[Any]]) -> list[tuple[Lane[Any], int]]:
        """What to send now: to the member with the least to do, up to its concurrency, whole prompts where that can be (their
        prefix is cached), and the rest of others' prompts in the end."""
        sent = []
        while free := [lane for lane in lanes if len(lane.running) < lane.concurrency]:
            lane = min(free, key=lambda lane: len(lane.running))
            if (index := self._next(lane, lanes)) is None:
                break
            lane.running.add(index)
            sent.append((lane, index))
        return sent

    def _next(self, lane: Lane[Any], lanes: Sequence[Lane[Any]]) -> int | None:
        while True:
            if not lane.waiting and self._groups:
                lane.waiting = self._groups.popleft()
            source = lane.waiting or max((other.waiting for other in lanes), key=len)
            if not source and not self._groups:
                return None
            if source and self._found[index := source.popleft()] is None:
                return index

    def give_back(self, lane: Lane[Any], error: Exception) -> None:
        """A member has failed: others sample what it did not finish. Raises `ModelError` for a request that saw too many fail."""
        for index in lane.running:
            self._tries[index] += 1
            if self._tries[index] >= MOST_TRIES:
                request = self.requests[index]
                raise ModelError(
                    f"prompt {request.prompt.id}, rollout {request.index} was asked for {MOST_TRIES} times, and each time the "
                    f"vLLM server failed: {error}. See the servers' logs"
                ) from error
        self._groups.append(deque(sorted({*lane.running, *lane.waiting})))
        lane.waiting = deque()
