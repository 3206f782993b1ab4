import math

import pytest
import torch
from torch import nn

from logra.errors import ConfigError
from logra.optim.muon import Muon, orthogonalise

SHAPES = {"wide": (6, 10), "tall": (12, 5), "square": (7, 7)}


def weights(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}


def set_gradients(parameters, step, scale=1.0):
    for n, p in parameters.items():
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, n)))
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw", None])
def test_it_is_torchs_bit_for_bit(nesterov, adjust_lr_fn):
    ours, theirs = weights(), weights()
    common = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": 0.1}
    one = Muon(list(ours.items()), 0.02, **common)
    other = torch.optim.Muon(theirs.values(), 0.02, **common)
    for step in range(8):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        one.step()
        other.step()
        for n in SHAPES:
            assert torch.equal(ours[n], theirs[n]), (step, n)


def newton_schulz(matrix, steps=5):
    """Float64, from the equations: a X + b X X^T X + c (X X^T)^2 X on a matrix of norm 1."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def test_a_step_is_that_of_the_equations():
    parameters, mu, lr, wd = weights(), 0.95, 0.02, 0.1
    optimizer = Muon(list(parameters.items()), lr, momentum=mu, weight_decay=wd)
    twin = {n: p.detach().double().clone() for n, p in parameters.items()}
    buffers = {n: torch.zeros_like(p) for n, p in twin.items()}
    for step in range(4):
        set_gradients(parameters, step)
        optimizer.step()
        for n, (p, q) in SHAPES.items():
            g = parameters[n].grad.double()
            buffers[n] = mu * buffers[n] + (1 - mu) * g
            x = newton_schulz((1 - mu) * g + mu * buffers[n])
            twin[n] = (1 - lr * wd) * twin[n] - lr * math.sqrt(max(1, p / q)) * x
            error = (
                parameters[n].detach() - twin[n]
            )  # a move has norm lr f sqrt(min(p, q)); bfloat16 within Newton-Schulz
            assert error.norm() < 0.03 * lr * (step + 1) * math.sqrt(max(1, p / q) * min(p, q)), n


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (96, 96), (8, 300)])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_singular_values_are_nearly_one(shape, scale):
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix).float())
    if shape != (96, 96):  # a square one has singular values near zero, which five steps do not lift
        assert values.min() > 0.65
    assert values.max() < 1.2


def test_small_gradients_move_the_weights_as_far_as_large_ones():
    moved = {}
    for name, options in (("ours", {}), ("torch's", {"ns_eps": 1e-7})):
        for scale in (1.0, 1e-10):
            parameters = weights({"w": (48, 32)})
            before = parameters["w"].detach().clone()
            optimizer = Muon(list(parameters.items()), 0.02, **options)
            set_gradients(parameters, 0, scale)
            optimizer.step()
            moved[name, scale] = float((parameters["w"].detach() - before).norm())
    assert moved["ours", 1e-10] == pytest.approx(moved["ours", 1.0], rel=0.02)
    assert moved["torch's", 1e-10] < 0.5 * moved["torch's", 1.0]


@pytest.mark.parametrize(("options", "is_moving"), [({}, False), (Muon.FAITHFUL, True)])
def test_zero_gradients_move_nothing(options, is_moving):
    """torch's goes on at full length."""
    parameters = weights({"w": (6, 10)})
    optimizer = Muon(list(parameters.items()), 0.02, **options)
    set_gradients(parameters, 0)
    optimizer.step()
    before = parameters["w"].detach().clone()
    parameters["w"].grad = torch.zeros(6, 10)
    optimizer.step()
    length = float((parameters["w"].detach() - before).norm())
    assert (length > 0.5 * 0.02 * math.sqrt(6)) == is_moving and (length == 0.0) != is_moving


def test_all_of_a_model_in_one_optimizer():
    """Norms and groups without a rank are AdamW's, with their own lr."""
    from logra.optim import param_groups
    from logra.rl.tiny import tiny_model

    model, twin = tiny_model(), tiny_model()
    twin.load_state_dict(model.state_dict())
    optimizer = Muon(param_groups(model, others={"lr": 3e-4}), 0.02)
    is_matrix = {slot.name: slot.is_matrix for slot in optimizer.slots()}
    rest = [p for n, p in twin.named_parameters() if not is_matrix[n]]
    adamw = torch.optim.AdamW(rest, 3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    muon = torch.optim.Muon([p for n, p in twin.named_parameters() if is_matrix[n]], 0.02, weight_decay=0.0)
    for step in range(3):
        for one in (model, twin):
            set_gradients(dict(one.named_parameters()), step)
        for one in (optimizer, adamw, muon):
            one.step()
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=0.0 if is_matrix[n] else 1e-7)


def test_bfloat16_gradients_stay_as_they_are():
    parameters = weights(dtype=torch.bfloat16)
    optimizer = Muon(list(parameters.items()), 0.02, nesterov=False, momentum=0.0)
    set_gradients(parameters, 0)
    before = {n: p.grad.clone() for n, p in parameters.items()}
    optimizer.step()
    assert all(torch.equal(before[n], p.grad) for n, p in parameters.items())


def test_no_rank_is_spoken_of(caplog):
    Muon(list(weights().items()), 0.02, rank=128)
    assert not caplog.records


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 1.0}, {"momentum": -0.1}, {"ns_steps": 0}, {"ns_steps": 100}, {"ns_steps": 2.5}, {"ns_eps": -1.0},
        {"adjust_lr_fn": "adamw"}, {"nesterov": "yes"}, {"rank": 0.5}, {"lr": math.inf},
    ],
)  # fmt: skip
def test_bad_options_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Muon(list(weights().items()), **options)
