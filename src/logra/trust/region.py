"""The step size from a KL budget (methods.md 1.4): alpha = min(alpha_max, sqrt(delta / q)).

The budget delta is constant or annealed by a cosine, and lowered by the observed mismatch between the policy that sampled
and the policy that trains, at most to `floor` of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from logra.errors import ConfigError, NonFiniteError

SCHEDULES = ("constant", "cosine")


def cosine_budget(update: int, start: float, final: float, horizon: int) -> float:
    """delta(u) = final + (start - final)/2 (1 + cos(pi min(u/(H-1), 1))); u finished updates, 0-based."""
    progress = min(update / (horizon - 1), 1.0) if horizon > 1 else 1.0
    return final + 0.5 * (start - final) * (1.0 + math.cos(math.pi * progress))


def step_scale(predicted: float, budget: float, largest: float) -> float:
    """alpha = min(alpha_max, sqrt(delta/q)); 1 if q is 0; `NonFiniteError` if q is negative or not finite."""
    if not 0.0 <= predicted < math.inf:
        raise NonFiniteError(f"the predicted KL is {predicted}; the step was not applied")
    return min(largest, math.sqrt(budget / predicted)) if predicted > 0.0 else 1.0


@dataclass(frozen=True)
class Decision:
    """What the trust region decided: q at scale 1, the budget after correction, alpha, and the measured KL if asked for."""

    predicted_at_one: float
    budget: float
    scale: float
    measured: float | None = None

    @property
    def predicted(self) -> float:
        """Predicted KL of the step that is taken: alpha^2 q."""
        return self.scale**2 * self.predicted_at_one


class TrustRegion:
    """Budget schedule, mismatch correction and step scale.

    budget: "constant" (stays at `start`) or "cosine" (from `start` to `final` over `steps` updates). The defaults are the
    published ones. mismatch: correct by the observed gap, kept as an average with weight 0.3. verify: shrink a step whose
    measured KL exceeds `tolerance` times the budget, at most three times.
    """

    def __init__(
        self,
        budget: str = "cosine",
        *,
        start: float = 2e-4,
        final: float = 2e-5,
        steps: int = 300,
        largest_scale: float = 3.0,
        mismatch: bool = True,
        mismatch_weight: float = 0.3,
        floor: float = 0.5,
        measure_every: int = 10,
        verify: bool = False,
        tolerance: float = 1.5,
    ):
        if budget not in SCHEDULES:
            raise ConfigError(f"trust.budget={budget!r} is not known: use one of {list(SCHEDULES)}")
        if not (start > 0 and final > 0 and steps >= 1 and largest_scale > 0 and tolerance >= 1):
            raise ConfigError(
                "the trust region needs start, final and largest_scale above 0, steps >= 1, tolerance >= 1"
            )
        self.kind, self.start, self.final, self.steps = budget, start, final, steps
        self.largest_scale, self.floor = largest_scale, floor
        self.corrects, self.mismatch_weight = mismatch, mismatch_weight
        self.measure_every, self.verify, self.tolerance = measure_every, verify, tolerance
        self.gap = 0.0

    def scheduled(self, update: int) -> float:
        """The budget before correction, for `update` finished updates."""
        return self.start if self.kind == "constant" else cosine_budget(update, self.start, self.final, self.steps)

    def observe(self, gap: float) -> None:
        """Take in mean(logp_generation - logp_trainer) of the rollouts that ended with an end-of-sequence token."""
        if not math.isfinite(gap):
            raise NonFiniteError(
                f"the log-prob gap between rollout and trainer is {gap}: the engine's log-probs are broken"
            )
        self.gap = (1.0 - self.mismatch_weight) * self.gap + self.mismatch_weight * max(0.0, gap)

    def budget(self, update: int) -> float:
        """delta <- max(delta - m, floor delta)."""
        delta = self.scheduled(update)
        return max(delta - self.gap, self.floor * delta) if self.corrects else delta

    def decide(self, update: int, predicted: float, measure: Callable[[float], float]) -> Decision:
        """Choose alpha. `measure(alpha)` gives the exact KL; called every `measure_every` updates, and for `verify`."""
        budget = self.budget(update)
        scale = step_scale(predicted, budget, self.largest_scale)
        if not self.verify:
            is_due = self.measure_every > 0 and update % self.measure_every == 0
            return Decision(predicted, budget, scale, measure(scale) if is_due else None)
        measured = measure(scale)
        for _ in range(3):
            if measured <= self.tolerance * budget:
                break
            scale *= math.sqrt(budget / measured)
            measured = measure(scale)
        return Decision(predicted, budget, scale, measured)

    def state_dict(self) -> dict[str, Any]:
        return {"gap": self.gap}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gap = float(state["gap"])
