"""Split weights: exact for every bit pattern, equal to float32 under updates, undone by detach."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logra
from logra.errors import ConfigError, ModelError, UpdateError
from logra.rl.tiny import tiny_model
from logra.sketch.block import Block, apply_blocks, blocks_of
from logra.sketch.sketcher import attach
from logra.sketch.split import merge, split

EDGES = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x80000000, 0xFF800001, 0xFFFFFFFF]


def slow_split(bits: int) -> tuple[int, int]:
    """hi and lo in Python's integers, mod 2^16."""
    hi = ((bits + 0x8000) >> 16) & 0xFFFF
    lo = (bits - (hi << 16)) & 0xFFFF
    return hi, lo - 0x10000 if lo >= 0x8000 else lo


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(EDGES), min_size=1, max_size=50))
def test_every_bit_pattern_survives(patterns):
    value = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32).copy())
    hi, lo = split(value)
    assert hi.dtype == torch.bfloat16 and lo.dtype == torch.int16
    expected = [slow_split(p) for p in patterns]
    assert [int(h) & 0xFFFF for h in hi.view(torch.int16)] == [h for h, _ in expected]
    assert lo.tolist() == [low for _, low in expected]
    assert torch.equal(merge(hi, lo).view(torch.int32), value.view(torch.int32))


def test_hi_is_the_nearest_bfloat16():
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    hi, _ = split(value)
    ties = (value.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(hi[~ties], value.to(torch.bfloat16)[~ties])
    only_ties = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    assert split(only_ties)[0].view(torch.int16).tolist() == [0x3F81, 0x3F82]


def test_split_refuses_other_dtypes():
    with pytest.raises(UpdateError, match="float32"):
        split(torch.zeros(3, dtype=torch.bfloat16))


def train(model, sketcher, steps, autocast=False, lr=1e-2):
    """Backward passes on fixed tokens, applied at once."""
    updates = []
    for step in range(steps):
        ids = torch.randint(4, 51, (2, 10), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids).logits.float()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        updates.append(sketcher.apply(sketcher.propose(lr)))
    return updates


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("residual", ["device", "cpu"])
def test_training_split_is_training_fp32_from_the_same_updates(arch, residual):
    model, twin = tiny_model(arch), tiny_model(arch)
    before = logra.digest(twin)
    sketcher = attach(model, rank=8, weights="split", residual=residual)
    assert sketcher.digest() == logra.digest(twin, sketcher.names)  # splitting loses nothing
    updates = train(model, sketcher, 6, autocast=True)
    for update in updates:
        logra.apply_update(twin, update)
    assert sketcher.digest() == logra.digest(twin, sketcher.names) and logra.digest(twin) != before
    for target in sketcher.targets:
        assert target.weight.dtype == torch.bfloat16
        assert torch.equal(target.weight, split(dict(twin.named_parameters())[target.name].detach())[0])
    masters = sketcher.masters()
    for name, parameter in twin.named_parameters():
        if name in masters:
            assert torch.equal(masters[name], parameter)
    sketcher.detach()
    assert logra.digest(model) == logra.digest(twin)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_bfloat16_model_attaches_with_a_residual_of_zero():
    model = tiny_model().to(torch.bfloat16)
    with pytest.raises(ModelError, match="weights='split'"):
        attach(model, rank=4)
    sketcher = attach(model, rank=4, weights="split")
    updates = train(model, sketcher, 4)
    twin = tiny_model().to(torch.bfloat16).float()
    for update in updates:
        logra.apply_update(twin, update)
    assert sketcher.digest() == logra.digest(twin, sketcher.names)
    assert any(bool(block.residual.any()) for block in sketcher.blocks().values())


def test_small_steps_add_up_that_bfloat16_would_lose():
    """methods.md 1.6: relative steps of 6e-5 vanish in bfloat16; the residual keeps them."""
    model = tiny_model().to(torch.bfloat16)
    sketcher = attach(model, rank=8, weights="split", variant="paper", update_ratio=6e-5)
    start = sketcher.masters()
    train(model, sketcher, 20, lr=1.0)
    moved = sum(float((sketcher.masters()[n] - start[n]).norm() ** 2) for n in start) ** 0.5
    size = sum(float(v.norm() ** 2) for v in start.values()) ** 0.5
    assert moved / size > 1.5e-4


def test_state_dict_restores_residuals_and_refuses_strange_ones():
    model = tiny_model()
    sketcher = attach(model, rank=4, weights="split")
    train(model, sketcher, 2, autocast=True)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    state = sketcher.state_dict()
    after = sketcher.digest()
    train(model, sketcher, 1, autocast=True)
    assert sketcher.digest() != after
    model.load_state_dict(weights)
    sketcher.load_state_dict(state)
    assert sketcher.digest() == after and sketcher.update_index == 2
    state[next(k for k in state if k.startswith("residual."))] = torch.zeros(2, 2, dtype=torch.int16)
    with pytest.raises(UpdateError, match="residual"):
        sketcher.load_state_dict(state)
    assert not any(k.startswith("residual") for k in sketcher.state_dict(residuals=False))


def test_bad_options():
    for options, message in (
        ({"weights": "bf16"}, "weights"),
        ({"weights": "split", "residual": "disk"}, "residual"),
    ):
        with pytest.raises(ConfigError, match=message):
            attach(tiny_model(), rank=4, **options)
    half = tiny_model().half()
    with pytest.raises(ModelError, match="float16"):
        attach(half, rank=4, weights="split")
    assert all(p.dtype == torch.float16 for p in half.parameters())


def test_bfloat16_without_a_residual_can_be_read_but_not_updated():
    model = tiny_model()
    sketcher = attach(model, rank=4)
    update = train(model, sketcher, 1)[0]
    bare = tiny_model().to(torch.bfloat16)
    assert logra.digest(bare) == logra.digest(tiny_model().to(torch.bfloat16).float())
    with pytest.raises(UpdateError, match="residual"):
        logra.apply_update(bare, update)


def test_no_full_size_float32_temporary(monkeypatch):
    """Merging goes by row chunks: the largest temporary is a chunk, not the matrix."""
    from logra.sketch import block as module

    monkeypatch.setattr(module, "_CHUNK", 64)
    value = torch.randn(50, 16)
    hi, lo = split(value)
    seen = []
    real = module.merge
    monkeypatch.setattr(module, "merge", lambda h, low: seen.append(h.numel()) or real(h, low))
    block = Block("w", hi, lo)
    assert torch.equal(block.master(), value) and max(seen) <= 64
    assert block.sums() == Block("w", value).sums()


def test_blocks_of_a_model_name_what_is_missing():
    with pytest.raises(UpdateError, match=r"lacks model.nothing"):
        blocks_of(tiny_model(), ["model.nothing"])


@pytest.mark.parametrize("cast", ["half", "float", "double"])
def test_a_cast_after_attaching_is_refused_and_detach_loses_nothing(cast):
    model = tiny_model().to(torch.bfloat16)
    sketcher = attach(model, rank=4, weights="split")
    update = train(model, sketcher, 1)[0]
    proposal = sketcher.propose(1e-3)
    masters = sketcher.masters()
    getattr(model, cast)()
    for use in (
        lambda: sketcher.digest(),
        sketcher.masters,
        sketcher.detach,
        lambda: apply_blocks(sketcher.blocks(), update),
    ):
        with pytest.raises(UpdateError, match="cast after attaching"):
            use()
    assert proposal.is_zero
    model.to(torch.bfloat16)
    assert all(torch.equal(v, masters[n]) for n, v in sketcher.masters().items())  # bfloat16 values survive the cast
    sketcher.detach()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())  # as before attaching


