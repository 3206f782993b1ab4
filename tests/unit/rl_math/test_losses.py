"""Every loss against Python loops in float64 written from the papers; gradients by central differences."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import ConfigError
from logra.rl.losses import (
    AGGREGATIONS,
    LOSSES,
    importance_weights,
    k3_kl,
    policy_loss,
    token_weights,
    weighted_loss,
)

POISON = (math.inf, -math.inf, math.nan)
MASK = [
    [True] * 5,
    [True, True, False, False, False],
    [False] * 5,
    [False, True, True, True, False],
    [True] * 5,
]
ADVANTAGES = [1.5, -0.7, 2.0, -2.0, 0.0]


def logps(spread, seed=0):
    """Two (5, 5) tables of log-probabilities whose difference has the given spread."""
    rng = random.Random(seed)
    old = [[-rng.uniform(0.1, 4.0) for _ in row] for row in MASK]
    new = [[value + rng.gauss(0.0, spread) for value in row] for row in old]
    return new, old


def tensor(table, grad=False):
    return torch.tensor(table, dtype=torch.float32, requires_grad=grad)


# -- slow references: one loss a token, floats only --


def surrogate(ratio, advantage, low, high, dual):
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, bounded * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def slow_ppo(new, old, advantage, low, high, dual):
    return [surrogate(math.exp(n - o), advantage, low, high, dual) for n, o in zip(new, old, strict=True)]


def slow_gspo(new, old, advantage, low, high, dual):
    likelihood_ratio = math.exp(sum(new)) / math.exp(sum(old))
    return [surrogate(likelihood_ratio ** (1 / len(new)), advantage, low, high, dual)] * len(new)


def slow_reinforce(new, old, advantage, low, high, dual):
    return [-advantage * n for n in new]


def slow_cispo(new, old, advantage, low, high, frozen):
    """frozen: the log-probs at which the gradient is taken, behind the stop-gradient."""
    ratios = [math.exp(f - o) for f, o in zip(frozen, old, strict=True)]
    return [-min(max(r, 1 - low), 1 + high) * advantage * n for r, n in zip(ratios, new, strict=True)]


def slow_table(kind, new, old, low, high, dual, frozen=None):
    """(B, T) losses, 0 where masked, each rollout's live tokens passed as a plain list."""
    out = []
    for b, mask in enumerate(MASK):
        live = [t for t, keep in enumerate(mask) if keep]
        row = [0.0] * len(mask)
        n, o = [new[b][t] for t in live], [old[b][t] for t in live]
        if live and kind == "cispo":
            at = [(frozen or new)[b][t] for t in live]
            values = slow_cispo(n, o, ADVANTAGES[b], low, high, at)
        elif live:
            slow = {"ppo": slow_ppo, "gspo": slow_gspo, "reinforce": slow_reinforce}[kind]
            values = slow(n, o, ADVANTAGES[b], low, high, dual)
        else:
            values = []
        for t, value in zip(live, values, strict=True):
            row[t] = value
        out.append(row)
    return out


def slow_gradient(kind, new, old, weights, low, high, dual, h=1e-6):
    def total(table):
        rows = slow_table(kind, table, old, low, high, dual, frozen=new)
        return sum(w * sum(row) for w, row in zip(weights, rows, strict=True))

    grad = [[0.0] * len(row) for row in new]
    for b in range(len(new)):
        for t in range(len(new[b])):
            up, down = [list(row) for row in new], [list(row) for row in new]
            up[b][t] += h
            down[b][t] -= h
            grad[b][t] = (total(up) - total(down)) / (2 * h)
    return grad


CASES = [
    (kind, *clip)
    for kind in ("ppo", "gspo", "cispo", "reinforce")
    for clip in ((0.2, 0.2, None), (0.1, 0.28, None), (1.0, 0.5, None), (0.2, 0.2, 1.3))
    if clip[2] is None or kind in ("ppo", "gspo")
]


