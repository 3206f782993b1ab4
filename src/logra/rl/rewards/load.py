"""Finding reward functions and calling them. For worker processes: user code never runs in the trainer's."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from logra.errors import RewardError
from logra.rl.rewards.builtin import BUILTINS, Reply, make_builtin, message_text, nearest
from logra.rl.rewards.spec import STATUSES, RewardSpec, Score

FIXED = ("prompts", "completions", "completion_ids")
MESSAGE_CHARS = 2000


@dataclass(frozen=True)
class Batch:
    """The rollouts of one call, as reward functions see them. Every list has one item a rollout."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class Loaded:
    """A function ready to be called. `score` yields lists of scores that cover the batch in order."""

    needs: tuple[str, ...]
    score: Callable[[Batch], Iterator[list[Score]]]


class ContractError(Exception):
    """The function returned no list of numbers: a fault to mend at once, not one to count."""


def load(spec: RewardSpec) -> Loaded:
    """RewardError if the function is not found, does not import, or cannot be called with keywords."""
    if spec.is_builtin:
        scorer = make_builtin(spec.path, dict(spec.params))
        needs = BUILTINS[spec.path].needs
        if "task" in spec.params:  # the name of a reasoning-gym task stands in for its metadata
            needs = tuple(n for n in needs if n != "metadata")
        return Loaded(needs, lambda batch: _each(spec, batch, scorer))
    function = find(spec.path)
    if spec.kind == "verl":
        return Loaded((), lambda batch: _each(spec, batch, lambda reply: _verl(spec, function, reply)))
    wanted, needs = _parameters(spec, function)
    return Loaded(needs, lambda batch: iter([_together(spec, function, wanted, batch)]))


def find(path: str) -> Callable[..., Any]:
    """The callable at "package.module.function" or "path/to/file.py:function"."""
    file, colon, name = path.rpartition(":")
    module, names = (_from_file(file), name.split(".")) if colon else _from_package(path)
    target: Any = module
    for i, part in enumerate(names):
        if not hasattr(target, part):
            where = ".".join([file or module.__name__, *names[:i]])
            raise RewardError(f"reward {path!r}: no {part!r} in {where}; {nearest(part, _callables(target))}")
        target = getattr(target, part)
    if not callable(target):
        raise RewardError(f"reward {path!r} is a {type(target).__name__}, not a function")
    return target


LARGEST = 1e18  # the square of a reward must fit float32


