"""Aligned bases: the power step, the next basis, its integers, moments that follow it; and what the sketcher does with them."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import ConfigError, UpdateError
from logra.rl.tiny import tiny_model
from logra.sketch import aligned, optimizers
from logra.sketch.sketcher import attach


def low_rank(count, columns, rank, seed=0, noise=0.05):
    """(count, columns) rows that lie mostly in a subspace of dimension `rank`."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** -torch.arange(rank)
    rows = torch.randn(count, rank, generator=generator) * scale
    directions = torch.randn(rank, columns, generator=torch.Generator().manual_seed(99))
    return rows @ directions + noise * torch.randn(count, columns, generator=generator)


def captured(gradient, basis):
    """cos(G, G P) for the projection P on the rows of an orthonormal basis."""
    gradient, basis = gradient.double(), basis.double()  # squares of 1e-22 underflow in float32
    return float((gradient @ torch.linalg.qr(basis.t())[0]).norm() / gradient.norm())


def loss_of(model, ids):
    logits = model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model, sketcher, batches, lr=1e-3):
    for ids in batches:
        loss_of(model, ids).backward()
        sketcher.apply(sketcher.propose(lr))


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 51, (4, 12), generator=generator) for _ in range(count)]


# -- the math ---------------------------------------------------------------------------------------------------------


def test_power_step_is_the_weighted_covariance_times_the_basis():
    generator = torch.Generator().manual_seed(0)
    x, h, a = (torch.randn(s, generator=generator) for s in ((30, 12), (30, 7), (4, 12)))
    covariance = sum(float(h[n].double().norm()) * torch.outer(x[n], x[n]).double() for n in range(30))
    expected = covariance @ a.double().t()
    actual = aligned.power_step(x, h, x @ a.t())
    assert (actual.double() - expected).norm() < 1e-6 * expected.norm()


def test_tokens_without_gradient_do_not_count():
    generator = torch.Generator().manual_seed(1)
    x, h, a = (torch.randn(s, generator=generator) for s in ((10, 12), (10, 7), (4, 12)))
    h[5:] = 0.0
    x[5:] = 1e6
    assert torch.equal(aligned.power_step(x, h, x @ a.t()), aligned.power_step(x[:5], h[:5], x[:5] @ a.t()))


@settings(max_examples=50, deadline=None)
@given(
    rank=st.integers(1, 9),
    columns=st.integers(9, 40),
    directions=st.integers(1, 12),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-20, 1.0, 1e15]),
)
def test_the_next_basis_is_orthonormal_and_spans_what_was_seen(rank, columns, directions, seed, size):
    generator = torch.Generator().manual_seed(seed)
    previous = torch.linalg.qr(torch.randn(columns, rank, generator=generator))[0].t()
    span = torch.randn(columns, min(directions, rank), generator=generator)
    y = span @ torch.randn(span.shape[1], rank, generator=generator) * size
    basis, energy = aligned.next_basis(y, previous, torch.zeros(rank))
    assert float(energy.sum()) == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(basis @ basis.t(), torch.eye(rank), atol=1e-5)
    if span.shape[1] == rank:
        assert captured(y.t(), basis) > 1 - 1e-4
    assert bool(((basis * previous).sum(1) >= -1e-6).all())  # no axis turns round


def test_directions_that_are_missing_come_from_the_old_basis():
    previous = torch.eye(20)[:4]
    y = torch.zeros(20, 4)
    y[10] = torch.tensor([1.0, 2.0, -1.0, 0.5])  # one direction only
    basis, _ = aligned.next_basis(y, previous, torch.zeros(4))
    assert captured(torch.eye(20)[10:11], basis) > 0.999
    assert float(basis[:, :4].square().sum() + basis[:, 10].square().sum()) > 3.99


