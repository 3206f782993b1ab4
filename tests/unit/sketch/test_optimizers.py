"""RowAdam against a float64 twin written from methods.md 1.3, and the Sketcher's state."""

import copy
import math

import pytest
import torch

from logra.errors import NonFiniteError, UpdateError
from logra.rl.tiny import tiny_model
from logra.sketch import optimizers
from logra.sketch.block import digest
from logra.sketch.sketcher import attach


def random_sketches(count, d=24, r=8):
    generator = torch.Generator().manual_seed(5)
    scale = torch.rand(d, 1, generator=generator) * 3 + 0.01
    return [torch.randn(d, r, generator=generator) * scale for _ in range(count)]


def twin_simplified(sketches, beta2, eps):
    """Row by row, in Python floats."""
    d, r = sketches[0].shape
    v = [0.0] * d
    for t, sketch in enumerate(sketches, start=1):
        rows = sketch.double().tolist()
        out = []
        for i, row in enumerate(rows):
            v[i] = beta2 * v[i] + (1 - beta2) * sum(x * x for x in row) / r
            out.append([x / (math.sqrt(v[i] / (1 - beta2**t)) + eps) for x in row])
        yield torch.tensor(out, dtype=torch.float64)


def twin_paper(sketches, beta2, eps):
    d, r = sketches[0].shape
    v = [0.0] * d
    for t, sketch in enumerate(sketches, start=1):
        rows = sketch.double().tolist()
        for i, row in enumerate(rows):
            v[i] = beta2 * v[i] + (1 - beta2) * sum(x * x for x in row) / r
        root = [math.sqrt(x / (1 - beta2**t)) for x in v]
        den = [x + max(eps * sum(root) / d, 1.1754943508222875e-38) for x in root]
        c = [min(den) / x for x in den]
        rms = math.sqrt(sum(x * x for x in c) / d)
        direction = [[x * c[i] / rms for x in row] for i, row in enumerate(rows)]
        norm = math.sqrt(sum(x * x for row in rows for x in row))
        mine = math.sqrt(sum(x * x for row in direction for x in row))
        yield torch.tensor([[x * norm / mine for x in row] for row in direction], dtype=torch.float64)


@pytest.mark.parametrize(
    ("twin", "direction"),
    [
        (twin_simplified, optimizers.row_adam_direction),
        (twin_paper, optimizers.row_adam_paper_direction),
    ],
)
def test_row_adam_equals_its_float64_twin(twin, direction):
    sketches = random_sketches(4)
    moment = torch.zeros(24, 1)
    for step, (sketch, expected) in enumerate(zip(sketches, twin(sketches, 0.95, 1e-8), strict=True), start=1):
        moment, corrected = optimizers.row_second_moment(sketch, moment, step, 0.95)
        torch.testing.assert_close(direction(sketch, corrected, 1e-8).double(), expected, rtol=2e-5, atol=1e-6)


def test_variants_agree_in_direction_per_layer():
    """methods.md 10.1: cosine above 0.9999."""
    moment = torch.zeros(24, 1)
    for step, sketch in enumerate(random_sketches(5), start=1):
        moment, corrected = optimizers.row_second_moment(sketch, moment, step, 0.95)
        one = optimizers.row_adam_direction(sketch, corrected, 1e-8).flatten()
        other = optimizers.row_adam_paper_direction(sketch, corrected, 1e-8).flatten()
        assert float(one @ other / one.norm() / other.norm()) > 0.9999


def test_steady_state_step_has_unit_rms():
    """methods.md 10.1: rms(D A) in 0.9 to 1.05."""
    from logra.sketch import basis

    moment, generator = torch.zeros(64, 1), torch.Generator().manual_seed(0)
    scale = torch.rand(64, 1, generator=generator) + 0.1
    for step in range(1, 80):
        a = basis.draw("random", 1, "w", step, range(16), range(256)).float() / 4
        sketch = (torch.randn(64, 256, generator=generator) * scale) @ a.t()
        moment, corrected = optimizers.row_second_moment(sketch, moment, step, 0.95)
    rebuilt = optimizers.row_adam_direction(sketch, corrected, 1e-8) @ a
    assert 0.9 < float(rebuilt.square().mean().sqrt()) < 1.05


def test_gram_norm_equals_direct_norm():
    factor, a = torch.randn(30, 16), torch.randn(16, 100)
    direct = float((factor @ a).double().square().sum())
    assert float(optimizers.reconstructed_square(factor, a @ a.t())) == pytest.approx(direct, rel=1e-5)


def sketched(ids, **options):
    model = tiny_model()
    sketcher = attach(model, **({"rank": 16} | options))
    model(input_ids=ids).logits.square().mean().backward()
    return model, sketcher


