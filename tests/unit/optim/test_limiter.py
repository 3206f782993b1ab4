"""The norm-growth limiter: the published rule, its two stalls, and what "steady" keeps and mends."""

import math

import pytest
import torch

from logra.optim import factored, limiter

LEAST = 0.5


def run(kind, sizes, least=LEAST):
    """(limited norms, what is stored after each step) of a run of updates of one matrix."""
    stored, limited, kept = torch.zeros(()), [], []
    for step, size in enumerate(sizes, 1):
        whole = torch.full((2, 2), size / 2.0)
        (scale,) = limiter.limited([torch.ones(2, 1)], [whole], [stored], kind, least, step)
        limited.append(float(torch.linalg.vector_norm(scale * whole)))
        kept.append(float(stored))
    return limited, kept


def by_hand(sizes):
    """The published rule, in Python's numbers."""
    limited, stored = [], None
    for size in sizes:
        if stored is not None:
            size = size / (max(size / (stored + 1e-8), 1.01) / 1.01)
        stored = size
        limited.append(size)
    return limited


def ordinary(seed):
    """Sizes that wander over three decades, with spikes, but never fall to a tenth of what is stored."""
    draw = torch.Generator().manual_seed(seed)
    sizes, stored = [3.0], 3.0
    for u in torch.rand(60, generator=draw).tolist():
        sizes.append(max(stored * (100.0 if u > 0.95 else 0.15 * 12.0**u), 1.1 * LEAST))
        stored = min(sizes[-1], 1.01 * stored)
    return sizes


@pytest.mark.parametrize("seed", range(5))
def test_published_is_the_published_rule(seed):
    sizes = [*ordinary(seed), 1e-3, 0.0, 2.0, 1e-12, 5.0]
    assert run("published", sizes)[0] == pytest.approx(by_hand(sizes), rel=1e-4, abs=1e-12)
    assert run("published", [0.0, 1.0])[0] == pytest.approx(by_hand([0.0, 1.0]), rel=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_steady_is_bitwise_the_published_rule_on_ordinary_updates(seed):
    sizes = ordinary(seed)
    assert min(sizes) > LEAST and max(by_hand(sizes)[1:]) < max(sizes)  # something was limited
    assert run("steady", sizes) == run("published", sizes)


@pytest.mark.parametrize("kind", ["steady", "published"])
def test_updates_grow_by_a_hundredth_at_most(kind):
    limited, stored = run(kind, [1.0] + [10.0] * 299)
    assert limited == pytest.approx([min(1.01**step, 10.0) for step in range(300)], rel=1e-4)
    assert stored == pytest.approx(limited)


@pytest.mark.parametrize("first", [0.0, 1e-30, 1e-12, 1e-4])
def test_a_first_update_of_nothing_stops_the_published_rule_only(first):
    sizes = [first] + [1.0] * 400
    assert run("published", sizes)[0][-1] < 0.01
    limited, stored = run("steady", sizes)
    assert limited == pytest.approx(sizes) and stored[:2] == [0.0, pytest.approx(1.0)]


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-3])
@pytest.mark.parametrize("count", [1, 7])
def test_a_nearly_zero_update_in_the_middle_stops_the_published_rule_only(size, count):
    sizes = [1.0] * 5 + [size] * count + [1.0] * 300
    assert run("published", sizes)[0][-1] < 0.05
    limited, stored = run("steady", sizes)
    assert limited[5] == pytest.approx(size) and min(stored) > 0.9  # applied, not remembered
    assert limited[5 + 2 * count :] == pytest.approx([1.0] * (300 - count))  # n outliers cost at most n steps


def test_a_size_that_falls_for_good_is_followed_down():
    sizes = [100.0 * LEAST] + [2.0 * LEAST] * 300
    _, stored = run("steady", sizes)
    after = 1 + math.ceil(math.log(100.0 * limiter.OUTLIER / 2.0) / math.log(1.01))
    assert stored[after - 2] > 2.0 * LEAST and stored[after + 1] == pytest.approx(2.0 * LEAST)
    assert run("steady", [*sizes, 1000.0])[0][-1] == pytest.approx(2.02 * LEAST, rel=1e-3)  # and limits from there


def test_a_slow_decline_takes_463_steps_to_come_back_from_at_most():
    decline = [0.2**i for i in range(20)]
    sizes = decline + [1.0] * 463
    least = 0.01
    assert run("published", sizes)[0][-1] < 1e-3
    limited, stored = run("steady", sizes, least)
    assert limited[:20] == pytest.approx(decline) and min(stored) == pytest.approx(least)
    assert limited[-1] == pytest.approx(1.0)


def test_zeros_for_ever_stay_finite_and_above_zero():
    limited, stored = run("steady", [1.0] + [0.0] * 1500)
    assert limited[1:] == [0.0] * 1500 and min(stored) == LEAST
    assert run("steady", [0.0] * 5) == ([0.0] * 5, [0.0] * 5)
    assert run("published", [0.0] * 5) == ([0.0] * 5, [0.0] * 5)


def test_matrices_are_limited_each_by_its_own():
    wholes = [torch.ones(3, 4), torch.ones(3, 4)]
    stored = [torch.tensor(1.0), torch.tensor(100.0)]
    scales = limiter.limited([torch.ones(3, 1)] * 2, wholes, stored, "steady", 0.01, 7)
    assert float(scales[0][0]) == pytest.approx(1.01 / math.sqrt(12.0)) and float(scales[1][0]) == 1.0
    assert [float(s) for s in stored] == pytest.approx([1.01, 100.0 / 1.01])  # 3.5 is an outlier of 100


@pytest.mark.parametrize("shape", [(5, 1), (1, 7), (1, 1)])
@pytest.mark.parametrize("size", [(5, 7), (1, 7), (5, 1)])
def test_scaled_norm_is_that_of_the_product(shape, size):
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(size, generator=draw)
    shape = tuple(min(a, b) for a, b in zip(shape, size, strict=True))
    scale = torch.rand(shape, generator=draw)
    torch.testing.assert_close(limiter.scaled_norm(scale, whole), torch.linalg.vector_norm(scale * whole))


@pytest.mark.parametrize("shape", [(1, 7), (5, 1), (0, 3), (700, 300)])
@pytest.mark.parametrize("along", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_norm_is_that_of_the_channels(shape, along, is_transposed):
    assert shape[0] < 700 or len(factored.parts(shape, torch.device("cpu"))) > 1  # the largest is summed in parts
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if is_transposed:
        x = x.t().contiguous().t()
    expected = torch.linalg.vector_norm(x.double(), dim=along, keepdim=True)
    found = limiter.norm(x, along)
    assert found.dtype == torch.float32 and torch.equal(found > 0.0, expected > 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0.0)


def test_scaling_is_a_ratio_of_norms_that_zeros_do_not_break():
    normed, seen = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    torch.testing.assert_close(limiter.scaling(normed, seen, (1,)), torch.tensor([[2.5], [0.0]]))
    torch.testing.assert_close(limiter.scaling(normed, seen, (0,)), torch.tensor([[3e8, 2.0]]))
    torch.testing.assert_close(limiter.scaling(normed, seen, (0, 1)), torch.tensor([[2.5]]))


def test_worth_is_a_share_of_adams_size():
    assert limiter.worth((16, 4)) == pytest.approx(0.08)
    assert limiter.worth((16, 4), 3.0) == pytest.approx(0.24)
