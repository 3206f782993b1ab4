import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import CheckpointError, DataError
from logra.rl.sampler import PromptSampler, defer, epoch_permutation

SIZES = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def stream(sampler: PromptSampler, num_batches: int) -> list[list[int]]:
    return [sampler.next_batch() for _ in range(num_batches)]


@settings(deadline=None)
@given(SIZES, st.integers(0, 2**31), st.booleans())
def test_epochs_are_permutations_and_batches_full_and_without_repeats(sizes, seed, shuffle):
    num_prompts, batch_size = sizes
    num_epochs = 4
    num_batches = -(-num_epochs * num_prompts // batch_size)
    batches = stream(PromptSampler(num_prompts, batch_size, seed, shuffle), num_batches)
    assert all(len(batch) == batch_size == len(set(batch)) for batch in batches)
    flat = [index for batch in batches for index in batch]
    for epoch in range(num_epochs):
        assert sorted(flat[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))
    if not shuffle:
        assert flat == [i % num_prompts for i in range(len(flat))]


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 2**31), st.booleans())
def test_saved_at_every_step_and_loaded_equals_uninterrupted(sizes, seed, shuffle):
    num_prompts, batch_size = sizes
    num_batches = 3 * num_prompts // batch_size + 3
    whole = stream(PromptSampler(num_prompts, batch_size, seed, shuffle, "abc"), num_batches)
    interrupted = PromptSampler(num_prompts, batch_size, seed, shuffle, "abc")
    for k in range(num_batches):
        state = json.loads(json.dumps(interrupted.state_dict()))
        resumed = PromptSampler(num_prompts, batch_size, seed, shuffle, "abc")
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert stream(resumed, num_batches - k) == whole[k:]
        interrupted.next_batch()


@settings(deadline=None)
@given(SIZES, st.integers(0, 99), st.integers(0, 30), st.data())
def test_batch_size_may_change_on_resume_with_epochs_still_exact(sizes, seed, num_before, data):
    num_prompts, batch_size = sizes
    sampler = PromptSampler(num_prompts, batch_size, seed)
    flat = [index for batch in stream(sampler, num_before) for index in batch]
    resumed = PromptSampler(num_prompts, data.draw(st.integers(1, num_prompts)), seed)
    resumed.load_state_dict(sampler.state_dict())
    for _ in range(3 * num_prompts // resumed.batch_size + 1):
        batch = resumed.next_batch()
        assert len(set(batch)) == len(batch) == resumed.batch_size
        flat += batch
    for start in range(0, len(flat) - num_prompts + 1, num_prompts):
        assert sorted(flat[start : start + num_prompts]) == list(range(num_prompts))


@settings(deadline=None)
@given(st.integers(2, 30), st.integers(0, 99), st.data())
def test_defer_is_a_stable_permutation_that_keeps_the_window_clear(num_prompts, seed, data):
    num_avoided = data.draw(st.integers(0, num_prompts - 1))
    window = data.draw(st.integers(0, num_prompts - num_avoided))
    order = epoch_permutation(num_prompts, seed, 0)
    avoid = epoch_permutation(num_prompts, seed, 1)[:num_avoided].tolist()
    deferred = defer(order, avoid, window).tolist()
    assert sorted(deferred) == list(range(num_prompts))
    assert not set(deferred[:window]) & set(avoid)
    # Slow reference: the window takes the first allowed entries, everything else keeps its order.
    first = [i for i in order.tolist() if i not in avoid][:window]
    assert deferred == first + [i for i in order.tolist() if i not in first]


def test_permutation_is_fixed_for_all_time():
    # Golden values: a change here breaks the resume of every run in the world.
    assert epoch_permutation(10, seed=0, epoch=0).tolist() == [5, 3, 6, 7, 0, 2, 9, 4, 1, 8]
    assert epoch_permutation(10, seed=7, epoch=3).tolist() == [0, 8, 6, 4, 9, 3, 5, 7, 2, 1]


def test_permutations_differ_by_seed_and_epoch_and_ignore_global_state():
    np.random.seed(0)
    first = epoch_permutation(1000, 1, 0)
    np.random.seed(1)
    assert np.array_equal(first, epoch_permutation(1000, 1, 0))
    others = [epoch_permutation(1000, 1, 1), epoch_permutation(1000, 2, 0), np.arange(1000)]
    assert all((first == other).mean() < 0.02 for other in others)


def test_permutations_are_uniform():
    # 6000 draws of the 6 orders of 3 items: chi-square with 5 degrees of freedom exceeds 30 with p = 1.5e-5.
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        key = tuple(epoch_permutation(3, 5, epoch).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 30


def test_batch_larger_than_the_data_is_refused_with_the_fix():
    with pytest.raises(DataError, match="at most 3"):
        PromptSampler(3, 4, seed=0)
    with pytest.raises(DataError, match="at least 1"):
        PromptSampler(3, 0, seed=0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptSampler(9, 2, 1, fingerprint="a"), "num_prompts was 8, now 9"),
        (PromptSampler(8, 2, 2, fingerprint="a"), "seed was 1, now 2"),
        (PromptSampler(8, 2, 1, fingerprint="b"), "fingerprint was 'a', now 'b'"),
        (PromptSampler(8, 2, 1, shuffle=False, fingerprint="a"), "shuffle was True, now False"),
    ],
)
def test_resume_on_other_data_is_refused_and_changes_nothing(other, message):
    saved = PromptSampler(8, 2, 1, fingerprint="a")
    saved.next_batch()
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"position": 8},
        {"position": -1},
        {"position": "3"},
        {"epoch": -1},
        {"epoch": True},
        {"avoid": [1, 1]},
        {"avoid": [8]},
        {"avoid": ["1"]},
        {"window": 9},
        {"extra": 1},
    ],
)
def test_damaged_state_is_refused(damage):
    sampler = PromptSampler(8, 2, 1)
    with pytest.raises(CheckpointError, match="damaged"):
        sampler.load_state_dict(sampler.state_dict() | damage)
    assert sampler.state_dict() == PromptSampler(8, 2, 1).state_dict()


def test_state_with_a_missing_entry_is_refused():
    sampler = PromptSampler(8, 2, 1)
    state = sampler.state_dict()
    del state["position"]
    with pytest.raises(CheckpointError, match="position"):
        sampler.load_state_dict(state)
