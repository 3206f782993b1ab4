"""Row-sharded weights (FSDP2's DTensor): the whole gradient of a matrix meets on one rank, its owner, which makes the step.

The update is that of the unsharded matrix, for every method: singular vectors, norms and orthogonalisation see all rows.
State and work are spread over ranks by whole matrices (each state exists once), rows travel once there and once back. What
is not a matrix is stepped by AdamW, number by number, where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from logra.errors import ConfigError
from logra.optim.batch import Batch, Dense, Slot, whole
from logra.sketch.shards import local, rows_of, sharding

if TYPE_CHECKING:
    from logra.optim.base import LowRankOptimizer


def check(name: str, parameter: Tensor) -> None:
    """Raise `ConfigError` for storage that no method here can step."""
    if type(parameter).__name__ == "FlatParameter":
        raise ConfigError(
            f"{name} is flattened (FSDP1): matrices cannot be told apart there. Use FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    sharding(name, parameter)


def group_of(slot: Slot) -> Any:
    """The process group that splits a parameter's rows, or None."""
    dim = sharding(slot.name, slot.parameter)
    return None if dim is None else slot.parameter.device_mesh.get_group(dim)  # type: ignore[attr-defined]


def owners(slots: Sequence[Slot]) -> dict[str, int]:
    """The rank, in its group, that owns each sharded matrix: the largest first, each to the rank with least so far."""
    loads: dict[int, list[int]] = {}
    chosen: dict[str, int] = {}
    for slot in sorted((s for s in slots if s.is_matrix), key=lambda s: (-s.parameter.numel(), s.name)):
        group = group_of(slot)
        if group is not None:
            load = loads.setdefault(id(group), [0] * dist.get_world_size(group))
            chosen[slot.name] = rank = load.index(min(load))
            load[rank] += slot.parameter.numel()
    return chosen


def largest(slots: Sequence[Slot], values: Sequence[float]) -> list[float]:
    """The largest over all shards of each gradient's number; what is not finite counts as infinite."""
    result = list(values)
    groups = {id(group): group for slot in slots if (group := group_of(slot)) is not None}
    for key, group in groups.items():
        places = [i for i, slot in enumerate(slots) if id(group_of(slot)) == key]
        own = torch.tensor([values[i] for i in places], dtype=torch.float64).nan_to_num(nan=float("inf"))
        own = own.to(local(slots[places[0]].parameter).device)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
        for place, value in zip(places, own.tolist(), strict=True):
            result[place] = value
    return result


def advance(optimizer: LowRankOptimizer, slots: Sequence[Slot], step: int) -> None:
    """One step of sharded matrices, one after the other."""
    for slot in slots:
        group, owner = group_of(slot), optimizer.owner(slot)
        gradient, moved = gather_rows(slot, slot.parameter.grad, owner, group), None
        if gradient is not None:
            moved = whole(optimizer._moves(Batch([slot], [gradient], step))[0], gradient)
        optimizer.move(slot, [Dense(scatter_rows(slot, moved, owner, group))], step)


def _rows(slot: Slot, group: Any) -> list[int]:
    """How many rows each rank has."""
    return [len(rows) for rows in rows_of(slot.shape[0], dist.get_world_size(group))]


def gather_rows(slot: Slot, gradient: Any, owner: int, group: Any) -> Tensor | None:
    """The whole (p, q) float32 gradient on the owner, None elsewhere."""
    rows = _rows(slot, group)
    own = _padded(local(gradient).float(), rows[0])
    parts = [torch.empty_like(own) for _ in rows] if dist.get_rank(group) == owner else None
    dist.gather(own, parts, group=group, group_dst=owner)
    return None if parts is None else torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])


def scatter_rows(slot: Slot, moved: Tensor | None, owner: int, group: Any) -> Tensor:
    """This rank's rows of what the owner has."""
    rows = _rows(slot, group)
    weight = local(slot.parameter)
    own = torch.empty((rows[0], *slot.shape[1:]), dtype=torch.float32, device=weight.device)
    parts = None if moved is None else [_padded(part, rows[0]) for part in moved.split(rows)]
    dist.scatter(own, parts, group=group, group_src=owner)
    return own[: rows[dist.get_rank(group)]]


def _padded(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows.contiguous()


# -- whole state: what is saved once and loaded on any number of ranks ------------------------------------------------------


def full_state(optimizer: LowRankOptimizer) -> dict[str, Any]:
    """`state_dict()` as an unsharded optimizer has it, on the CPU; the same on every rank. A collective call."""
    whole_state = optimizer.state_dict()
    for place, slot in enumerate(optimizer.slots()):
        group = group_of(slot)
        whole_state["state"][place] = _on_cpu(slot.state)
        if group is None or not slot.state:
            continue
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, whole_state["state"][place], group=group)
        if slot.is_matrix:
            whole_state["state"][place] = parts[optimizer.owner(slot)]
        else:
            keys = optimizer.layout(slot)
            whole_state["state"][place] = {k: torch.cat([p[k] for p in parts]) for k in keys} | {
                "step": parts[0]["step"]
            }
    return whole_state


def own_part(optimizer: LowRankOptimizer, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank keeps of a parameter's whole state."""
    group = group_of(slot)
    if group is None or not state:
        return dict(state)
    rank = dist.get_rank(group)
    if slot.is_matrix:
        return dict(state) if rank == optimizer.owner(slot) else {"step": state["step"]}
    rows = _rows(slot, group)
    return {k: v.split(rows)[rank] if isinstance(v, Tensor) else v for k, v in state.items()}


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that later steps do not change."""
    return {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}
