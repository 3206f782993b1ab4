"""Proposals carry no moments: `apply` makes them again from the sketches, and refuses those that have changed since."""

import pytest
import torch
from test_update_memory import KINDS, RANK, WIDTH, attached, backward, stack

import logra
from logra.errors import UpdateError
from logra.sketch import sketcher
from logra.trust.probe import branch


@pytest.mark.parametrize(("basis", "optimizer"), KINDS)
def test_a_proposal_whose_merge_failed_can_be_applied_again(basis, optimizer, monkeypatch):
    model, own = attached(basis, optimizer)
    twin_model, twin = attached(basis, optimizer)
    for m, s in ((model, own), (twin_model, twin)):
        for step in range(2):
            backward(m, step)
            if step == 0:
                s.apply(s.propose(1e-3))
    proposal = own.propose(1e-3)

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(sketcher, "apply_blocks", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            own.apply(proposal)
    own.apply(proposal)
    twin.apply(twin.propose(1e-3))
    mine, other = own.state_dict(), twin.state_dict()
    assert own.digest() == twin.digest() and mine.keys() == other.keys()
    assert all(torch.equal(v, other[k]) for k, v in mine.items() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("limit", [0.0, 1e-3])
@pytest.mark.parametrize("optimizer", ["row_adam", "adam"])
def test_the_moments_are_those_of_the_clipped_sketches(optimizer, limit, monkeypatch):
    monkeypatch.setattr(sketcher, "_CHUNK", 1 << 12)
    model = stack(layers=2)
    own = logra.attach(
        model, rank=RANK, basis="random", refresh=False, optimizer=optimizer, beta1=0.5, beta2=0.75, max_grad_norm=limit
    )
    first = torch.zeros(2 * WIDTH, RANK, dtype=torch.float64)
    second = first.clone()
    for step in range(3):
        backward(model, step)
        sketches = own.accumulated()[0].double()
        if limit:
            sketches *= limit / (sketches.norm() + 1e-6)
        first = 0.5 * first + 0.5 * sketches
        second = 0.75 * second + 0.25 * sketches.square()
        own.apply(own.propose(1e-3))
    if optimizer == "row_adam":
        second = second.mean(1, keepdim=True)
    for mine, other in ((own._moments["first_moment"], first), (own._moments["moment"], second)):
        assert float((mine.double() - other).norm() / other.norm()) < 1e-6


CHANGES = {
    "backward": lambda model, own: backward(model, 1),
    "zero": lambda model, own: own.zero(),
    "ranks": lambda model, own: [t.data.mul_(2.0) for t in own.accumulated()],  # unseen by torch, as collectives are
    "load": lambda model, own: own.load_state_dict(own.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_proposal_of_other_sketches_is_refused(change):
    model, own = attached("aligned", "adam")
    backward(model, 0)
    proposal, before = own.propose(1e-3), own.digest()
    own.propose(1e-3)  # proposing changes nothing
    CHANGES[change](model, own)
    with pytest.raises(UpdateError, match="propose again"):
        own.apply(proposal)
    assert own.digest() == before and own.update_index == 0
    assert not any(bool(m.any()) for m in own._moments.values())
    assert (own.apply(own.propose(1e-3)) is None) == (change == "zero")


def test_a_microbatch_after_the_trust_region_is_not_lost():
    model, own = attached("aligned", "adam")
    twin_model, twin = attached("aligned", "adam")
    batch = {"input": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(9))}
    backward(model, 0)
    proposal = own.propose(1e-3)
    with branch(own, proposal, 0.5), torch.no_grad():  # what a trust region measures leaves the sketches alone
        model(**batch)
    assert own.quantize(proposal, 0.5).factors.keys() == set(own.names)
    backward(model, 1)
    with pytest.raises(UpdateError, match="backward pass"):
        own.apply(proposal, 0.5)
    own.apply(own.propose(1e-3), 0.5)
    backward(twin_model, 0)
    backward(twin_model, 1)
    twin.apply(twin.propose(1e-3), 0.5)
    assert own.digest() == twin.digest()


def test_no_signal_then_a_microbatch_is_refused_too():
    model, own = attached("aligned", "adam")
    proposal = own.propose(1e-3)
    assert proposal.is_zero
    backward(model, 0)
    with pytest.raises(UpdateError, match="propose again"):
        own.apply(proposal)
    assert own._bases.pending and own.has_signal


def test_a_checkpoint_between_proposing_and_applying_is_of_the_moment_before():
    model, own = attached("aligned", "adam")
    backward(model, 0)
    own.apply(own.propose(1e-3))
    backward(model, 1)
    proposal = own.propose(1e-3)
    state, weights = own.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    own.apply(proposal)
    other_model, other = attached("aligned", "adam")
    other_model.load_state_dict(weights)
    other.load_state_dict(state)
    assert other.update_index == 1
    other.apply(other.propose(1e-3))
    assert own.digest() == other.digest()
    assert all(torch.equal(m, other._moments[key]) for key, m in own._moments.items())


def test_a_trust_function_that_runs_backward_is_refused_by_the_optimizer():
    model, own = attached("aligned", "adam")

    def meddle(_):
        with torch.enable_grad():
            backward(model, 1)
        return 1.0

    optimizer = own.as_optimizer(lr=1e-3, trust=meddle)
    backward(model, 0)
    before = own.digest()
    with pytest.raises(UpdateError, match="propose again"):
        optimizer.step()
    assert own.digest() == before
    optimizer.trust = lambda _: 0.5
    optimizer.step()
    assert own.digest() != before and own.update_index == 1 and not own.has_signal
