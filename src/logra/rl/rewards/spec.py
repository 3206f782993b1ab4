"""What a reward function is called and what it hands back. No heavy import: the worker processes load this
file."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from logra.errors import RewardError

Status = Literal["scored", "wrong", "unparseable", "error", "timeout", "abstain"]
STATUSES: tuple[Status, ...] = get_args(Status)
FAILED: tuple[Status, ...] = ("error", "timeout")


@dataclass(frozen=True)
class Score:
    """One rollout's score by one function. It has one status, so the counts add up to the rollouts.

    scored: a value was given (full or partial credit; whatever number a user function returns).
    wrong: an answer was read and is worth nothing. unparseable: no answer could be read.
    abstain: the function does not judge this rollout. error, timeout: the function failed; value is None.
    """

    value: float | None
    status: Status = "scored"
    message: str = ""


@dataclass(frozen=True)
class RewardSpec:
    """One reward function and how to call it.

    function: a built-in's name, "package.module.function", "path/to/file.py:function", or the function.
    weight: factor in the total; 0 only logs the function.
    name: the metric's name; empty means the function's own name.
    kind: "trl" (one call with lists) or "verl" (`compute_score`, one call a rollout). Built-ins ignore it.
    params: further keyword arguments of the function or options of the built-in.
    chunk: most rollouts in one call of a "trl" function; None gives it the whole batch, so that it may
        compare them.
    timeout_s: limit of one call in wall-clock seconds; None takes the pool's.
    """

    function: str | Callable[..., Any]
    weight: float = 1.0
    name: str = ""
    kind: Literal["trl", "verl"] = "trl"
    params: Mapping[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        path = self.function if isinstance(self.function, str) else path_of(self.function)
        object.__setattr__(self, "function", path)
        object.__setattr__(self, "name", self.name or path.replace(":", ".").rpartition(".")[2])
        if not math.isfinite(self.weight):
            raise RewardError(f"reward {self.name!r}: weight must be finite, got {self.weight}")
        if self.kind not in ("trl", "verl"):
            raise RewardError(f"reward {self.name!r}: kind must be 'trl' or 'verl', got {self.kind!r}")
        if self.chunk is not None and self.chunk < 1:
            raise RewardError(f"reward {self.name!r}: chunk must be at least 1, got {self.chunk}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RewardError(f"reward {self.name!r}: timeout_s must be positive, got {self.timeout_s}")

    @property
    def path(self) -> str:
        return str(self.function)

    @property
    def is_builtin(self) -> bool:
        return "." not in self.path and ":" not in self.path

    @property
    def is_per_rollout(self) -> bool:
        """Whether the function is called once a rollout, so that a hang or a crash costs that rollout
        only."""
        return self.is_builtin or self.kind == "verl"


def path_of(function: Callable[..., Any]) -> str:
    """The path by which another process finds a module-level function. RewardError where there is none."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if not name or "<" in name or not module:
        raise RewardError(
            f"reward function {function!r} cannot be found from another process: "
            "define it with `def` at the top level of a module (no lambda, no nested function, no instance)"
        )
    if module != "__main__":
        return f"{module}.{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise RewardError(
            f"reward function {name!r} was typed into an interactive session; no other process can find it: "
            f"write it to a file and pass 'path/to/file.py:{name}'"
        )
    return f"{os.path.abspath(file)}:{name}"
