"""Strict loading of optimizer state: arranged by name and checked whole before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from logra.errors import CheckpointError, ConfigError
from logra.optim import sharded
from logra.optim.batch import Slot
from logra.sketch.targets import clean_name

if TYPE_CHECKING:
    from logra.optim.base import LowRankOptimizer


def arrange(optimizer: LowRankOptimizer, saved: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """The saved state with this optimizer's order of parameters; `CheckpointError` if it does not fit.

    whole: it is that of an unsharded optimizer, of which this rank's part is taken.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise CheckpointError("this is no optimizer state: it needs 'state' and 'param_groups'")
    owner, writer = type(optimizer).__name__, saved.get("optimizer", type(optimizer).__name__)
    if writer != owner:
        raise CheckpointError(f"this state was written by {writer}, not by {owner}")
    groups = saved.get("param_groups", ())
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the saved state has {len(groups)} parameter groups, this optimizer {len(optimizer.param_groups)}"
        )
    slots, place, arranged = iter(optimizer.slots()), 0, []
    state: dict[int, dict[str, Any]] = {}
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        _check_options(optimizer, ours, theirs)
        indices = _indices(ours, theirs)
        for index in indices:
            slot, own = next(slots), saved["state"].get(index, {})
            _check(optimizer, slot, own, whole)
            if index in saved["state"]:
                state[place] = sharded.own_part(optimizer, slot, own) if whole else own
            place += 1
        arranged.append({**theirs, "params": list(range(place - len(indices), place))})
        if "param_names" in ours:
            arranged[-1]["param_names"] = list(ours["param_names"])
    return {**saved, "state": state, "param_groups": arranged}


def _check_options(optimizer: LowRankOptimizer, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Saved options replace this optimizer's: all must be there, be possible, and lead to the same state."""
    # torch adds "differentiable" to the defaults at a load
    absent = sorted(set(optimizer.defaults) - set(theirs) - {"differentiable"})
    if absent:
        raise CheckpointError(
            f"a saved parameter group has no {absent[0]!r}: it is not from {type(optimizer).__name__}"
        )
    try:
        optimizer.check_options(theirs)
    except ConfigError as error:
        raise CheckpointError(f"a saved parameter group cannot be used: {error}") from error
    for parameter in ours["params"]:
        shape = tuple(parameter.shape)
        if optimizer.layout_of(shape, ours) != optimizer.layout_of(shape, theirs):
            raise CheckpointError(
                f"the state was saved with rank={theirs['rank']} and other options that shape it, this optimizer has "
                f"rank={ours['rank']}: build it with the options that the state was saved with"
            )


def _indices(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[int]:
    """The saved index of each parameter of a group, by name or, where one side has none, by place."""
    saved = list(theirs["params"])
    if len(saved) != len(ours["params"]):
        raise CheckpointError(
            f"a saved parameter group has {len(saved)} parameters, this optimizer's {len(ours['params'])}"
        )
    if "param_names" not in ours or "param_names" not in theirs:
        return saved
    by_name = {clean_name(name): index for name, index in zip(theirs["param_names"], saved, strict=True)}
    absent = [name for name in map(clean_name, ours["param_names"]) if name not in by_name]
    if absent:
        raise CheckpointError(f"the saved state has no {absent[0]!r} in the same parameter group")
    return [by_name[clean_name(name)] for name in ours["param_names"]]


def _check(optimizer: LowRankOptimizer, slot: Slot, state: Mapping[str, Any], whole: bool) -> None:
    if not state:
        return  # it never had a gradient
    layout = optimizer.layout_of(slot.shape, slot.group) if whole else optimizer.layout(slot)
    if set(state) != {"step", *layout}:
        raise CheckpointError(f"the saved state of {slot.name} holds {sorted(state)}, not {sorted(['step', *layout])}")
    if not isinstance(state["step"], int | float | Tensor) or not float(state["step"]) >= 0:
        raise CheckpointError(f"the saved state of {slot.name} has step {state['step']!r}")
    for key, (shape, dtype) in layout.items():
        value = state[key]
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape) or value.dtype != dtype:
            found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{key} of {slot.name} was saved as {found}, this optimizer keeps {tuple(shape)} {dtype}: build it with "
                "the rank and options that the state was saved with"
            )


def restore(optimizer: LowRankOptimizer, arranged: Mapping[str, Any]) -> None:
    """Put the saved tensors in place as they are."""
    for place, slot in enumerate(optimizer.slots()):
        for key, value in arranged["state"].get(place, {}).items():
            if isinstance(value, Tensor):
                slot.state[key] = value.detach().to(slot.parameter.device, copy=True)
            else:
                slot.state[key] = int(value) if key == "step" else value
