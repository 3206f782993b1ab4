import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra import hashing
from logra.errors import ConfigError
from logra.optim import factored
from logra.optim.lora_pre import LoRAPreAdamW, LoRAPreMuon, largest_direction, square_weights

SHAPES = {"wide": (12, 20), "tall": (22, 9), "square": (11, 11)}
RANK = 4
PUBLISHED = {**LoRAPreAdamW.FAITHFUL, "zero_gradient": "skip"}
PUBLISHED_MUON = {**LoRAPreMuon.FAITHFUL, "zero_gradient": "skip"}
IN_TURN = {"factors": "in_turn"}


def zeros(shapes=SHAPES):
    return {n: nn.Parameter(torch.zeros(s)) for n, s in shapes.items()}


def noise(shape, step, name=""):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + sum(map(ord, name))))


def low_rank(shape=(24, 40), rank=RANK, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)


def run(optimizer, parameters, gradients):
    """The moves of each step of one matrix: its weight is put back to zero."""
    (parameter,) = parameters.values()
    moves = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        moves.append(parameter.detach().clone())
        parameter.detach().zero_()
    return moves


def product(optimizer, kind="mean"):
    (slot,) = optimizer.slots()
    return slot.state[f"{kind}_left"] @ slot.state[f"{kind}_right"]


def one(cls=LoRAPreAdamW, shape=(24, 40), rank=RANK, **options):
    parameters = zeros({"w": shape})
    return cls(list(parameters.items()), 1.0, rank=rank, **options), parameters


# -- against the equations, in float64 --------------------------------------------------------------------------------------


class Pair:
    """Factors as the paper and `logra.optim.factored` have them: explicit inverses, QR, float64."""

    def __init__(self, shape, name, key, options, decay, gain=1.0):
        seed = hashing.derive_key(42, "lora_pre", name, key) >> 1
        drawn = torch.randn((RANK, shape[1]), generator=torch.Generator().manual_seed(seed))
        self.b, self.a = torch.zeros(shape[0], RANK).double(), 0.02 * drawn.double()
        self.options, self.rate, self.gain = options, 1 - math.sqrt(decay), gain
        self.gauge()

    def gauge(self):
        if self.options["gauge"] == "orthonormal":
            q, r = torch.linalg.qr(self.a.t())
            self.b, self.a = self.b @ r.t(), q.t()

    def inverse(self, gram):
        size = gram.trace().clamp(min=1e-300) if self.options["damping_is"] == "relative" else 1.0
        return torch.linalg.inv(gram + 1e-6 * size * torch.eye(RANK).double())

    def follow(self, x):
        y, x = self.rate, self.gain * x
        b = (1 - y) * self.b + y * x @ self.a.t() @ self.inverse(self.a @ self.a.t())
        seen = b if self.options["factors"] == "in_turn" else self.b
        target = self.inverse(seen.t() @ seen) @ seen.t() @ x if seen.any() else torch.zeros_like(self.a)
        if self.options["gauge"] == "orthonormal":
            target *= min(1.0, 2 * math.sqrt(RANK) / y / max(float(target.norm()), 1e-300))
        self.b, self.a = b, (1 - y) * self.a + y * target
        self.gauge()

    def value(self):
        return self.b @ self.a


def adam_twin(shape, name, options, gradients, betas=(0.9, 0.95), eps=1e-8):
    """The directions of LoRA-Pre's Adam."""
    b1, b2 = betas
    mean, root = Pair(shape, name, "mean_right", options, b1), Pair(shape, name, "root_right", options, math.sqrt(b2))
    for t, g in enumerate(gradients, 1):
        g = g.double()
        if options["order"] == "new":
            mean.follow(g)
            root.follow(g.abs())
        m = (b1 * mean.value() + (1 - b1) * g) / (1 - b1**t)
        square, seen = root.value() ** 2, 1 - b2**t
        v = (b2 * square + (1 - b2) * g**2) / seen
        if options["second_moment"] == "corrected":
            num = t if options["order"] == "new" else t - 1
            q = square / (1 - b2 ** (num / 2)) ** 2 if num else square
            v = ((seen - (1 - b2)) * q + (1 - b2) * g**2) / seen
        u = m / (v.sqrt() + eps)
        if options["limit"] == "adam":
            weights = [(1 - b1) * b1**k / (1 - b1**t) for k in range(t)]
            shares = [(1 - b2) * b2**k / (1 - b2**t) for k in range(t)]
            bound = math.sqrt(sum(a * a / s for a, s in zip(weights, shares, strict=True)))
            u = u.clamp(-bound, bound)
        yield u
        if options["order"] == "old":
            mean.follow(g)
            root.follow(g.abs())


