"""GaLore: Adam in a slowly changing subspace of the gradient (Zhao et al., arXiv 2403.03507; official code galore-torch 1.0).

    every `update_proj_gap` steps: P = r leading singular directions of G
    R = G P^T or P^T G;   m, v: Adam's moments of R;   N = m / (sqrt(v) + eps)
    W <- W - lr sqrt(1 - b2^t) / (1 - b1^t) scale (N P or P N);   then W <- (1 - lr wd) W

Where we leave the code, each behind a switch (`GaLoreAdamW(groups, **GaLoreAdamW.FAITHFUL)` sets all to the code's ways):
1. `on_refresh="rotate"`: when P changes the moments are carried over to the new basis; the code keeps ("keep") the numbers,
   which then belong to directions that are gone. "reset" zeroes them.
2. `zero_gradient="skip"`: see `logra.optim.base`. After a refresh on a zero gradient the code trains along coordinate axes.
3. `refresh="staggered"`: each matrix at its own step, evenly spread; the code does all at once ("together"), a stall.
4. Rank is clamped to the smaller side; state is float32 (the code: the gradient's dtype) or 8 bits (`state_bits=8`).
5. An SVD that fails keeps the old basis and is counted (`failed_refreshes`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from logra import hashing
from logra.optim import adam, limiter, options, quantized, subspace
from logra.optim.base import MOMENTS, Layout, LowRankOptimizer
from logra.optim.batch import Batch, Move, Product, Slot
from logra.sketch.optimizers import carry_first, carry_second

logger = logging.getLogger(__name__)


class ProjectedOptimizer(LowRankOptimizer):
    """Base of GaLore, Fira and APOLLO: Adam's moments of a gradient seen through a basis of its leading singular directions."""

    FAITHFUL: ClassVar[Mapping[str, Any]] = {
        "on_refresh": "keep", "zero_gradient": "step", "refresh": "together", "projection": "svd",
    }  # fmt: skip

    failed_refreshes: int = 0  # of this process

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        rank: int | None,
        update_proj_gap: int,
        proj_type: str,
        projection: str,
        on_refresh: str,
        refresh: str,
        **common: Any,
    ):
        super().__init__(
            params, lr=lr, rank=rank, update_proj_gap=update_proj_gap, proj_type=proj_type, projection=projection,
            on_refresh=on_refresh, refresh=refresh, **common,
        )  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        options.check_number(group, "update_proj_gap", 1)
        options.check_choice(group, "proj_type", tuple(sorted(subspace.SIDES)))
        options.check_choice(group, "projection", ("svd", "range"))
        options.check_choice(group, "on_refresh", ("rotate", "keep", "reset"))
        options.check_choice(group, "refresh", ("staggered", "together"))

    def _groups_changed(self) -> None:
        super()._groups_changed()
        self._turns: dict[str, int] = {}

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        where = subspace.side(shape, group["proj_type"])
        seen = subspace.projected_shape(shape, group["rank"], where)
        layout: Layout = {key: (seen, torch.float32) for key in MOMENTS}
        for key, one in _bases(where):
            layout[key] = (subspace.basis_shape(shape, group["rank"], one), torch.float32)
        return layout

    # -- the basis ----------------------------------------------------------------------------------------------------

    def _is_due(self, slot: Slot, step: int) -> bool:
        """Is a matrix's basis made anew at its step number `step` (1-based)? Always at the first."""
        gap = int(slot.group["update_proj_gap"])
        return step == 1 or (step - 1 + self._turn(slot, gap)) % gap == 0

    def _turn(self, slot: Slot, gap: int) -> int:
        """Steps by which a matrix's refreshes come early: evenly spread over the sorted names."""
        if slot.group["refresh"] == "together":
            return 0
        if not self._turns:
            names = sorted(s.name for s in self.slots() if s.is_matrix)
            self._turns = {name: place for place, name in enumerate(names)}
        return self._turns[slot.name] * gap // len(self._turns)

    def _seen(self, batch: Batch) -> list[Tensor]:
        """R of each gradient, through bases that are refreshed where due."""
        seen = []
        for slot, gradient in zip(batch.slots, batch.gradients, strict=True):
            if self._is_due(slot, batch.step):
                self._refresh(slot, gradient, batch.step)
            seen.append(_project(slot, gradient))
        return seen

    def _refresh(self, slot: Slot, gradient: Tensor, step: int) -> None:
        rank, state = slot.group["rank"], slot.state
        for key, where in _bases(subspace.side(slot.shape, slot.group["proj_type"])):
            if (found := self._leading(slot, gradient, rank, where, step)) is None:
                return
            if step > 1 and slot.group["on_refresh"] == "rotate":
                self._rotate(slot, subspace.overlap(state[key], found, where), where, step - 1)
            state[key].copy_(found)
        if slot.group["on_refresh"] == "reset" and step > 1:
            self._set_moments(slot, *(torch.zeros_like(m) for m in self._get_moments(slot)))

    def _leading(self, slot: Slot, gradient: Tensor, rank: int, where: str, step: int) -> Tensor | None:
        """The new basis, or None if it could not be found and there is an old one to keep."""
        try:
            if slot.group["projection"] == "range":
                key = hashing.derive_key(slot.group["seed"], "range", slot.name, step, where)
                return subspace.leading_randomised(gradient, rank, where, key)
            return subspace.leading(gradient, rank, where)
        except torch.linalg.LinAlgError:
            self.failed_refreshes += 1
            if step == 1:
                raise
            logger.warning("no basis found for %s at its step %d; it keeps the old one", slot.name, step)
            return None

    def _rotate(self, slot: Slot, turn_rr: Tensor, where: str, steps: int) -> None:
        """Carry the moments over: as rows on the right, as columns on the left."""
        first, second = self._get_moments(slot)
        if where == "left":
            first, second = first.t(), second.t()
        first = carry_first(first, turn_rr)
        second = carry_second(second, turn_rr, first, steps, slot.group["betas"])
        self._set_moments(slot, *((first.t(), second.t()) if where == "left" else (first, second)))

    def _get_moments(self, slot: Slot) -> tuple[Tensor, Tensor]:
        return slot.state[MOMENTS[0]], slot.state[MOMENTS[1]]

    def _set_moments(self, slot: Slot, first: Tensor, second: Tensor) -> None:
        slot.state[MOMENTS[0]].copy_(first)
        slot.state[MOMENTS[1]].copy_(second)


