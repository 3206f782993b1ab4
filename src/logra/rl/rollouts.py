"""What is between the sampler and the engine: rollouts of the newest policy, or rollouts made ahead while the trainer computes.

Steps and batches have numbers from 1; batch t is what step t trains on. `OnPolicy` generates a batch when it is asked for one.
`Ahead` has a thread that owns the engine and works through one fixed list, here for ahead = 1:

    batch 1, batch 2, updates of step 1, batch 3, updates of step 2, batch 4, ...

so batch t is sampled by the policy after max(first, t - 1 - ahead) steps, `first` being the steps done when the source was made
(0, or where a run was resumed). While the trainer computes step t the engine samples batches t + 1 to t + ahead. With on_update
"finish" the list alone decides what is sampled by which version: the same seed gives the same run whatever the timing. The two
other ways apply an Update as soon as it is there: "keep" while requests run, "restart" after dropping what is in flight, which
is asked for again. No rollout is older than with "finish", but which version samples what is up to the timing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from logra.errors import ConfigError, MismatchError
from logra.rl.engines.base import Engine, Interrupted, RemoteEngine
from logra.rl.sampler import PromptSampler
from logra.rl.types import Prompt, Rollout, Sampling

OnUpdate = Literal["finish", "keep", "restart"]
CLOSE_S = 30.0  # how long `close` waits for a call of the engine to end


@dataclass(frozen=True)
class Batch:
    """The rollouts of one step. seconds: of generating them. position: the sampler's state once its prompts were drawn."""

    prompts: list[Prompt]
    rollouts: list[Rollout]
    seconds: float
    position: Mapping[str, Any]


class Source(Protocol):
    """Where the trainer's rollouts come from. One thread calls it."""

    def take(self, step: int) -> Batch:
        """The batch of the step that follows `step` finished ones. Raises what the engine raised."""
        ...

    def publish(self, version: int, message: object | None) -> None:
        """An Update of the step under way; `message` must not change afterwards."""
        ...

    def finish(self, step: int) -> None:
        """So many steps are finished: their Updates are all published."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """Within it the engine is at the newest version and samples for nobody but the caller (evaluation)."""
        ...

    def state(self) -> dict[str, Any]:
        """The sampler's state as of the last batch that was taken, whatever was drawn ahead."""
        ...

    def close(self) -> None:
        """Give the engine back, with the sampler at `state`. What was sampled ahead is dropped. May be called twice."""
        ...


@dataclass
class Order:
    """What every batch asks for."""

    engine: Engine
    sampler: PromptSampler
    prompts: Sequence[Prompt]
    num_rollouts: int
    sampling: Sampling

    def draw(self) -> list[Prompt]:
        return [self.prompts[index] for index in self.sampler.next_batch()]

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        """Random numbers are keyed by the step, the prompt and the rollout's index: by no version and no moment."""
        return self.engine.generate(prompts, self.num_rollouts, replace(self.sampling, step=step))


def make_source(order: Order, *, ahead: int, on_update: OnUpdate, first: int, last: int) -> Source:
    """ahead: how many batches are made ahead; 0: none, strictly on-policy. first, last: finished steps, now and in the end.

    Raises `ConfigError` for an engine that cannot do what is asked.
    """
    if ahead == 0:
        return OnPolicy(order)
    return Ahead(order, ahead=ahead, on_update=on_update, first=first, last=last)


def check_versions(rollouts: Sequence[Rollout], step: int, *, oldest: int, newest: int) -> None:
    """Raise `MismatchError` if a rollout was sampled by none of the versions `oldest` to `newest`."""
    strange = sorted({r.version for r in rollouts} - set(range(oldest, newest + 1)))
    if strange:
        allowed = f"at {newest}" if oldest == newest else f"at {newest} and takes rollouts of {oldest} and later"
        raise MismatchError(
            f"step {step}: the rollout engine sampled from version {strange[0]} of the policy, the trainer is {allowed}: "
            "an update was lost or applied twice; restart the engine and resume the run"
        )


