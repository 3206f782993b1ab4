"""Several vLLM servers as one engine: the work is shared, a server that fails is left out and taken up again when it is back.

What a rollout holds depends on its seed, not on the server that samples it, so an unfinished request is simply asked of another
one. A server is used only while all its workers acknowledge the trainer's version; one that comes back, or was started anew, is
brought there by Updates of the run's log or by an anchor. No server left is no failure either until `patience_s` are over.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from logra.errors import LograError, ModelError, UpdateError, UpdateOrderError, UserError
from logra.rl.engines.base import Interrupted, check_sampling
from logra.rl.engines.fleet_work import Lane, Work
from logra.rl.engines.vllm_link import TransferError
from logra.rl.engines.vllm_requests import Request, check_lengths
from logra.rl.engines.vllm_server import UnavailableError
from logra.rl.types import Prompt, Rollout, Sampling
from logra.sketch.update import Update
from logra.sync.acknowledge import Acknowledgement
from logra.sync.log import Log
from logra.sync.packet import Packet

logger = logging.getLogger(__name__)

_PROBE_S = 2.0

Live = Literal["always", "placing", "never"]


class Member(Protocol):
    """What a fleet needs of one server: `VLLMServerEngine` made with connect=False. Failures are UpdateError or ModelError."""

    url: str
    concurrency: int

    @property
    def pad_token_id(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def version(self) -> int: ...
    def is_up(self, timeout_s: float) -> bool: ...
    def join(self) -> None: ...
    def catch_up(self, version: int, log: Log | None, *, is_live: bool) -> None: ...
    def check(self) -> None: ...
    def publish(self, version: int, update: object | None) -> None: ...
    def requests(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Request]: ...
    def sample(self, request: Request) -> Rollout: ...
    def digest(self) -> str: ...
    def acknowledgements(self) -> list[Acknowledgement]: ...
    def abort(self) -> None: ...
    def rearm(self) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Seat:
    """A member and how it stands. next_try: when a dropped one is tried again (monotonic)."""

    member: Member
    reason: str | None = "not joined yet"
    next_try: float = 0.0
    was_joined: bool = False
    told: str = ""

    @property
    def is_healthy(self) -> bool:
        return self.reason is None


class FleetEngine:
    """See the module and `Engine`. One url is a fleet too: a server that is killed and started again costs no step.

    make_member: the server at a url, not connected yet; each needs a transfer folder of its own.
    log: of the run, from which a server that comes back is brought to our version; None: always by an anchor.
    live: when the trainer's weights may be read, for an anchor or to compare digests. "always": they are those of our version
    during `generate` and `publish`, strictly on-policy. "placing": only in `publish(version, None)`, rollouts being made ahead.
    "never": they are sharded, so that reading them takes more ranks than this one. Without, servers come back by the log alone.
    patience_s: how long to wait, at the start and whenever no server is left. retry_s: between two tries of a dropped server.

    `generate` and `publish` may come from two threads; they take turns. `abort` may come from any.
    """

    publishes_midway = False

    def __init__(
        self,
        urls: Sequence[str],
        make_member: Callable[[str], Member],
        *,
        log: Log | None = None,
        live: Live = "always",
        patience_s: float = 300.0,
        retry_s: float = 3.0,
    ) -> None:
        self.log, self.live, self.patience_s, self.retry_s = log, live, patience_s, retry_s
        self._version, self._max_model_len = 0, 0
        self._is_placed = False  # whether our version is known to be that of the weights in the trainer
        self._num_dropped = self._num_rejoined = 0
        self._turn, self._aborting = threading.Lock(), threading.Lock()
        self._is_aborted = threading.Event()
        self._results: queue.SimpleQueue[_Result | None] = queue.SimpleQueue()
        self._seats: list[_Seat] = []
        try:
            self._seats += [_Seat(make_member(url)) for url in urls]
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Updates in the policy that is sampled."""
        return self._version

    @property
    def pad_token_id(self) -> int:
        """Any id of the vocabulary: it fills places that are masked."""
        return self._seats[0].member.pad_token_id

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response: the least of the servers at the start; one with less is not used later."""
        return self._max_model_len

    def check_lengths(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Raise `ModelError` if a prompt and `max_new_tokens` exceed the smallest max_model_len of the servers."""
        check_lengths(prompts, max_new_tokens, self.max_model_len)

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`. Raises `TransferError` if no server is left for `patience_s`, `Interrupted` after
        `abort`, and what an answer shows to be wrong with the policy (`NonFiniteError`)."""
        check_sampling(sampling, num_rollouts)
        self.check_lengths(prompts, sampling.max_new_tokens)
        if not self._is_placed:
            for seat in self._healthy() or self._seats:
                seat.member.check()  # raises: which version an anchor would be of, only `publish` can say
            self._is_placed = True
        work = Work(self._seats[0].member.requests(prompts, num_rollouts, sampling), num_rollouts)
        try:
            self._mend()
            while True:
                with self._turn:
                    self._sample(work)
                if work.is_done:
                    return work.rollouts()
                self._wait_for_a_server()
        finally:
            with self._aborting:  # until every server has been told
                self._is_aborted.clear()
                for seat in self._seats:
                    seat.member.rearm()

    def abort(self) -> None:
        """See `RemoteEngine.abort`."""
        with self._aborting:
            self._is_aborted.set()
            self._each(self._healthy(), lambda seat: seat.member.abort())
            self._results.put(None)

    def publish(self, version: int, update: object | None) -> None:
        """Bring all servers to `version`, at the same time; see `Link.publish`. One that fails is dropped, not the run."""
        _check_update(version, update)
        with self._turn:
            healthy = self._healthy()
            self._version, self._is_placed = version, True
            is_live = self.live == "always" or (self.live == "placing" and update is None)

            def bring(seat: _Seat) -> None:
                if update is None and not is_live:
                    seat.member.catch_up(version, self.log, is_live=False)
                else:
                    seat.member.publish(version, update)

            self._drop_failed(self._each(healthy, bring))
            self._revive(self._answering(), is_live)

    def digest(self) -> str:
        """The digest of the servers' float32 weights, as they are now. Raises `UpdateError` if they differ."""
        digests = {seat.member.url: seat.member.digest() for seat in self._healthy()}
        if len({*digests.values()}) != 1:
            raise UpdateError(f"the vLLM servers hold different weights, or there is none: {digests}")
        return next(iter(digests.values()))

    def acknowledgements(self) -> list[Acknowledgement]:
        """The word of each worker of each server in use."""
        return [
            replace(word, name=f"server-{number}-{word.name}")
            for number, seat in enumerate(self._seats)
            if seat.is_healthy
            for word in seat.member.acknowledgements()
        ]

    def metrics(self) -> dict[str, float]:
        """Servers in use now; drops and returns since the start."""
        return {
            "rollout/servers": float(len(self._healthy())),
            "rollout/dropped": float(self._num_dropped),
            "rollout/rejoined": float(self._num_rejoined),
        }

    def close(self) -> None:
        """Close the connections; the servers run on. May be called twice."""
        for seat in self._seats:
            seat.member.close()

    # -- who is in use ----------------------------------------------------------------------------------------------

    def _healthy(self) -> list[_Seat]:
        return [seat for seat in self._seats if seat.is_healthy]

    def _start(self) -> None:
        """Join the servers that are there, at least one. What one refuses at the start is for the user to mend: raised."""
        deadline, words = time.monotonic() + self.patience_s, ""
        while not self._healthy():
            for seat, error in self._each(self._answering(), lambda seat: seat.member.join()).items():
                if error is None:
                    seat.reason, seat.was_joined = None, True
                elif isinstance(error, UnavailableError):
                    words = f" ({error})"
                else:
                    raise error
            if self._healthy():
                break
            if time.monotonic() >= deadline:
                urls = ", ".join(seat.member.url for seat in self._seats)
                raise TransferError(
                    f"no vLLM server was ready at {urls} within {self.patience_s:g} s{words}: start one with vllm serve "
                    "(docs/sync.md), or let logra launch start it"
                )
            time.sleep(min(0.5, self.retry_s))
        self._max_model_len = min(seat.member.max_model_len for seat in self._healthy())
        for seat in self._seats:
            if not seat.is_healthy:
                logger.warning("the vLLM server at %s is not there yet: the run begins without it", seat.member.url)

    def _answering(self) -> list[_Seat]:
        """Dropped members whose time for another try has come, and that answer."""
        now = time.monotonic()
        due = [seat for seat in self._seats if not seat.is_healthy and now >= seat.next_try]
        up: list[_Seat] = []

        def probe(seat: _Seat) -> None:
            started = time.monotonic()
            if seat.member.is_up(_PROBE_S):
                up.append(seat)
            # one that does not even refuse costs time at each try: a tenth of the run's at most
            now = time.monotonic()
            seat.next_try = now + max(self.retry_s, 10 * (now - started))

        self._each(due, probe)
        return up

    def _revive(self, seats: Sequence[_Seat], is_live: bool) -> None:
        """Bring members to our version; those that get there are used."""

        def bring(seat: _Seat) -> None:
            seat.member.catch_up(self._version, self.log, is_live=is_live)
            if (length := seat.member.max_model_len) < self._max_model_len:
                raise ModelError(
                    f"its max_model_len is {length}, the run began with {self._max_model_len}: start it with that"
                )
            seat.member.check()

        for seat, error in self._each(seats, bring).items():
            if error is None:
                verb = "back" if seat.was_joined else "there"
                logger.warning("the vLLM server at %s is %s, at version %d", seat.member.url, verb, self._version)
                self._num_rejoined += seat.was_joined
                seat.reason, seat.was_joined, seat.told = None, True, ""
            else:
                seat.reason, seat.next_try = str(error), time.monotonic() + self.retry_s
                if seat.told != seat.reason:  # once, not at every try
                    logger.warning("the vLLM server at %s answers, and is no use: %s", seat.member.url, error)
                seat.told = seat.reason

    def _mend(self) -> None:
        """Drop members that are not where they should be, and take up those that are back."""
        with self._turn:
            self._drop_failed(self._each(self._healthy(), lambda seat: seat.member.check()))
            self._revive(self._answering(), self.live == "always")

    def _drop_failed(self, outcomes: dict[_Seat, LograError | None]) -> None:
        for seat, error in outcomes.items():
            if error is not None:
                self._drop(seat, error)

    def _drop(self, seat: _Seat, error: LograError) -> None:
        if not seat.is_healthy:
            return
        seat.reason, seat.next_try = str(error), 0.0  # at once: it may be a fresh process already
        self._num_dropped += 1
        logger.warning("the vLLM server at %s is left out: %.500s", seat.member.url, error)

    def _wait_for_a_server(self) -> None:
        deadline, is_told = time.monotonic() + self.patience_s, False
        while True:
            self._mend()
            self._check_aborted()
            if self._healthy():
                return
            if time.monotonic() >= deadline:
                reasons = "; ".join(f"{seat.member.url}: {seat.reason}" for seat in self._seats)
                raise TransferError(
                    f"no vLLM server was left to sample with, for {self.patience_s:g} s (rollout.vllm.patience_s): "
                    f"{reasons:.2000}. Start them again and resume the run: --resume auto"
                )
            if not is_told:
                logger.warning("no vLLM server is left: waiting up to %g s for one to come back", self.patience_s)
                is_told = True
            time.sleep(min(0.2, self.retry_s))

    def _check_aborted(self) -> None:
        if self._is_aborted.is_set():
            raise Interrupted

    def _each(self, seats: Iterable[_Seat], call: Callable[[_Seat], None]) -> dict[_Seat, LograError | None]:
        """`call` for all at the same time; what went wrong for each (what is no failure of a server is raised)."""
        seats = list(seats)
        if len(seats) < 2:
            return {seat: _attempt(call, seat) for seat in seats}
        with ThreadPoolExecutor(len(seats), thread_name_prefix="vllm-fleet") as pool:
            return dict(zip(seats, pool.map(lambda seat: _attempt(call, seat), seats), strict=True))

    # -- sampling ---------------------------------------------------------------------------------------------------

    def _sample(self, work: Work) -> None:
        """Go on with `work` until it is done or nobody is left."""
        results = self._results = queue.SimpleQueue()  # late answers of a call before go nowhere
        self._check_aborted()
        lanes = [Lane(seat, seat.member.concurrency) for seat in self._healthy()]
        while not work.is_done and lanes:
            for lane, index in work.assign(lanes):
                arguments = (lane, index, work.requests[index], self._version, results)
                threading.Thread(target=_ask, args=arguments, daemon=True).start()
            if (result := results.get()) is None:
                raise Interrupted
            lane, error = result.lane, result.error
            if result.rollout is not None:
                work.put(result.index, result.rollout)
            elif not isinstance(error, (UpdateError, ModelError)):
                assert error is not None
                raise error
            elif lane in lanes:
                self._drop(lane.owner, error)
                lanes.remove(lane)
                work.give_back(lane, error)
            lane.running.discard(result.index)


@dataclass(frozen=True)
class _Result:
    lane: Lane[_Seat]
    index: int
    rollout: Rollout | None = None
    error: Exception | None = None


def _ask(
    lane: Lane[_Seat], index: int, request: Request, version: int, results: queue.SimpleQueue[_Result | None]
) -> None:
    try:
        rollout = lane.owner.member.sample(request)
        if rollout.version != version:
            raise UpdateOrderError(f"it sampled from version {rollout.version} of the policy, not from {version}")
    except Exception as error:  # whatever it is, the caller's thread gets it
        results.put(_Result(lane, index, error=error))
    else:
        results.put(_Result(lane, index, rollout))


def _attempt(call: Callable[[_Seat], None], seat: _Seat) -> LograError | None:
    try:
        call(seat)
    except UserError as error:
        return error
    return None


def _check_update(version: int, update: object | None) -> None:
    """The trainer's own mistakes, before any server is blamed for them."""
    if update is None:
        return
    if not isinstance(update, Update | Packet):
        raise UpdateError(f"vLLM servers take Updates and packets, not {type(update).__name__}")
    if update.index + 1 != version:
        raise UpdateOrderError(f"update {update.index} leads to version {update.index + 1}, not to {version}")
