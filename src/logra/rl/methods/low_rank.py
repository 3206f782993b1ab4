"""The optimizers of `logra.optim` as training methods: on the same target weights as `dense`, everything else frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from logra.errors import CheckpointError
from logra.optim.base import LowRankOptimizer
from logra.optim.registry import OPTIMIZERS
from logra.rl.methods.base import Probe, Schedule, StepResult
from logra.rl.methods.dense import OptimizerMethod, shapes_of, train_only
from logra.sketch.targets import Skipped


class LowRankMethod(OptimizerMethod):
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
        self.name, self.model = name, model
        self.targets, self.skipped = train_only(model, targets)
        super().__init__({t.name: t.weight for t in self.targets}, schedule, max_grad_norm)
        group = {"params": list(self.parameters.items()), **options}  # options of a group are checked by name
        self.optimizer: LowRankOptimizer = OPTIMIZERS[name]([group], schedule.lr)

    def step(self, probe: Probe, temperature: float) -> StepResult:
        for slot in self.optimizer.slots():
            if not self.optimizer.reads(slot):  # sharded blocks get a gradient, trained or not
                slot.parameter.grad = None
        return super().step(probe, temperature)

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        return shapes_of(self.targets), self.skipped

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's state of the parameters that have stepped; that of whole ones, where they are sharded."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, dict[str, Any]] = {}
        saved = self.optimizer.state_dict() if self.shards is None else self.optimizer.full_state_dict()
        names = list(self.parameters)
        for place, slots in saved["state"].items():
            for key, value in slots.items():
                if isinstance(value, Tensor):
                    tensors[f"{key}.{names[place]}"] = value
                else:
                    numbers.setdefault(names[place], {})[key] = value
        return tensors, {
            "method": self.name, "num_updates": self.num_updates, "numbers": numbers, "extra": saved["extra"],
        }  # fmt: skip

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
        load = self.optimizer.load_state_dict if self.shards is None else self.optimizer.load_full_state_dict
        load({**saved, "extra": state["extra"]})
        self.num_updates = int(state["num_updates"])