DEFAULT = {
    "order": "old", "factors": "together", "damping_is": "relative", "gauge": "orthonormal",
    "second_moment": "corrected", "limit": "adam",
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        PUBLISHED, {**PUBLISHED, "order": "new"}, {**PUBLISHED, "factors": "in_turn"},
        {**PUBLISHED, "second_moment": "corrected"}, {**PUBLISHED, "damping_is": "relative"},
        {}, IN_TURN, {"order": "new"}, {"order": "new", **IN_TURN},
    ],
)  # fmt: skip
def test_steps_are_those_of_the_equations(options):
    parameters, lr, wd = zeros(), 0.1, 0.2
    optimizer = LoRAPreAdamW(list(parameters.items()), lr, rank=RANK, weight_decay=wd, **options)
    gradients = {n: [noise(s, t, n) + low_rank(s) for t in range(6)] for n, s in SHAPES.items()}
    twins = {n: adam_twin(s, n, {**DEFAULT, **options}, gradients[n]) for n, s in SHAPES.items()}
    weights = {n: torch.zeros(s).double() for n, s in SHAPES.items()}
    for t in range(6):
        for n, p in parameters.items():
            p.grad = gradients[n][t].clone()
        optimizer.step()
        for n in SHAPES:
            weights[n] = (1 - lr * wd) * weights[n] - lr * next(twins[n])
            # single numbers are large where v crosses zero, if there is no limit
            error = (parameters[n].detach() - weights[n]).norm() / weights[n].norm()
            assert error < 2e-3, (n, t, float(error))


@pytest.mark.parametrize("options", [PUBLISHED_MUON, {}, IN_TURN])
def test_the_momentum_of_muon_is_that_of_the_equations(options):
    """Newton-Schulz is torch's: what goes in is checked."""
    mu, shape = 0.9, SHAPES["wide"]
    optimizer, parameters = one(LoRAPreMuon, shape, momentum=mu, **options)
    twin = Pair(shape, "w", "mean_right", {**DEFAULT, **options}, mu, 1 / (1 - mu))
    for t in range(6):
        g = noise(shape, t) + low_rank(shape)
        (move,) = run(optimizer, parameters, [g])
        m = mu * twin.value() + g
        left, _, right = torch.linalg.svd(m, full_matrices=False)
        assert float((-move.double() * (left @ right)).sum()) > 0.8 * min(shape)
        twin.follow(g.double())
        torch.testing.assert_close(product(optimizer).double(), twin.value(), rtol=0, atol=1e-3 * float(m.norm()))


