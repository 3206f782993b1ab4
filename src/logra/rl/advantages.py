"""From rewards to advantages: one number a rollout, in float64.

Shape legend: B rollouts of a batch, N of them with a reward, K groups (a group: the rollouts of one prompt).

Sources: grpo arXiv 2402.03300 section 4.1.2; dr_grpo arXiv 2503.20783; rloo arXiv 2402.14740; reinforce++
arXiv 2501.03262; running_baseline arXiv 2610.06647 (its published training recipe).

Departures:
1. The standard deviation has ddof 1 and eps is 1e-4, both as in TRL 1.16 (`nanstd` there applies Bessel's
   correction); the papers do not say.
2. A group whose rewards are all equal gives exactly 0, by comparing the rewards themselves. A computed mean
   or deviation of equal numbers may differ from them in the last bit, and dividing that residue by a small
   deviation makes an advantage in the thousands. There is no floor: rewards that differ at all are taken to
   differ.
3. reinforce++ normalises one value a rollout over the batch; the paper's per-token KL penalty is not part of
   the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logra.errors import CheckpointError, ConfigError, RewardError


@dataclass(frozen=True, eq=False)
class AdvantageResult:
    """Advantages of one batch.

    advantages: (B,) float64, exactly 0 for dropped rollouts.
    dropped: (B,) bool, rollouts without a reward (NaN): they take no part in the loss or its denominators.
    frac_zero_std: share of the groups with at least one reward whose rewards are all equal (1.0 if there is
        no group). A group of one counts as all equal: with one rollout a prompt it is 1.0 whatever the kind.
    num_dropped: number of rollouts without a reward.
    has_signal: whether any advantage is not exactly 0. If not, the step must be skipped and no state
        committed, and so a KL penalty does not act on such a batch either.
    """

    advantages: Tensor
    dropped: Tensor
    frac_zero_std: float
    num_dropped: int
    has_signal: bool


class RunningBaseline:
    """The moving average of outcomes that `running_baseline` subtracts.

    outcome = 1 if reward >= threshold else failure; value <- value + weight * (mean outcome - value), from 0.
    Computing advantages reads `value` and never moves it. Only `commit` does, and the caller calls it after
    the update of the same batch was applied: a step that is skipped or refused leaves the baseline as it was.
    """

    def __init__(self, *, weight: float = 0.1, threshold: float = 1.0, failure: float = -0.01) -> None:
        if not 0.0 < weight <= 1.0:
            raise ConfigError(f"the baseline weight must lie in (0, 1], got {weight}")
        self.weight = weight
        self.threshold = threshold
        self.failure = failure
        self.value = 0.0

    def outcomes(self, rewards: Tensor) -> Tensor:
        """Rewards of any shape -> 1 or `failure`, float64."""
        failures = torch.full_like(rewards, self.failure, dtype=torch.float64)
        return failures.masked_fill(rewards.double() >= self.threshold, 1.0)

    def commit(self, rewards: Tensor) -> None:
        """Move the average by one batch of rewards (B,); NaN is left out. No reward at all: nothing moves."""
        kept = rewards[~rewards.isnan()]
        if kept.numel():
            self.value += self.weight * (float(self.outcomes(kept).mean()) - self.value)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if set(state) != {"value"}:
            raise CheckpointError(f"the state of a running baseline has the key 'value' only, got {sorted(state)}")
        self.value = float(state["value"])


@dataclass(frozen=True, eq=False)
class _Rewarded:
    """The rollouts that have a reward. groups_N holds 0..K-1; is_flat_K: a group's rewards are all equal."""

    rewards_N: Tensor
    groups_N: Tensor
    counts_K: Tensor
    is_flat_K: Tensor
    lengths_N: Tensor | None
    state: RunningBaseline | None

    def centred(self) -> Tensor:
        """Reward minus its group's mean, (N,); exactly 0 in flat groups."""
        sums_K = torch.zeros_like(self.counts_K).index_add_(0, self.groups_N, self.rewards_N)
        centred_N = self.rewards_N - (sums_K / self.counts_K)[self.groups_N]
        return torch.where(self.is_flat_K[self.groups_N], 0.0, centred_N)

    def group_std(self) -> Tensor:
        """Standard deviation (ddof 1) of each rollout's group, (N,); 0 in flat groups and groups of one."""
        squares_K = torch.zeros_like(self.counts_K).index_add_(0, self.groups_N, self.centred() ** 2)
        return (squares_K / (self.counts_K - 1).clamp(min=1)).sqrt()[self.groups_N]


def _std(values_N: Tensor) -> Tensor:
    """Standard deviation (ddof 1), exactly 0 for equal values and for fewer than two."""
    if values_N.numel() < 2 or bool((values_N == values_N[0]).all()):
        return values_N.new_zeros(())
    return values_N.std(correction=1)


def grpo(live: _Rewarded, *, scale: str = "group", eps: float = 1e-4) -> Tensor:
    """(r - group mean) / (std + eps), std of the group, of all rewards of the batch, or no division."""
    if scale == "none":
        return live.centred()
    if scale == "group":
        return live.centred() / (live.group_std() + eps)
    if scale == "batch":
        return live.centred() / (_std(live.rewards_N) + eps)
    raise ConfigError(f"grpo: scale {scale!r} is unknown: use 'group', 'batch' or 'none'")


def dr_grpo(live: _Rewarded) -> Tensor:
    """r - group mean."""
    return live.centred()