def test_explored_rows_are_orthogonal_to_the_rest():
    generator = torch.Generator().manual_seed(3)
    previous = torch.linalg.qr(torch.randn(30, 6, generator=generator))[0].t()
    y = torch.randn(30, 6, generator=generator)
    explore = torch.randn(2, 30, generator=generator)
    basis, _ = aligned.next_basis(y, previous, torch.zeros(6), explore)
    assert torch.allclose(basis @ basis.t(), torch.eye(6), atol=1e-5)
    assert torch.allclose(basis[:4], aligned.next_basis(y[:, :4], previous[:4], torch.zeros(4))[0], atol=1e-4)
    assert captured(explore, torch.cat([basis[:4], explore])) > 0.999


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.floats(1e-6, 1e6))
def test_integers_round_to_powers_of_two_of_little_spread(seed, size):
    sizes = torch.tensor([1.0, 0.9, 0.3, 0.01, 1e-6])[:, None] * size
    basis = torch.randn(5, 17, generator=torch.Generator().manual_seed(seed)) * sizes
    q, scale = aligned.to_integers(basis)
    assert q.dtype == torch.int8 and int(q.abs().max()) <= 127
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    assert float(((q * scale[:, None] - basis).abs() / scale[:, None]).max()) <= 0.5
    assert int(q.abs().amax(1).max()) >= 63 and float(scale.max() / scale.min()) <= 2**aligned.SPREAD


@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e-8, 1e18, 1e25])
def test_inputs_of_any_size_give_the_same_basis(size):
    """No square of Y over- or underflows; what cannot be told from nothing leaves the basis as it is, and alive."""

    def next_of(scale):
        bases = aligned.AlignedBases({"w": 12}, rank=3, seed=0)
        bases.pending["w"] = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)) * scale
        bases.take(bases.following(1))
        return bases.bases["w"]

    assert torch.equal(next_of(size).q, next_of(1.0).q)
    assert bool(next_of(size).q.any(1).all()) and bool(torch.isfinite(next_of(size).energy).all())


def test_memory_holds_the_axes_where_the_batch_says_nothing_new():
    previous, energy = torch.eye(20)[:4], torch.tensor([0.5, 0.3, 0.15, 0.05])
    y = previous.t() * energy + 0.01 * torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    overlap = {}
    for held in (energy, torch.zeros(4)):
        basis, _ = aligned.next_basis(y, previous, held)
        overlap[float(held.sum())] = float((previous @ basis.t()).diagonal().square().mean())
    assert overlap[1.0] > overlap[0.0]
    basis, after = aligned.next_basis(y * 1e9, previous, energy)  # each batch counts the same, whatever its gradients
    assert torch.allclose(after, energy, atol=0.03)


@pytest.mark.parametrize("rank", [4, 8])
def test_tracking_reaches_the_exact_principal_directions(rank):
    """Within 3 % of an exact decomposition of the same past data, on data that neither has seen."""
    columns = 48
    bases = aligned.AlignedBases({"w": columns}, rank=rank, seed=0, every=1)
    covariance = torch.zeros(columns, columns, dtype=torch.float64)
    for index in range(6):
        x = low_rank(200, columns, 10, seed=index)
        h = torch.randn(200, 5, generator=torch.Generator().manual_seed(100 + index))
        covariance += (x.t() * h.norm(dim=1)).double() @ x.double()
        bases.observe("w", x, h, x @ bases.bases["w"].matrix.t())
        bases.take(bases.following(index + 1))
    exact = torch.linalg.eigh(covariance)[1][:, -rank:].t().float()
    x = low_rank(200, columns, 10, seed=77)
    gradient = torch.randn(5, 200, generator=torch.Generator().manual_seed(78)) @ x
    assert captured(gradient, bases.bases["w"].matrix) > 0.97 * captured(gradient, exact)
    assert captured(gradient, bases.bases["w"].matrix) > 2 * math.sqrt(rank / (columns + rank))


# -- moments ----------------------------------------------------------------------------------------------------------


def rotation(rank, seed):
    return torch.linalg.qr(torch.randn(rank, rank, generator=torch.Generator().manual_seed(seed)))[0]


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(1, 8),
    steps=st.integers(1, 30),
    seed=st.integers(0, 1000),
    kind=st.sampled_from("rcs"),
    tail=st.integers(0, 3),
)
def test_a_refresh_never_spikes_the_step(rank, steps, seed, kind, tail):
    """|m_hat| / sqrt(v_hat) stays at most 1 right after any change of basis, whatever the gradients were."""
    generator = torch.Generator().manual_seed(seed)
    first = second = torch.zeros(3, rank)
    beta1, beta2 = 0.9, 0.95
    direction = torch.randn(3, rank, generator=generator)
    for step in range(1, steps + 1):
        noise = torch.randn(3, rank, generator=generator)
        sketch = {"r": noise, "c": direction, "s": noise * (step == 1)}[kind]
        first, _ = optimizers.first_moment(sketch, first, step, beta1)
        second, _ = optimizers.element_second_moment(sketch, second, step, beta2)
    overlap = rotation(rank + tail, seed)[:rank, :rank]  # a part of a rotation, as between two subspaces
    first = optimizers.carry_first(first, overlap)
    second = optimizers.carry_second(second, overlap, first, steps, (beta1, beta2))
    ratio = (first / (1 - beta1**steps)).abs() / (second / (1 - beta2**steps)).sqrt().clamp(min=1e-30)
    assert float(ratio.max()) <= 1 + 1e-4
    assert bool((second >= 0).all())