class LimitedOptimizer(ProjectedOptimizer):
    """Base of Fira and APOLLO: one side is projected, and a norm-growth limiter keeps a number a matrix."""

    FAITHFUL: ClassVar[Mapping[str, Any]] = {**ProjectedOptimizer.FAITHFUL, "limiter": "published"}

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        options.check_choice(group, "proj_type", tuple(sorted(subspace.SIDES - {"full"})))
        options.check_choice(group, "limiter", limiter.KINDS)

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        layout = super()._layout(shape, group)
        return layout if group["limiter"] == "off" else {**layout, "limiter": ((), torch.float32)}

    def _along(self, slot: Slot) -> tuple[int, ...]:
        """The dimension of R that the rank is, which norms of channels are taken along."""
        return (1,) if subspace.side(slot.shape, slot.group["proj_type"]) == "right" else (0,)


class GaLoreAdamW(ProjectedOptimizer):
    """GaLore. Per matrix: moments 2 r max(p, q), basis r min(p, q), float32.

    rank, scale (times the step), update_proj_gap (steps between bases), proj_type ("std": the smaller side; "reverse_std",
    "left", "right", "full"): as in the official code. projection: "svd" (the code's), or "range", a randomised range finder that
    costs O(p q r). state_bits: 32, or 8: moments in a byte, with a float32 scale per 256. Other switches: see the module.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        rank: int | None = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        state_bits: int = 32,
        projection: str = "svd",
        on_refresh: str = "rotate",
        refresh: str = "staggered",
        zero_gradient: str = "skip",
        seed: int = 42,
    ):
        super().__init__(
            params, lr, rank=rank, update_proj_gap=update_proj_gap, proj_type=proj_type, betas=betas, eps=eps,
            weight_decay=weight_decay, projection=projection, on_refresh=on_refresh, refresh=refresh,
            zero_gradient=zero_gradient, seed=seed, scale=scale, state_bits=state_bits,
        )  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        options.check_number(group, "scale", 0.0)
        options.check_choice(group, "state_bits", (8, 32))

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        layout = super()._layout(shape, group)
        if group["state_bits"] == 8:
            for key in MOMENTS:
                seen = layout[key][0]
                layout[key] = (seen, torch.uint8)
                layout[f"{key}_scale"] = ((quantized.num_blocks(seen[0] * seen[1]),), torch.float32)
        return layout

    def _begin(self, slot: Slot) -> None:
        if slot.group["state_bits"] == 8:
            self._set_moments(
                slot, *(torch.zeros(slot.state[key].shape, device=slot.parameter.device) for key in MOMENTS)
            )

    def _moves(self, batch: Batch) -> list[list[Move]]:
        seen = self._seen(batch)
        if batch.group["state_bits"] == 8:
            normed = [self._adam_8bit(slot, one) for slot, one in zip(batch.slots, seen, strict=True)]
        else:
            normed = self._adam(batch, seen)
        factor = -adam.corrected_step(batch.group, batch.step) * batch.group["scale"]
        return [[_back(slot, one, factor)] for slot, one in zip(batch.slots, normed, strict=True)]

    def _adam_8bit(self, slot: Slot, seen: Tensor) -> Tensor:
        first, second = self._get_moments(slot)
        adam.advance([first], [second], [seen], slot.group["betas"])
        self._set_moments(slot, first, second)
        return adam.directions([first], [second], slot.group["eps"])[0]

    def _get_moments(self, slot: Slot) -> tuple[Tensor, Tensor]:
        if slot.group["state_bits"] == 32:
            return super()._get_moments(slot)
        first, second = (
            quantized.dequantize(slot.state[key], slot.state[f"{key}_scale"], is_signed)
            for key, is_signed in zip(MOMENTS, (True, False), strict=True)
        )
        return first, second

    def _set_moments(self, slot: Slot, first: Tensor, second: Tensor) -> None:
        if slot.group["state_bits"] == 32:
            return super()._set_moments(slot, first, second)
        for key, value, is_signed in zip(MOMENTS, (first, second), (True, False), strict=True):
            codes, scales = quantized.quantize(value, is_signed)
            slot.state[key].copy_(codes)
            slot.state[f"{key}_scale"].copy_(scales)


def _bases(where: str) -> tuple[tuple[str, str], ...]:
    """(state key, side) of each basis."""
    return (("basis_left", "left"), ("basis_right", "right")) if where == "both" else (("basis", where),)


def _project(slot: Slot, gradient: Tensor) -> Tensor:
    seen = gradient
    for key, where in _bases(subspace.side(slot.shape, slot.group["proj_type"])):
        seen = subspace.project(seen, slot.state[key], where)
    return seen


def _back(slot: Slot, seen: Tensor, factor: float) -> Product:
    """The move that a direction in the subspace stands for."""
    where = subspace.side(slot.shape, slot.group["proj_type"])
    if where == "both":
        return Product(slot.state["basis_left"], seen @ slot.state["basis_right"], factor)
    return Product(*subspace.factors(seen, slot.state["basis"], where), factor)
