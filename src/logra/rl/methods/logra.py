"""LoGRA: sketches, a proposal, a trust region, an exact Update (arXiv 2610.06647; departures in `logra.sketch.sketcher`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import CheckpointError, UpdateError
from logra.rl.methods.base import Probe, Schedule, StepResult
from logra.sketch.sketcher import Proposal, Sketcher, attach
from logra.sketch.targets import Skipped
from logra.trust.kl import measure_kl, predict_kl
from logra.trust.region import Decision, TrustRegion


class LograMethod:
    """trust: None applies proposals as they are. autocast: probe in bfloat16, as the policy computes.

    options: keyword arguments of `logra.sketch.sketcher.attach`.
    """

    name = "logra"

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        trust: TrustRegion | None = None,
        trust_mode: str = "auto",
        autocast: bool = False,
        **options: Any,
    ):
        self.model, self.schedule, self.trust, self.trust_mode = model, schedule, trust, trust_mode
        self.autocast = autocast
        self.sketcher: Sketcher = attach(model, **options)

    @property
    def num_updates(self) -> int:
        return self.sketcher.update_index

    def zero(self) -> None:
        self.sketcher.zero()

    def observe_mismatch(self, gap: float) -> None:
        if self.trust is not None:
            self.trust.observe(gap)

    def step(self, probe: Probe, temperature: float) -> StepResult:
        lr = self.schedule.at(self.num_updates)
        proposal = self.sketcher.propose(lr)
        if proposal.is_zero:
            return StepResult(False, {"grad_norm": 0.0, "learning_rate": lr})
        metrics = {"grad_norm": proposal.grad_norm, "learning_rate": lr}
        scale = 1.0
        if self.trust is not None:
            with torch.autocast(proposal.factors.device.type, torch.bfloat16, enabled=self.autocast):
                decision = self._decide(self.trust, proposal, probe(), temperature)
            scale = decision.scale
            metrics |= _metrics(decision, self.trust)
        update = self.sketcher.apply(proposal, scale)
        return StepResult(True, metrics, update)

    def _decide(
        self, trust: TrustRegion, proposal: Proposal, batch: Mapping[str, Tensor], temperature: float
    ) -> Decision:
        predicted = predict_kl(
            self.model, self.sketcher, proposal, batch, temperature=temperature, mode=self.trust_mode
        )

        def measure(scale: float) -> float:
            return measure_kl(self.model, self.sketcher, proposal, batch, scale, temperature=temperature)

        return trust.decide(self.num_updates, predicted, measure)

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        chosen = [(t.name, (t.out_features, t.in_features)) for t in self.sketcher.targets]
        return chosen, self.sketcher.skipped

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = self.sketcher.state_dict()
        tensors = {f"sketcher.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        values = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        return tensors, {"sketcher": values, "trust": self.trust.state_dict() if self.trust else None}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        saved = {k.removeprefix("sketcher."): v for k, v in tensors.items() if k.startswith("sketcher.")}
        if (state["trust"] is None) != (self.trust is None):
            raise CheckpointError("the checkpoint was written with another trust.enabled: resume with the same setting")
        try:
            self.sketcher.load_state_dict({**state["sketcher"], **saved})
        except UpdateError as error:
            raise CheckpointError(f"{error}: resume with the settings the run was started with") from error
        if self.trust is not None:
            self.trust.load_state_dict(state["trust"])

    def export(self, write: Callable[[nn.Module, Path], None], folder: Path) -> None:
        write(self.model, folder)


def _metrics(decision: Decision, trust: TrustRegion) -> dict[str, float]:
    metrics = {
        "trust/predicted_kl": decision.predicted,
        "trust/predicted_kl_at_1": decision.predicted_at_one,
        "trust/budget": decision.budget,
        "trust/scale": decision.scale,
        "trust/mismatch": trust.gap,
    }
    if decision.measured is not None:
        metrics["trust/measured_kl"] = decision.measured
    return metrics