def test_without_the_bound_a_rotated_mean_would_spike():
    """The fault that `carry_second` mends is real: a constant gradient along a diagonal doubles in one new coordinate."""
    first = torch.full((1, 4), 1.0)
    second = torch.full((1, 4), 1.0)
    overlap = torch.full((4, 1), 0.5)  # the new direction is the diagonal
    carried = optimizers.carry_first(first, overlap)
    naive = second @ overlap.square()
    assert float(carried / naive.sqrt()) == pytest.approx(2.0)
    mended = optimizers.carry_second(second, overlap, carried, 1000, (0.9, 0.95))
    assert float(carried / mended.sqrt()) == pytest.approx(1.0)


def test_what_a_new_direction_has_outside_the_old_span_takes_the_rows_mean():
    second = torch.tensor([[4.0, 2.0], [1.0, 0.0]])
    overlap = torch.tensor([[1.0, 0.0], [0.0, 0.6]])  # the second new direction is 36 % inside
    carried = optimizers.carry_second(second, overlap, None, 10, (0.0, 0.95))
    assert torch.allclose(carried, torch.tensor([[4.0, 0.36 * 2.0 + 0.64 * 3.0], [1.0, 0.64 * 0.5]]))


def test_an_unchanged_basis_leaves_the_moments():
    first, second = torch.randn(3, 4) * 0.1, torch.rand(3, 4) + 1.0
    identity = torch.eye(4)
    carried = optimizers.carry_first(first, identity)
    assert torch.equal(carried, first)
    assert torch.equal(optimizers.carry_second(second, identity, carried, 50, (0.9, 0.95)), second)


