"""The sync benchmark: message sizes equal their formula, deltas are lossless, shares are counted right. No time is asserted."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from logra import apply_update

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
record = importlib.import_module("record")
delta = importlib.import_module("delta")
sync_bytes = importlib.import_module("sync_bytes")

SMALL = sync_bytes.Decoder(hidden=16, intermediate=40, layers=2, kv=4, vocab=99, tied=False)


def test_qwen_shapes_have_the_published_parameter_counts():
    counts = {name: decoder.num_parameters for name, decoder in sync_bytes.QWEN.items()}
    assert counts == {"Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-7B": 7_615_616_512}


@pytest.mark.parametrize("bits", [8, 15])
@pytest.mark.parametrize("rank", [1, 8, 100])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("num_dense", [0, 1, 3])
@pytest.mark.parametrize("with_envelope", [False, True])
def test_the_formula_is_the_real_length(bits, rank, layers, num_dense, with_envelope):
    shapes = SMALL.targets(layers) | {"lm_head.weight": (1234, 16)}
    dense = {f"model.layers.{i}.norm.weight": torch.randn(5 + i, 1 + i) for i in range(num_dense)}
    update = sync_bytes.random_update(shapes, rank, bits, dense=dense)
    envelope, text = (sync_bytes.ENVELOPE, sync_bytes.ENVELOPE_TEXT) if with_envelope else (None, "")
    dense_shapes = {name: tuple(value.shape) for name, value in dense.items()}
    expected = sync_bytes.wire_bytes(shapes, rank, bits, dense=dense_shapes, envelope=text)
    assert len(update.to_bytes(envelope)) == expected


def test_the_formula_knows_longer_counters_and_an_update_without_targets():
    update = dataclasses.replace(
        sync_bytes.random_update({}, 8, 8, dense={"a": torch.zeros(3, 1)}), index=12345, basis_index=12345, seed=-7
    )
    assert len(update.to_bytes()) == sync_bytes.wire_bytes({}, 8, 8, dense={"a": (3, 1)}, index=12345, seed=-7)


@pytest.fixture
def small_models(monkeypatch):
    monkeypatch.setattr(
        sync_bytes, "QWEN", {"Qwen2.5-1.5B": SMALL, "Qwen2.5-7B": dataclasses.replace(SMALL, tied=True)}
    )


def test_sizes_are_real_or_refused(small_models, monkeypatch):
    sizes = sync_bytes.message_sizes([4, 256])
    row = sizes["Qwen2.5-1.5B"]
    targets = 2 * (2 * 16 * 16 + 2 * 4 * 16 + 3 * 40 * 16)
    assert row["target_parameters"] == targets and row["bf16_target_bytes"] == 2 * targets
    assert row["parameters"] == targets + 2 * (16 + 8 + 32) + 16 + 2 * 99 * 16
    assert sizes["Qwen2.5-7B"]["parameters"] == row["parameters"] - 99 * 16
    message = row["messages"][0]
    rows = 2 * (16 + 4 + 4 + 16 + 40 + 40 + 16)
    assert (message["rank"], message["bits"], message["is_real"]) == (4, 8, True)
    assert 0 < message["bytes"] - rows * (1 + 4) < 2000  # the header
    assert sync_bytes.misses(sizes) == []
    formula = sync_bytes.wire_bytes
    monkeypatch.setattr(sync_bytes, "wire_bytes", lambda *a, **k: formula(*a, **k) + 1)
    with pytest.raises(RuntimeError, match="formula"):
        sync_bytes.message_sizes([4])


def test_only_rank_256_in_8_bits_has_a_limit(small_models, monkeypatch):
    monkeypatch.setattr(sync_bytes, "LIMITS", {"Qwen2.5-1.5B": 1e-5, "Qwen2.5-7B": 1.0})
    assert len(sync_bytes.misses(sync_bytes.message_sizes([64, 256]))) == 1
    assert sync_bytes.misses(sync_bytes.message_sizes([64])) == []


def a_pair(kind, seed=0, count=3001):
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 1 << 16, count).astype(np.uint16)
    steps = generator.choice([-1, 1], count) * (generator.random(count) < 0.02)
    new = {
        "same": old,
        "rare": (old.astype(np.int64) + steps).clip(0, 65535).astype(np.uint16),
        "all": old ^ 1,
        "signs": old ^ 0x8000,
        "unrelated": generator.integers(0, 1 << 16, count).astype(np.uint16),
        "first": np.concatenate([old[:1] ^ 3, old[1:]]),
        "last": np.concatenate([old[:-1], old[-1:] ^ 3]),
    }[kind]
    return old, new


@pytest.mark.parametrize("codec", sorted(delta.CODECS))
@pytest.mark.parametrize("kind", ["same", "rare", "all", "signs", "unrelated", "first", "last"])
def test_every_codec_is_lossless(codec, kind):
    encode, decode = delta.CODECS[codec]
    old, new = a_pair(kind)
    before = old.copy()
    assert np.array_equal(decode(old, encode(old, new)), new) and np.array_equal(old, before)


def test_message_sizes_of_the_codecs():
    """By hand for the plain ones; the strong ones are near the bound, and cannot beat it on independent changes."""
    old, new = a_pair("rare", count=200_001)
    changed = int((old != new).sum())
    lengths = {name: len(encode(old, new)) for name, (encode, _) in delta.CODECS.items()}
    gaps = np.diff(np.flatnonzero(old != new), prepend=-1) - 1
    assert lengths["gaps"] == 8 + 2 * changed + sum(1 + (g > 127) for g in gaps)
    assert lengths["bitmap"] == 8 + 25_001 + 2 * changed
    share = changed / len(old)
    bound = -len(old) / 8 * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) + changed / 8
    assert delta.delta_bound(old, new) == pytest.approx(bound, rel=1e-3)
    assert bound < lengths["rice"] < 1.1 * bound < lengths["ulps_zstd"] < lengths["gaps"]
    assert delta.delta_bound(old, old) == 0.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1 << 34)))
def test_varints_equal_a_slow_reference(values):
    slow = bytearray()
    for value in values:
        while value > 127:
            slow.append(128 | value & 127)
            value >>= 7
        slow.append(value)
    assert delta.varints(np.array(values, np.int64)) == bytes(slow)
    assert delta.read_varints(bytes(slow)).tolist() == values


def test_order_of_bit_patterns_is_that_of_the_numbers():
    bits = np.arange(1 << 16).astype(np.uint16)
    numbers = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).double().numpy()
    known = np.isfinite(numbers)
    by_order = numbers[known][np.argsort(delta.ordered(bits)[known])]
    assert bool((np.diff(by_order) >= 0).all()) and len(set(delta.ordered(bits).tolist())) == 1 << 16


def test_entropy_of_known_distributions():
    assert delta.entropy(np.array([5, 5, 5, 5, 0])) == pytest.approx(2.0)
    assert delta.entropy(np.array([7])) == 0.0


def test_starts():
    weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    fresh, settled, small = (sync_bytes.start_master(weight, s, "a") for s in ("fresh", "settled", "settled_small"))
    assert torch.equal(fresh, weight.bfloat16().float())
    assert torch.equal(settled.bfloat16(), weight.bfloat16()) and not torch.equal(settled, fresh)
    residual = (settled.view(torch.int32) - fresh.view(torch.int32)).double() / (1 << 16)
    assert abs(float(residual.mean())) < 0.02 and float(residual.std()) == pytest.approx(12**-0.5, rel=0.03)  # uniform
    assert float(small.square().mean().sqrt()) == pytest.approx(0.02, rel=0.01)


def test_watch_counts_elements_whose_bits_changed():
    layer = nn.Linear(10, 20, bias=False)
    target = SimpleNamespace(name="model.q_proj.weight", weight=layer.weight)
    with torch.no_grad():
        layer.weight.fill_(1.0)  # the bf16 neighbours of 1 are 2^-8 below and 2^-7 above it
        watch = sync_bytes.Watch([target], {target.name: layer.weight.detach().clone()})
        layer.weight[:2] += 2.0**-9  # a quarter of the way up: only some of the settled ones cross
        assert watch.step(False) is None
        layer.weight[:4] += 2.0**-7
        sizes = watch.step(True)
    assert watch.shares["fresh"] == [0.0, 40 / 200]
    assert 0.0 < watch.shares["settled"][0] < 0.1 and watch.shares["settled"][1] == 40 / 200
    row = sizes["fresh"]["q_proj"]
    assert (row["elements"], row["changed"], row["bitmap"]) == (200, 40, 8 + 25 + 80)
    assert row["best"] == min(row[name] for name in delta.CODECS)


def test_scaling_goes_by_kind_of_matrix():
    kinds = {f"{k}_proj": {"elements": 100, "best": 0.0} for k in ("q", "k", "v", "o", "gate", "up", "down")}
    kinds["k_proj"]["best"], kinds["down_proj"]["best"] = 50.0, 10.0
    assert sync_bytes.scaled(kinds, SMALL) == pytest.approx(2 * (4 * 16 * 0.5 + 16 * 40 * 0.1))


def test_the_timed_layer_has_the_update_s_names():
    shapes = SMALL.targets(1)
    layer = sync_bytes.Layer(shapes)
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    assert {n: tuple(p.shape) for n, p in before.items()} == shapes
    apply_update(layer, sync_bytes.random_update(shapes, 4, 8))
    assert not any(torch.equal(before[n], p) for n, p in layer.named_parameters())


def test_a_whole_run_is_recorded(small_models, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "git_state", lambda: {"commit": "0" * 40, "dirty": True})
    monkeypatch.setattr(sys, "argv", ["benchmarks/sync_bytes.py"])
    recipe, path = str(record.ROOT / "recipes" / "tiny.yaml"), tmp_path / "x.json"
    flags = [
        "--threads=1",
        "--repeats=1",
        "--steps=2",
        "--ranks",
        "4",
        "8",
        "--simulated-rank=8",
        "--lrs=1e-4",
        "--record",
    ]
    assert sync_bytes.main(["--recipe", recipe, *flags, str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["name"] == "sync_bytes" and written["config"]["recipe"] == "recipes/tiny.yaml"
    runs = written["results"]["runs"]
    assert [run["method"] for run in runs] == ["logra recipe", "dense AdamW", "logra r8"]
    for run in runs:
        for start in sync_bytes.STARTS:
            total = sync_bytes.summed(run["sizes"][start])
            assert total["elements"] == 73728 and total["changed"] / 73728 == run["shares"][start][-1] > 0
            assert total["bound"] < total["best"] < 2 * total["elements"]
            assert 0 < run["scaled_bytes"][start]["Qwen2.5-1.5B"] < 2 * SMALL.num_targets
    assert {row["rank"] for row in written["results"]["compress"]} == {4, 8}
    assert all(0.5 < row["entropy"] <= 1.0 for row in written["results"]["compress"])
    assert "GiB a sync" in capsys.readouterr().out


def test_bad_arguments(small_models, capsys):
    for flags in (["--lrs", "0"], ["--ranks", "0"], ["--check", "--ranks", "64"]):
        with pytest.raises(SystemExit):
            sync_bytes.main(["--no-record", *flags])
    assert "256" in capsys.readouterr().err
    assert sync_bytes.main(["--no-record", "--recipe", "nowhere.yaml", "--ranks", "1", "--repeats", "1"]) == 2
