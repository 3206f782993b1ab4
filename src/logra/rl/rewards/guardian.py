"""A tiny process that outlives its parent just long enough to kill what the parent started.

Run as a script, `python guardian.py PARENT_PID`, told over stdin which process groups live ("+123") and
which are gone ("-123"). When stdin closes, or the parent is no longer its parent (a forked child may hold
the pipe open), it kills every group left and ends. A separate process, because a worker cannot be trusted to
notice: it may hang in C code that holds the interpreter lock; and the kernel's parent-death signal fires when
the *thread* that started the worker ends, and does not reach the worker's children.
"""

import os
import select
import signal
import sys

POLL_S = 1.0


def main(parent: int) -> None:
    groups: set[int] = set()
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            data = os.read(0, 4096)
            if not data:
                break
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                number = int(line)
                groups.add(number) if number > 0 else groups.discard(-number)
        elif os.getppid() != parent:
            break
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # ended already, or a zombie on macOS
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]))
