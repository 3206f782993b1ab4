"""AdamW: on the same target weights (`dense`) or on peft LoRA adapters of all of them (`lora`); torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logra import hashing
from logra.errors import CheckpointError, ConfigError, NonFiniteError
from logra.rl.methods.base import Probe, Schedule, StepResult, Writer, held_weights, take
from logra.sketch.shards import local, rows_here, shards_of, whole
from logra.sketch.targets import Skipped, Target, check_float32, select_targets

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names


class OptimizerMethod:
    """An optimizer of torch's kind over named parameters, with the rule "no signal, no step". Base of the dense methods."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, parameters: Mapping[str, nn.Parameter], schedule: Schedule, max_grad_norm: float):
        self.parameters, self.schedule, self.max_grad_norm = dict(parameters), schedule, max_grad_norm
        self.shards = shards_of(self.parameters)
        self.num_updates = 0

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def observe_mismatch(self, gap: float) -> None:
        """No trust region here: nothing to correct."""

    def step(self, probe: Probe, temperature: float) -> StepResult:
        lr = self.schedule.at(self.num_updates)
        norm = self.grad_norm()
        if norm == 0.0:
            return StepResult(False, {"grad_norm": 0.0, "learning_rate": lr})
        self.advance(norm, lr)
        return StepResult(True, {"grad_norm": norm, "learning_rate": lr})

    def grad_norm(self) -> float:
        """Norm of all gradients; `NonFiniteError` naming the first that is not finite."""
        gradients = {n: local(p.grad) for n, p in self.parameters.items() if p.grad is not None}
        norm = float(torch.nn.utils.get_total_norm(list(gradients.values()))) if gradients else 0.0
        if self.shards is not None:
            norm = self.shards.sums([norm**2])[0] ** 0.5
        if not norm < float("inf"):
            broken = next((n for n, g in gradients.items() if not bool(torch.isfinite(g).all())), "some parameter")
            raise NonFiniteError(f"the gradient of {broken} is not finite; nothing was applied")
        return norm

    def advance(self, norm: float, lr: float) -> None:
        """Clip, take the optimizer's step, count it, forget the gradients."""
        if self.max_grad_norm:
            gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, min(1.0, self.max_grad_norm / (norm + 1e-6)))  # as torch's clip_grad_norm_
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.num_updates += 1
        self.zero()

    def held(self) -> dict[str, list[Tensor]]:
        return {"weights": held_weights(self.model), **self.held_state()}

    def held_state(self) -> dict[str, list[Tensor]]:
        """Gradients and the optimizer's state, without the model."""
        state = [local(t) for slots in self.optimizer.state.values() for t in slots.values() if isinstance(t, Tensor)]
        gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        return {"gradients": gradients, "optimizer": state}

    def export(self, write: Writer, folder: Path) -> None:
        write(self.model, folder, None)


class AdamWMethod(OptimizerMethod):
    """torch's AdamW, with strict state. Base of the two methods."""

    name = "adamw"

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        schedule: Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
    ):
        super().__init__(parameters, schedule, max_grad_norm)
        self.model = model
        chosen = list(self.parameters.values())
        # torch's default on an accelerator, foreach, makes temporaries of all parameters' size; on the CPU it takes one by one
        self.is_fused = all(p.is_cuda for p in chosen)
        self.optimizer = torch.optim.AdamW(
            chosen, lr=schedule.lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=self.is_fused or None
        )
        for parameter in chosen:  # now, not at the first step: memory is asked for before it is spent
            self.optimizer.state[parameter] = self._slots(parameter)

    def _slots(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state before the first step, as torch lays it out: a fused step wants the count beside the parameter."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if self.is_fused else "cpu")
        return {"step": step} | {key: torch.zeros_like(parameter) for key in _MOMENTS}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Moments and step counts of the parameters that have stepped: the others' are zero."""
        tensors: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for name, parameter in self.parameters.items():
            slots = self.optimizer.state[parameter]
            if int(slots["step"]):
                tensors |= {f"{key}.{name}": whole(slots[key]) for key in _MOMENTS}
                steps[name] = int(slots["step"])
        return tensors, {"method": self.name, "num_updates": self.num_updates, "steps": steps}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if state.get("method") != self.name or set(state["steps"]) - set(self.parameters):
            raise CheckpointError(f"the checkpoint was written by method {state.get('method')!r} with other targets")
        saved = {n: {key: take(tensors, f"{key}.{n}", self.parameters[n]) for key in _MOMENTS} for n in state["steps"]}
        for name, parameter in self.parameters.items():
            slots = self.optimizer.state[parameter]
            slots["step"].fill_(float(state["steps"].get(name, 0)))
            for key in _MOMENTS:
                local(slots[key]).zero_()
                if name in saved:
                    local(slots[key]).copy_(saved[name][key])
        self.num_updates = int(state["num_updates"])


class DenseMethod(AdamWMethod):
    """AdamW on the targets themselves; everything else is frozen."""

    name = "dense"

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        targets: Sequence[str] | str | None = None,
        **options: Any,
    ):
        self.targets, self.skipped = train_only(model, targets)
        super().__init__(model, {t.name: t.weight for t in self.targets}, schedule, **options)

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        return shapes_of(self.targets), self.skipped


