"""Every advantage against Python loops written from the papers, and the cases that blow up elsewhere."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import CheckpointError, ConfigError, RewardError
from logra.rl.advantages import ADVANTAGES, RunningBaseline, compute_advantages

NAN = math.nan
OUTCOME_KINDS = ("grpo", "dr_grpo", "rloo")
REWARDS = [0.1, 0.9, 0.4, 1.0, 0.35, 0.35, 0.35, NAN, 2.0, -1.5, NAN]
GROUPS = [7, 7, 3, 7, 3, 5, 5, 3, 3, 7, 9]


def advantages(kind, rewards, groups, **options):
    return compute_advantages(kind, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options)


def mates(rewards, groups, b):
    """Rewards of the rollout's group, itself included, NaN left out."""
    return [r for r, g in zip(rewards, groups, strict=True) if g == groups[b] and not math.isnan(r)]


def kept(rewards):
    return [r for r in rewards if not math.isnan(r)]


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def slow_grpo(rewards, groups, scale="group", eps=1e-4):
    out = []
    for b, r in enumerate(rewards):
        if math.isnan(r):
            out.append(0.0)
            continue
        group = mates(rewards, groups, b)
        centred = r - statistics.fmean(group)
        if scale == "group":
            centred /= spread(group) + eps
        elif scale == "batch":
            centred /= spread(kept(rewards)) + eps
        out.append(centred)
    return out


def slow_dr_grpo(rewards, groups):
    return slow_grpo(rewards, groups, scale="none")


def slow_rloo(rewards, groups):
    out = []
    for b, r in enumerate(rewards):
        others = [
            other for j, other in enumerate(rewards) if j != b and groups[j] == groups[b] and not math.isnan(other)
        ]
        out.append(r - sum(others) / len(others) if others and not math.isnan(r) else 0.0)
    return out


def slow_reinforce_plus_plus(rewards, groups, baseline="batch", eps=1e-4):
    values = list(rewards)
    if baseline == "group":
        values = slow_dr_grpo(rewards, groups)
        values = [NAN if math.isnan(r) else v for r, v in zip(rewards, values, strict=True)]
    mean, std = statistics.fmean(kept(values)), spread(kept(values))
    return [0.0 if math.isnan(v) else (v - mean) / (std + eps) for v in values]


@pytest.mark.parametrize(
    ("kind", "slow", "options"),
    [
        ("grpo", slow_grpo, {}),
        ("grpo", slow_grpo, {"eps": 0.1}),
        ("grpo", slow_grpo, {"scale": "batch"}),
        ("grpo", slow_grpo, {"scale": "none"}),
        ("dr_grpo", slow_dr_grpo, {}),
        ("rloo", slow_rloo, {}),
        ("reinforce++", slow_reinforce_plus_plus, {}),
        ("reinforce++", slow_reinforce_plus_plus, {"baseline": "group"}),
        ("reinforce++", slow_reinforce_plus_plus, {"eps": 0.5}),
    ],
)
def test_matches_loop_reference(kind, slow, options):
    result = advantages(kind, REWARDS, GROUPS, **options)
    assert result.advantages.dtype == torch.float64
    torch.testing.assert_close(
        result.advantages,
        torch.tensor(slow(REWARDS, GROUPS, **options), dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )
    assert result.dropped.tolist() == [math.isnan(r) for r in REWARDS]
    assert result.num_dropped == 2
    assert result.has_signal
    # groups with a reward: 7 and 3 spread, 5 all equal; 9 has none
    assert result.frac_zero_std == pytest.approx(1 / 3)


def test_grpo_hand_value():
    # mean 0.25, deviation with ddof 1 is 0.5
    result = advantages("grpo", [1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    assert result.advantages.tolist() == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3], abs=1e-15)


@pytest.mark.parametrize("kind", OUTCOME_KINDS)
@pytest.mark.parametrize("value", [0.35, 0.1, 1 / 3, 1e9 + 0.1, float(torch.tensor(0.35))])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_groups_are_exactly_zero(kind, value, size):
    result = advantages(kind, [value] * size, [4] * size)
    assert result.advantages.tolist() == [0.0] * size
    assert not result.has_signal
    assert result.frac_zero_std == 1.0


def test_equal_groups_are_exactly_zero_beside_others():
    rewards, groups = [0.1] * 7 + [0.0, 1.0], [0] * 7 + [1, 1]
    batch_scaled = [("grpo", {"scale": "batch"}), ("reinforce++", {"baseline": "group"})]
    for kind, options in [*((kind, {}) for kind in OUTCOME_KINDS), *batch_scaled]:
        result = advantages(kind, rewards, groups, **options)
        assert result.advantages[:7].tolist() == [0.0] * 7, kind
        assert (result.advantages[7:] != 0).all(), kind
        assert result.frac_zero_std == 0.5


def test_equal_batch_is_exactly_zero_for_batch_statistics():
    result = advantages("reinforce++", [0.35] * 7, list(range(7)))
    assert result.advantages.tolist() == [0.0] * 7
    assert not result.has_signal


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("odd", [0.0, 1.0, 0.35])
def test_seven_against_one_does_not_blow_up(kind, odd):
    # the others' fp32 deviation of 0.35 is not 0 but 1.6e-4, which divided by gives -2154
    rewards = torch.tensor([odd] + [0.35] * 7, dtype=torch.float32)
    result = compute_advantages(kind, rewards, torch.zeros(8, dtype=torch.long), state=RunningBaseline())
    assert result.advantages.abs().max() <= 7 / math.sqrt(8) + 1e-9
    # a difference in the last bit is a difference, but a small one
    rewards[0] = torch.nextafter(torch.tensor(0.35), torch.tensor(1.0))
    result = compute_advantages(kind, rewards, torch.zeros(8, dtype=torch.long), state=RunningBaseline())
    assert result.advantages.abs().max() < 0.02


@pytest.mark.parametrize("kind", OUTCOME_KINDS)
def test_group_of_one_gives_zero(kind):
    result = advantages(kind, [1.0, 0.5, NAN], [0, 1, 1])
    assert result.advantages.tolist() == [0.0, 0.0, 0.0]
    assert not result.has_signal


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_no_reward_at_all(kind):
    for rewards in ([NAN, NAN], []):
        result = advantages(kind, rewards, [0] * len(rewards), state=RunningBaseline())
        assert result.advantages.tolist() == [0.0] * len(rewards)
        assert (result.num_dropped, result.has_signal, result.frac_zero_std) == (len(rewards), False, 1.0)


def test_reinforce_plus_plus_works_with_one_rollout_a_prompt():
    result = advantages("reinforce++", [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3])
    scaled = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert result.advantages.tolist() == pytest.approx([scaled, -scaled, -scaled, scaled])
    assert result.has_signal


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=12),
    st.sampled_from([*OUTCOME_KINDS, "reinforce++"]),
    st.randoms(use_true_random=False),
)
def test_order_and_dropped_rollouts_do_not_matter(pairs, kind, random):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    plain = advantages(kind, rewards, groups).advantages
    order = list(range(len(pairs) + 2))
    random.shuffle(order)
    more_rewards, more_groups = [*rewards, NAN, NAN], [*groups, 0, 99]
    mixed = advantages(kind, [more_rewards[i] for i in order], [more_groups[i] for i in order]).advantages
    restored = torch.empty_like(mixed)
    restored[torch.tensor(order)] = mixed
    torch.testing.assert_close(restored[: len(pairs)], plain, rtol=1e-7, atol=1e-7)
    assert restored[len(pairs) :].tolist() == [0.0, 0.0]