def rloo(live: _Rewarded) -> Tensor:
    """r - mean of the group's other rewards; 0 in a group of one.

    Computed as n / (n - 1) times the centred reward, which is the same number.
    """
    factor_K = live.counts_K / (live.counts_K - 1).clamp(min=1)
    return live.centred() * factor_K[live.groups_N]


def reinforce_plus_plus(live: _Rewarded, *, baseline: str = "batch", eps: float = 1e-4) -> Tensor:
    """(x - batch mean of x) / (batch std of x + eps); x = r, or with baseline "group" x = r - group mean.

    The batch mean of group-centred rewards is 0 in exact arithmetic, so it is not subtracted: flat groups
    stay exactly 0.
    """
    if baseline == "group":
        centred_N = live.centred()
        return centred_N / (_std(centred_N) + eps)
    if baseline != "batch":
        raise ConfigError(f"reinforce++: baseline {baseline!r} is unknown: use 'batch' or 'group'")
    std = _std(live.rewards_N)
    if std == 0:
        return torch.zeros_like(live.rewards_N)
    return (live.rewards_N - live.rewards_N.mean()) / (std + eps)


def running_baseline(live: _Rewarded, *, length_scale: float | None = None) -> Tensor:
    """outcome - baseline (see RunningBaseline).

    length_scale: if given, times length_scale / length (1024 in the author's code).
    """
    if live.state is None:
        raise ConfigError("running_baseline needs its state: pass state=RunningBaseline()")
    advantages_N = live.state.outcomes(live.rewards_N) - live.state.value
    if length_scale is None:
        return advantages_N
    if live.lengths_N is None:
        raise ConfigError("running_baseline with length_scale needs the completion lengths: pass lengths=...")
    return advantages_N * length_scale / live.lengths_N.clamp(min=1)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "running_baseline": running_baseline,
}


def compute_advantages(
    kind: str,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    state: RunningBaseline | None = None,
    lengths: Tensor | None = None,
    **options: Any,
) -> AdvantageResult:
    """Advantages of a batch; pure: `state` is read, never moved.

    kind: a key of ADVANTAGES; options: that function's keywords.
    rewards: (B,), computed on in float64, NaN where there is no reward. An infinite reward is a RewardError.
    group_ids: (B,) integers, equal for the rollouts of one prompt, in any order; groups may differ in size.
    lengths: (B,) completion lengths in tokens, only for running_baseline's length_scale.
    """
    function = find_advantage(kind, options)
    _check_shapes(rewards, group_ids, lengths)
    rewards_B = rewards.detach().double()
    dropped_B = rewards_B.isnan()
    live = _rewarded(rewards_B, group_ids, ~dropped_B, lengths, state)
    advantages_B = torch.zeros_like(rewards_B)
    advantages_B[~dropped_B] = function(live, **options)
    num_groups = live.is_flat_K.numel()
    return AdvantageResult(
        advantages=advantages_B,
        dropped=dropped_B,
        frac_zero_std=float(live.is_flat_K.double().mean()) if num_groups else 1.0,
        num_dropped=int(dropped_B.sum()),
        has_signal=bool((advantages_B != 0).any()),
    )


def find_advantage(kind: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    """The function of a kind; `ConfigError` for an unknown kind or option."""
    if kind not in ADVANTAGES:
        raise ConfigError(f"unknown advantage {kind!r}: use one of {', '.join(ADVANTAGES)}")
    known = list(inspect.signature(ADVANTAGES[kind]).parameters)[1:]
    for name in options:
        if name not in known:
            raise ConfigError(f"advantage {kind!r} has no option {name!r}; its options: {', '.join(known) or 'none'}")
    if options.get("eps", 1.0) <= 0:
        raise ConfigError(f"advantage {kind!r}: eps must be positive (1e-4 is usual), got {options['eps']}")
    return ADVANTAGES[kind]


def _check_shapes(rewards: Tensor, group_ids: Tensor, lengths: Tensor | None) -> None:
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(f"rewards and group_ids must both be (B,), got {rewards.shape} and {group_ids.shape}")
    if lengths is not None and lengths.shape != rewards.shape:
        raise ValueError(f"lengths must be (B,) = {tuple(rewards.shape)}, got {tuple(lengths.shape)}")
    infinite = rewards.isinf().nonzero().flatten().tolist()
    if infinite:
        raise RewardError(
            f"the rewards of rollouts {infinite[:8]} are infinite: return finite numbers, or None to drop one"
        )


def _rewarded(
    rewards_B: Tensor,
    group_ids: Tensor,
    keep_B: Tensor,
    lengths: Tensor | None,
    state: RunningBaseline | None,
) -> _Rewarded:
    rewards_N = rewards_B[keep_B]
    ids_K, groups_N = group_ids[keep_B].unique(return_inverse=True)
    blank_K = rewards_N.new_zeros(ids_K.numel())
    low_K = blank_K.scatter_reduce(0, groups_N, rewards_N, "amin", include_self=False)
    high_K = blank_K.scatter_reduce(0, groups_N, rewards_N, "amax", include_self=False)
    return _Rewarded(
        rewards_N=rewards_N,
        groups_N=groups_N,
        counts_K=blank_K.index_add(0, groups_N, torch.ones_like(rewards_N)),
        is_flat_K=low_K == high_K,
        lengths_N=None if lengths is None else lengths[keep_B].double(),
        state=state,
    )
