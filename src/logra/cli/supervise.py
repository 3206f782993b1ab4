"""Runs the processes of a launch: their lines with a prefix, servers that die started again, everything ended together.

Children are sessions of their own, so a Ctrl-C reaches the launcher alone, which ends them in order: the trainer, then the
servers. However the launcher itself ends, they do: on SIGTERM it ends them; killed with -9, its guardian does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from logra.cli import guardian
from logra.cli.launch_plan import Command, LaunchPlan
from logra.errors import LograError, UserError

MOST_RESTARTS, RESTART_WINDOW_S = 3, 600.0
TAIL_LINES = 20
POLL_S = 0.1
_WAIT_NOTE_S = 30.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class ServerError(LograError):
    """A server died too often. The text has its last lines."""


class Child:
    """A started command. Its lines go to `write`, the last ones stay in `tail`."""

    def __init__(self, command: Command, environment: Mapping[str, str], write: Callable[[str, str], None]) -> None:
        self.command, self.tail = command, deque[str](maxlen=TAIL_LINES)
        self._write = write
        try:
            self._process = subprocess.Popen(
                command.words,
                env={**environment, **command.environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                preexec_fn=_dying_with(os.getpid()),
            )
        except OSError as error:
            raise UserError(f"{command.name} cannot be started: {error}. Its command was {command.shown()}") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Also its process group and session. Only `end` and `reap` reap it: until then the number is its own."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal. The zombie is left."""
        if self.is_reaped or sys.platform == "darwin":
            return self._process.poll()
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def finish_reading(self) -> None:
        """After its end: the rest of its lines. Something else may hold the pipe for longer."""
        self._reader.join(1)

    @property
    def is_reaped(self) -> bool:
        return self._process.returncode is not None

    def reap(self) -> None:
        """After its end. The number may be another's from now on."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.finish_reading()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.tail.append(line.rstrip("\n"))
                self._write(self.command.name, self.tail[-1])


class Supervisor:
    """One launch. environment: of all children. secret: never written. grace_s: from asking a process to end to killing it."""

    def __init__(
        self, plan: LaunchPlan, environment: Mapping[str, str], *, secret: str = "", grace_s: float = 30.0
    ) -> None:
        self.plan, self.environment, self.secret, self.grace_s = plan, environment, secret, grace_s
        self._mutex = threading.Lock()
        self._signals: list[int] = []
        self._woken = threading.Event()
        self._is_unread = False  # whoever read our output has gone
        self._servers: list[Child] = []
        self._trainer: Child | None = None
        self._restarts: dict[str, deque[float]] = {}
        self._guardian: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Servers, then the trainer, whose exit code is returned (128 + N for signal N, also for one of our own). Main thread."""
        handlers = self._catch_signals()
        _adopt_orphans()
        self._guardian = _start_guardian(self.grace_s)
        try:
            for command in self.plan.servers:
                self._servers.append(self._start(command))
            if self._wait_until_healthy():
                self._trainer = self._start(self.plan.trainer)
                return self._watch(self._trainer)
            return self._own_code()
        finally:
            self._end_all()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # -- the course of things -----------------------------------------------------------------------------------------

    def _watch(self, trainer: Child) -> int:
        while not self._is_stopping():
            if (code := trainer.exit_code()) is not None:
                self.say(f"training ended with exit code {code}" if code else "training is done")
                return 128 - code if code < 0 else code
            for index, server in enumerate(self._servers):
                if server.exit_code() is not None:
                    self._servers[index] = self._restart(server)
            self._woken.wait(POLL_S)
        return self._own_code()

    def _wait_until_healthy(self) -> bool:
        """False if we were told to stop. Raises `UserError` for a server that ends before it is ready."""
        started = noted = time.monotonic()
        waiting = list(self._servers)
        while waiting and not self._is_stopping():
            for server in self._servers:
                if (code := server.exit_code()) is not None:
                    server.finish_reading()
                    raise UserError(
                        f"{server.command.name} ended with exit code {code} before it was ready; its last lines:\n"
                        + "\n".join(self._masked(line) for line in server.tail)
                    )
            waiting = [server for server in waiting if not is_healthy(server.command.url or "")]
            if time.monotonic() - noted > _WAIT_NOTE_S:
                noted = time.monotonic()
                names = ", ".join(server.command.name for server in waiting)
                self.say(f"waiting for {names} ({noted - started:.0f} s)")
            self._woken.wait(POLL_S)
        if self.plan.servers and not waiting:
            self.say(f"servers are ready after {time.monotonic() - started:.0f} s")
        return not self._is_stopping()

    def _restart(self, server: Child) -> Child:
        """The same command again, if it does not die too often; the trainer brings it to its version."""
        command, code = server.command, server.exit_code()
        self._end([server], 0.0)
        times = self._restarts.setdefault(command.name, deque())
        now = time.monotonic()
        while times and now - times[0] > RESTART_WINDOW_S:
            times.popleft()
        if len(times) >= MOST_RESTARTS:
            raise ServerError(
                f"{command.name} ended with exit code {code}, after {MOST_RESTARTS} new starts within "
                f"{RESTART_WINDOW_S / 60:.0f} minutes; its last lines:\n" + "\n".join(map(self._masked, server.tail))
            )
        times.append(now)
        self.say(f"{command.name} ended with exit code {code}: started again ({len(times)} of {MOST_RESTARTS})")
        return self._start(command)

    def _start(self, command: Command) -> Child:
        child = Child(command, self.environment, self._write)
        self._tell_guardian(f"+{child.pid}\n")
        return child

    def _end_all(self) -> None:
        """The trainer first, which would otherwise miss its servers; a second signal ends the patience."""
        told = len(self._signals)
        first = signal.SIGINT if self._signals[:1] == [signal.SIGINT] else signal.SIGTERM
        if self._trainer is not None:
            self._end([self._trainer], self.grace_s, first=first, told=told)
        self._end(self._servers, self.grace_s, told=told)
        guardian.end([], self.grace_s, seen=self._orphans(), hurry=lambda: len(self._signals) > told)
        if self._guardian is not None and self._guardian.stdin is not None:
            with suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait(self.grace_s + 5)

    def _end(self, children: list[Child], grace_s: float, *, first: int = signal.SIGTERM, told: int = 0) -> None:
        children = [child for child in children if not child.is_reaped]
        guardian.end([child.pid for child in children], grace_s, first=first, hurry=lambda: len(self._signals) > told)
        for child in children:
            child.reap()
            self._tell_guardian(f"-{child.pid}\n")

    def _orphans(self) -> dict[int, str]:
        """What our children left behind, which is ours by now (Linux)."""
        known = {child.pid for child in self._servers} | {self._guardian.pid if self._guardian else 0}
        mine = [p for p, (parent, *_) in guardian.alive().items() if parent == os.getpid() and p not in known]
        return guardian.tree(mine)

    # -- signals and lines --------------------------------------------------------------------------------------------

    def _catch_signals(self) -> dict[int, Any]:
        def note(number: int, _: object) -> None:
            self._signals.append(number)
            self._woken.set()

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        return {number: signal.signal(number, note) for number in numbers}

    def _is_stopping(self) -> bool:
        return bool(self._signals) or self._is_unread

    def _own_code(self) -> int:
        if not self._signals:
            return 141
        self.say(f"stopping: {signal.Signals(self._signals[0]).name}")
        return 128 + self._signals[0]

    def say(self, text: str) -> None:
        self._write("launch", text)

    def _write(self, name: str, line: str) -> None:
        with self._mutex:
            if self._is_unread:
                return
            try:
                print(f"[{name}] {self._masked(line)}", flush=True)
            except (BrokenPipeError, ValueError):
                self._is_unread = True
                self._woken.set()

    def _masked(self, line: str) -> str:
        return line.replace(self.secret, "(key)") if self.secret else line

    def _tell_guardian(self, text: str) -> None:
        assert self._guardian is not None and self._guardian.stdin is not None
        with suppress(BrokenPipeError):
            self._guardian.stdin.write(text.encode())


def is_healthy(url: str) -> bool:
    """Whether a server answers its health route."""
    try:
        with _OPENER.open(f"{url}/health", timeout=2.0) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


def _start_guardian(grace_s: float) -> subprocess.Popen[bytes]:
    """In a session of its own, so that nothing meant for us reaches it."""
    script = Path(guardian.__file__)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def _adopt_orphans() -> None:
    """Processes whose parents die become our children, so that we can end them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _dying_with(parent: int) -> Callable[[], None] | None:
    """For a child, before it runs: SIGTERM when we die (Linux). The guardian sees to its children, and to what ignores that."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that
            os._exit(1)

    return set_signal
