"""The worker processes of a pool and the loop that feeds them.

One thread, the caller's, does everything.
consumes: tasks from Call.pending. produces: scores in the Call, replacement workers.
waits for: a worker's pipe, at most TICK_S. unblocked by: a reply, a death (also seen by polling), a deadline.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from logra.errors import RewardError
from logra.rl.rewards.call import Call, Task
from logra.rl.rewards.process import Guardian, WorkerProcess
from logra.rl.rewards.spec import Score

TICK_S = 0.1  # how soon a death is seen when a forked child keeps the dead worker's pipe open
GRACE_S = 0.5
EXIT_S = 0.5  # a dying process closes its pipe a little before its exit code can be read


@dataclass
class _Slot:
    """A worker and what it does. Loading: not ready, no task. Idle: ready, no task. Busy: ready, a task."""

    process: WorkerProcess
    deadline: float
    is_ready: bool = False
    task: Task | None = None
    has_begun: bool = False
    num_done: int = 0

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.task is None


class Crew:
    """limits_s: seconds for one call of each function. first_request: what makes a new worker load them."""

    def __init__(self, size: int, first_request: bytes, limits_s: Sequence[float], start_limit_s: float) -> None:
        self.needs: list[list[str]] | None = None
        self._size = size
        self._first_request = first_request
        self._limits_s = limits_s
        self._start_limit_s = start_limit_s
        self._slots: list[_Slot] = []
        self._guardian = Guardian()
        self._owner = os.getpid()

    def load(self, everyone: bool) -> list[list[str]]:
        """Start what is missing, wait for one worker or all. Returns the columns each function needs."""
        if os.getpid() != self._owner:
            raise RewardError("a reward pool works only in the process that made it: make one in each process")
        for slot in list(self._slots):
            if slot.is_idle and slot.process.exit_code() is not None:
                self._drop(slot)
        while len(self._slots) < self._size:
            self._start()
        while self.needs is None or (everyone and not all(slot.is_ready for slot in self._slots)):
            self._attend(None)
        return self.needs

    def drive(self, call: Call) -> None:
        """Until every rollout of the call has a score."""
        while call.pending or any(slot.task for slot in self._slots):
            for slot in list(self._slots):
                if call.pending and slot.is_idle:
                    self._send(slot, call)
            self._attend(call)

    def abort(self) -> None:
        """After an exception: no worker may come back with an answer to an abandoned call."""
        for slot in list(self._slots):
            if not slot.is_idle:
                self._drop(slot)

    def shut_down(self, grace_s: float = 0.0) -> None:
        if os.getpid() != self._owner:  # a forked copy of the trainer must not kill the trainer's workers
            return
        for slot in self._slots:
            if slot.is_idle:
                slot.process.connection.close()
        for slot in list(self._slots):
            self._drop(slot, grace_s if slot.is_idle else 0.0)
        self._guardian.close()

    def _start(self) -> None:
        process = WorkerProcess(self._first_request, self._guardian)
        self._slots.append(_Slot(process, time.monotonic() + self._start_limit_s))

    def _drop(self, slot: _Slot, grace_s: float = 0.0) -> None:
        self._slots.remove(slot)
        slot.process.kill(grace_s)

    def _send(self, slot: _Slot, call: Call) -> None:
        task = call.pending.popleft()
        request = call.request(task)
        try:
            slot.process.connection.send_bytes(request)
        except (BrokenPipeError, ConnectionResetError):
            self._drop(slot)
            self._start()
            call.retry(task)
            return
        slot.task, slot.has_begun, slot.num_done = task, False, 0
        slot.deadline = time.monotonic() + self._limits_s[task.spec]

    def _attend(self, call: Call | None) -> None:
        """Read what has come, then look for the dead and the late. `call` is None while workers only load."""
        active = {slot.process.connection: slot for slot in self._slots if not slot.is_idle}
        soonest = min((slot.deadline for slot in active.values()), default=math.inf) - time.monotonic()
        wait(list(active), timeout=min(TICK_S, max(0.0, soonest)))
        for connection, slot in active.items():
            is_dead = slot.process.exit_code() is not None
            if connection.poll():  # before any verdict: it may have answered just in time
                is_dead = not self._read(slot, call)
            is_late = time.monotonic() > slot.deadline
            if not slot.is_idle and (is_dead or is_late):
                self._lose(slot, call, is_late=not is_dead)

    def _read(self, slot: _Slot, call: Call | None) -> bool:
        """One reply. False if the pipe has ended or carries something that no worker sends."""
        try:
            reply = json.loads(slot.process.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return False
        if "failed" in reply or "breach" in reply:
            raise RewardError(reply.get("failed") or reply["breach"])
        if "ready" in reply:
            self.needs, slot.is_ready = reply["ready"], True
            return True
        assert call is not None and slot.task is not None
        slot.has_begun = True
        scores = [Score(value, status, message) for value, status, message in reply.get("scores", ())]
        call.record(slot.task, slot.num_done, scores)
        slot.num_done += len(scores)
        slot.deadline = time.monotonic() + self._limits_s[slot.task.spec]
        if slot.num_done == len(slot.task.rollouts):
            slot.task = None
        return True

    def _lose(self, slot: _Slot, call: Call | None, is_late: bool) -> None:
        """Replace a worker that died or hangs, and book what it was doing."""
        code, task = slot.process.exit_code(0.0 if is_late else EXIT_S), slot.task
        self._drop(slot)
        if task is None:
            how = f"did not within {self._start_limit_s:g} s" if is_late else f"ended with exit code {code}"
            raise RewardError(f"a reward worker {how} while it loaded the reward functions; see its output above")
        self._start()
        assert call is not None
        if is_late:
            call.fail(task, slot.num_done, "timeout", f"no result within {self._limits_s[task.spec]:g} s")
        elif not slot.has_begun:
            call.retry(task)
        else:
            call.fail(task, slot.num_done, "error", f"the process that ran it ended with exit code {code}")