class LoraMethod(AdamWMethod):
    """peft LoRA adapters on the same targets (all projections, not peft's default of two), trained by AdamW.

    alpha: default the rank, so that the adapters' scale is 1. The adapters' start is keyed by the seed and their names. shard:
    shards the model with its adapters in place (`logra.rl.sharding`).
    """

    name = "lora"

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        rank: int = 64,
        alpha: float | None = None,
        seed: int = 42,
        targets: Sequence[str] | str | None = None,
        shard: Callable[[nn.Module], None] | None = None,
        **options: Any,
    ):
        chosen, self.skipped = select_targets(model, targets)
        check_float32(chosen)
        self.chosen = shapes_of(chosen)
        wrapped = _wrap(
            model, [t.name.removesuffix(".weight") for t in chosen], chosen[0].transposed, rank, alpha or rank
        )
        if shard is not None:
            shard(wrapped)
        adapters = {n: p for n, p in wrapped.named_parameters() if "lora_" in n}
        for name, parameter in adapters.items():
            _initialise(name, parameter, seed)
        super().__init__(wrapped, adapters, schedule, **options)

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        return self.chosen, self.skipped

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = super().state()
        return tensors | {f"adapter.{n}": whole(p.detach()) for n, p in self.parameters.items()}, values

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        super().load_state(tensors, state)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local(parameter).copy_(take(tensors, f"adapter.{name}", parameter))


def train_only(model: nn.Module, targets: Sequence[str] | str | None) -> tuple[list[Target], list[Skipped]]:
    """(the chosen matrices, the others with reasons); everything else of the model is frozen. The matrices must be float32."""
    chosen, skipped = select_targets(model, targets)
    check_float32(chosen)
    trained = {id(target.weight) for target in chosen}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return chosen, skipped


def shapes_of(targets: Sequence[Target]) -> list[tuple[str, tuple[int, ...]]]:
    return [(target.name, (target.out_features, target.in_features)) for target in targets]


def _wrap(model: nn.Module, names: list[str], transposed: bool, rank: int, alpha: float) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("method lora needs peft: pip install 'logra[peft]'") from error
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=names, fan_in_fan_out=transposed, task_type="CAUSAL_LM"
    )  # type: ignore[arg-type]
    return peft.get_peft_model(model, settings)  # type: ignore[arg-type]


def _initialise(name: str, parameter: nn.Parameter, seed: int) -> None:
    """peft's own start (A: Kaiming uniform with a = sqrt 5, B: zero), drawn from a generator of this adapter's own."""
    start = torch.zeros(parameter.shape, dtype=torch.float32)
    if "lora_A" in name:
        generator = torch.Generator().manual_seed(hashing.derive_key(seed, "adapter", name) >> 1)
        nn.init.kaiming_uniform_(start, a=5**0.5, generator=generator)
    rows = rows_here(name, parameter)
    with torch.no_grad():
        local(parameter).copy_(start[rows.start : rows.stop])