def as_score(value: Any, name: str) -> Score:
    """A function's value for one rollout. ContractError unless it is a number, a bool, None or a Score."""
    if isinstance(value, Score):
        if value.status not in STATUSES:
            raise ContractError(
                f"reward {name!r} returned the status {value.status!r}; {nearest(value.status, STATUSES)}"
            )
        inner = as_score(value.value, name)
        return inner if inner.status == "error" else Score(inner.value, value.status, value.message)
    if value is None:
        return Score(None, "abstain")
    if not isinstance(value, numbers.Real):
        raise ContractError(
            f"reward {name!r} returned a {type(value).__name__} as a reward: "
            "return a list with one float, bool or None a completion (float(x), or x.item() for a tensor)"
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond float's range
        number = math.inf
    if abs(number) <= LARGEST:  # false for NaN
        return Score(number)
    return Score(None, "error", f"returned {number:g}: a reward must be finite and at most {LARGEST:g} in size")


def as_scores(values: Any, count: int, name: str) -> list[Score]:
    if not isinstance(values, list | tuple):
        raise ContractError(
            f"reward {name!r} returned a {type(values).__name__}: "
            "return a list with one float, bool or None a completion (x.tolist() for a tensor or an array)"
        )
    if len(values) != count:
        raise ContractError(
            f"reward {name!r} returned {len(values)} values for {count} completions: return one for each"
        )
    return [as_score(value, name) for value in values]


def _each(spec: RewardSpec, batch: Batch, scorer: Callable[[Reply], Any]) -> Iterator[list[Score]]:
    """One call a rollout. An exception costs that rollout only."""
    for i, completion in enumerate(batch.completions):
        row = {key: values[i] for key, values in batch.columns.items()}
        reply = Reply(batch.prompts[i], message_text(completion), batch.completion_ids[i], row)
        try:
            value = scorer(reply)
        except (Exception, SystemExit):
            value = Score(None, "error", traceback_text())
        yield [as_score(value, spec.name)]


def _together(spec: RewardSpec, function: Callable[..., Any], wanted: set[str] | None, batch: Batch) -> list[Score]:
    """One call for the whole batch, TRL's way. An exception costs every rollout in it."""
    everything = {
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
        **batch.columns,
        **spec.params,
    }
    chosen = everything if wanted is None else {k: v for k, v in everything.items() if k in wanted}
    try:
        values = _finish(function(**chosen))
    except (Exception, SystemExit):
        return [Score(None, "error", traceback_text())] * len(batch.completions)
    return as_scores(values, len(batch.completions), spec.name)


def _verl(spec: RewardSpec, function: Callable[..., Any], reply: Reply) -> Any:
    """verl's `compute_score`; it may return a number or a dict with the number under "score"."""
    row = reply.row
    nested = row.get("reward_model")
    nested_gold = nested.get("ground_truth") if isinstance(nested, dict) else None
    gold = next((g for g in (row.get("ground_truth"), nested_gold, row.get("answer")) if g is not None), None)
    value = _finish(
        function(
            data_source=row.get("data_source"),
            solution_str=reply.text,
            ground_truth=gold,
            extra_info=row.get("extra_info"),
            **spec.params,
        )
    )
    return value["score"] if isinstance(value, dict) else value


def _finish(value: Any) -> Any:
    """The value itself, or what it gives when awaited."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _parameters(spec: RewardSpec, function: Callable[..., Any]) -> tuple[set[str] | None, tuple[str, ...]]:
    """(the keywords it takes, None for all; the columns it cannot do without)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some C functions have no signature
        return None, ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise RewardError(f"reward {spec.name!r} has positional-only parameters, but it is called with keywords")
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    unknown = [key for key in spec.params if key not in {p.name for p in named}]
    if unknown and not takes_all:
        hint = nearest(unknown[0], [p.name for p in named])
        raise RewardError(f"reward {spec.name!r} has no parameter {unknown[0]!r}; {hint}")
    given = {*FIXED, *spec.params}
    needs = tuple(p.name for p in named if p.default is p.empty and p.name not in given)
    return None if takes_all else {p.name for p in named}, needs


def _from_file(file: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RewardError(f"no reward file {str(path)!r}{hint}")
    name = f"_logra_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise RewardError(f"{str(path)!r} is no Python file: a reward path reads path/to/file.py:function")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import its neighbours
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"importing the reward file {str(path)!r} failed:\n{traceback_text()}") from error
    return module


def _from_package(path: str) -> tuple[ModuleType, list[str]]:
    """The longest prefix of the path that imports, and the names left."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            return importlib.import_module(name), parts[end:]
        except ModuleNotFoundError as error:
            if not error.name or not (name == error.name or name.startswith(error.name + ".")):
                raise RewardError(f"importing {name!r} for the reward {path!r} failed:\n{traceback_text()}") from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"importing {name!r} for the reward {path!r} failed:\n{traceback_text()}") from error
    raise RewardError(
        f"reward {path!r}: no module {parts[0]!r} is installed or on the path; "
        "write package.module.function, path/to/file.py:function or a built-in: " + ", ".join(sorted(BUILTINS))
    )


def _callables(target: Any) -> list[str]:
    return [name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name, None))]


def traceback_text() -> str:
    """The exception being handled, its last frames only."""
    return traceback.format_exc(limit=-3)[-MESSAGE_CHARS:]
