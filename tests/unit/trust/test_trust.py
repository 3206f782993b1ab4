"""Predicted against measured KL, the budget's golden values, and the trust region's rules."""

import math

import pytest
import torch

from logra.errors import ConfigError, NonFiniteError, UserError
from logra.rl.tiny import tiny_model
from logra.sketch.block import digest
from logra.sketch.sketcher import attach
from logra.trust import kl, probe
from logra.trust.region import TrustRegion, cosine_budget, step_scale


def proposal_of(model, ids, **options):
    """A proposal; with an aligned basis the second, after one step too small to matter has aligned it."""
    sketcher = attach(
        model, **({"rank": 16, "variant": "paper", "optimizer": "row_adam", "update_ratio": 1e-3} | options)
    )
    if options.get("basis") == "aligned":
        model(input_ids=ids).logits.square().mean().backward()
        sketcher.apply(sketcher.propose(1.0), 1e-6)
    model(input_ids=ids).logits.square().mean().backward()
    return sketcher, sketcher.propose(1.0)


def padded(ids):
    """Left padding of several lengths and a completion in the last seven columns."""
    attention = torch.ones_like(ids)
    for row in range(len(ids)):
        attention[row, :row] = 0
    completion = torch.zeros_like(ids, dtype=torch.bool)
    completion[:, 13:] = True
    completion[2, 17:] = False
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def logits_of(model, batch):
    return torch.cat([z for (z,) in probe.contexts(model, batch).logits()])


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_predicted_is_within_3_percent_of_measured_below_1e_3(arch, scale, temperature, basis, ids):
    model = tiny_model(arch)
    ratio = 1e-3 if basis == "random" else 2e-4  # an aligned step moves the logits more
    sketcher, proposal = proposal_of(model, ids, basis=basis, update_ratio=ratio)
    q = kl.predict_kl(model, sketcher, proposal, padded(ids), temperature=temperature, mode="forward")
    measured = kl.measure_kl(model, sketcher, proposal, padded(ids), scale, temperature=temperature)
    assert 0 < measured < 1e-3
    assert scale**2 * q / measured == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_forward_mode_equals_a_float64_difference_of_real_weights(arch, basis, ids):
    """Independent reference: two float64 copies whose weights really moved by -/+ h times the step."""
    model = tiny_model(arch)
    sketcher, proposal = proposal_of(model, ids, basis=basis)
    batch = padded(ids)
    found, slopes = probe.forward_derivative(model, sketcher, proposal, batch)
    derivative = torch.cat([slope for _, slope in found.logits(slopes)])
    sides = []
    for h in (1.0, -1.0):  # large enough for the float32 inside RMSNorm
        copy = tiny_model(arch).double()
        parameters = dict(copy.named_parameters())
        for target in sketcher.targets:
            delta = (proposal.factor(target.name).double() @ sketcher.basis(target.name).double()) * h
            parameters[target.name].data += delta.t() if target.transposed else delta
        with torch.no_grad():
            sides.append(logits_of(copy, batch))
    expected = (sides[0] - sides[1]) / 2.0
    assert float((derivative.double() - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_finite_difference_agrees_with_forward_mode(arch, ids):
    model = tiny_model(arch)
    sketcher, proposal = proposal_of(model, ids)
    exact = kl.predict_kl(model, sketcher, proposal, padded(ids), mode="forward")
    assert kl.predict_kl(model, sketcher, proposal, padded(ids), mode="finite_difference") == pytest.approx(
        exact, rel=2e-3
    )


def test_auto_falls_back_where_forward_mode_is_missing(ids, monkeypatch):
    model = tiny_model()
    sketcher, proposal = proposal_of(model, ids)
    exact = kl.predict_kl(model, sketcher, proposal, padded(ids), mode="forward")

    def refuse(*_args):
        raise NotImplementedError("Trying to use forward AD with a fused kernel that does not support it")

    monkeypatch.setattr(probe, "forward_derivative", refuse)
    assert kl.predict_kl(model, sketcher, proposal, padded(ids)) == pytest.approx(exact, rel=2e-3)
    with pytest.raises(NotImplementedError):
        kl.predict_kl(model, sketcher, proposal, padded(ids), mode="forward")


def test_probing_changes_nothing(ids):
    model = tiny_model().train()
    model.model.layers[0].eval()
    sketcher, proposal = proposal_of(model, ids)
    before, hooks = digest(model), [len(m._forward_hooks) for m in model.modules()]
    flags, sketches = [m.training for m in model.modules()], sketcher._sketches.clone()
    kl.predict_kl(model, sketcher, proposal, padded(ids))
    kl.measure_kl(model, sketcher, proposal, padded(ids), 1.0)
    assert digest(model) == before and torch.equal(sketcher._sketches, sketches)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert [m.training for m in model.modules()] == flags


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_contexts_do_not_depend_on_padding(arch, ids):
    """One row alone and inside a left-padded batch: the same logits (GPT-2 needs position ids for that)."""
    model = tiny_model(arch)
    batch = padded(ids)
    with torch.no_grad():
        together = logits_of(model, batch)
        row = 5
        alone = {k: v[row : row + 1, row:] for k, v in batch.items()}
        single = logits_of(model, alone)
    start = int(batch["completion_mask"][:row, 1:].sum())
    torch.testing.assert_close(together[start : start + len(single)], single, rtol=1e-4, atol=1e-5)


def test_half_variance_and_mean_kl_against_sums_by_hand():
    generator = torch.Generator().manual_seed(0)
    z, dz = (torch.randn(70, 11, generator=generator) for _ in range(2))
    temperature, total, divergence = 0.8, 0.0, 0.0
    for row, slope in zip(z.double().tolist(), dz.double().tolist(), strict=True):
        weights = [math.exp(x / temperature) for x in row]
        p = [w / sum(weights) for w in weights]
        mean = sum(a * b / temperature for a, b in zip(p, slope, strict=True))
        total += 0.5 * sum(a * (b / temperature - mean) ** 2 for a, b in zip(p, slope, strict=True))
        moved = [math.exp((x + 0.3 * s) / temperature) for x, s in zip(row, slope, strict=True)]
        divergence += sum(a * math.log(a / (m / sum(moved))) for a, m in zip(p, moved, strict=True))
    assert float(kl.half_variances(z, dz, temperature).mean()) == pytest.approx(total / 70, rel=1e-9)
    assert float(kl.kls(z, z.double() + 0.3 * dz.double(), temperature).mean()) == pytest.approx(
        divergence / 70, rel=1e-9
    )


def test_cosine_budget_golden_values():
    golden = {0: 2.0e-4, 75: 1.7347e-4, 150: 1.0953e-4, 225: 4.586e-5, 299: 2e-5, 5000: 2e-5}
    for update, value in golden.items():
        assert cosine_budget(update, 2e-4, 2e-5, 300) == pytest.approx(value, rel=1e-4)


def test_alpha_halves_when_q_is_four_times_the_budget():
    assert step_scale(4e-4, 1e-4, 3.0) == 0.5
    assert step_scale(1e-4, 1e-4, 3.0) == 1.0
    assert step_scale(1e-9, 1e-4, 3.0) == 3.0
    assert step_scale(0.0, 1e-4, 3.0) == 1.0
    for broken in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(NonFiniteError):
            step_scale(broken, 1e-4, 3.0)


def test_mismatch_correction_follows_the_published_rule():
    region = TrustRegion("constant", start=1e-4)
    region.observe(-5.0)
    assert region.budget(0) == 1e-4
    region.observe(1e-4)
    assert region.gap == pytest.approx(0.3e-4) and region.budget(0) == pytest.approx(0.7e-4)
    region.observe(1.0)
    assert region.budget(0) == 0.5e-4
    other = TrustRegion("constant", start=1e-4)
    other.load_state_dict(region.state_dict())
    assert other.budget(3) == region.budget(3)
    assert TrustRegion("constant", start=1e-4, mismatch=False).budget(0) == 1e-4


def test_measured_every_n_updates_and_verified_on_request():
    calls = []

    def measure(scale):
        calls.append(scale)
        return 10e-4 * scale**2  # the truth is ten times the prediction

    region = TrustRegion("constant", start=1e-4, measure_every=3)
    for update in range(7):
        region.decide(update, 1e-4, measure)
    assert len(calls) == 3
    verified = TrustRegion("constant", start=1e-4, verify=True, tolerance=1.5).decide(1, 1e-4, measure)
    assert verified.measured <= 1.5e-4 and verified.scale < 0.4


def test_bad_settings_and_empty_probes_name_the_fix(ids):
    with pytest.raises(ConfigError, match="constant"):
        TrustRegion("linear")
    with pytest.raises(ConfigError):
        TrustRegion(start=0.0)
    model = tiny_model()
    sketcher, proposal = proposal_of(model, ids)
    empty = padded(ids) | {"completion_mask": torch.zeros_like(ids, dtype=torch.bool)}
    with pytest.raises(UserError, match="no generated token"):
        kl.predict_kl(model, sketcher, proposal, empty)
    with pytest.raises(ConfigError, match="mode"):
        kl.predict_kl(model, sketcher, proposal, padded(ids), mode="backward")


def test_a_zero_proposal_predicts_nothing(ids):
    model = tiny_model()
    sketcher = attach(model, rank=16)
    assert kl.predict_kl(model, sketcher, sketcher.propose(1.0), padded(ids)) == 0.0


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_in_blocks_is_torchs(mask, heads, monkeypatch):
    monkeypatch.setattr(probe, "_QUERIES", 5)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 13, 8, generator=generator) for h in (heads[0], heads[1], heads[1]))
    given = None if mask is None else torch.ones(13, 13, dtype=torch.bool).tril(2).expand(2, 1, 13, 13)
    if mask == "float":
        given = torch.zeros(given.shape).masked_fill(~given, float("-inf"))
    options = {"attn_mask": given, "is_causal": mask is None, "enable_gqa": heads[0] != heads[1], "scale": 0.3}
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    with probe.BlockAttention():
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_groups_of_rows_change_nothing(ids, monkeypatch):
    model = tiny_model()
    sketcher, proposal = proposal_of(model, ids)
    together = [
        kl.predict_kl(model, sketcher, proposal, padded(ids)), kl.measure_kl(model, sketcher, proposal, padded(ids), 1.0)
    ]  # fmt: skip
    monkeypatch.setattr(probe, "_TOKENS", 45)
    assert len(list(probe.groups(padded(ids)))) == 4
    assert kl.predict_kl(model, sketcher, proposal, padded(ids)) == pytest.approx(together[0], rel=1e-5)
    assert kl.measure_kl(model, sketcher, proposal, padded(ids), 1.0) == pytest.approx(together[1], rel=1e-4)
