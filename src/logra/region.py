"""Names for stretches of code, so that memory can be told apart by what it is for.

`with region("logits"):` labels what is allocated inside; the innermost name counts. It costs next to nothing where nobody looks
(`logra.memory.meter` does). Threads have their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_stack = _Stack()


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """Label everything that is allocated within as `name`."""
    _stack.names.append(name)
    try:
        yield
    finally:
        _stack.names.pop()


def current_region(default: str) -> str:
    """The innermost name, or `default` outside all regions."""
    return _stack.names[-1] if _stack.names else default