@pytest.mark.parametrize(("kind", "low", "high", "dual"), CASES)
@pytest.mark.parametrize("spread", [0.05, 0.4, 1.0])
def test_loss_and_gradient_match_loop_reference(kind, low, high, dual, spread):
    new, old = logps(spread)
    weights = [0.3, 0.1, 0.7, 0.2, 0.5]
    logp = tensor(new, grad=True)
    clip = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    loss, _ = policy_loss(kind, logp, tensor(old), torch.tensor(ADVANTAGES), torch.tensor(MASK), **clip)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, tensor(slow_table(kind, new, old, low, high, dual)), rtol=3e-6, atol=3e-6)
    weighted_loss(loss, torch.tensor(weights)).backward()
    torch.testing.assert_close(
        logp.grad, tensor(slow_gradient(kind, new, old, weights, low, high, dual)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("dual", [None, 1.3])
def test_clip_metrics_are_sums_of_tokens(kind, dual):
    new, old = logps(0.6)
    low, high, counts = 0.1, 0.28, {"low": 0, "high": 0, "region": 0, "dual": 0}
    for b, mask in enumerate(MASK):
        live = [t for t, keep in enumerate(mask) if keep]
        logs = [new[b][t] - old[b][t] for t in live]
        for log in logs:
            ratio = math.exp(sum(logs) / len(logs) if kind == "gspo" else log)
            is_low, is_high = ratio < 1 - low and ADVANTAGES[b] < 0, ratio > 1 + high and ADVANTAGES[b] > 0
            counts["low"] += is_low
            counts["high"] += is_high
            counts["region"] += is_low or is_high
            counts["dual"] += ratio > 1.3 and ADVANTAGES[b] < 0
    args = tensor(new), tensor(old), torch.tensor(ADVANTAGES), torch.tensor(MASK)
    _, metrics = policy_loss(kind, *args, clip_low=low, clip_high=high, dual_clip=dual)
    expected = {f"clip_ratio/{k}_mean": v for k, v in counts.items() if k != "dual" or dual is not None}
    assert {name: int(value) for name, value in metrics.items()} == expected
    assert counts["low"] and counts["high"] if kind == "ppo" else counts["region"]


def test_cispo_counts_clipped_weights_of_either_sign():
    new, old = [[0.0, -1.0, -5.0, -1.0]], [[-1.0, 0.0, -5.0, -3.0]]
    args = tensor(new), tensor(old), torch.tensor([-1.0]), torch.tensor([[True, True, True, False]])
    _, metrics = policy_loss("cispo", *args)
    assert {k.split("/")[1]: int(v) for k, v in metrics.items()} == {
        "low_mean": 1,
        "high_mean": 1,
        "region_mean": 2,
    }
    assert policy_loss("reinforce", *args)[1] == {}


@pytest.mark.parametrize("kind", LOSSES)
def test_no_old_logp_means_on_policy(kind):
    new, _ = logps(0.0)
    a, b = tensor(new, grad=True), tensor(new, grad=True)
    rest = torch.tensor(ADVANTAGES), torch.tensor(MASK)
    loss_a, metrics = policy_loss(kind, a, None, *rest)
    loss_b, _ = policy_loss(kind, b, b.detach().clone(), *rest)
    loss_a.sum().backward()
    loss_b.sum().backward()
    assert torch.equal(loss_a, loss_b)
    assert torch.equal(a.grad, b.grad)
    assert all(int(value) == 0 for value in metrics.values())
    # on-policy, every loss has the REINFORCE gradient
    expected = torch.where(torch.tensor(MASK), -torch.tensor(ADVANTAGES)[:, None], 0.0)
    torch.testing.assert_close(a.grad, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("where", ["new", "old", "both"])
@pytest.mark.parametrize("poison", POISON)
def test_padding_poison_reaches_nothing(kind, where, poison):
    new, old = logps(0.5)
    mask = torch.tensor(MASK)
    results = []
    for fill in (0.0, poison):
        logp, old_logp = tensor(new), tensor(old)
        if where != "old":
            logp[~mask] = fill
        if where != "new":
            old_logp[~mask] = fill
        logp.requires_grad_()
        advantage = torch.tensor(ADVANTAGES)
        if math.isnan(fill):
            advantage[2] = fill  # a row without tokens
        loss, metrics = policy_loss(kind, logp, old_logp, advantage, mask)
        loss.sum().backward()
        results.append((loss.detach(), logp.grad, metrics))
    (clean, clean_grad, clean_metrics), (loss, grad, metrics) = results
    assert torch.equal(loss, clean)
    assert torch.equal(grad, clean_grad)
    assert metrics == clean_metrics
    assert (loss[~mask] == 0).all()
    assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("kind", LOSSES)
def test_fully_masked_batch_is_connected_with_zero_gradient(kind):
    logp = tensor([[math.nan, -1.0]], grad=True)
    loss, _ = policy_loss(kind, logp, tensor([[-1.0, -1.0]]), torch.tensor([1.0]), torch.zeros(1, 2, dtype=torch.bool))
    weighted_loss(loss, torch.zeros(1)).backward()
    assert loss.tolist() == [[0.0, 0.0]]
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("gap", [119.0, -119.0, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(kind, gap, advantage):
    logp = tensor([[gap - 1.0, -1.0]], grad=True)
    loss, _ = policy_loss(kind, logp, tensor([[-1.0, -1.0]]), torch.tensor([advantage]), torch.ones(1, 2).bool())
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("kind", LOSSES)
def test_nan_in_a_real_token_is_not_hidden(kind):
    loss, _ = policy_loss(
        kind, tensor([[math.nan, -1.0]]), tensor([[-1.0, -1.0]]), torch.tensor([1.0]), torch.ones(1, 2).bool()
    )
    assert loss[0, 0].isnan()


@pytest.mark.parametrize("kind", LOSSES)
def test_only_the_policy_gets_a_gradient(kind):
    new, old = logps(0.1)
    logp, old_logp, advantage = (
        tensor(new, grad=True),
        tensor(old, grad=True),
        torch.tensor(ADVANTAGES).double(),
    )
    loss, _ = policy_loss(kind, logp, old_logp, advantage.requires_grad_(), torch.tensor(MASK))
    assert loss.dtype == torch.float32
    (loss.sum() + k3_kl(logp, old_logp, torch.tensor(MASK)).sum()).backward()
    assert logp.grad is not None
    assert old_logp.grad is None
    assert advantage.grad is None


def test_bfloat16_is_computed_in_float32():
    new, old = logps(0.3)
    new_half, old_half = tensor(new).bfloat16(), tensor(old).bfloat16()
    rest = torch.tensor(ADVANTAGES), torch.tensor(MASK)
    half, _ = policy_loss("ppo", new_half, old_half, *rest)
    full, _ = policy_loss("ppo", new_half.float(), old_half.float(), *rest)
    assert half.dtype == torch.float32
    assert torch.equal(half, full)


# -- importance weights and KL --


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [2.0, 1.1, math.inf])
def test_importance_weights_match_loop_reference(level, cap):
    trainer, rollout = logps(0.5)
    expected = []
    for b, mask in enumerate(MASK):
        logs = [trainer[b][t] - rollout[b][t] if keep else 0.0 for t, keep in enumerate(mask)]
        ratios = [math.exp(sum(logs) if level == "sequence" else log) for log in logs]
        expected.append([min(r, cap) if keep else 0.0 for r, keep in zip(ratios, mask, strict=True)])
    weights = importance_weights(tensor(trainer, grad=True), tensor(rollout), torch.tensor(MASK), cap=cap, level=level)
    torch.testing.assert_close(weights, tensor(expected), rtol=2e-6, atol=2e-6)
    assert not weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("poison", POISON)
def test_importance_weights_ignore_poison_and_stay_finite(level, poison):
    trainer, rollout = logps(0.5)
    mask = torch.tensor(MASK)
    bad_trainer, bad_rollout = tensor(trainer), tensor(rollout)
    bad_trainer[~mask] = poison
    bad_rollout[~mask] = poison
    clean = importance_weights(tensor(trainer), tensor(rollout), mask, level=level)
    assert torch.equal(importance_weights(bad_trainer, bad_rollout, mask, level=level), clean)
    far = importance_weights(tensor([[0.0, -500.0]]), tensor([[-500.0, 0.0]]), torch.ones(1, 2).bool(), cap=5.0)
    assert far[0, 0] == 5.0
    assert 0 < far[0, 1] < 1e-8


@pytest.mark.parametrize("spread", [1e-3, 0.3, 2.0])
def test_k3_matches_loop_reference_with_gradient(spread):
    new, ref = logps(spread)
    logp = tensor(new, grad=True)
    kl = k3_kl(logp, tensor(ref), torch.tensor(MASK))
    # the float32 inputs, exactly
    new, ref = logp.detach().double().tolist(), tensor(ref).double().tolist()
    expected, gradient = [], []
    for b, mask in enumerate(MASK):
        x = [r - n for r, n in zip(ref[b], new[b], strict=True)]
        expected.append([math.exp(v) - v - 1 if keep else 0.0 for v, keep in zip(x, mask, strict=True)])
        gradient.append([1 - math.exp(v) if keep else 0.0 for v, keep in zip(x, mask, strict=True)])
    torch.testing.assert_close(kl, tensor(expected), rtol=1e-4, atol=1e-9)
    assert (kl >= 0).all()
    kl.sum().backward()
    torch.testing.assert_close(logp.grad, tensor(gradient), rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("poison", POISON)
def test_k3_with_log_ratio_119_and_poison_is_finite(poison):
    logp = tensor([[-120.0, -1.0, -1.0, poison]], grad=True)
    ref = tensor([[-1.0, -120.0, -math.inf, poison]])
    kl = k3_kl(logp, ref, torch.tensor([[True, True, True, False]]))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logp.grad.isfinite().all()
    assert kl[0, 3] == logp.grad[0, 3] == 0
    # far from the reference in the common direction, the pull back is still there
    assert kl[0, 1].item() == pytest.approx(118.0)
    assert logp.grad[0, 1].item() == pytest.approx(1.0)
    naive = tensor([[-120.0]], grad=True)
    x = tensor([[-1.0]]) - naive
    (torch.exp(x) - x - 1).clamp(max=10.0).sum().backward()
    assert naive.grad.isnan().all(), "clipping after exp no longer fails: this test has lost its control"


# -- weights --


def slow_step_loss(kind, table, lengths, groups, dropped, max_new_tokens):
    """The step loss of per-token values, straight from each aggregation's definition."""
    live = [b for b in range(len(lengths)) if lengths[b] > 0 and not dropped[b]]
    if not live:
        return 0.0
    tokens = {b: table[b][: lengths[b]] for b in live}
    if kind == "token":
        flat = [value for b in live for value in tokens[b]]
        return sum(flat) / len(flat)
    if kind == "sequence":
        return sum(sum(tokens[b]) / lengths[b] for b in live) / len(live)
    if kind == "constant":
        return sum(sum(tokens[b]) / max_new_tokens for b in live) / len(live)
    means = []
    for group in {groups[b] for b in live}:
        flat = [value for b in live if groups[b] == group for value in tokens[b]]
        means.append(sum(flat) / len(flat))
    return sum(means) / len(means)


rollout_shapes = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=9
)


@pytest.mark.parametrize("kind", AGGREGATIONS)
@settings(deadline=None, derandomize=True)
@given(shapes=rollout_shapes, seed=st.integers(0, 99), data=st.data())
def test_aggregation_is_its_definition_however_the_batch_is_split(kind, shapes, seed, data):
    lengths, groups = [s[0] for s in shapes], [s[1] for s in shapes]
    dropped = [s[2] and s[3] == 0 for s in shapes]
    rng = random.Random(seed)
    table = [[rng.gauss(0, 1) for _ in range(9)] for _ in shapes]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    weights = token_weights(kind, lengths, groups, max_new_tokens=9, dropped=dropped)
    assert weights.dtype == torch.float64
    tensors = torch.tensor(groups), torch.tensor(dropped)
    from_mask = token_weights(kind, mask, tensors[0], max_new_tokens=9, dropped=tensors[1])
    assert torch.equal(from_mask, weights)
    losses = torch.where(mask, torch.tensor(table, dtype=torch.float64), 0.0)
    expected = slow_step_loss(kind, table, lengths, groups, dropped, 9)
    assert weighted_loss(losses, weights).item() == pytest.approx(expected, abs=1e-12)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(shapes)), max_size=4)))
    total = 0.0
    for start, stop in zip([0, *cuts], [*cuts, len(shapes)], strict=True):
        total += weighted_loss(losses[start:stop], weights[start:stop]).item()
    assert total == pytest.approx(expected, abs=1e-12)
    for b, weight in enumerate(weights.tolist()):
        assert (weight == 0) == (lengths[b] == 0 or dropped[b])