def test_weights_loaded_after_attaching_are_refused_until_they_are_set_whole():
    model, other = tiny_model(), tiny_model(seed=5)
    sketcher = attach(model, rank=4, weights="split")
    train(model, sketcher, 1, autocast=True)
    model.load_state_dict(other.state_dict())
    with pytest.raises(UpdateError, match="load_masters"):
        sketcher.digest()
    fresh = tiny_model()
    sketcher = attach(fresh, rank=4, weights="split")
    sketcher.load_masters({n: p.detach() for n, p in other.named_parameters() if n in sketcher.names})
    assert sketcher.digest() == logra.digest(other, sketcher.names)
    with pytest.raises(UpdateError, match="no target"):
        sketcher.load_masters({"model.norm.weight": torch.ones(64)})


def test_computing_in_float32_says_what_to_do():
    model, ids = tiny_model(), torch.randint(4, 51, (2, 8))
    sketcher = attach(model, rank=4, weights="split")
    with pytest.raises(ModelError, match=r"torch\.autocast"):
        model(input_ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    proposal = sketcher.propose(1e-3)
    with pytest.raises(ModelError, match=r"torch\.autocast"):
        logra.predict_kl(model, sketcher, proposal, {"input_ids": ids})


@pytest.mark.parametrize("weights", ["fp32", "split"])
def test_a_deep_copy_is_not_attached(weights):
    model, ids = tiny_model(), torch.randint(4, 51, (2, 8))
    sketcher = attach(model, rank=4, weights=weights)
    copied = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == "split"):
        for parameter in copied.parameters():
            parameter.requires_grad_(True)
        copied(input_ids=ids, labels=ids).loss.backward()
    assert not sketcher.has_signal
    assert attach(copied, rank=4, weights=weights).names == sketcher.names
