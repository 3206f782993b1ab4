"""GaLore against the paper in float64, against galore-torch step by step, and what we mend."""

import logging
import warnings

import pytest
import torch
from torch import nn

from logra.errors import ConfigError
from logra.optim import GaLoreAdamW

SHAPES = [(24, 40), (40, 24), (16, 16)]
BETAS, EPS = (0.9, 0.999), 1e-6


def start(shapes=SHAPES, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + shape[0]))


def run(optimizer, parameters, steps, first=0):
    for step in range(first, first + steps):
        for p in parameters:
            p.grad = gradient(p.shape, step)
        optimizer.step()


def twin(weight, gradients, rank, gap, lr, scale, decay):
    """Algorithm 2 of the paper with the code's order, in float64; moments kept over a change of basis."""
    weight = weight.double()
    is_tall = weight.shape[0] >= weight.shape[1]
    mean = square = basis = None
    for n, g in enumerate(gradients):
        g = g.double()
        if n % gap == 0:
            u, _, vt = torch.linalg.svd(g, full_matrices=False)
            basis = vt[:rank].T if is_tall else u[:, :rank]
        seen = g @ basis if is_tall else basis.T @ g
        mean = (1 - BETAS[0]) * seen + (BETAS[0] * mean if n else 0)
        square = (1 - BETAS[1]) * seen**2 + (BETAS[1] * square if n else 0)
        normed = mean / (square.sqrt() + EPS)
        step = lr * (1 - BETAS[1] ** (n + 1)) ** 0.5 / (1 - BETAS[0] ** (n + 1))
        weight = weight - step * scale * (normed @ basis.T if is_tall else basis @ normed)
        weight = weight * (1 - lr * decay)
    return weight