# -- identities -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [PUBLISHED, {}, IN_TURN])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9)])
def test_the_first_step_is_adams(options, betas):
    parameters, twin = zeros(), zeros()
    for n in SHAPES:
        parameters[n].grad = twin[n].grad = noise(SHAPES[n], 0, n)
    LoRAPreAdamW(list(parameters.items()), 0.1, rank=RANK, betas=betas, **options).step()
    torch.optim.AdamW(twin.values(), 0.1, betas=betas).step()
    for n in SHAPES:
        torch.testing.assert_close(parameters[n], twin[n], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("options", [PUBLISHED, {}, IN_TURN])
def test_a_constant_gradient_within_the_rank_is_found(options):
    optimizer, parameters = one(**options)
    g = low_rank()
    run(optimizer, parameters, [g] * 200)
    assert (product(optimizer) - g).norm() < 1e-3 * g.norm()


@pytest.mark.parametrize("options", [PUBLISHED_MUON, {}, IN_TURN])
def test_the_fixed_point_of_muon(options):
    """m_B m_A = g / (1 - mu)."""
    optimizer, parameters = one(LoRAPreMuon, **options)
    g = low_rank()
    run(optimizer, parameters, [g] * 400)
    assert (product(optimizer) - g / 0.05).norm() < 1e-4 * g.norm() / 0.05


@pytest.mark.parametrize(("options", "is_mean"), [(IN_TURN, True), (PUBLISHED, False)])
def test_in_turn_is_the_running_mean_to_the_letter(options, is_mean):
    """For targets in the span, however large: the published rule doubles this one."""
    optimizer, parameters = one(rank=1, **options)
    g = low_rank(rank=1)
    run(optimizer, parameters, [g] * 120)
    before = product(optimizer)
    run(optimizer, parameters, [50 * g])
    expected = 0.9 * before + 0.1 * 50 * g
    assert ((product(optimizer) - expected).norm() < 1e-3 * expected.norm()) == is_mean
    assert is_mean or product(optimizer).norm() > 2 * expected.norm()


@pytest.mark.parametrize("shape", [(4, 30), (30, 4), (3, 3), (1, 9)])
def test_matrices_no_wider_than_the_rank_are_exact(shape):
    """Adam's: AdamW. Muon's: Muon without Nesterov."""
    arms = [
        (LoRAPreAdamW, lambda ps: torch.optim.AdamW(ps, 0.1, betas=(0.9, 0.95), weight_decay=0.0)),
        (LoRAPreMuon, lambda ps: torch.optim.Muon(ps, 0.1, nesterov=False, weight_decay=0.0)),
    ]
    for cls, exact in arms:
        ours, theirs = zeros({"w": shape}), zeros({"w": shape})
        one, other = cls(list(ours.items()), 0.1, rank=4), exact(theirs.values())
        for t in range(5):
            ours["w"].grad = theirs["w"].grad = noise(shape, t)
            one.step()
            other.step()
            torch.testing.assert_close(ours["w"], theirs["w"], rtol=1e-5, atol=1e-6)


def test_the_scale_of_the_update():
    whole, parameters = one()
    quarter, others = one(update_scale=0.25)
    gradients = [noise((24, 40), t) for t in range(3)]
    for a, b in zip(run(whole, parameters, gradients), run(quarter, others, gradients), strict=True):
        torch.testing.assert_close(0.25 * a, b)


# -- the faults of the published rule, and their absence ----------------------------------------------------------------------


def test_the_scale_of_the_gradients_changes_nothing():
    """By 2^-30, about 1e-9: bit for bit. The published damping drowns the factors."""
    gradients = [low_rank() + 0.1 * noise((24, 40), t) for t in range(60)]
    small = [g * 2.0**-30 for g in gradients]
    for options in ({}, IN_TURN):
        ours, ours_small = one(eps=1e-30, **options), one(eps=1e-30, **options)
        for a, b in zip(run(*ours, gradients), run(*ours_small, small), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(product(ours[0]) * 2.0**-30, product(ours_small[0]))
    theirs, theirs_small = one(eps=1e-30, **PUBLISHED), one(eps=1e-30, **PUBLISHED)
    run(*theirs, gradients)
    run(*theirs_small, small)
    of_large, of_small = product(theirs[0]), product(theirs_small[0]) * 2.0**30
    assert (of_large - low_rank()).norm() < 0.2 * low_rank().norm()
    assert (of_small - low_rank()).norm() > 0.8 * low_rank().norm()


def second_moment(optimizer, g, step):
    of_square, own = square_weights(0.95, step, step - 1, optimizer.param_groups[0]["second_moment"] == "corrected")
    return of_square * product(optimizer, "root") ** 2 + own * g**2


@pytest.mark.parametrize(
    ("options", "expected"),
    [  # medians of v over that of Adam at steps 2, 5, 10, 20, 50, 100, 200
        (PUBLISHED, [(0.49, 0.55), (0.16, 0.28), (0.15, 0.25), (0.20, 0.33), (0.40, 0.62), (0.60, 0.9), (0.7, 1.05)]),
        ({**PUBLISHED, "second_moment": "corrected"}, [(0.49, 0.6), (0.68, 1.05), *[(0.84, 1.05)] * 5]),
        ({}, [(0.49, 0.6), (0.58, 1.05), (0.78, 1.05), *[(0.84, 1.05)] * 4]),
        (IN_TURN, [(0.55, 0.9), (0.65, 1.05), (0.78, 1.05), *[(0.84, 1.05)] * 4]),
    ],
)
@pytest.mark.parametrize("seed", [3, 4])
def test_the_second_moment_is_right_from_the_start(options, expected, seed):
    optimizer, parameters = one(**options)
    g = low_rank(seed=seed)
    for t in range(1, 201):
        if t in (2, 5, 10, 20, 50, 100, 200):
            least, most = expected[(2, 5, 10, 20, 50, 100, 200).index(t)]
            ratio = float((second_moment(optimizer, g, t) / g**2).median())
            assert least < ratio < most, (t, ratio)
        run(optimizer, parameters, [g])


@pytest.mark.parametrize(
    ("options", "most"), [({}, 1.17), (IN_TURN, 1.17), ({"limit": "none"}, None), (PUBLISHED, None)]
)
def test_no_step_exceeds_adams_when_gradients_get_smaller(options, most):
    """v_B v_A crosses zero where m_B m_A does not; so does the published rule."""
    optimizer, parameters = one(**options)
    gradients = [low_rank() + 0.3 * noise((24, 40), t) for t in range(40)]
    moves = run(optimizer, parameters, gradients + [1e-4 * g for g in gradients[:20]])
    largest = max(float(move.abs().max()) for move in moves)
    assert largest < most if most else largest > 50.0


def test_the_limit_is_adams():
    """Adam reaches it on the worst gradients and never exceeds it."""
    for beta1, beta2 in ((0.9, 0.95), (0.9, 0.999), (0.5, 0.3), (0.9, 0.81)):
        for t in (1, 2, 7, 40):
            weights = [(1 - beta1) * beta1**k / (1 - beta1**t) for k in range(t)]
            shares = [(1 - beta2) * beta2**k / (1 - beta2**t) for k in range(t)]
            bound = largest_direction(beta1, beta2, t)
            for g in [[a / s for a, s in zip(weights, shares, strict=True)], torch.randn(t).tolist()]:
                m = sum(a * x for a, x in zip(weights, g, strict=True))
                v = sum(s * x * x for s, x in zip(shares, g, strict=True))
                assert abs(m) / math.sqrt(v) <= bound
            m, v = (sum(a * a / s for a, s in zip(weights, shares, strict=True)),) * 2
            assert bound == pytest.approx(m / math.sqrt(v), rel=1e-5)
    assert largest_direction(0.9, 0.0, 1) == pytest.approx(1.0)
    assert largest_direction(0.9, 0.0, 2) == largest_direction(0.99, 0.1, 5000) == math.inf
    assert largest_direction(0.9, 0.95, 5000) == pytest.approx(1.165, abs=1e-3)


@pytest.mark.parametrize(("options", "least", "most"), [({}, 0.9, 1.6), (IN_TURN, 0.9, 1.05), (PUBLISHED, 10.0, 1e3)])
def test_one_large_gradient_is_not_blown_up(options, least, most):
    """The mean of a gradient 1000 times larger than before, against the running mean."""
    optimizer, parameters = one(**options)
    mean = torch.zeros(24, 40)
    for t in range(60):
        g = (low_rank() + 0.3 * noise((24, 40), t)) * (1000.0 if t == 50 else 1.0)
        run(optimizer, parameters, [g])
        mean = 0.9 * mean + 0.1 * g
    assert least < float(product(optimizer).norm() / mean.norm()) < most


def test_the_gauge_keeps_the_product_and_ends_the_drift():
    kept, kept_parameters = one(damping=1e-7, limit="none")
    free, free_parameters = one(damping=1e-7, limit="none", gauge="free")
    for t in range(400):
        g = noise((24, 40), t)
        run(kept, kept_parameters, [g])
        run(free, free_parameters, [g])
        if t < 12:
            for kind in ("mean", "root"):
                gap = (product(kept, kind) - product(free, kind)).norm()
                assert gap < 1e-3 * product(free, kind).norm(), (t, kind)
    (slot,), (drifted,) = kept.slots(), free.slots()
    right = slot.state["mean_right"]
    torch.testing.assert_close(right @ right.t(), torch.eye(RANK), rtol=0, atol=1e-3)
    ratio = float(drifted.state["mean_left"].norm() / drifted.state["mean_right"].norm())
    assert abs(math.log10(ratio)) > 3.0  # and grows by a constant factor a step


@pytest.mark.parametrize("cls", [LoRAPreAdamW, LoRAPreMuon])
@pytest.mark.parametrize("options", ["published", {"zero_gradient": "step"}, {"zero_gradient": "step", **IN_TURN}])
def test_many_zero_gradients_that_are_stepped(cls, options):
    """Factors fade to 1e-12; then a gradient comes."""
    optimizer, parameters = one(cls, (10, 8), **(cls.FAITHFUL if options == "published" else options))
    zero = torch.zeros(10, 8)
    gradients = [
        zero,
        *(noise((10, 8), t) for t in range(3)),
        *[zero] * 500,
        *(noise((10, 8), t) for t in range(9)),
    ]
    moves = run(optimizer, parameters, gradients)
    assert all(torch.isfinite(move).all() for move in moves)
    assert all(torch.isfinite(v).all() for v in optimizer.slots()[0].state.values() if isinstance(v, torch.Tensor))
    assert moves[-1].abs().max() > 0.01
    if options != "published":
        assert moves[-1].abs().max() < 1.2


@pytest.mark.parametrize("size", [1e-15, 1e12])
def test_gradients_of_any_size_are_finite(size):
    optimizer, parameters = one(eps=1e-30)
    moves = run(optimizer, parameters, [size * (low_rank(rank=1) + 1e-6 * noise((24, 40), t)) for t in range(60)])
    assert all(torch.isfinite(move).all() for move in moves)
    assert (product(optimizer) / size - low_rank(rank=1)).norm() < 0.05 * low_rank(rank=1).norm()


# -- cost, draws, options -----------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """The most storages of at least `numel` float32 numbers that are alive at a time, and how often the solvers are called."""

    def __init__(self, numel):
        super().__init__()
        self.nbytes, self.alive, self.most, self.num_solves = 4 * numel, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.nbytes:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    self.alive[id(storage)] = weakref.ref(tensor)
        self.alive = {k: t for k, t in self.alive.items() if t() is not None}
        self.most = max(self.most, len(self.alive))
        self.num_solves += "solve_ex" in str(func) or "cholesky_ex" in str(func)
        return result


@pytest.mark.parametrize("options", [{}, IN_TURN, PUBLISHED])
def test_one_whole_matrix_beside_the_state(options, monkeypatch):
    monkeypatch.setattr(factored, "_PART", 1 << 12)
    optimizer, parameters = one(shape=(300, 200), **options)
    run(optimizer, parameters, [noise((300, 200), 0)])
    parameters["w"].grad = noise((300, 200), 1)
    with Counter(300 * 200) as counter:
        optimizer.step()
    assert counter.most == 1  # the move


def test_like_matrices_are_solved_together():
    parameters = zeros({f"w{i}": (24, 40) for i in range(5)})
    optimizer = LoRAPreAdamW(list(parameters.items()), rank=RANK)
    for step in range(2):
        for n, p in parameters.items():
            p.grad = noise((24, 40), step, n)
        with Counter(1) as counter:
            optimizer.step()
    assert counter.num_solves == 4  # a solve and a gauge for each moment


def test_draws_depend_on_the_seed_and_the_name_alone():
    def rights(names, **options):
        parameters = zeros(dict.fromkeys(names, (24, 40)))
        optimizer = LoRAPreAdamW(list(parameters.items()), rank=RANK, gauge="free", **options)
        for p in parameters.values():
            p.grad = torch.ones(24, 40)
        optimizer.step()
        return {slot.name: slot.state["mean_right"] for slot in optimizer.slots()}

    first = rights("ab")
    assert torch.equal(first["a"], rights("cba")["a"]) and not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], rights("ab", seed=1)["a"])
    assert float(first["a"].std()) == pytest.approx(0.02, rel=0.25)