def test_mean_of_means_would_differ():
    # one token of loss 1, fifteen of loss 0: 1/16, where averaging microbatch means gives 1/2
    losses = torch.zeros(2, 15)
    losses[0, 0] = 1.0
    assert weighted_loss(losses, token_weights("token", [1, 15], [0, 0])).item() == pytest.approx(1 / 16)


def test_all_dropped_gives_zero_weights():
    for kind in AGGREGATIONS:
        assert token_weights(kind, [3, 0], [0, 1], max_new_tokens=4, dropped=[True, False]).tolist() == [
            0.0,
            0.0,
        ]


def test_bad_input_says_what_to_do():
    logp, advantage, mask = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3).bool()
    with pytest.raises(ConfigError, match="ppo, gspo, cispo, reinforce"):
        policy_loss("grpo", logp, logp, advantage, mask)
    with pytest.raises(ConfigError, match="negative"):
        policy_loss("ppo", logp, logp, advantage, mask, clip_low=-0.1)
    with pytest.raises(ConfigError, match="above 1"):
        policy_loss("ppo", logp, logp, advantage, mask, dual_clip=1.0)
    with pytest.raises(ConfigError, match="no dual clip"):
        policy_loss("cispo", logp, logp, advantage, mask, dual_clip=3.0)
    with pytest.raises(ValueError, match=r"like the mask \(2, 3\)"):
        policy_loss("ppo", logp, torch.zeros(2, 4), advantage, mask)
    with pytest.raises(ConfigError, match="cap"):
        importance_weights(logp, logp, mask, cap=0.0)
    with pytest.raises(ConfigError, match="'token' or 'sequence'"):
        importance_weights(logp, logp, mask, level="rollout")
    with pytest.raises(ConfigError, match="token, sequence, prompt, constant"):
        token_weights("mean", [1], [0])
    with pytest.raises(ConfigError, match="max_new_tokens"):
        token_weights("constant", [1], [0])
    with pytest.raises(ValueError, match="group_ids"):
        token_weights("token", [1, 2], [0])
