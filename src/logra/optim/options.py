"""Options of parameter groups: checked by name when a group is added, with the nearest valid name in the message."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from logra.errors import ConfigError

_OF_TORCH = {"params", "param_names", "initial_lr", "swap_tensors"}  # what torch and its schedulers put into a group


def check_names(group: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> None:
    """Raise `ConfigError` for an option that the optimizer does not have."""
    for key in group:
        if key not in defaults and key not in _OF_TORCH:
            near = difflib.get_close_matches(key, list(defaults), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(defaults))}"
            raise ConfigError(f"{owner} has no option {key!r}; {hint}")


def check_common(group: Mapping[str, Any]) -> None:
    """The options that every optimizer of the package has."""
    check_number(group, "lr", 0.0)
    check_number(group, "eps", 0.0)
    check_number(group, "weight_decay", 0.0)
    betas = group["betas"]
    is_pair = isinstance(betas, Sequence) and len(betas) == 2 and all(isinstance(beta, Real) for beta in betas)
    if not is_pair or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas must be two numbers in [0, 1), got {betas}")
    rank = group["rank"]
    if rank is not None and not (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1):
        raise ConfigError(f"rank must be a whole number of at least 1, or None for plain AdamW, got {rank!r}")
    check_choice(group, "zero_gradient", ("skip", "step"))
    if not isinstance(group["seed"], int):
        raise ConfigError(f"seed must be a whole number, got {group['seed']!r}")


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with Python's numbers in place of numpy's, which a safe load of the state would refuse."""
    return {k: v.item() if hasattr(v, "item") and not isinstance(v, Tensor) else v for k, v in group.items()}


def check_number(group: Mapping[str, Any], key: str, least: float, most: float = math.inf) -> None:
    """least <= value <= most, finite."""
    given = group[key]
    is_number = isinstance(given, Real | Tensor) and not isinstance(given, bool)
    value = float(given) if is_number else math.nan
    if not (math.isfinite(value) and least <= value <= most):
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ConfigError(f"{key} must be a finite number of at least {least:g}{upper}, got {group[key]!r}")


def check_choice(group: Mapping[str, Any], key: str, choices: tuple[Any, ...]) -> None:
    if group[key] not in choices:
        raise ConfigError(f"{key} must be one of {', '.join(map(str, choices))}, got {group[key]!r}")