class OnPolicy:
    """Generates when asked; an Update is applied when it is published."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def take(self, step: int) -> Batch:
        prompts = self.order.draw()
        started = time.perf_counter()
        rollouts = self.order.generate(prompts, step)
        return Batch(prompts, rollouts, time.perf_counter() - started, self.state())

    def publish(self, version: int, message: object | None) -> None:
        self.order.engine.publish(version, message)

    def finish(self, step: int) -> None:
        pass

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return self.order.sampler.state_dict()

    def close(self) -> None:
        pass


class Ahead:
    """See the module. The thread starts with the first `take`; until then the engine is the caller's.

    An error of the thread is raised, as it is, by the next `take` or `exclusive`, and by all that follow.
    """

    def __init__(
        self, order: Order, *, ahead: int, on_update: OnUpdate, first: int, last: int, close_s: float = CLOSE_S
    ) -> None:
        _check_engine(order.engine, on_update)
        self.order, self.ahead, self.on_update = order, ahead, on_update
        self.last, self.close_s = last, close_s
        self._turn = threading.Condition()  # guards all below
        self._finished, self._next = first, first + 1  # steps; the batch to be made next
        self._ready: deque[Batch] = deque()
        self._pending: deque[tuple[int, int, object | None]] = deque()  # step, version, message
        self._drawn: tuple[list[Prompt], dict[str, Any]] | None = None  # asked for, and not sampled yet
        self._position = order.sampler.state_dict()
        self._version = 0
        self._is_held = self._is_closing = self._is_busy = self._is_generating = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    # -- the trainer's side -------------------------------------------------------------------------------------------

    def take(self, step: int) -> Batch:
        """The batch after `step` finished steps; waits for it if the engine is behind."""
        with self._turn:
            if self._thread is None:
                self._version = self.order.engine.version
                self._thread = threading.Thread(target=self._run, name="rollouts-ahead", daemon=True)
                self._thread.start()
            self._wait(lambda: bool(self._ready))
            batch = self._ready.popleft()
            self._position = batch.position
            return batch

    def publish(self, version: int, message: object | None) -> None:
        """Hand an Update to the thread ("keep": to the engine, at once)."""
        if self.on_update == "keep":
            self.order.engine.publish(version, message)
            return
        with self._turn:
            self._pending.append((self._finished + 1, version, message))
            is_stale = self.on_update == "restart" and self._is_generating
            self._turn.notify_all()
        if is_stale:
            _remote(self.order.engine).abort()

    def finish(self, step: int) -> None:
        with self._turn:
            self._finished = step
            self._turn.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits until the batches of the older versions are made and the Updates applied; holds what comes then."""
        with self._turn:
            self._is_held = True
            self._turn.notify_all()
            try:
                self._wait(self._is_settled)
            except BaseException:
                self._is_held = False
                raise
        try:
            yield
        finally:
            with self._turn:
                self._is_held = False
                self._turn.notify_all()

    def state(self) -> dict[str, Any]:
        return dict(self._position)

    def close(self) -> None:
        """Ends the thread: drops what is in flight and waits up to `close_s`. A thread that hangs longer is left to die with
        the process; it makes nothing more."""
        with self._turn:
            self._is_closing = True
            is_generating = self._is_generating
            self._turn.notify_all()
        if self._thread is not None:
            if is_generating:
                _remote(self.order.engine).abort()
            self._thread.join(self.close_s)
            self.order.sampler.load_state_dict(self._position)
            self._thread = None

    def _wait(self, is_there: Callable[[], bool]) -> None:
        """Wait, with the lock, until `is_there`. Raises the thread's error, whose type and words stay."""
        self._turn.wait_for(lambda: is_there() or self._error is not None or self._is_closing)
        if self._error is not None:
            raise self._error
        if self._is_closing:
            raise RuntimeError("the source of rollouts is closed")

    def _is_settled(self) -> bool:
        made = self._next > min(self._finished + self.ahead, self.last)
        return self._thread is None or (made and not self._pending and not self._is_busy)

    # -- the thread's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
        except BaseException as error:  # whatever it is, it belongs to whoever waits for rollouts
            with self._turn:
                self._error = error
                self._is_busy = self._is_generating = False
                self._turn.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """What the list says, once it may be done; None: closed."""
        with self._turn:
            self._is_busy = self._is_generating = False
            self._turn.notify_all()
            while not self._is_closing:
                if self._may_apply():
                    self._is_busy = True
                    return self._apply
                if self._may_generate():
                    self._is_busy = self._is_generating = True
                    return self._generate
                self._turn.wait()
        return None

    def _may_apply(self) -> bool:
        """In turn: before an Update come all batches of the versions before it."""
        is_due = self.on_update != "finish" or self._next > self.last
        return bool(self._pending) and (is_due or self._pending[0][0] < self._next - self.ahead)

    def _may_generate(self) -> bool:
        room = self.ahead if self._is_held else self.ahead + 1
        return self._next <= min(self._finished + room, self.last)

    def _apply(self) -> None:
        with self._turn:
            _, version, message = self._pending[0]
        self.order.engine.publish(version, message)
        with self._turn:
            self._version = version
            self._pending.popleft()

    def _generate(self) -> None:
        """Make the next batch; one that was interrupted stays to be made, of the same prompts and random numbers."""
        if self._drawn is None:
            self._drawn = self.order.draw(), self.order.sampler.state_dict()
        prompts, position = self._drawn
        engine, before, started = self.order.engine, self._version, time.perf_counter()
        if self.on_update == "keep":
            before = engine.version
        try:
            rollouts = self.order.generate(prompts, self._next - 1)
        except Interrupted:
            return
        after = engine.version if self.on_update == "keep" else before
        check_versions(rollouts, self._next, oldest=before, newest=after)
        with self._turn:
            self._ready.append(Batch(prompts, rollouts, time.perf_counter() - started, position))
            self._drawn = None
            self._next += 1


def _remote(engine: Engine) -> RemoteEngine:
    assert isinstance(engine, RemoteEngine)  # checked when the source was made
    return engine


def _check_engine(engine: Engine, on_update: OnUpdate) -> None:
    if not isinstance(engine, RemoteEngine):
        raise ConfigError(
            f"rollout.async needs an engine that runs beside the trainer, and {type(engine).__name__} computes in the "
            "trainer's process: use a vLLM server (rollout.engine=vllm, rollout.vllm.url), or rollout.async=0"
        )
    if on_update == "keep" and not engine.publishes_midway:
        raise ConfigError(
            f"rollout.on_update=keep changes weights while requests run, which {type(engine).__name__} was not made for: use "
            "finish or restart"
        )