@pytest.mark.parametrize("shape", SHAPES)
def test_the_paper_in_float64(shape):
    (p,) = start([shape])
    gradients = [gradient(shape, n) for n in range(9)]
    expected = twin(p.detach(), gradients, 5, 4, 1e-2, 0.25, 0.1)
    optimizer = GaLoreAdamW(
        [p], 1e-2, rank=5, update_proj_gap=4, weight_decay=0.1, betas=BETAS, eps=EPS, **GaLoreAdamW.FAITHFUL
    )
    run(optimizer, [p], 9)
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_the_official_code_step_by_step(proj_type):
    galore_torch = pytest.importorskip("galore_torch")
    theirs, ours = start(), start()
    vectors = [nn.Parameter(torch.ones(9)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = galore_torch.GaLoreAdamW(
            [
                {"params": vectors[:1]},
                {"params": theirs, "rank": 6, "update_proj_gap": 4, "scale": 0.25, "proj_type": proj_type},
            ],
            lr=1e-2,
            weight_decay=0.1,
        )
    groups = [{"params": vectors[1:], "rank": None}, {"params": ours}]
    optimizer = GaLoreAdamW(
        groups, 1e-2, rank=6, update_proj_gap=4, proj_type=proj_type, weight_decay=0.1, **GaLoreAdamW.FAITHFUL
    )
    for step in range(13):
        run(reference, [*theirs, vectors[0]], 1, step)
        run(optimizer, [*ours, vectors[1]], 1, step)
        for a, b in zip([*theirs, vectors[0]], [*ours, vectors[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_full_rank_is_adam_in_a_turned_basis():
    """Adam of R = G P^T with P square and orthogonal, turned back: equals Adam itself where P is a signed permutation."""
    (p,) = start([(12, 12)])
    before = p.detach().clone()
    spectrum = torch.diag(torch.arange(12, 0, -1).float())
    p.grad = spectrum.clone()
    GaLoreAdamW([p], 0.1, rank=12, scale=1.0, eps=1e-12).step()
    moved = before - p.detach()
    torch.testing.assert_close(moved, 0.1 * torch.eye(12), rtol=1e-4, atol=1e-5)


def leading_angle(found, wanted):
    return float(torch.linalg.svdvals(found @ wanted.T).min())


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (50, 50)])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_the_range_finder_finds_the_leading_directions(shape, size):
    left = torch.linalg.qr(torch.randn(shape[0], 40, generator=torch.Generator().manual_seed(0)))[0]
    right = torch.linalg.qr(torch.randn(shape[1], 40, generator=torch.Generator().manual_seed(1)))[0]
    g = (left * (size * 0.7 ** torch.arange(40))) @ right.T
    (p,) = start([shape])
    optimizer = GaLoreAdamW([p], rank=8, projection="range")
    p.grad = g
    optimizer.step()
    basis = optimizer.state[p]["basis"]
    basis = basis if shape[0] >= shape[1] else basis.T
    wanted = (right if shape[0] >= shape[1] else left).T[:8]
    torch.testing.assert_close(basis @ basis.T, torch.eye(8), rtol=0, atol=1e-5)
    assert leading_angle(basis, wanted) > 0.99


def test_moments_follow_the_basis():
    """A constant gradient: with the moments carried over, a change of basis changes no step; kept, it does."""
    moved = {}
    for way in ("rotate", "keep"):
        (p,) = start([(20, 12)])
        g = gradient((20, 12), 1)
        optimizer = GaLoreAdamW([p], 1.0, rank=12, scale=1.0, update_proj_gap=5, on_refresh=way, refresh="together")
        for step in range(6):
            turn = torch.linalg.qr(gradient((12, 12), step))[0] if step == 5 else torch.eye(12)
            before = p.detach().clone()
            p.grad = g.clone()
            if step == 5:  # the same gradient through a basis that has turned
                optimizer._leading = lambda slot, grad, rank, where, step, turn=turn: slot.state["basis"].T.mm(turn).T
            optimizer.step()
        moved[way] = float(torch.nn.functional.cosine_similarity((before - p.detach()).flatten(), g.flatten(), 0))
    assert moved["rotate"] > 0.75 > 0.5 > moved["keep"]


def test_a_refresh_on_a_zero_gradient_keeps_the_basis():
    """The published code draws coordinate axes there; ours does not look at it."""
    bases = {}
    for way in ("skip", "step"):
        (p,) = start([(20, 12)])
        optimizer = GaLoreAdamW([p], rank=2, update_proj_gap=3, zero_gradient=way, refresh="together")
        low = gradient((20, 2), 1) @ gradient((2, 12), 2)
        for step in range(4):
            p.grad = torch.zeros_like(p) if step == 3 else low.clone()
            optimizer.step()
        basis = optimizer.state[p]["basis"]
        bases[way] = float((low @ basis.T).norm() / low.norm())
    assert bases["skip"] > 0.999 and bases["step"] < 0.9


def test_refreshes_are_spread_evenly():
    parameters = {f"layer{i}": p for i, p in enumerate(start([(8, 6)] * 10))}
    optimizer = GaLoreAdamW(list(parameters.items()), rank=2, update_proj_gap=5)
    due = [[optimizer._is_due(slot, step) for slot in optimizer.slots()] for step in range(1, 12)]
    assert all(due[0]) and [sum(row) for row in due[1:]] == [2] * 10
    assert all(sum(row[i] for row in due[1:6]) == 1 for i in range(10))


def test_an_svd_that_fails_keeps_the_old_basis(caplog, monkeypatch):
    (p,) = start([(9, 7)])
    optimizer = GaLoreAdamW([p], rank=3, update_proj_gap=2)
    run(optimizer, [p], 2)
    basis = optimizer.state[p]["basis"].clone()

    def fails(*args):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr("logra.optim.subspace.leading", fails)
    with caplog.at_level(logging.WARNING):
        run(optimizer, [p], 1, 2)
    assert torch.equal(optimizer.state[p]["basis"], basis) and optimizer.failed_refreshes == 1
    assert "keeps the old one" in caplog.text
    fresh = GaLoreAdamW(start([(9, 7)]), rank=3)
    with pytest.raises(torch.linalg.LinAlgError):
        run(fresh, fresh.param_groups[0]["params"], 1)


def test_bytes_of_eight_bits_follow_float32():
    """The same run in 8 bits: within five percent of the way, a quarter of the bytes of the moments."""
    ends, held = {}, {}
    for bits in (32, 8):
        (p,) = start([(64, 96)])
        before = p.detach().clone()
        optimizer = GaLoreAdamW([p], rank=16, state_bits=bits, update_proj_gap=20)
        signal = gradient((64, 96), 7)
        for step in range(60):
            p.grad = signal + gradient((64, 96), step)
            optimizer.step()
        ends[bits] = p.detach() - before
        held[bits] = sum(v.nbytes for k, v in optimizer.state[p].items() if k.startswith("exp_avg"))
    assert float((ends[8] - ends[32]).norm() / ends[32].norm()) < 0.05
    assert held[8] / held[32] < 0.27


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"proj_type": "sideways"}, "proj_type"), ({"projection": "guess"}, "projection"), ({"on_refresh": "x"}, "on_refresh"),
        ({"update_proj_gap": 0}, "update_proj_gap"), ({"state_bits": 4}, "state_bits"), ({"rank": 0}, "rank"),
        ({"refresh": "never"}, "refresh"), ({"scale": float("nan")}, "scale"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        GaLoreAdamW(start(), **options)
