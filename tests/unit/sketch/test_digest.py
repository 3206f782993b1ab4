"""The digest: an independent slow reference, shards that add up, every change seen."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logra
from logra import hashing
from logra.rl.tiny import tiny_model
from logra.sketch import digest as digests
from logra.sketch.block import Block, digest_blocks

MASK = (1 << 64) - 1


def slow_sums(value: torch.Tensor, name: str) -> tuple[int, int]:
    """The definition in Python's integers."""

    def keys(axis: str, place: int) -> tuple[int, int]:
        w = [int(x) for x in hashing.philox((torch.tensor(place), 0, 0, 0), hashing.derive_key("digest", axis, name))]
        return (w[0] | w[1] << 32) | 1, (w[2] | w[3] << 32) | 1

    bits = value.view(torch.int32).tolist()
    totals = [0, 0]
    for i, row in enumerate(bits):
        for j, word in enumerate(row):
            for lane in range(2):
                totals[lane] += keys("row", i)[lane] * keys("column", j)[lane] * word
    return totals[0] & MASK, totals[1] & MASK


def test_against_the_definition():
    value = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert digests.block_sums(value, "layer.weight") == slow_sums(value, "layer.weight")
    text = b"".join(f"{len(n)}:{n}:5x7:{a:016x}{b:016x};".encode() for n, (a, b) in [("a", slow_sums(value, "a"))])
    assert digest_blocks({"a": Block("a", value)}) == hashlib.blake2b(text, digest_size=16).hexdigest()


def test_golden():
    value = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert digest_blocks({"w": Block("w", value)}) == "9587ba2850444e3fb5d7d3c7034e01ec"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_shards_add_up(rows, columns, data):
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 31 + columns))
    row_cut, column_cut = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    parts = [
        Block("w", value[r0:r1, c0:c1], shape=(rows, columns), row_start=r0, column_start=c0).sums()
        for r0, r1 in ((0, row_cut), (row_cut, rows))
        for c0, c1 in ((0, column_cut), (column_cut, columns))
    ]
    whole = Block("w", value)
    assert digests.add_sums(*parts) == whole.sums()
    assert digests.combine({"w": ((rows, columns), digests.add_sums(*parts))}) == digest_blocks({"w": whole})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_a_changed_bit_is_always_seen(data):
    value = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    before = digest_blocks({"w": Block("w", value)})
    flips = data.draw(st.sets(st.tuples(st.integers(0, 53), st.integers(0, 31)), min_size=1, max_size=4))
    bits = value.view(torch.int32).reshape(-1)
    for place, bit in flips:
        bits[place] ^= (1 << bit) - (1 << 32) * (bit == 31)
    assert digest_blocks({"w": Block("w", value)}) != before


@pytest.mark.parametrize("change", ["swap rows", "rename", "reshape", "negative zero"])
def test_place_name_shape_and_sign_count(change):
    value = torch.zeros(4, 6)
    value[1, 2] = 3.0
    before = digest_blocks({"w": Block("w", value)})
    if change == "swap rows":
        other = Block("w", value[[1, 0, 2, 3]])
    elif change == "rename":
        other = Block("v", value)
    elif change == "reshape":
        other = Block("w", value.reshape(6, 4))
    else:
        other = Block("w", torch.where(value == 0, -0.0, value))
    assert digest_blocks({other.name: other}) != before


def test_of_models():
    assert logra.digest(tiny_model()) == logra.digest(tiny_model())
    assert logra.digest(tiny_model("gpt2")) != logra.digest(tiny_model())
    half = tiny_model().to(torch.bfloat16)
    assert logra.digest(half) == logra.digest(half.float())
