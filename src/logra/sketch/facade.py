"""`Sketcher` as a `torch.optim.Optimizer`, for training loops that only know that interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from logra.sketch.sketcher import Proposal, Sketcher
    from logra.sketch.update import Update

Trust = Callable[["Proposal"], float]


class SketchOptimizer(torch.optim.Optimizer):
    """step() = propose, (trust,) apply, zero. Learning-rate schedulers see and set `param_groups[0]["lr"]`.

    trust: None, or a function from the proposal to the scale of the step. `last_update` is what the last step applied, None
    if it had no signal.
    """

    def __init__(self, sketcher: Sketcher, lr: float, trust: Trust | None = None):
        self.sketcher, self.trust = sketcher, trust
        self.last_update: Update | None = None
        super().__init__([t.weight for t in sketcher.targets], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        proposal = self.sketcher.propose(self.param_groups[0]["lr"])
        scale = 1.0 if self.trust is None or proposal.is_zero else self.trust(proposal)
        self.last_update = self.sketcher.apply(proposal, scale)
        self.sketcher.zero()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.sketcher.zero()

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"sketcher": self.sketcher.state_dict(), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sketcher.load_state_dict(state_dict["sketcher"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
