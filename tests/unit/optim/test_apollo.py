"""APOLLO and Mini against the paper in float64, the official code, and its faults."""

import math

import pytest
import torch
from matrices import SHAPES, step_with, weights

from logra import hashing
from logra.errors import ConfigError
from logra.optim.apollo import ApolloAdamW, ApolloMini, random_basis

GAP = 3
LR = 0.05


def build(parameters, **options):
    return ApolloAdamW(list(parameters.items()), LR, **{"rank": 3, "update_proj_gap": GAP, **options})


# -- the paper, in float64 ------------------------------------------------------------------------------------------------


class Twin:
    """One matrix, line by line from the paper; refreshes together, limiter as published."""

    def __init__(self, name, weight, rank, right, scale, scale_type, scale_front, weight_decay, seed=42):
        self.name, self.w, self.rank, self.right, self.seed = name, weight.double(), rank, right, seed
        self.scale, self.type, self.front, self.decay = scale, scale_type, scale_front, weight_decay
        self.t, self.stored, self.m, self.v = 0, None, 0.0, 0.0

    def basis(self):
        key = hashing.derive_key(self.seed, "apollo", self.name, self.t)
        p, q = self.w.shape
        generator = torch.Generator().manual_seed(key >> 1)
        return (
            torch.randn((self.rank, q) if self.right else (p, self.rank), generator=generator).double() / self.rank**0.5
        )

    def step(self, gradient):
        g, (b1, b2) = gradient.double(), (0.9, 0.999)
        self.t += 1
        if (self.t - 1) % GAP == 0:
            self.p = self.basis()
        r = g @ self.p.T if self.right else self.p.T @ g
        self.m = b1 * self.m + (1 - b1) * r
        self.v = b2 * self.v + (1 - b2) * r**2
        n = self.m / (self.v.sqrt() + 1e-6)
        x = torch.zeros_like(g)
        if self.type == "tensor":
            x = g * n.norm() / r.norm()
        elif self.right:
            for row in range(len(g)):
                x[row] = g[row] * n[row].norm() / r[row].norm()
        else:
            for column in range(g.shape[1]):
                x[:, column] = g[:, column] * n[:, column].norm() / r[:, column].norm()
        x = x * self.scale**0.5 if self.front else x
        if self.stored is not None and x.norm() > 1.01 * self.stored:
            x = x * (1.01 * self.stored / x.norm())
        self.stored = x.norm()
        x = x if self.front else x * self.scale**0.5
        self.w = self.w - LR * math.sqrt(1 - b2**self.t) / (1 - b1**self.t) * x
        self.w = self.w - LR * self.decay * self.w


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(
    ("scale_type", "front", "proj_type"),
    [("channel", False, "std"), ("tensor", True, "std"), ("channel", True, "reverse_std"), ("tensor", False, "left"),
     ("channel", False, "right")],
)  # fmt: skip
def test_it_is_the_paper(shape, scale_type, front, proj_type):
    parameters = weights({shape: SHAPES[shape]})
    p, q = SHAPES[shape]
    right = {"std": p >= q, "reverse_std": p < q, "left": False, "right": True}[proj_type]
    twin = Twin(shape, parameters[shape].detach(), 3, right, 4.0, scale_type, front, 0.1)
    ours = build(
        parameters, scale=4.0, scale_type=scale_type, scale_front=front, proj_type=proj_type, weight_decay=0.1,
        refresh="together",
    )  # fmt: skip
    for step in range(8):
        size = 30.0 if step == 5 else 1.0
        step_with(ours, parameters, step, size)
        twin.step(parameters[shape].grad)
        torch.testing.assert_close(parameters[shape].detach().double(), twin.w, rtol=2e-5, atol=2e-5)


# -- the official code ----------------------------------------------------------------------------------------------------