def test_running_baseline_follows_the_recipe():
    state, baseline = RunningBaseline(), 0.0
    for rewards in ([1.0, 0.0, 0.5, NAN], [1.0, 2.0], [0.99, 1.0, -3.0]):
        outcomes = [1.0 if r >= 1 else -0.01 for r in rewards if not math.isnan(r)]
        expected = [0.0 if math.isnan(r) else (1.0 if r >= 1 else -0.01) - baseline for r in rewards]
        result = advantages("running_baseline", rewards, list(range(len(rewards))), state=state)
        assert result.advantages.tolist() == pytest.approx(expected, abs=1e-15)
        assert result.has_signal
        state.commit(torch.tensor(rewards, dtype=torch.float64))
        baseline = 0.9 * baseline + 0.1 * sum(outcomes) / len(outcomes)
        assert state.value == pytest.approx(baseline, abs=1e-15)


def test_running_baseline_moves_only_on_commit():
    state = RunningBaseline()
    for _ in range(3):
        advantages("running_baseline", [1.0, 0.0], [0, 1], state=state)
    assert state.value == 0.0
    state.commit(torch.tensor([NAN, NAN]))
    assert state.value == 0.0


def test_running_baseline_length_scale():
    lengths = torch.tensor([512, 2048, 0])
    result = advantages(
        "running_baseline",
        [1.0, 0.0, 1.0],
        [0, 1, 2],
        state=RunningBaseline(),
        lengths=lengths,
        length_scale=1024.0,
    )
    assert result.advantages.tolist() == pytest.approx([2.0, -0.005, 1024.0])
    with pytest.raises(ConfigError, match="lengths"):
        advantages("running_baseline", [1.0], [0], state=RunningBaseline(), length_scale=1024.0)


def test_running_baseline_state_round_trip():
    state = RunningBaseline()
    state.commit(torch.tensor([1.0, 0.0]))
    other = RunningBaseline()
    other.load_state_dict(state.state_dict())
    assert other.value == state.value != 0.0
    with pytest.raises(CheckpointError, match="value"):
        other.load_state_dict({"baseline": 1.0})


def test_bad_input_says_what_to_do():
    with pytest.raises(ConfigError, match="grpo, dr_grpo, rloo"):
        advantages("gpro", [1.0], [0])
    with pytest.raises(ConfigError, match="no option 'epsilon'; its options: scale, eps"):
        advantages("grpo", [1.0], [0], epsilon=1.0)
    with pytest.raises(ConfigError, match="'group', 'batch' or 'none'"):
        advantages("grpo", [1.0], [0], scale="std")
    with pytest.raises(ConfigError, match="'batch' or 'group'"):
        advantages("reinforce++", [1.0], [0], baseline="none")
    with pytest.raises(ConfigError, match="eps must be positive"):
        advantages("grpo", [1.0], [0], eps=0.0)
    with pytest.raises(ConfigError, match="RunningBaseline"):
        advantages("running_baseline", [1.0], [0])
    with pytest.raises(ConfigError, match="weight"):
        RunningBaseline(weight=0.0)
    with pytest.raises(RewardError, match=r"\[1\] are infinite"):
        advantages("grpo", [1.0, math.inf], [0, 0])
    with pytest.raises(ValueError, match="group_ids"):
        advantages("grpo", [1.0, 2.0], [0])
    with pytest.raises(ValueError, match="lengths"):
        advantages("grpo", [1.0], [0], lengths=torch.tensor([1, 2]))
