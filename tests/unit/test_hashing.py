"""Philox known answers, block independence, and the statistics that the sketch relies on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra import hashing

# Published known-answer vectors of Philox4x32-10 (Random123, kat_vectors)
KNOWN = [
    ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (1 << 64) - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
GOLDEN_KEY = 0x9475620E3888F62B
GOLDEN_SIGNS = ["+-+-----++-+++++", "-+-+--+-+-++---+", "++++-++-+++++-+-", "+-+-+++-+-++--+-"]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    words = hashing.philox(counter, key)
    assert [f"{int(word):08x}" for word in words] == expected.split()


def test_golden_signs():
    """Written down once: a change of the key derivation or the bit layout would break stored journals."""
    key = hashing.derive_key(42, "basis", "model.layers.0.self_attn.q_proj.weight", 0)
    assert key == GOLDEN_KEY
    block = hashing.signs(key, range(0, 4), range(0, 16))
    assert ["".join("+" if v > 0 else "-" for v in row) for row in block.tolist()] == GOLDEN_SIGNS


def test_signs_follow_their_definition_bit_by_bit():
    key, rows, columns = 7, 300, 5
    block = hashing.signs(key, range(rows), range(columns))
    for i in (0, 1, 31, 32, 127, 128, 255, 256, 299):
        for j in range(columns):
            word = int(hashing.philox((j, i // 128, 0, 0), key)[i % 128 // 32])
            assert block[i, j] == 2 * (word >> (i % 32) & 1) - 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 90),
    st.integers(0, 90),
)
def test_any_block_of_signs_equals_the_whole(key, r0, r1, c0, c1):
    (r0, r1), (c0, c1) = sorted((r0, r1)), sorted((c0, c1))
    whole = hashing.signs(key, range(300), range(90))
    assert torch.equal(hashing.signs(key, range(r0, r1), range(c0, c1)), whole[r0:r1, c0:c1])


def test_signs_are_balanced_and_uncorrelated():
    block = hashing.signs(3, range(256), range(4096)).double()
    assert abs(float(block.mean())) < 4 / (256 * 4096) ** 0.5
    gram = block @ block.t() / 4096
    off = gram - torch.eye(256, dtype=torch.float64)
    assert float(off.abs().max()) < 6 / 4096**0.5


def test_uniforms_depend_on_stream_row_and_key_only():
    rows, stream = torch.arange(40), torch.full((40,), 9)
    whole = hashing.uniforms16(5, stream, rows, 20)
    assert torch.equal(hashing.uniforms16(5, stream[10:15], rows[10:15], 20), whole[10:15])
    assert torch.equal(hashing.uniforms16(5, stream, rows, 13), whole[:, :13])
    assert not torch.equal(hashing.uniforms16(6, stream, rows, 20), whole)
    assert not torch.equal(hashing.uniforms16(5, stream + 1, rows, 20), whole)
    assert whole.min() >= 0 and whole.max() < 1


def test_uniforms_are_uniform():
    values = hashing.uniforms16(1, torch.zeros(4000, dtype=torch.int64), torch.arange(4000), 64).double()
    count = values.numel()
    assert abs(float(values.mean()) - (0.5 - 2**-17)) < 4 * (1 / 12 / count) ** 0.5
    bins = torch.histc(values.float(), 16, 0, 1)
    chi2 = float(((bins - count / 16) ** 2 / (count / 16)).sum())
    assert chi2 < 37.7  # 15 degrees of freedom, p = 0.001


def test_keys_do_not_collide_by_concatenation():
    keys = {hashing.derive_key(*parts) for parts in [("ab", 1), ("a", "b1"), ("ab1",), ("ab", "1"), (1, "ab")]}
    assert len(keys) == 5
