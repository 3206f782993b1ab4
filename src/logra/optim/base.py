"""What the low-rank optimizers of dense weights share: groups, screening of gradients, AdamW for the rest, strict state.

A subclass says what it keeps of a matrix (`_layout`, `_begin`) and how a batch of matrices moves (`_moves`). Here, for all:

- A group whose `rank` is None, and every parameter that is not a matrix, is stepped by AdamW with the same lr and betas.
- Gradients are looked at before anything moves. One that is not finite raises `NonFiniteError` with the parameter's name.
- A parameter whose gradient is exactly zero is left as it is, state included (`zero_gradient="step"` steps it all the same, as
  the published codes do: there one such step stalls a norm-growth limiter for a thousand steps and draws an arbitrary basis).
- State is float32 whatever the parameter's dtype; the weight is rounded once a step.
- State holds tensors and numbers only, and is loaded strictly, by name where parameters are named.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from logra.errors import CheckpointError, ConfigError, NonFiniteError
from logra.optim import adam, options, saving, sharded
from logra.optim.batch import Batch, Dense, Move, Slot, batches, merge
from logra.sketch.shards import local
from logra.sketch.targets import clean_name

logger = logging.getLogger(__name__)

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names


class LowRankOptimizer(torch.optim.Optimizer):
    """Base class. params: parameters, (name, parameter) pairs, or groups of either, such as `param_groups` makes.

    lr, betas, eps, weight_decay (decoupled): as in AdamW. rank: of the groups that do not say otherwise; None: AdamW. seed: of
    whatever is drawn, with the parameter's name (its place in the list if it has none). zero_gradient: "skip" or "step".
    """

    # options with which it is the published code, faults included
    FAITHFUL: ClassVar[Mapping[str, Any]] = {"zero_gradient": "step"}
    DECAYS_FIRST: ClassVar[bool] = False  # W <- (1 - lr wd) W before the step (Adam's way) or after it (GaLore's code)
    CORRECTS_BEFORE_EPS: ClassVar[bool] = False  # eps beside the corrected root (Adam, torch), or beside sqrt(v)

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        rank: int | None,
        seed: int = 42,
        zero_gradient: str = "skip",
        **own: Any,
    ):
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "rank": rank, "seed": seed,
            "zero_gradient": zero_gradient, **own,
        }  # fmt: skip
        super().__init__(params, options.plain(defaults))

    # -- what a subclass defines ----------------------------------------------------------------------------------------

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the method's own options are wrong."""

    def _takes(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> bool:
        """Does the method's rule apply to a matrix of this shape? Otherwise AdamW."""
        return True

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        """Shape and dtype of each state tensor of a matrix."""
        raise NotImplementedError

    def _begin(self, slot: Slot) -> None:
        """Fill a matrix's state, all zeros, before its first step."""

    def _moves(self, batch: Batch) -> list[list[Move]]:
        """Advance the states of a batch of matrices; how each weight moves, the learning rate included."""
        raise NotImplementedError

    # -- groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up a group. One that is refused leaves nothing behind."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise ConfigError("a parameter group is a dictionary with 'params'")
        param_group = options.plain(param_group)
        self.check_options(param_group)
        super().add_param_group(param_group)
        try:
            self._groups_changed()
            self._accept()
        except BaseException:
            self.param_groups.pop()
            self._groups_changed()
            raise
        self._clamp(self.param_groups[-1])

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for an option that does not exist or has no sensible value."""
        options.check_names(group, self.defaults, type(self).__name__)
        options.check_common({**self.defaults, **group})
        self._check({**self.defaults, **group})

    def _accept(self) -> None:
        """Raise `ConfigError` for parameters that cannot be stepped, all groups together."""
        names: set[str] = set()
        seen: set[int] = set()
        for slot in self.slots():
            sharded.check(slot.name, slot.parameter)
            if not slot.parameter.is_floating_point():
                raise ConfigError(
                    f"{slot.name} is {slot.parameter.dtype}: only real floating-point parameters can be stepped"
                )
            if slot.name in names or id(slot.parameter) in seen:
                raise ConfigError(
                    f"two parameters have the same name, {slot.name}, or it is listed twice: names tell state apart"
                )
            names.add(slot.name)
            seen.add(id(slot.parameter))

    def _groups_changed(self) -> None:
        """Forget what was derived from the groups."""
        self._owners: dict[str, int] | None = None

    def _clamp(self, group: dict[str, Any]) -> None:
        """Say which ranks exceed a matrix's smaller side: they are used as far as they go."""
        if group["rank"] is None:
            return
        small = [p for p in group["params"] if p.ndim == 2 and min(p.shape) < group["rank"]]
        if small:
            least = min(min(p.shape) for p in small)
            logger.warning(
                "rank %d exceeds the smaller side of %d matrices (down to %d): %s there",
                group["rank"], len(small), least, self._at_most(),
            )  # fmt: skip

    def _at_most(self) -> str:
        return "it is clamped to that side"

    def slots(self) -> list[Slot]:
        """Every parameter in order, with its name, group and state."""
        found = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"group{number}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                is_matrix = self._is_matrix(tuple(parameter.shape), group)
                found.append(Slot(clean_name(name), parameter, group, self.state[parameter], is_matrix))
        return found

    def _is_matrix(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> bool:
        return group["rank"] is not None and len(shape) == 2 and self._takes(shape, group)

    def layout_of(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        """Shape and dtype of the state tensors of an unsharded parameter."""
        if self._is_matrix(shape, group):
            return self._layout(shape, group)
        return {key: (shape, torch.float32) for key in MOMENTS}

    def layout(self, slot: Slot) -> Layout:
        """Shape and dtype of a parameter's state tensors on this rank."""
        if slot.is_matrix and not self._is_here(slot):
            return {}
        return self.layout_of(slot.shape if slot.is_matrix else tuple(local(slot.parameter).shape), slot.group)

    def owner(self, slot: Slot) -> int:
        """The rank, in the group that splits its rows, that keeps the state of a sharded matrix and makes its steps."""
        if self._owners is None:
            self._owners = sharded.owners(self.slots())
        return self._owners[slot.name]

    def _is_here(self, slot: Slot) -> bool:
        group = sharded.group_of(slot)
        return group is None or torch.distributed.get_rank(group) == self.owner(slot)

    # -- a step -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update from the gradients at hand. closure: computes them and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slots = self._with_signal()
        for batch in batches(slots, slots[0].parameter.device.type if slots else "cpu"):
            self._advance(batch)
        return loss

    def reads(self, slot: Slot) -> bool:
        """Does the next step look at this parameter's gradient?"""
        return True

    def _with_signal(self) -> list[Slot]:
        """The parameters to step. Raises before anything moves if a gradient cannot be used."""
        slots = [slot for slot in self.slots() if slot.parameter.grad is not None]
        found = sharded.largest(slots, signals([(slot.name, local(slot.parameter.grad)) for slot in slots]))
        for slot, value in zip(slots, found, strict=True):
            if not math.isfinite(value):
                raise NonFiniteError(f"the gradient of {slot.name} is not finite; nothing was applied")
        return [
            slot
            for slot, value in zip(slots, found, strict=True)
            if value > 0.0 or slot.group["zero_gradient"] == "step"
        ]

    def _advance(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if not slot.state:
                self._start(slot)
        step = slots[0].state["step"] + 1
        if slots[0].is_matrix and sharded.group_of(slots[0]) is not None:
            return sharded.advance(self, slots, step)
        batch = Batch(slots, [local(slot.parameter.grad).float() for slot in slots], step)
        moves = self._moves(batch) if slots[0].is_matrix else self._adamw(batch)
        for slot, own in zip(slots, moves, strict=True):
            self.move(slot, own, step)

    def move(self, slot: Slot, moves: Sequence[Move], step: int) -> None:
        """Put a parameter's step number `step` in place, what lies on this rank, and count it."""
        slot.state["step"] = step
        decay = float(slot.group["lr"]) * slot.group["weight_decay"]
        merge(local(slot.parameter), moves, decay, self.DECAYS_FIRST)

    def _start(self, slot: Slot) -> None:
        slot.state["step"] = 0
        for key, (shape, dtype) in self.layout(slot).items():
            slot.state[key] = torch.zeros(shape, dtype=dtype, device=slot.parameter.device)
        if slot.is_matrix and self._is_here(slot):
            self._begin(slot)

    def _adamw(self, batch: Batch) -> list[list[Move]]:
        return [[Dense(d, -adam.corrected_step(batch.group, batch.step))] for d in self._adam(batch, batch.gradients)]

    def _adam(self, batch: Batch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Adam's directions of gradients (projected or not) from the moments in a batch's state, which advance."""
        means, squares = (batch.states(key) for key in MOMENTS)
        adam.advance(means, squares, gradients, batch.group["betas"])
        eps, beta2 = batch.group["eps"], batch.group["betas"][1]
        return adam.directions(
            means, squares, eps * math.sqrt(1.0 - beta2**batch.step) if self.CORRECTS_BEFORE_EPS else eps
        )

    # -- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's layout, tensors and numbers only; "optimizer" names the class."""
        return {**super().state_dict(), "optimizer": type(self).__name__, "extra": self._extra()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Strict: other parameters, shapes, dtypes or another optimizer raise `CheckpointError`, and nothing is loaded.

        Parameters are matched by name where both sides have names, so that their order does not matter.
        """
        self._load(saving.arrange(self, state_dict))

    def full_state_dict(self) -> dict[str, Any]:
        """The state that an unsharded optimizer would have, on the CPU, the same on every rank. A collective call.

        What is written once and read by any number of ranks (`load_full_state_dict`).
        """
        return sharded.full_state(self)

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """`load_state_dict` of a whole state: this rank keeps its part."""
        self._load(saving.arrange(self, state_dict, whole=True))

    def _load(self, arranged: dict[str, Any]) -> None:
        self._check_extra(arranged.get("extra") or {}, arranged["state"])
        super().load_state_dict({key: arranged[key] for key in ("state", "param_groups")})
        saving.restore(self, arranged)  # torch has cast the state to the parameters' dtypes
        self._take_extra(arranged.get("extra") or {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_extra_state": self._extra()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch calls this for copies and pickles, and again with groups and state alone when a state is loaded."""
        extra = state.pop("_extra_state", None)
        super().__setstate__(state)
        self._groups_changed()
        if extra is not None:
            self._take_extra(extra)

    def _extra(self) -> dict[str, Any]:
        """Numbers of the optimizer as a whole."""
        return {}

    def _check_extra(self, extra: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise `CheckpointError` if a saved `_extra` does not fit."""
        if extra:
            raise CheckpointError(f"{type(self).__name__} keeps no {sorted(extra)}")

    def _take_extra(self, extra: Mapping[str, Any]) -> None:
        """Put a saved `_extra` in place."""


def signals(gradients: Sequence[tuple[str, Tensor]]) -> list[float]:
    """Of each gradient a number that is 0.0 if it is exactly zero, and not finite if it holds NaN or infinity.

    Norms, all with one wait for the device; where squares may have under- or overflowed, the largest number itself.
    """
    for name, gradient in gradients:
        if gradient.is_sparse:
            raise ConfigError(f"the gradient of {name} is sparse: build the embedding with sparse=False")
    there = [g for _, g in gradients if g.numel()]
    norms = torch._foreach_norm(there) if there else []
    values = torch.stack([n.to(norms[0].device, torch.float32) for n in norms]).tolist() if norms else []
    exact = iter(v if 0.0 < v < math.inf else _largest(g) for v, g in zip(values, there, strict=True))
    return [next(exact) if g.numel() else 0.0 for _, g in gradients]


def _largest(gradient: Tensor) -> float:
    """max |g|, or NaN if there is one."""
    low, high = torch.aminmax(gradient.float())  # what is worked with: of float64 the rest is lost, or infinite
    return float(torch.maximum(-low, high))
