"""The meter against hand counts, against what is really alive, and against fake tensors."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import logra
from logra.memory.meter import Meter
from logra.region import current_region, region
from logra.rl.tiny import tiny_model

KIB = 1024


def test_storages_count_once_from_their_making_to_their_release():
    with Meter() as meter:
        a = torch.zeros(256)  # 1 KiB
        assert meter.total == KIB
        view, flat = a[10:20], a.view(16, 16).t()  # share its storage
        a.add_(1.0)
        assert meter.total == KIB
        del a
        assert meter.total == KIB  # the views keep it
        del view, flat
        assert meter.total == 0
        low, high = torch.zeros(512).chunk(2)  # one storage of 2 KiB
        values, indices = torch.zeros(4, 64).max(dim=1)
        assert meter.total == 2 * KIB + values.nbytes + indices.nbytes
        del low, high, values, indices
    assert meter.reading().peak == 2 * KIB + KIB + 4 * 4 + 4 * 8


def test_kinds_come_from_registration_first_and_then_from_the_region():
    weight = torch.zeros(256)
    with Meter() as meter:
        meter.register("weights", [weight, weight[5:], None])
        with region("logits"):
            a = weight * 2
            with region("workspace"):
                b = weight * 3
        c = weight * 4
        assert meter.live == {"weights": KIB, "logits": KIB, "workspace": KIB, "other": KIB}
        meter.register("optimizer", [b])
        assert meter.live["workspace"] == 0 and meter.live["optimizer"] == KIB
        del a, b, c
        assert meter.total == KIB
    assert current_region("none") == "none"


def test_phases_have_their_own_peaks_and_the_peak_its_own_kinds():
    with Meter(weigh=lambda *_: 1.0) as meter:
        with meter.phase("first"), region("activations"):
            a = torch.zeros(1024)
            del a
        with meter.phase("second"):
            b = torch.zeros(256)
        with meter.phase("first"):
            c = torch.zeros(256)
        del b, c
    assert {name: r.peak for name, r in meter.phases().items()} == {"first": 4 * KIB, "second": KIB}
    assert meter.reading().by_kind == {"activations": 4 * KIB}
    assert 0 < meter.reading().mean < 4 * KIB


def test_gradients_are_known_from_the_moment_they_are_there():
    layer = torch.nn.Linear(16, 16, bias=False)
    with Meter() as meter:
        meter.register("weights", layer.parameters())
        meter.watch_gradients(layer.parameters())
        for _ in range(2):
            layer(torch.ones(2, 16)).sum().backward()
        assert meter.live["gradients"] == KIB
        layer.zero_grad(set_to_none=True)
        assert meter.live["gradients"] == 0
    assert not layer.weight._post_accumulate_grad_hooks


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("nvdmc"), st.integers(0, 7), st.integers(1, 300)), max_size=25))
def test_the_total_is_that_of_what_is_alive(actions):
    """n: new, v: view, d: drop, m: multiply in place, c: concatenate two."""
    kept: list[torch.Tensor] = []
    with Meter() as meter:
        for action, where, size in actions:
            if action == "n" or not kept:
                kept.append(torch.zeros(size))
            elif action == "v":
                kept.append(kept[where % len(kept)][: max(1, size // 2)])
            elif action == "d":
                kept.pop(where % len(kept))
            elif action == "m":
                kept[where % len(kept)].mul_(2.0)
            else:
                kept.append(torch.cat([kept[where % len(kept)], kept[0]]))
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
            assert meter.total == sum(storages.values())


def step(model, ids):
    sketcher = logra.attach(model, rank=4)
    sketcher.basis_block(sketcher.names[0])
    with Meter() as meter, region("activations"):
        for kind, tensors in {"weights": list(model.parameters()), **sketcher.held()}.items():
            meter.register(kind, tensors)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0  # padded, as batches are: transformers drops a mask of ones, but cannot see that in fake ones
        model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss.backward()
    return meter.reading()


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fake_tensors_give_the_bytes_of_a_real_step(arch, checkpointing):
    def model():
        made = tiny_model(arch)
        if checkpointing:
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            made.train()
        return made

    real = step(model(), torch.ones(3, 40, dtype=torch.int64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = step(model(), torch.ones(3, 40, dtype=torch.int64))
    assert real.peak == pytest.approx(fake.peak, rel=0.01)
    assert real.by_kind["activations"] == pytest.approx(fake.by_kind["activations"], rel=0.02)


def test_nothing_outlives_a_step_but_what_the_method_keeps():
    model = tiny_model()
    sketcher = logra.attach(model, rank=4)
    ids = torch.ones(3, 20, dtype=torch.int64)
    with Meter() as meter, region("activations"):
        meter.register("weights", model.parameters())
        for tensors in sketcher.held().values():
            meter.register("kept", tensors)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gc.collect()
        assert meter.live["activations"] <= 64  # the zero dimensional odds and ends that torch caches
