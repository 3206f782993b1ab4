"""The meter against hand counts, against what is really alive, and against fake tensors."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import logra
from logra.memory import meter as meter_module
from logra.memory.meter import Meter, Timeline
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


def test_what_was_there_before_counts_once_it_is_registered_or_written():
    before = torch.zeros(256)
    with Meter() as meter:
        rows = before.view(16, 16)[2:]
        rows.sum()
        assert meter.total == 0
        meter.register("weights", [rows])
        assert meter.live["weights"] == meter.total == KIB
    with Meter() as meter:
        before.add_(1.0)
        assert meter.total == KIB


def test_tensors_from_python_values_and_new_sizes_of_old_storages():
    with Meter() as meter:
        made = torch.tensor([1.0] * 256)
        assert meter.total == KIB
        made.resize_(512)
        assert meter.total == 2 * KIB
        empty = torch.empty(0)
        torch.add(made, 1.0, out=empty.resize_(512))
        assert meter.total == 4 * KIB
        del made, empty
        assert meter.total == 0


class Twice(torch.autograd.Function):
    """y = 2 x; saves x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("nested", [False, True])
def test_saved_tensors_live_until_the_backward_pass_and_checkpointed_ones_do_not(nested):
    """Four layers of 1 KiB each, whose results are kept by the graph alone; checkpointed in one or in two levels."""

    def layers(count):
        return lambda x: layers(count - 1)(Twice.apply(x)) if count else x

    def checkpointed(function, x):
        return checkpoint(function, x, use_reentrant=False)

    start = torch.ones(256, requires_grad=True)
    with Meter() as meter:
        meter.register("weights", [start])
        end = layers(4)(start)
        assert meter.total == 5 * KIB  # the start, three saved, and the end
        end.backward(torch.ones(256))
        del end
        assert meter.total == 2 * KIB and start.grad.unique().tolist() == [16.0]
        start.grad = None
        if nested:
            end = checkpointed(lambda x: checkpointed(layers(2), checkpointed(layers(2), x)), start)
        else:
            end = checkpointed(layers(4), start)
        assert meter.total == 2 * KIB  # the start, which is the input that is kept, and the end
        with meter.phase("backward"):
            end.backward(torch.ones(256))
        del end
        assert meter.total == 2 * KIB and start.grad.unique().tolist() == [16.0]
    assert meter.reading("backward").peak >= (4 if nested else 5) * KIB


def test_the_total_is_that_of_all_tensors_the_collector_finds():
    def storages():
        found = [t.untyped_storage() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        return {s.data_ptr(): s.nbytes() for s in found}

    model = tiny_model()
    gc.collect()
    before = storages()
    with Meter() as meter, torch.no_grad():
        output = model(input_ids=torch.arange(4, 24).view(2, 10), use_cache=True)
        kept = [t[0] for t in output.past_key_values.layers[0].keys.unbind(1)]
        gc.collect()
        assert meter.total == sum(size for key, size in storages().items() if key not in before) > 10_000
        del output
        gc.collect()
        assert meter.total == sum(size for key, size in storages().items() if key not in before) > 0
        del kept


def test_no_call_goes_through_the_compiler():
    """torch wraps a mode's calls unless told not to: twice the overhead, and the compiler is imported."""
    assert Meter.__torch_dispatch__.__code__.co_filename == meter_module.__file__


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=200), st.integers(2, 9))
def test_a_timeline_is_short_and_keeps_its_peak(totals, limit):
    timeline = Timeline(limit)
    for number, total in enumerate(totals):
        timeline.add(str(number), total, {"other": total}, 1.0)
    assert len(timeline.moments) <= limit
    top = max(timeline.moments, key=lambda m: m.total)
    assert top.total == max(totals) == top.live["other"] == totals[int(top.phase)]
    assert sum(m.duration for m in timeline.moments) == len(totals)
    assert [int(m.phase) for m in timeline.moments] == sorted(int(m.phase) for m in timeline.moments)
    if len(totals) <= limit:
        assert [m.total for m in timeline.moments] == totals


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
    assert real.peak == fake.peak and real.by_kind == fake.by_kind


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