def test_what_is_too_narrow_is_said(caplog):
    LoRAPreAdamW(list(zeros().items()), rank=10)
    assert "rank 10 exceeds the smaller side of 1 matrices (down to 9): they are stepped by AdamW" in caplog.text
    LoRAPreMuon(list(zeros().items()), rank=10)
    assert "they keep their whole momentum" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"order": "jacobi"}, {"factors": "both"}, {"damping": -1e-6}, {"damping_is": "trace"}, {"gauge": "qr"},
        {"rank": 0}, {"betas": (0.9, 1.0)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("cls", [LoRAPreAdamW, LoRAPreMuon])
def test_bad_options_are_named(cls, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        cls(list(zeros().items()), **options)


@pytest.mark.parametrize("options", [{"second_moment": "exact"}, {"limit": 1.0}, {"update_scale": -0.25}])
def test_bad_options_of_adam_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        LoRAPreAdamW(list(zeros().items()), **options)


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"ns_steps": 100}, {"adjust_lr_fn": "none"}])
def test_bad_options_of_muon_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        LoRAPreMuon(list(zeros().items()), **options)


def test_a_damping_of_zero_is_refused():
    with pytest.raises(ConfigError, match="damping"):
        LoRAPreAdamW([torch.nn.Parameter(torch.ones(6, 5))], rank=2, damping=0.0)