def test_adam_in_sketch_space_is_torchs_adam():
    factor = torch.nn.Parameter(torch.zeros(6, 4))
    reference = torch.optim.Adam([factor], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    first = second = torch.zeros(6, 4)
    total = torch.zeros(6, 4)
    for step in range(1, 6):
        sketch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        factor.grad = sketch.clone()
        reference.step()
        first, mean = optimizers.first_moment(sketch, first, step, 0.9)
        second, corrected = optimizers.element_second_moment(sketch, second, step, 0.95)
        total -= 0.1 * optimizers.row_adam_direction(mean, corrected, 1e-8)
    assert torch.allclose(total, factor.detach(), atol=1e-6)


# -- the sketcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sketch_is_autograd_gradient_times_the_tracked_basis(arch, dtype, ids):
    model = tiny_model(arch)
    sketcher = attach(model, rank=8, basis="aligned", refresh_every=2)
    train(model, sketcher, batches(3))
    dense = copy.deepcopy(model).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss_of(dense, ids).backward()
        loss_of(model, ids).backward()
    gradients = {n: p.grad for n, p in dense.named_parameters()}
    for target in sketcher.targets:
        gradient = gradients[target.name].t() if target.transposed else gradients[target.name]
        expected = gradient @ sketcher.basis(target.name).t()
        error = (sketcher.sketch(target.name) - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.05), target.name


def test_bases_become_orthonormal_and_see_more_than_random_ones(ids):
    model = tiny_model(spread=0.1)
    sketcher = attach(model, rank=8, basis="aligned")
    rest = batches(4)
    train(model, sketcher, rest[:3])
    dense = copy.deepcopy(model).requires_grad_(True)
    loss_of(dense, rest[3]).backward()
    gradients = {n: p.grad for n, p in dense.named_parameters()}
    seen = [captured(gradients[name], sketcher.basis(name)) for name in sketcher.names]
    for name in sketcher.names:
        basis = sketcher.basis(name)
        assert torch.allclose(basis @ basis.t(), torch.eye(8), atol=0.02)
    assert sum(seen) / len(seen) > 1.5 * math.sqrt(8 / 64)


@pytest.mark.parametrize("every", [1, 3, 8])
def test_targets_take_turns(every):
    model = tiny_model(layers=3)
    sketcher = attach(model, rank=4, basis="aligned", refresh_every=every)
    before = {name: sketcher.basis_block(name).clone() for name in sketcher.names}
    for index, ids in enumerate(batches(2 + 2 * every)):
        train(model, sketcher, [ids])
        now = {name: sketcher.basis_block(name).clone() for name in sketcher.names}
        changed = [name for name in sketcher.names if not torch.equal(before[name], now[name])]
        if index < aligned.START:
            assert len(changed) == len(sketcher.names)
        else:
            assert len(changed) <= math.ceil(len(sketcher.names) / every)
        update_index = {sketcher.blocks()[name].basis_index for name in changed}
        assert update_index <= {index + 1}
        before = now


def test_an_update_carries_the_basis_it_was_made_with(ids):
    model, other = tiny_model(), tiny_model()
    sketcher = attach(model, rank=8, basis="aligned", refresh_every=2)
    from logra import apply_update, digest

    for ids_ in batches(6):
        loss_of(model, ids_).backward()
        bases = {name: sketcher.basis_block(name).clone() for name in sketcher.names}
        update = sketcher.apply(sketcher.propose(1e-3), 0.5)
        assert all(torch.equal(update.factors[name].basis, bases[name]) for name in sketcher.names)
        apply_update(other, type(update).from_bytes(update.to_bytes()))
        assert digest(other, sketcher.names) == sketcher.digest()


def test_the_step_is_the_proposal_times_the_basis():
    """The merge moves W by U A to within the rounding of U: the rows' scales are where they belong."""
    model = tiny_model()
    sketcher = attach(model, rank=8, basis="aligned", bits=8)
    train(model, sketcher, batches(3))
    loss_of(model, batches(1, seed=5)[0]).backward()
    proposal = sketcher.propose(1e-2)
    before = {t.name: t.matrix().clone() for t in sketcher.targets}
    bases = {name: sketcher.basis(name) for name in sketcher.names}
    sketcher.apply(proposal)
    for target in sketcher.targets:
        expected = proposal.factor(target.name) @ bases[target.name]
        assert (target.matrix() - before[target.name] - expected).norm() < 0.03 * expected.norm()


def test_microbatches_and_checkpointing_leave_the_basis_as_it_is(ids):
    def bases_of(parts, checkpointing):
        model = tiny_model(spread=0.1)
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sketcher = attach(model, rank=4, basis="aligned")
        for _ in range(2):
            for part in ids.split(parts):
                (loss_of(model, part) * len(part) / len(ids)).backward()
            sketcher.apply(sketcher.propose(1e-4))
        return {name: sketcher.basis(name) for name in sketcher.names}

    whole = bases_of(8, False)
    for parts, checkpointing in ((8, True), (4, False)):
        other = bases_of(parts, checkpointing)
        for name, basis in whole.items():
            limit = 1e-6 if parts == 8 else 0.02
            assert float((basis - other[name]).abs().max()) <= limit, name


def test_no_signal_no_refresh(ids):
    model = tiny_model()
    sketcher = attach(model, rank=4, basis="aligned")
    train(model, sketcher, batches(1))
    before = sketcher.state_dict()
    (loss_of(model, ids) * 0.0).backward()
    assert sketcher.apply(sketcher.propose(1e-3)) is None
    sketcher.zero()
    after = sketcher.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[k]) if isinstance(v, torch.Tensor) else v == after[k] for k, v in before.items())


OPTIMIZERS = [
    {},
    {"optimizer": "adam"},
    {"optimizer": "adam", "beta1": 0.0},
    {"beta1": 0.9},
    {"optimizer": "adam", "explore": 2},
]


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_resume_is_bit_identical_even_in_the_middle_of_an_update(options):
    data = batches(8)
    models = [tiny_model(), tiny_model()]
    straight = attach(models[0], rank=4, basis="aligned", refresh_every=2, **options)
    train(models[0], straight, data[:5])
    loss_of(models[0], data[5]).backward()
    models[1].load_state_dict(models[0].state_dict())
    resumed = attach(models[1], rank=4, basis="aligned", refresh_every=2, **options)
    resumed.load_state_dict(straight.state_dict())
    for model, sketcher in zip(models, (straight, resumed), strict=True):
        loss_of(model, data[6]).backward()
        sketcher.apply(sketcher.propose(1e-3))
        train(model, sketcher, data[7:])
    assert straight.digest() == resumed.digest()
    states = straight.state_dict(), resumed.state_dict()
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items() if isinstance(v, torch.Tensor))