def test_paper_variant_moves_by_the_update_ratio(ids):
    _model, sketcher = sketched(ids, variant="paper", update_ratio=1e-3)
    proposal = sketcher.propose(1.0)
    step = sum(float((proposal.factor(n) @ sketcher.basis(n)).norm()) ** 2 for n in sketcher.names)
    weights = sum(float(t.weight.norm()) ** 2 for t in sketcher.targets)
    assert math.sqrt(step / weights) == pytest.approx(1e-3, rel=1e-4)


def test_sgd_proposes_the_negative_sketch(ids):
    _, sketcher = sketched(ids, optimizer="sgd")
    proposal = sketcher.propose(0.1)
    for name in sketcher.names:
        torch.testing.assert_close(proposal.factor(name), -0.1 * sketcher.sketch(name))


def test_gradient_clipping_scales_the_sketch(ids):
    _, plain = sketched(ids, optimizer="sgd")
    _, clipped = sketched(ids, optimizer="sgd", max_grad_norm=1e-3)
    norm = plain.propose(1.0).grad_norm
    assert norm > 1e-3
    torch.testing.assert_close(clipped.propose(1.0).factors, plain.propose(1.0).factors * (1e-3 / (norm + 1e-6)))


def test_weight_decay_is_decoupled_and_part_of_the_update(ids):
    model, sketcher = sketched(ids, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    bases = {n: sketcher.basis(n) for n in sketcher.names}
    proposal = sketcher.propose(1e-3)
    update = sketcher.apply(proposal)
    assert update.decay == pytest.approx(5e-4)
    weights = dict(model.named_parameters())
    for name in sketcher.names:
        moved = weights[name].detach() - before[name] * (1 - 5e-4)
        expected = proposal.factor(name) @ bases[name]
        assert (moved - expected).norm() / expected.norm() < 0.03, name


def test_proposing_changes_nothing(ids):
    model, sketcher = sketched(ids)
    before, state = digest(model), copy.deepcopy(sketcher.state_dict())
    first, second = sketcher.propose(1e-3), sketcher.propose(1e-3)
    assert torch.equal(first.factors, second.factors) and digest(model) == before
    assert_same(sketcher.state_dict(), state)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def test_no_signal_no_step(ids):
    model, sketcher = sketched(ids, weight_decay=0.1)
    sketcher.apply(sketcher.propose(1e-3))
    before, state = digest(model), copy.deepcopy(sketcher.state_dict())
    (model(input_ids=ids).logits.sum() * 0.0).backward()
    proposal = sketcher.propose(1e-3)
    assert proposal.is_zero and sketcher.apply(proposal) is None
    sketcher.zero()
    assert digest(model) == before
    assert_same(sketcher.state_dict(), state)


def test_non_finite_sketch_is_named_and_nothing_moves(ids):
    model, sketcher = sketched(ids)
    before = digest(model)
    sketcher.sketch(sketcher.names[3])[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=sketcher.names[3].replace(".", r"\.")):
        sketcher.propose(1e-3)
    assert digest(model) == before and sketcher.update_index == 0


@pytest.mark.parametrize("options", [{}, {"variant": "paper"}, {"optimizer": "sgd"}, {"refresh": False}])
def test_saved_and_loaded_state_continues_bit_for_bit(options, ids, tmp_path):
    model, sketcher = sketched(ids, **options)
    sketcher.apply(sketcher.propose(1e-3))
    model(input_ids=ids).logits.square().mean().backward()  # mid-accumulation
    torch.save(sketcher.state_dict(), tmp_path / "state.pt")
    twin = tiny_model()
    twin.load_state_dict(model.state_dict())
    other = attach(twin, **({"rank": 16} | options))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for m, s in ((model, sketcher), (twin, other)):
        m(input_ids=ids[:3]).logits.square().mean().backward()
        s.apply(s.propose(1e-3))
    assert digest(model) == digest(twin)
    assert_same(sketcher.state_dict(), other.state_dict())


def test_loading_is_strict(ids):
    _, sketcher = sketched(ids)
    state = sketcher.state_dict()
    other = attach(tiny_model(), rank=8)
    with pytest.raises(UpdateError, match="rank was 16, is 8"):
        other.load_state_dict(state)
    same = attach(tiny_model(), rank=16)
    with pytest.raises(UpdateError, match="moment"):
        same.load_state_dict({k: v for k, v in state.items() if k != "moment"})


def test_optimizer_facade_equals_the_calls_by_hand(ids):
    by_hand, sketcher = sketched(ids)
    facade_model, other = sketched(ids)
    optimizer = other.as_optimizer(lr=1e-3, trust=lambda proposal: 0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    for step in range(3):
        sketcher.apply(sketcher.propose(1e-3 / (step + 1)), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for model in (by_hand, facade_model):
            model(input_ids=ids).logits.square().mean().backward()
    assert digest(by_hand) == digest(facade_model)
    assert optimizer.last_update is not None
    state = optimizer.state_dict()
    fresh = attach(tiny_model(), rank=16).as_optimizer(lr=1.0)
    fresh.load_state_dict(state)
    assert fresh.sketcher.update_index == 3 and fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
