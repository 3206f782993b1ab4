"""The protocol of a training method, and the learning-rate schedule they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from logra.errors import CheckpointError
from logra.sketch.shards import local, rows_here
from logra.sketch.targets import Skipped

Probe = Callable[[], Mapping[str, Tensor]]
# (model, folder, float32 values by name that replace the model's own, or None)
Writer = Callable[[nn.Module, Path, Mapping[str, Tensor] | None], None]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer update did. `message` is what rollout engines need to follow it (logra: the Update)."""

    applied: bool
    metrics: dict[str, float] = field(default_factory=dict)
    message: Any = None


class Method(Protocol):
    """Owns how gradients are held and how weights move. `model` is what the train step calls.

    One update: `zero()`, any number of backward passes, `step()`. A step without signal (all gradients exactly zero)
    changes nothing, counts nothing, and says so by `applied=False`. Non-finite gradients raise before anything moves.
    `num_updates` counts applied updates; the learning rate is a function of it.
    """

    name: str

    @property
    def model(self) -> nn.Module: ...

    @property
    def num_updates(self) -> int: ...

    def zero(self) -> None: ...

    def step(self, probe: Probe, temperature: float) -> StepResult:
        """Apply one update. `probe()` gives the contexts on which a KL may be predicted."""
        ...

    def observe_mismatch(self, gap: float) -> None:
        """Take in the mean log-prob gap between the rollout engine and the trainer (nats a token)."""
        ...

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        """(chosen targets with shapes, skipped parameters with reasons)."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON values of everything but the base weights. Of sharded weights a collective call; the tensors are whole
        on the first rank, and may be empty on the others."""
        ...

    def held(self) -> dict[str, list[Tensor]]:
        """What it keeps between steps, the model included, by kind (`logra.memory.meter.KINDS`): the tensors themselves."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None: ...

    def export(self, write: Writer, folder: Path) -> None:
        """Call `write(model, folder, masters)` with the model as it is now; the writer merges peft adapters.

        masters of a sharded model: of the rows that lie on this rank, adapters merged."""
        ...


@dataclass(frozen=True)
class Schedule:
    """Learning rate by number of applied updates: linear warm-up, then constant, cosine or linear to zero at `total`."""

    lr: float
    warmup: int = 0
    kind: str = "constant"
    total: int = 1

    def at(self, update: int) -> float:
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        progress = min((update - self.warmup) / max(1, self.total - self.warmup), 1.0)
        return self.lr * (1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def held_weights(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer of a model, what of them lies on this rank."""
    return [local(tensor).detach() for tensor in (*model.parameters(), *model.buffers())]


def take(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A saved tensor, checked against the one it is to fill, of which it gives what lies on this rank; `CheckpointError` if it is
    absent or does not fit."""
    saved = tensors.get(name)
    if saved is None or saved.shape != like.shape or saved.dtype != like.dtype:
        found = "nothing" if saved is None else f"{tuple(saved.shape)} {saved.dtype}"
        raise CheckpointError(
            f"the checkpoint holds {found} as {name!r}, this run needs {tuple(like.shape)} {like.dtype}: "
            "resume with the settings the run was started with"
        )
    rows = rows_here(name, like)
    return saved[rows.start : rows.stop] if hasattr(like, "placements") else saved


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
