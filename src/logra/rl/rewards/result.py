"""What came out of one scoring call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from logra.rl.rewards.spec import FAILED, STATUSES, RewardSpec, Score


@dataclass(frozen=True)
class RewardResult:
    """Rewards of B rollouts, in the order in which they were given.

    total: per rollout, the weighted sum over the functions that gave a value. None, and the rollout must be
        dropped, where no function of non-zero weight gave one, or where one failed (error, timeout): a
        verifier that broke is no zero.
    per_function: name -> B values, None where it abstained or failed.
    counts: name -> how many rollouts ended in each status; disjoint, so they add up to B.
    messages: name -> the first error's text; functions without one are absent.
    """

    total: list[float | None]
    per_function: dict[str, list[float | None]]
    counts: dict[str, dict[str, int]]
    messages: dict[str, str]

    def metrics(self) -> dict[str, float]:
        """Flat numbers to log, under TRL's names where TRL has one.

        rewards/NAME/{mean,std}: over the values given, absent if there are none; std has n - 1, 0 for one.
        rewards/NAME/{unparseable,abstain,error,timeout}: shares of the rollouts.
        """
        logged: dict[str, float] = {}
        for name, values in self.per_function.items():
            given = [value for value in values if value is not None]
            if given:
                mean = math.fsum(given) / len(given)
                squares = math.fsum((value - mean) ** 2 for value in given)
                logged[f"rewards/{name}/mean"] = mean
                logged[f"rewards/{name}/std"] = math.sqrt(squares / max(len(given) - 1, 1))
            if values:
                for status in ("unparseable", "abstain", "error", "timeout"):
                    logged[f"rewards/{name}/{status}"] = self.counts[name][status] / len(values)
        return logged


def combine(
    specs: Sequence[RewardSpec], scores: Sequence[Sequence[Score]], messages: Mapping[int, str]
) -> RewardResult:
    """scores: one list of B scores per function. messages: function index -> first error."""
    num_rollouts = len(scores[0])
    return RewardResult(
        total=[total(specs, [column[i] for column in scores]) for i in range(num_rollouts)],
        per_function={spec.name: [s.value for s in column] for spec, column in zip(specs, scores, strict=True)},
        counts={
            spec.name: {status: sum(s.status == status for s in column) for status in STATUSES}
            for spec, column in zip(specs, scores, strict=True)
        },
        messages={specs[i].name: text for i, text in sorted(messages.items())},
    )


def total(specs: Sequence[RewardSpec], scores: Sequence[Score]) -> float | None:
    """Sum of weight_f * value_f over f with weight_f != 0 and a value; None if one failed or none has one."""
    weighed = [(spec.weight, score) for spec, score in zip(specs, scores, strict=True) if spec.weight != 0]
    if any(score.status in FAILED for _, score in weighed):
        return None
    values = [weight * score.value for weight, score in weighed if score.value is not None]
    return math.fsum(values) if values else None
