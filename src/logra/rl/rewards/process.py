"""One worker process: its own session, so that it dies with everything it forked; a pipe; a guardian that
survives us.

Started by `subprocess`, not `multiprocessing`: a spawned process would import the caller's main module again
(torch and all, and a script without a main guard would start over).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from logra.errors import RewardError

IN_WORKER = "LOGRA_REWARD_WORKER"
REAP_S = 5.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from logra.rl.rewards.worker import main; main(int(sys.argv[1]))"
)


class Guardian:
    """Holds the list of live process groups in a second process that kills them when this one is gone."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guardian, which kills whatever is still listed."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        process.wait(REAP_S)

    def _tell(self, line: str) -> None:
        if self._process is not None and self._write(line):
            return
        self.close()  # somebody killed it: start another and tell it everything
        script = Path(__file__).with_name("guardian.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._write("".join(f"+{group}\n" for group in self._groups))

    def _write(self, text: str) -> bool:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
        except BrokenPipeError:
            return False
        return True


class WorkerProcess:
    """A started worker. `connection` carries requests and replies; see worker.py for what they are."""

    def __init__(self, first_request: bytes, guardian: Guardian) -> None:
        if os.environ.get(IN_WORKER):
            raise RewardError(
                "a reward worker tried to start reward workers: the file of a reward function starts a run "
                "when it is imported; put the run under `if __name__ == '__main__':`"
            )
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(descriptor), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,
            env={**os.environ, IN_WORKER: "1", "PYTHONUNBUFFERED": "1"},
        )
        theirs.close()
        self._guardian = guardian
        guardian.watch(self.pid)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died at once: whoever waits for it will see
            self.connection.send_bytes(first_request)

    @property
    def pid(self) -> int:
        """Also its process group and session. Only `kill` reaps it: until then the number is ours."""
        return self._process.pid

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """None while it runs; negative for a signal. Leaves the zombie: its group can still be killed."""
        end = time.monotonic() + wait_s
        while (code := self._peek()) is None and time.monotonic() < end:
            time.sleep(0.005)
        return code

    def _peek(self) -> int | None:
        if sys.platform == "darwin":  # os.waitid came to macOS with Python 3.13; there the zombie is reaped here
            return self._process.poll()
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped by somebody else in this process
            return 0
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def kill(self, grace_s: float = 0.0) -> None:
        """Ends the process and its group, and reaps it. With grace_s, it may first end by itself."""
        self.connection.close()
        self.exit_code(grace_s)
        with suppress(ProcessLookupError, PermissionError):  # the whole group is gone
            os.killpg(self.pid, signal.SIGKILL)
        self._guardian.forget(self.pid)
        self._process.wait(REAP_S)