class Seeded(ApolloAdamW):
    """Draws as apollo-torch does: by place in the list, each seed the 15th number of the one before."""

    def _leading(self, slot, gradient, rank, where, step):
        if slot.group["proj"] == "svd":
            return super()._leading(slot, gradient, rank, where, step)
        from apollo_torch.random_projector import next_seed, stable_randn

        places = {s.name: i for i, s in enumerate(self.slots(), 1)}
        seeds = self.__dict__.setdefault("seeds", places)
        drawn = stable_randn(tuple(slot.state["basis"].shape), seeds[slot.name]) / math.sqrt(rank)
        seeds[slot.name] = next_seed(seeds[slot.name])
        return drawn


@pytest.mark.parametrize(
    ("proj", "scale_type", "front", "kind"),
    [("random", "channel", False, "published"), ("random", "tensor", True, "published"),
     ("random", "channel", True, "off"), ("svd", "channel", False, "published"), ("svd", "tensor", True, "published")],
)  # fmt: skip
def test_it_is_apollo_torch(proj, scale_type, front, kind):
    from apollo_torch import APOLLOAdamW

    ours, theirs = weights(), weights()
    options = {
        "rank": 3,
        "update_proj_gap": GAP,
        "scale": 2.0,
        "proj_type": "std",
        "proj": proj,
        "scale_type": scale_type,
    }
    common = {"betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.1, "scale_front": front}
    one = Seeded(list(ours.items()), LR, **{**options, **common, **ApolloAdamW.FAITHFUL})
    one.param_groups[0]["limiter"] = kind if kind == "off" else one.param_groups[0]["limiter"]
    other = APOLLOAdamW([{"params": list(theirs.values()), **options}], lr=LR, disable_nl=kind == "off", **common)
    for step in range(3 * GAP + 2):
        size = {4: 50.0, 7: 0.0}.get(step, 1.0)  # a spike, and what stops the limiter
        step_with(one, ours, step, size)
        step_with(other, theirs, step, size)
        for n in SHAPES:
            torch.testing.assert_close(ours[n], theirs[n], rtol=2e-4, atol=2e-5, msg=f"{n} at step {step}")


def test_mini_is_apollo_torch_at_rank_one():
    from apollo_torch import APOLLOAdamW

    class SeededMini(ApolloMini, Seeded):
        pass

    ours, theirs = weights(), weights()
    one = SeededMini(list(ours.items()), LR, update_proj_gap=GAP, **ApolloMini.FAITHFUL)
    group = {"rank": 1, "scale": 128, "scale_type": "tensor", "proj": "random", "proj_type": "std"}
    other = APOLLOAdamW([{"params": list(theirs.values()), "update_proj_gap": GAP, **group}], lr=LR)
    for step in range(3 * GAP):
        step_with(one, ours, step)
        step_with(other, theirs, step)
        for n in SHAPES:
            torch.testing.assert_close(ours[n], theirs[n], rtol=2e-4, atol=2e-5)


# -- identities -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("kind", ["steady", "published"])
def test_no_update_grows_by_more_than_a_hundredth(front, kind):
    parameters = weights({"w": (30, 20)})
    ours = build(parameters, limiter=kind, scale=9.0, scale_front=front)
    previous = math.inf
    for step in range(12):
        moved = step_with(ours, parameters, step, size=1.0 + 10.0 * (step % 4 == 3))["w"]
        size = float(moved.norm()) * (1 - 0.9 ** (step + 1)) / math.sqrt(1 - 0.999 ** (step + 1)) / LR / 3.0
        assert size <= 1.0101 * previous
        assert float(ours.state[parameters["w"]]["limiter"]) == pytest.approx(size * (3.0 if front else 1.0), rel=1e-3)
        previous = size


def test_a_channel_moves_along_its_raw_gradient():
    parameters = weights()
    moved = step_with(build(parameters), parameters, 0)
    for n, along in (("tall", 1), ("wide", 0), ("square", 1)):
        cosine = torch.cosine_similarity(moved[n], parameters[n].grad, dim=along)
        torch.testing.assert_close(cosine, -torch.ones_like(cosine))
        factor = -(moved[n] / parameters[n].grad).mean(along)
        assert float(factor.std()) > 0.01 * float(factor.mean())  # by factors of their own
    parameters = weights()
    moved = step_with(build(parameters, scale_type="tensor"), parameters, 0)
    for n in SHAPES:
        gradient = parameters[n].grad
        factor = (moved[n] * gradient).sum() / gradient.square().sum()
        torch.testing.assert_close(moved[n], factor * gradient)


def test_a_random_basis_keeps_norms_on_average():
    gradient = torch.randn(4, 60, generator=torch.Generator().manual_seed(1))
    seen = torch.stack([gradient @ random_basis((80, 60), 8, "right", key).T for key in range(2000)])
    torch.testing.assert_close(seen.square().sum(2).mean(0), gradient.square().sum(1), rtol=0.06, atol=0.0)
    assert random_basis((80, 60), 8, "left", 1).shape == (80, 8)
    assert random_basis((80, 60), 999, "right", 1).std() == pytest.approx(60**-0.5, rel=0.03)  # clamped


def test_the_factor_of_rank_r_is_smaller_by_the_root_of_its_share():
    """E s_r / s_n = sqrt(r / n): what `scale` is for."""
    factors = {}
    for rank in (16, 64):
        parameters = weights({"w": (64, 64)})
        ours = build(parameters, rank=rank, update_proj_gap=1000, limiter="off")
        for step in range(12):
            moved = step_with(ours, parameters, step)["w"]
        factors[rank] = float(moved.norm() / parameters["w"].grad.norm())
    assert factors[16] / factors[64] == pytest.approx(0.5, rel=0.15)


def test_what_is_worth_storing_grows_with_a_scale_in_front():
    stored = []
    for eps in (100.0, 1.0):  # N = 0.1 G / eps at the first step: a thousandth and a tenth of Adam's size
        parameters = weights()
        ours = build(parameters, scale=1e4, scale_front=True, eps=eps)
        step_with(ours, parameters, 0)
        stored.append([float(state["limiter"]) for state in ours.state.values()])
    assert stored[0] == [0.0] * 3 and all(stored[1])


# -- faults that are mended -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0.0, 1e-20])
@pytest.mark.parametrize("at", [0, 20])
def test_a_gradient_of_nothing_stops_the_published_limiter_only(first, at):
    reached = {}
    for kind in ("published", "steady"):
        parameters = weights({"w": (12, 5)})
        ours = build(parameters, limiter=kind, zero_gradient="step")
        for step in range(100):
            moved = step_with(ours, parameters, step, size=first if step == at else 1.0)
        reached[kind] = float(moved["w"].norm())
    assert reached["published"] < 1e-5 * reached["steady"]
    assert reached["steady"] > 0.1 * LR * math.sqrt(15)


def test_a_skipped_zero_gradient_does_not_stop_even_the_published_limiter():
    one, other = weights(), weights()
    first, second = build(one, limiter="published"), build(other, limiter="published")
    for step in range(5):
        step_with(first, one, step)
        step_with(second, other, step)
        step_with(second, other, step, size=0.0)
    for n in SHAPES:
        assert torch.equal(one[n], other[n])


def test_a_frozen_parameter_does_not_change_the_others():
    whole, less = weights(), weights()
    less.pop("tall")
    one, other = build(whole, refresh="together"), build(less, refresh="together")
    for step in range(2 * GAP):
        step_with(one, whole, step)
        step_with(other, less, step)
    for n in less:
        assert torch.equal(whole[n], less[n])


def test_bases_differ_by_name_seed_and_refresh():
    def bases(seed):
        parameters = weights({"a": (12, 5), "b": (12, 5)})
        ours = build(parameters, seed=seed, refresh="together")
        for step in range(GAP + 1):
            step_with(ours, parameters, step)
            if step in (0, GAP):
                yield from (s["basis"].clone() for s in ours.state.values())

    found = [*bases(1), *bases(2)]
    assert len({tuple(b.flatten().tolist()) for b in found}) == 8
    assert all(torch.equal(x, y) for x, y in zip(bases(1), found[:4], strict=True))


def test_moments_stay_at_a_refresh_or_are_reset():
    for way in ("keep", "reset"):
        parameters = weights()
        ours = build(parameters, on_refresh=way, betas=(0.5, 0.5), refresh="together")
        for step in range(GAP):
            step_with(ours, parameters, step)
        before = ours.state[parameters["tall"]]["exp_avg"].clone()
        step_with(ours, parameters, GAP)
        state = ours.state[parameters["tall"]]
        seen = parameters["tall"].grad @ state["basis"].T
        torch.testing.assert_close(state["exp_avg"], 0.5 * seen + (0.5 * before if way == "keep" else 0.0))


def test_rotated_moments_of_singular_directions_follow_the_basis():
    """A gradient that does not change but for the order of its singular values has the same mean after a refresh."""
    parameters = weights({"w": (12, 5)})
    ours = build(parameters, rank=5, proj="svd", on_refresh="rotate", refresh="together", limiter="off")
    for step in range(GAP + 1):
        means = ours.state[parameters["w"]]["exp_avg"] @ ours.state[parameters["w"]]["basis"] if step else 0.0
        step_with(ours, parameters, step)
    state = ours.state[parameters["w"]]
    torch.testing.assert_close(state["exp_avg"] @ state["basis"], 0.9 * means + 0.1 * parameters["w"].grad)


# -- options --------------------------------------------------------------------------------------------------------------


def test_state_is_two_moments_a_basis_and_a_number():
    parameters = weights()
    ours, mini = build(parameters), ApolloMini(list(parameters.items()))
    for optimizer, rank in ((ours, 3), (mini, 1)):
        step_with(optimizer, parameters, 0)
        for p in parameters.values():
            state = dict(optimizer.state[p])
            assert state.pop("step") == 1 and set(state) == {"exp_avg", "exp_avg_sq", "basis", "limiter"}
            count = 2 * rank * max(p.shape) + rank * min(p.shape) + 1
            assert sum(v.nbytes for v in state.values()) == 4 * count
    assert mini.defaults["scale"] == 128.0 and mini.defaults["scale_type"] == "tensor"
    unlimited = build(weights(), limiter="off")
    assert all("limiter" not in unlimited.layout(slot) for slot in unlimited.slots())


def test_a_rank_above_the_smaller_side_is_clamped():
    parameters = weights()
    ours = build(parameters, rank=100)
    for step in range(2 * GAP):
        step_with(ours, parameters, step)
    assert ours.state[parameters["tall"]]["basis"].shape == (5, 5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": -1.0}, "scale"), ({"scale": math.inf}, "scale"), ({"proj": "rand"}, "proj must"),
        ({"proj_type": "full"}, "proj_type"), ({"scale_type": "row"}, "scale_type"), ({"scale_front": "yes"}, "scale_front"),
        ({"limiter": "on"}, "limiter"), ({"on_refresh": "rotate"}, "on_refresh"), ({"update_proj_gap": 0}, "update_proj_gap"),
        ({"rank": 0}, "rank"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        build(weights(), **options)


def test_mini_has_rank_one_whatever_its_groups_say():
    named = list(weights().items())
    with pytest.raises(ConfigError, match=r"rank of ApolloMini is 1, got 8.*ApolloAdamW"):
        ApolloMini(named, rank=8)
    ours = ApolloMini([{"params": named, "rank": 128}])
    assert [group["rank"] for group in ours.param_groups] == [1]
    assert ours.layout(ours.slots()[0])["basis"][0] == (1, 5)
    assert not any(slot.is_matrix for slot in ApolloMini([{"params": named, "rank": None}]).slots())