def test_backward_under_autocast_is_computed_in_float32(ids):
    results = []
    for inside in (False, True):
        model = tiny_model()
        sketcher = attach(model, rank=4, basis="aligned")
        loss = loss_of(model, ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        results.append(sketcher.accumulated())
    for outside, inside in zip(*results, strict=True):
        assert inside.dtype == torch.float32
        assert (
            outside - inside
        ).norm() <= 0.02 * outside.norm()  # the backward pass of the model itself is in bfloat16


def test_a_failing_refresh_leaves_the_weights(ids, monkeypatch):
    model = tiny_model()
    sketcher = attach(model, rank=4, basis="aligned")
    loss_of(model, ids).backward()
    before = sketcher.digest()

    def fail(*_):
        raise RuntimeError("no decomposition")

    monkeypatch.setattr(aligned, "next_basis", fail)
    with pytest.raises(RuntimeError):
        sketcher.apply(sketcher.propose(1e-3))
    assert sketcher.digest() == before and sketcher.update_index == 0
    monkeypatch.undo()
    assert sketcher.apply(sketcher.propose(1e-3)) is not None


def test_a_step_that_cancels_leaves_nothing_for_the_next_basis():
    """Two equal tokens with opposite output gradients: S is 0, Y is not."""
    model = tiny_model()
    sketcher = attach(model, rank=4, basis="aligned")
    sketcher._note()
    sketcher._bases.observe(sketcher.names[0], torch.ones(2, 64), torch.tensor([[1.0], [-1.0]]), torch.ones(2, 4))
    assert sketcher.apply(sketcher.propose(1e-3)) is None
    assert not sketcher._bases.pending


def test_state_is_strict():
    sketcher = attach(tiny_model(), rank=4, basis="aligned")
    state = sketcher.state_dict()
    name = f"basis.{sketcher.names[0]}"
    scale, index = f"basis_scale.{sketcher.names[0]}", state["basis_index"]
    for broken in (
        {**state, name: state[name][:2]},
        {k: v for k, v in state.items() if k != name},
        {**state, scale: state[scale] * float("nan")},
        {**state, "basis_index": index | {sketcher.names[0]: 1}},
        {**state, "basis_index": index | {sketcher.names[0]: "x"}},
    ):
        with pytest.raises(UpdateError, match=r"bas[ei]s"):
            sketcher.load_state_dict(broken)
    with pytest.raises(UpdateError, match="options"):
        attach(tiny_model(), rank=4, basis="random").load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"basis": "random", "optimizer": "adam"}, "drawn anew"),
        ({"basis": "random", "beta1": 0.9}, "drawn anew"),
        ({"basis": "aligned", "refresh": False}, "refresh_every"),
        ({"basis": "random", "explore": 1}, "explore"),
        ({"basis": "aligned", "explore": 4}, "explore"),
        ({"basis": "aligned", "refresh_every": 0}, "refresh_every"),
        ({"basis": "aligned", "variant": "paper", "optimizer": "adam"}, "paper"),
        ({"basis": "random", "refresh": False, "beta1": 1.0}, "beta1"),
    ],
)
def test_what_does_not_go_together_is_refused(options, match):
    model = tiny_model()
    with pytest.raises(ConfigError, match=match):
        attach(model, rank=4, **options)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fifteen_bits_need_a_small_rank():
    with pytest.raises(UpdateError, match="rank below"):
        attach(tiny_model(), rank=16, basis="aligned", bits=15)
    attach(tiny_model(), rank=8, basis="aligned", bits=15)


@pytest.mark.parametrize(
    "options",
    [
        {"basis": "aligned", "variant": "paper", "optimizer": "row_adam"},
        {"basis": "random", "refresh": False, "optimizer": "adam"},
    ],
)
def test_other_combinations_train(options):
    model = tiny_model(spread=0.1)
    sketcher = attach(model, rank=8, **options)
    data = batches(1) * 30
    start = float(loss_of(model, data[0]).detach())
    train(model, sketcher, data, lr=30.0 if "variant" in options else 3e-3)
    assert float(loss_of(model, data[0]).detach()) < start - 0.1
