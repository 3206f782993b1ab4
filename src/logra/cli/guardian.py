"""Ends what the launcher started, process groups and all; also as a script that outlives the launcher for just that.

As a script, `python guardian.py PARENT_PID GRACE_S`: told over stdin which process groups live ("+123") and which are gone
("-123"). When stdin closes, or the parent is no longer its parent, it ends all groups left, with what it has seen descend from
them: the kernel's parent-death signal, which the processes get too, reaches none of their children. Standard library only, and
nothing of logra.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

POLL_S = 1.0
_SHARE = 50  # a look at all processes takes at most one part in so many of the time


def alive() -> dict[int, tuple[int, int, int, str]]:
    """Of every process: parent, group, session, and when it started (a number may be given anew). Only on Linux."""
    found = {}
    with suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent, group, session, *rest = file.read().rpartition(")")[2].split()
                if state not in ("Z", "X"):
                    found[int(name)] = (int(parent), int(group), int(session), rest[15])
    return found


def tree(leaders: Iterable[int]) -> dict[int, str]:
    """Everything in the leaders' groups and sessions, and all that descends from it, with when it started."""
    processes, known = alive(), set(leaders)
    own = set(known)
    while True:
        more = {p for p, (parent, group, session, _) in processes.items() if {parent, group, session} & own} - own
        if not more:
            return {p: processes[p][3] for p in own if p in processes}
        own |= more


def end(
    leaders: Iterable[int],
    grace_s: float,
    *,
    first: int = signal.SIGTERM,
    seen: Mapping[int, str] = MappingProxyType({}),
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Ask the groups to end, then what they left behind; wait up to `grace_s`; kill what is left. seen: other processes to end,
    as `tree` gives them. Whoever started the leaders reaps them."""
    leaders = list(leaders)
    found = {**tree(leaders), **seen}
    for leader in leaders:
        _signal(os.killpg, leader, first)
    deadline, asked = time.monotonic() + grace_s, False
    while time.monotonic() < deadline and not hurry():
        found |= tree(set(leaders) | set(_left(found)))
        left = _left(found)
        if not left:
            break
        if not asked and not set(left) & set(leaders):
            asked = True
            for process in left:
                _signal(os.kill, process, signal.SIGTERM)
        time.sleep(0.05)
    for leader in leaders:
        _signal(os.killpg, leader, signal.SIGKILL)
    for process in _left(found):
        _signal(os.kill, process, signal.SIGKILL)


def _left(found: dict[int, str]) -> list[int]:
    processes = alive()
    return [p for p, started in found.items() if p in processes and processes[p][3] == started]


def _signal(send: Callable[[int, int], None], target: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # ended already, or a zombie on macOS
        send(target, number)


def main(parent: int, grace_s: float) -> None:
    groups: set[int] = set()
    seen: dict[int, str] = {}
    text, next_look = b"", 0.0
    while True:
        if time.monotonic() >= next_look:
            started = time.monotonic()
            seen = {p: seen[p] for p in _left(seen)} | tree(groups)
            next_look = time.monotonic() + max(POLL_S, _SHARE * (time.monotonic() - started))
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
    if groups:
        end(groups, grace_s, seen=seen)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
