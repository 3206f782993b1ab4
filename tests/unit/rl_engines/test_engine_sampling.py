"""Token choice against the softmax it samples, and the checks on sampling settings."""

from __future__ import annotations

import math

import pytest
import torch

from logra.errors import ConfigError
from logra.rl.engines.base import check_training_sampling
from logra.rl.engines.sampling import choose, keep_top_p, rollout_uniforms
from logra.rl.types import Sampling


def reference_top_p(probs: list[float], top_p: float) -> list[float]:
    """Add the most likely ids one by one until their mass reaches top_p."""
    kept, mass = [0.0] * len(probs), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if mass >= top_p:
            break
        kept[i], mass = probs[i], mass + probs[i]
    return kept


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_frequencies_follow_softmax(temperature: float) -> None:
    num, logits_V = 10_000, torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9])
    uniform = torch.tensor([rollout_uniforms(5, 0, i, 0, 1)[0] for i in range(num)])
    ids, _ = choose(logits_V.expand(num, -1), uniform, temperature)
    counts = torch.bincount(ids, minlength=7).double()
    expected = num * (logits_V.double() / temperature).softmax(-1)
    assert chi_square(counts, expected) < 22.46  # 0.999 quantile of chi-square with 6 degrees of freedom
    wrong = num * (logits_V.double() / (temperature * 1.1)).softmax(-1)
    assert chi_square(counts, wrong) > 22.46


def test_frequencies_follow_the_renormalised_top_p_set() -> None:
    num, logits_V = 10_000, torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9])
    uniform = torch.tensor([rollout_uniforms(6, 0, 0, i, 1)[0] for i in range(num)])
    ids, logp = choose(logits_V.expand(num, -1), uniform, 0.7, top_p=0.8)
    probs = (logits_V.double() / 0.7).softmax(-1)
    kept = torch.tensor(reference_top_p(probs.tolist(), 0.8), dtype=torch.float64)
    support = kept > 0
    counts = torch.bincount(ids, minlength=7).double()
    assert 1 < int(support.sum()) < 7 and float(counts[~support].sum()) == 0
    # 0.999 quantiles for 1 to 5 degrees of freedom.
    quantile = [10.83, 13.82, 16.27, 18.47, 20.52][int(support.sum()) - 2]
    assert chi_square(counts[support], num * kept[support] / kept.sum()) < quantile
    torch.testing.assert_close(logp.double(), probs.log()[ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize("top_p", [1e-6, 0.25, 0.5, 0.7, 0.999, 1.0])
def test_top_p_against_a_loop(top_p: float) -> None:
    probs = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    expected = [reference_top_p(row, top_p) for row in probs.double().tolist()]
    torch.testing.assert_close(keep_top_p(probs, top_p), torch.tensor(expected).float(), rtol=0, atol=0)


def test_top_p_breaks_ties_by_id() -> None:
    assert keep_top_p(torch.full((1, 4), 0.25), 0.5).tolist() == [[0.25, 0.25, 0.0, 0.0]]


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_ids_of_zero_probability_are_never_chosen(uniform: float) -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [10, 700]] = torch.tensor([1.0, 1.0])
    ids, logp = choose(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
    assert int(ids) in (10, 700)
    assert float(logp) == pytest.approx(math.log(0.5), abs=1e-6)


def test_extreme_uniforms_reach_the_first_and_last_possible_id() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 1.0, 2.0, -200.0, -math.inf]]).expand(2, -1)
    ids, _ = choose(logits, torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64), 1.0)
    assert ids.tolist() == [1, 3]


def test_uniforms_are_resolved_beyond_float32() -> None:
    """A uniform just beside a boundary must not be rounded across it."""
    logits, ids = torch.zeros(999, 1000), torch.arange(1, 1000)
    boundary = ids.double() / 1000
    assert torch.equal(choose(logits, boundary - 1e-12, 1.0)[0], ids - 1)
    assert torch.equal(choose(logits, boundary + 1e-12, 1.0)[0], ids)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_non_finite_logits_give_a_non_finite_logprob(bad: float, temperature: float, top_p: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    _, logp = choose(logits, torch.tensor([0.4, 0.4], dtype=torch.float64), temperature, top_p)
    assert torch.isfinite(logp).tolist() == [True, False]


def test_blocks_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(17, 23, generator=torch.Generator().manual_seed(1))
    uniform = torch.rand(17, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = choose(logits, uniform, 0.9)
    monkeypatch.setattr("logra.rl.engines.sampling._BLOCK_ELEMENTS", 50)
    split = choose(logits, uniform, 0.9)
    assert torch.equal(whole[0], split[0]) and torch.equal(whole[1], split[1])


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(3)).bfloat16()
    ids, logp = choose(logits, torch.full((4,), 0.3, dtype=torch.float64), 0.6)
    expected = (logits.double() / 0.6).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), expected, rtol=0, atol=1e-5)


def test_longer_draws_begin_with_shorter_ones_and_keys_differ() -> None:
    short, long = rollout_uniforms(1, 2, 3, 4, 5), rollout_uniforms(1, 2, 3, 4, 50)
    assert (long[:5] == short).all() and long.min() >= 0 and long.max() < 1
    firsts = {rollout_uniforms(*key, 1)[0] for key in [(1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3), (1, 23, 4, 0)]}
    assert len(firsts) == 4


def test_training_accepts_any_positive_temperature() -> None:
    for temperature in (0.1, 1.0, 1.5):
        check_training_sampling(Sampling(8, temperature))


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(8, top_p=0.95), "full softmax"),
        (Sampling(8, temperature=0.0), "greedily"),
        (Sampling(8, temperature=-0.5), "temperature"),
        (Sampling(0), "max_new_tokens"),
    ],
)
def test_training_refuses_what_the_loss_cannot_score(sampling: Sampling, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_training_sampling(sampling)
