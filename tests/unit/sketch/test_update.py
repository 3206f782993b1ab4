"""Exactness: any block, any order, any process gives the same bits; the wire form refuses damage."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import DamagedUpdateError, NonFiniteError, UpdateError
from logra.rl.tiny import tiny_model
from logra.sketch import quantize
from logra.sketch.block import apply_update, digest
from logra.sketch.sketcher import attach
from logra.sketch.update import Update, apply_block


def a_step(model, ids, **options):
    sketcher = attach(model, **({"rank": 16} | options))
    model(input_ids=ids).logits.square().mean().backward()
    return sketcher, sketcher.propose(1e-3)


def integers(generator, shape, top):
    return torch.randint(-top, top + 1, shape, generator=generator)


@pytest.mark.parametrize("bits", [8, 15])
@pytest.mark.parametrize("explicit", [False, True])
def test_blocks_and_rank_order_give_the_same_bits(bits, explicit):
    """Row blocks, column blocks, permuted rank and any chunk size; the float version of the same fails."""
    generator = torch.Generator().manual_seed(0)
    d, k, r = 96, 200, 7 if explicit and bits == 15 else 64
    q = integers(generator, (d, r), quantize.largest(bits)).to(quantize.BITS[bits])
    exponent = integers(generator, (d,), 10).sub(20).to(torch.int8)
    basis = integers(generator, (r, k), 127 if explicit else 1).to(torch.int8)
    weight = torch.randn(d, k, generator=generator)
    whole = weight.clone()
    apply_block(whole, q, exponent, basis, decay=1e-3)
    order = torch.randperm(r, generator=generator)
    for rows in ([(0, d)], [(0, 1), (1, 50), (50, d)]):
        for columns in ([(0, k)], [(0, 3), (3, 128), (128, k)]):
            for chunk in (1, 997, 1 << 20):
                pieces = weight.clone()
                for r0, r1 in rows:
                    for c0, c1 in columns:
                        block = pieces[r0:r1, c0:c1]
                        apply_block(
                            block,
                            q[r0:r1][:, order],
                            exponent[r0:r1],
                            basis[order][:, c0:c1],
                            1e-3,
                            chunk=chunk,
                        )
                assert torch.equal(pieces, whole)


def test_apply_is_one_rounding_of_the_exact_sum():
    generator = torch.Generator().manual_seed(1)
    q, basis = (
        integers(generator, (40, 64), 127).to(torch.int8),
        integers(generator, (64, 50), 1).to(torch.int8),
    )
    exponent = torch.full((40,), -25, dtype=torch.int8)
    weight = torch.randn(40, 50, generator=generator)
    exact = weight.double() + (q.double() @ basis.double()) * 2.0**-25
    apply_block(weight, q, exponent, basis)
    assert torch.equal(weight, exact.float())


def test_reduced_matmul_precision_is_overridden_for_wide_factors():
    generator = torch.Generator().manual_seed(2)
    q, basis = (
        integers(generator, (64, 512), 16383).to(torch.int16),
        integers(generator, (512, 64), 1).to(torch.int8),
    )
    exponent = torch.full((64,), -30, dtype=torch.int8)
    exact = torch.zeros(64, 64)
    apply_block(exact, q, exponent, basis)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        reduced = torch.zeros(64, 64)
        apply_block(reduced, q, exponent, basis)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(previous)
    assert torch.equal(reduced, exact)


@pytest.mark.parametrize("bits", [8, 15])
def test_rounding_is_unbiased_and_within_one_quantum(bits):
    factor = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [1e-6], [3e4]])
    rows, streams = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    total = torch.zeros(3, 40, dtype=torch.float64)
    for key in range(2000):
        q, exponent = quantize.quantize(factor, bits, key, streams, rows)
        value = q.double() * 2.0 ** exponent.double()[:, None]
        quantum = 2.0 ** exponent.double()[:, None]
        assert bool(((value - factor.double()).abs() < quantum).all())
        total += value
    error = (total / 2000 - factor.double()) / quantum
    assert (
        float(error.abs().max()) < 5 * 0.5 / 2000**0.5
    )  # the standard deviation of a rounding is at most half a quantum


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(2.0**-140, 2.0**120), st.sampled_from([8, 15]))
def test_exponent_is_the_smallest_that_holds_the_row(top, bits):
    factor = torch.tensor([[top, -top / 3]], dtype=torch.float32)
    exponent = int(quantize.row_exponents(factor, bits)[0])
    assert float(factor[0, 0]) <= quantize.largest(bits) * 2.0**exponent
    assert exponent == -126 or float(factor[0, 0]) * 1.0000002 >= quantize.largest(bits) * 2.0 ** (exponent - 1)


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128, dtype=torch.int16)
    assert quantize.power_of_two(exponents).double().tolist() == [2.0**e for e in range(-126, 128)]


def test_zero_rows_and_extremes():
    factor = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [3e38, -3e38]])
    q, exponent = quantize.quantize(factor, 8, 1, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert q[0].tolist() == [0, 0] and exponent[0] == -126
    assert q[2].abs().max() <= 127
    with pytest.raises(NonFiniteError):
        quantize.row_exponents(torch.tensor([[float("nan")]]), 8)


def test_exactness_bound_is_checked_when_made():
    quantize.check_exact(15, 1, 1024)
    with pytest.raises(UpdateError, match="rank"):
        quantize.check_exact(15, 1, 1025)
    with pytest.raises(UpdateError, match="bits"):
        quantize.check_exact(15, 127, 64)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("bits", [8, 15])
def test_replica_equals_trainer_through_bytes(arch, bits, ids):
    trainer, replica = tiny_model(arch), tiny_model(arch)
    sketcher, proposal = a_step(trainer, ids, bits=bits, weight_decay=0.1)
    for _ in range(3):
        update = sketcher.apply(proposal, 0.7)
        apply_update(replica, Update.from_bytes(update.to_bytes()))
        assert digest(trainer) == digest(replica)
        trainer(input_ids=ids).logits.square().mean().backward()
        proposal = sketcher.propose(1e-3)
    assert digest(trainer) != digest(tiny_model(arch))


def test_another_process_gets_the_same_bits(ids, tmp_path):
    trainer = tiny_model("gpt2")
    sketcher, proposal = a_step(trainer, ids)
    (tmp_path / "update.bin").write_bytes(sketcher.apply(proposal).to_bytes())
    code = (
        "import sys, pathlib, torch, logra\n"
        "from logra.rl.tiny import tiny_model\n"
        "torch.set_num_threads(2)\n"
        "model = tiny_model('gpt2')\n"
        "logra.apply_update(model, logra.Update.from_bytes(pathlib.Path(sys.argv[1]).read_bytes()))\n"
        "print(logra.digest(model))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "update.bin")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == digest(trainer), done.stderr


def test_applied_step_is_the_proposed_one_within_rounding(ids):
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    sketcher, proposal = a_step(model, ids)
    expected = {n: 0.5 * proposal.factor(n) @ sketcher.basis(n) for n in sketcher.names}
    sketcher.apply(proposal, 0.5)
    for name, delta in expected.items():
        moved = model.state_dict()[name] - before[name]
        assert (moved - delta).norm() / delta.norm() < 0.03, name


def test_stale_proposal_and_wrong_models_are_refused(ids):
    model = tiny_model()
    sketcher, proposal = a_step(model, ids)
    update = sketcher.apply(proposal)
    with pytest.raises(UpdateError, match="propose again"):
        sketcher.apply(proposal)
    other = tiny_model("gpt2")
    before = digest(other)
    with pytest.raises(UpdateError, match="lacks"):
        apply_update(other, update)
    narrow = tiny_model(hidden=32)
    with pytest.raises(UpdateError, match="another model"):
        apply_update(narrow, update)
    with pytest.raises(UpdateError, match="float32"):
        apply_update(tiny_model().to(torch.bfloat16), update)
    assert digest(other) == before


def test_gaussian_updates_cannot_be_sent(ids):
    sketcher, proposal = a_step(tiny_model(), ids, basis="gaussian")
    update = sketcher.apply(proposal)
    with pytest.raises(UpdateError, match="bit-portable"):
        update.to_bytes()


@pytest.fixture(scope="module")
def wire():
    model = tiny_model(layers=1)
    ids = torch.randint(4, 51, (2, 8), generator=torch.Generator().manual_seed(0))
    sketcher, proposal = a_step(model, ids, rank=4)
    return sketcher.apply(proposal).to_bytes()


def test_every_truncation_and_flip_is_refused(wire):
    """And told apart, where the head that says how long a message is came through."""
    for length in range(0, len(wire), 7):
        with pytest.raises(DamagedUpdateError, match="cut short" if length >= 34 else "not a logra Update"):
            Update.from_bytes(wire[:length])
    with pytest.raises(DamagedUpdateError, match="3 bytes follow"):
        Update.from_bytes(wire + b"abc")
    with pytest.raises(DamagedUpdateError, match="corrupted"):
        Update.from_bytes(wire[:-1] + bytes([wire[-1] ^ 1]))
    for position in range(0, len(wire), 5):
        damaged = bytearray(wire)
        damaged[position] ^= 0x10
        with pytest.raises(UpdateError):
            Update.from_bytes(bytes(damaged))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(UpdateError):
        Update.from_bytes(data)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_forged_checksum_still_meets_every_other_check(data):
    """A header that lies, under a right checksum: refused as malformed, never a crash or a huge allocation."""
    import hashlib
    import json

    from logra.sketch import wire as form

    junk = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        )
    )
    fields = {"index": 0, "basis": "random", "basis_index": 0, "seed": 1, "rank": 4, "bits": 8, "decay": 0.0}
    fields |= {"factors": [{"name": "w", "out": 2**30, "in": 3, "explicit": True}], "dense": []}
    fields[data.draw(st.sampled_from(list(fields)))] = junk
    text = json.dumps(fields).encode()
    whole = form._HEAD.size + len(text) + 20 + 16
    body = form._HEAD.pack(form.MAGIC, form.VERSION, len(text), whole) + text + b"x" * 20
    with pytest.raises(UpdateError):
        Update.from_bytes(body + hashlib.blake2b(body, digest_size=16).digest())
