"""Fira against the paper in float64, the official code, its identities, and its faults."""

import math

import pytest
import torch
from matrices import SHAPES, set_gradients, step_with, weights
from torch import nn

from logra.errors import ConfigError
from logra.optim.fira import FiraAdamW, residual
from logra.optim.galore import GaLoreAdamW

GAP = 3
LR = 0.02


def build(parameters, **options):
    return FiraAdamW(
        list(parameters.items()), LR, **{"rank": 2, "update_proj_gap": GAP, "refresh": "together", **options}
    )


class Twin:
    """One matrix, line by line from the paper; moments kept at a refresh. P by eigenvectors, with the given basis's signs."""

    def __init__(self, weight, rank, right, alpha, uses_alpha, weight_decay):
        self.w, self.rank, self.right, self.alpha = weight.double(), rank, right, alpha
        self.share, self.decay = alpha if uses_alpha else 1.0, weight_decay
        self.t, self.stored, self.m, self.v = 0, None, 0.0, 0.0

    def step(self, gradient, basis):
        g, (b1, b2) = gradient.double(), (0.9, 0.999)
        g, basis = (g, basis) if self.right else (g.T, basis.T)
        self.t += 1
        if (self.t - 1) % GAP == 0:
            values, vectors = torch.linalg.eigh(g.T @ g)
            p = vectors[:, values.argsort(descending=True)[: self.rank]].T
            self.p = p * (p * basis).sum(1, keepdim=True).sign()
        r = g @ self.p.T
        self.m = b1 * self.m + (1 - b1) * r
        self.v = b2 * self.v + (1 - b2) * r**2
        n = self.m / (self.v.sqrt() + 1e-6)
        e = torch.stack([
            n[i].norm() / r[i].norm() * (g[i] - self.share * sum(r[i, k] * self.p[k] for k in range(self.rank)))
            for i in range(len(g))
        ])  # fmt: skip
        if self.stored is not None and e.norm() > 1.01 * self.stored:
            e = e * (1.01 * self.stored / e.norm())
        self.stored = e.norm()
        x = self.alpha * n @ self.p + e
        x = x if self.right else x.T
        self.w = self.w - LR * math.sqrt(1 - b2**self.t) / (1 - b1**self.t) * x
        self.w = self.w - LR * self.decay * self.w


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("uses_alpha", [True, False])
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right"])
def test_it_is_the_paper(shape, uses_alpha, proj_type):
    parameters = weights({shape: SHAPES[shape]})
    p, q = SHAPES[shape]
    right = {"std": p >= q, "reverse_std": p < q, "left": False, "right": True}[proj_type]
    twin = Twin(parameters[shape].detach(), 2, right, 0.25, uses_alpha, 0.1)
    ours = build(
        parameters, proj_type=proj_type, residual_uses_alpha=uses_alpha, weight_decay=0.1, on_refresh="keep",
        limiter="published",
    )  # fmt: skip
    for step in range(2 * GAP + 2):
        step_with(ours, parameters, step, size=5.0 if step == 1 else 1.0)
        twin.step(parameters[shape].grad, ours.state[parameters[shape]]["basis"])
        torch.testing.assert_close(parameters[shape].detach().double(), twin.w, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_it_is_the_official_code(alpha):
    from fira import FiraAdamW as Official

    ours, theirs = weights(), weights()
    options = {"rank": 2, "update_proj_gap": GAP, "alpha": alpha, "proj_type": "std"}
    common = {"betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.1}
    one = FiraAdamW(list(ours.items()), LR, **{**options, **common, **FiraAdamW.FAITHFUL})
    other = Official([{"params": list(theirs.values()), **options}], lr=LR, no_deprecation_warning=True, **common)
    for step in range(3 * GAP + 2):
        size = {4: 50.0, 7: 0.0}.get(step, 1.0)  # a spike, and what stops the limiter
        step_with(one, ours, step, size)
        step_with(other, theirs, step, size)
        for n in SHAPES:
            torch.testing.assert_close(ours[n], theirs[n], rtol=2e-4, atol=2e-5, msg=f"{n} at step {step}")
            stored = theirs[n].grad.new_tensor(float(other.state[theirs[n]]["scaling_grad"]))
            torch.testing.assert_close(one.state[ours[n]]["limiter"], stored, rtol=2e-4, atol=2e-5)


# -- identities -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses_alpha", [True, False])
def test_at_full_rank_with_alpha_one_it_is_galore(uses_alpha):
    ours, theirs = weights(), weights()
    one = build(ours, rank=7, alpha=1.0, residual_uses_alpha=uses_alpha)
    other = GaLoreAdamW(list(theirs.items()), LR, rank=7, scale=1.0, update_proj_gap=GAP, refresh="together")
    for step in range(2 * GAP):
        step_with(one, ours, step)
        step_with(other, theirs, step)
        for n in SHAPES:
            torch.testing.assert_close(ours[n], theirs[n], rtol=1e-4, atol=1e-5)


def test_the_residual_lies_outside_the_subspace_and_alpha_leaves_the_rest_of_it():
    draw = torch.Generator().manual_seed(2)
    gradient = torch.randn(8, 6, generator=draw)
    basis = torch.linalg.qr(torch.randn(6, 2, generator=draw)).Q.T
    seen = gradient @ basis.T
    outside = residual(gradient, seen, basis, "right", 1.0)
    torch.testing.assert_close(outside @ basis.T, torch.zeros(8, 2), rtol=0, atol=1e-6)
    torch.testing.assert_close(residual(gradient, seen, basis, "right", 0.25), outside + 0.75 * seen @ basis)
    turned = residual(gradient.T, seen.T, basis.T, "left", 1.0)
    torch.testing.assert_close(turned, outside.T)


def test_the_residual_grows_by_a_hundredth_at_most():
    parameters = weights()
    ours = build(parameters)
    previous = math.inf
    for step in range(12):
        step_with(ours, parameters, step, size=1.0 + 10.0 * (step % 4 == 3))
        stored = float(ours.state[parameters["tall"]]["limiter"])
        assert 0.0 < stored <= 1.0101 * previous
        previous = stored


# -- faults that are mended -----------------------------------------------------------------------------------------------


def low_rank(step, rank, shape=(16, 12), dtype=torch.float32):
    draw = torch.Generator().manual_seed(step)
    left, right = torch.randn(shape[0], rank, generator=draw), torch.randn(rank, shape[1], generator=draw)
    return (left @ right).to(dtype)


def residual_norms(kind, gradients, dtype=torch.float32, **options):
    weight = nn.Parameter(torch.zeros(16, 12, dtype=dtype))
    ours = build({"w": weight}, rank=2, limiter=kind, update_proj_gap=1000, residual_uses_alpha=False, **options)
    found = []
    for gradient in gradients:
        weight.grad = gradient.to(dtype)
        before = weight.detach().float().clone()
        ours.step()
        moved = weight.detach().float() - before
        basis = ours.state[weight]["basis"]
        found.append(float((moved - moved @ basis.T @ basis).norm()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_gradient_of_low_rank_stops_the_published_limiter_only(dtype):
    """Its residual is rounding error, in which the next must not be measured."""
    gradients = [low_rank(step, 2, dtype=dtype) for step in range(40)]
    published, steady = (residual_norms(kind, gradients, dtype) for kind in ("published", "steady"))
    assert published[0] < 0.02 * steady[1]
    assert published[-1] < 0.05 * steady[-1]
    weight = nn.Parameter(torch.zeros(16, 12, dtype=dtype))
    ours = build({"w": weight})
    weight.grad = gradients[0]
    ours.step()
    assert float(ours.state[weight]["limiter"]) > 0.0  # with alpha in it there is a residual
    ours = build({"w": weight}, residual_uses_alpha=False)
    ours.step()
    assert float(ours.state[weight]["limiter"]) == 0.0  # here there is none to speak of


def test_a_low_rank_gradient_at_a_refresh_stops_the_published_limiter_only():
    reached = {}
    for kind in ("published", "steady"):
        parameters = weights({"w": (16, 12)})
        ours = build(parameters, rank=2, limiter=kind, update_proj_gap=5, residual_uses_alpha=False)
        for step in range(20):
            set_gradients(parameters, step)
            if step == 5:
                parameters["w"].grad = low_rank(step, 2)
            ours.step()
        reached[kind] = float(ours.state[parameters["w"]]["limiter"])
    assert reached["published"] < 1e-4 * reached["steady"]


@pytest.mark.parametrize("at", [0, 20])
def test_a_zero_gradient_stops_the_published_limiter_only(at):
    reached = {}
    for kind in ("published", "steady"):
        parameters = weights()
        ours = build(parameters, limiter=kind, zero_gradient="step")
        for step in range(60):
            step_with(ours, parameters, step, size=0.0 if step == at else 1.0)
        assert all(torch.isfinite(p).all() for p in parameters.values())
        reached[kind] = float(ours.state[parameters["wide"]]["limiter"])
    assert reached["published"] < 1e-5 * reached["steady"]


def test_default_and_published_limiter_agree_bitwise_on_ordinary_gradients():
    one, other = weights(), weights()
    first, second = build(one), build(other, limiter="published")
    for step in range(4 * GAP):
        size = 40.0 if step % 5 == 4 else 1.0
        step_with(first, one, step, size)
        step_with(second, other, step, size)
    for n in SHAPES:
        assert torch.equal(one[n], other[n])


# -- options --------------------------------------------------------------------------------------------------------------


def test_state_is_that_of_galore_and_a_number():
    parameters = weights()
    ours = build(parameters)
    step_with(ours, parameters, 0)
    for p in parameters.values():
        state = dict(ours.state[p])
        assert state.pop("step") == 1 and set(state) == {"exp_avg", "exp_avg_sq", "basis", "limiter"}
        assert sum(v.nbytes for v in state.values()) == 4 * (4 * max(p.shape) + 2 * min(p.shape) + 1)
    unlimited = build(weights(), limiter="off")
    assert all("limiter" not in unlimited.layout(slot) for slot in unlimited.slots())


def test_without_the_limiter_nothing_is_limited():
    gradients = [0.01 * low_rank(0, 12), *(low_rank(step, 12) for step in range(1, 4))]
    limited, free = (residual_norms(kind, gradients) for kind in ("steady", "off"))
    assert limited[0] == pytest.approx(free[0]) and limited[2] < 0.9 * free[2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"alpha": -0.1}, "alpha"), ({"alpha": math.nan}, "alpha"), ({"proj_type": "full"}, "proj_type"),
        ({"residual_uses_alpha": "no"}, "residual_uses_alpha"), ({"limiter": True}, "limiter"),
        ({"update_proj_gap": 0}, "update_proj_gap"), ({"on_refresh": "turn"}, "on_refresh"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        build(weights(), **options)


def test_the_scale_of_galore_is_called_alpha_here():
    with pytest.raises(ConfigError, match=r"no option 'scale'"):
        FiraAdamW([{"params": list(weights().items()), "scale": 0.25}])
