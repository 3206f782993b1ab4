"""The optimizers of `logra.optim` as training methods: on the same target weights as `dense`, everything else frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import CheckpointError
from logra.optim.registry import OPTIMIZERS
from logra.rl.methods.base import Probe, Schedule, StepResult, Writer, gradient_norm, held_weights
from logra.sketch.targets import Skipped, check_float32, select_targets


class LowRankMethod:
    """One of `OPTIMIZERS` by name. options: its own, such as `update_proj_gap` (what it does not have is a `ConfigError`)."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        schedule: Schedule,
        *,
        targets: Sequence[str] | str | None = None,
        max_grad_norm: float = 0.0,
        **options: Any,
    ):
        self.name, self.model, self.schedule, self.max_grad_norm = name, model, schedule, max_grad_norm
        self.targets, self.skipped = select_targets(model, targets)
        check_float32(self.targets)
        self.parameters = {t.name: t.weight for t in self.targets}
        chosen = {id(weight) for weight in self.parameters.values()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        self.num_updates = 0
        group = {"params": list(self.parameters.items()), **options}  # options of a group are checked by name
        self.optimizer = OPTIMIZERS[name]([group], schedule.lr)

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def observe_mismatch(self, gap: float) -> None:
        """No trust region here: nothing to correct."""

    def step(self, probe: Probe, temperature: float) -> StepResult:
        lr = self.schedule.at(self.num_updates)
        norm = gradient_norm(self.parameters)
        if norm == 0.0:
            return StepResult(False, {"grad_norm": 0.0, "learning_rate": lr})
        if self.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, torch.tensor(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.num_updates += 1
        self.zero()
        return StepResult(True, {"grad_norm": norm, "learning_rate": lr})

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        return [(t.name, (t.out_features, t.in_features)) for t in self.targets], self.skipped

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's state of the parameters that have stepped."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for slot in self.optimizer.slots():
            for key, value in slot.state.items():
                if isinstance(value, Tensor):
                    tensors[f"{key}.{slot.name}"] = value
                else:
                    numbers.setdefault(slot.name, {})[key] = value
        extra = self.optimizer.state_dict()["extra"]
        return tensors, {"method": self.name, "num_updates": self.num_updates, "numbers": numbers, "extra": extra}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if state.get("method") != self.name or set(state["numbers"]) - set(self.parameters):
            raise CheckpointError(f"the checkpoint was written by method {state.get('method')!r} with other targets")
        saved = self.optimizer.state_dict()
        names = {name: place for place, name in enumerate(self.parameters)}
        saved["state"] = {names[name]: dict(numbers) for name, numbers in state["numbers"].items()}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.partition(".")
            if name in names:
                saved["state"].setdefault(names[name], {})[key] = tensor
        self.optimizer.load_state_dict({**saved, "extra": state["extra"]})
        self.num_updates = int(state["num_updates"])

    def held(self) -> dict[str, list[Tensor]]:
        state = [t for slot in self.optimizer.slots() for t in slot.state.values() if isinstance(t, Tensor)]
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return {"weights": held_weights(self.model), "gradients": gradients, "optimizer": state}

    def export(self, write: Writer, folder: Path) -> None:
        write(self.model, folder, None)
