"""What an optimizer works on: slots (a parameter with its state), batches of like matrices, and the moves a step makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# numbers of a batch's gradients: large enough to spare launches on an accelerator, small enough to stay in a CPU's cache
_LIMIT = {"cpu": 1 << 18}
_LIMIT_ELSEWHERE = 1 << 25


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter in its group. is_matrix: the method's own rule applies; otherwise it is stepped by AdamW."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    is_matrix: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's, sharded or not."""
        return tuple(self.parameter.shape)


@dataclass(frozen=True, eq=False)
class Batch:
    """Slots of one group with the same shape and number of earlier steps, which are stepped together.

    gradients: float32, one of a slot; not to be changed. step: t of the bias corrections, 1 at the first step.
    """

    slots: Sequence[Slot]
    gradients: Sequence[Tensor]
    step: int

    @property
    def group(self) -> dict[str, Any]:
        return self.slots[0].group

    def states(self, key: str) -> list[Tensor]:
        """The state tensors of one kind, to be changed in place."""
        return [slot.state[key] for slot in self.slots]


@dataclass(frozen=True, eq=False)
class Dense:
    """The weight moves by factor * whole, (p, q) float32."""

    whole: Tensor
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Product:
    """The weight moves by factor * left @ right, (p, r) and (r, q) float32: added without forming the product."""

    left: Tensor
    right: Tensor
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Scaled:
    """The weight moves by factor * scale * whole, scale (p, 1), (1, q) or (1, 1): added without forming the product."""

    whole: Tensor
    scale: Tensor
    factor: float = 1.0


Move = Dense | Product | Scaled


def batches(slots: Iterable[Slot], device_type: str) -> Iterator[list[Slot]]:
    """Slots of a group that can be stepped together, in order, as many at a time as a batch's limit allows."""
    limit = _LIMIT.get(device_type, _LIMIT_ELSEWHERE)
    for _, like in itertools.groupby(slots, key=_kind):
        batch: list[Slot] = []
        for slot in like:
            if batch and (len(batch) + 1) * slot.parameter.numel() > limit:
                yield batch
                batch = []
            batch.append(slot)
        yield batch


def _kind(slot: Slot) -> tuple[Any, ...]:
    weight = slot.parameter
    return id(slot.group), slot.is_matrix, slot.shape, weight.dtype, weight.device, slot.state.get("step", 0)


def merge(weight: Tensor, moves: Sequence[Move], lr_decay: float, decay_first: bool) -> None:
    """W <- W + moves, and W <- (1 - lr_decay) W before or after, in place; rounded once if the weight is not float32."""
    target = weight if weight.dtype == torch.float32 else weight.float()
    if lr_decay and decay_first:
        target.mul_(1.0 - lr_decay)
    for move in moves:
        if isinstance(move, Product):
            target.addmm_(move.left, move.right, alpha=move.factor)
        elif isinstance(move, Scaled):
            target.addcmul_(move.whole, move.scale, value=move.factor)
        else:
            target.add_(move.whole, alpha=move.factor)
    if lr_decay and not decay_first:
        target.mul_(1.0 - lr_decay)
    if target is not weight:
        weight.copy_(target)


def whole(moves: Sequence[Move], like: Tensor) -> Tensor:
    """The sum of the moves, shaped as `like`, float32."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    merge(total, moves, 0.0, True)
    return total
