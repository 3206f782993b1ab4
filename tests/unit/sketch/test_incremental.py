"""Aligned Updates carry a basis only where it is new. Who has kept it goes on to the same bits; who has not, not at all."""

import hashlib
import json
import struct
from dataclasses import replace

import pytest
import torch

from logra.errors import DamagedUpdateError, UpdateError, WrongBaseError
from logra.rl.tiny import tiny_model
from logra.sketch.block import Block, apply_blocks, apply_update, blocks_of, digest_blocks
from logra.sketch.digest import add_sums, combine
from logra.sketch.quantize import BITS, largest
from logra.sketch.sketcher import attach
from logra.sketch.split import split
from logra.sketch.update import Factor, Update

SHAPES = {"q": (12, 8), "up": (20, 7), "down": (7, 20)}
RANK = 3
HEAD = struct.Struct("<4sHIQ")


def first_use(name, index):
    """The Update that brought the basis which Update `index` uses: each target changes it now and then, in its turn."""
    number = list(SHAPES).index(name)
    return max(i for i in range(index + 1) if i == 0 or (i + number) % 4 == 0)


def basis_of(name, index):
    generator = torch.Generator().manual_seed(10 * first_use(name, index) + len(name))
    return torch.randint(-127, 128, (RANK, SHAPES[name][1]), generator=generator).to(torch.int8)


def make_update(index, bits=8):
    """Self-contained, as a sketcher returns it."""
    generator = torch.Generator().manual_seed(1000 + 100 * index + bits)
    factors = {}
    for name, (rows, columns) in SHAPES.items():
        top = largest(bits)
        q = torch.randint(-top, top + 1, (rows, RANK), generator=generator).to(BITS[bits])
        exponent = torch.randint(-26, -20, (rows,), generator=generator).to(torch.int8)
        factors[name] = Factor(name, rows, columns, q, exponent, basis_of(name, index), first_use(name, index))
    return Update(index, "aligned", index, 1, RANK, bits, factors, 1e-3 if index % 2 else 0.0)


def make_blocks(kind="fp32"):
    generator = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}
    if kind == "split":
        return {name: Block(name, *split(master)) for name, master in masters.items()}
    return {name: Block(name, master) for name, master in masters.items()}


def shards(axis):
    """Two holders, each with its own uneven half of the rows (0) or columns (1)."""
    holders = [{}, {}]
    for name, block in make_blocks().items():
        cut = block.shape[axis] // 2 + 1
        for holder, part in zip(holders, (slice(0, cut), slice(cut, None)), strict=True):
            place = (part, slice(None)) if axis == 0 else (slice(None), part)
            start = {("row_start", "column_start")[axis]: part.start}
            holder[name] = Block(name, block.value[place].clone(), shape=block.shape, **start)
    return holders


def slow_reference(updates):
    """Every Update in float64 with one rounding where float32 has one, from its own explicit bases."""
    masters = {name: block.value.clone() for name, block in make_blocks().items()}
    for update in updates:
        for name, factor in update.factors.items():
            delta = (factor.q.double() @ factor.basis.double()) * 2.0 ** factor.exponent.double()[:, None]
            kept = masters[name] * torch.tensor(1.0 - update.decay) if update.decay else masters[name]
            masters[name] = (kept.double() + delta).float()
    return masters


@pytest.mark.parametrize("bits", [8, 15])
def test_holders_of_every_kind_go_on_to_the_same_bits(bits):
    updates = [make_update(index, bits) for index in range(13)]
    whole, halves, by_rows, by_columns = make_blocks(), make_blocks("split"), shards(0), shards(1)
    for update in updates:
        sent = Update.from_bytes(update.incremental().to_bytes())
        for blocks in (whole, halves, *by_rows, *by_columns):
            apply_blocks(blocks, sent)
    expected = slow_reference(updates)
    assert all(torch.equal(whole[name].value, expected[name]) for name in SHAPES)
    for parts in (by_rows, by_columns):
        sums = {n: (shape, add_sums(*(p[n].sums() for p in parts))) for n, shape in SHAPES.items()}
        assert combine(sums) == digest_blocks(whole) == digest_blocks(halves)
    for holder in by_columns:
        for name, block in holder.items():
            assert block.basis.shape == (RANK, len(block.columns)) and block.basis_index == first_use(name, 12)
            assert torch.equal(block.basis, basis_of(name, 12)[:, block.columns.start : block.columns.stop])


def test_a_basis_travels_only_in_the_first_update_that_uses_it():
    for index in range(9):
        update = make_update(index)
        sent = update.incremental()
        for name, factor in sent.factors.items():
            assert (factor.basis is not None) == (first_use(name, index) == index)
            assert factor.basis_index == first_use(name, index)
        assert all(factor.basis is not None for factor in update.factors.values())  # the original is as it was
        assert sent.incremental().to_bytes() == sent.to_bytes()
    assert all(factor.basis is not None for factor in make_update(0).incremental().factors.values())


def test_what_stands_alone_can_be_applied_alone():
    """The form that is in memory, and its bytes, need no holder that has kept anything."""
    blocks, alone = make_blocks(), make_blocks()
    for index in range(6):
        apply_blocks(blocks, make_update(index).incremental())
        for block in alone.values():
            block.hold(None, None)
        apply_blocks(alone, Update.from_bytes(make_update(index).to_bytes()))
    assert digest_blocks(blocks) == digest_blocks(alone)


def test_bytes_of_an_unchanged_basis_are_saved_exactly():
    """r k bytes a target in the payload; in the header true becomes false, one byte more."""
    for index in range(9):
        update = make_update(index)
        whole, sent = update.to_bytes(), update.incremental().to_bytes()
        kept = [name for name in SHAPES if first_use(name, index) != index]
        saved = sum(RANK * SHAPES[name][1] for name in kept)
        assert payload_bytes(whole) - payload_bytes(sent) == saved
        assert len(whole) - len(sent) == saved - len(kept)
    factors = sum(d * (RANK + 1) for d, _ in SHAPES.values())
    assert payload_bytes(make_update(5).incremental().to_bytes()) == factors  # not one basis: as small as a random one


def payload_bytes(message):
    return len(message) - HEAD.size - HEAD.unpack_from(message)[2] - 16


@pytest.mark.parametrize("kind", ["fp32", "split"])
@pytest.mark.parametrize("lost", ["all", "one", "another", "rank", "shape"])
def test_without_the_basis_nothing_moves(kind, lost):
    blocks, twin = make_blocks(kind), make_blocks(kind)
    for index in range(8):
        apply_blocks(blocks, make_update(index).incremental())
        apply_blocks(twin, make_update(index).incremental())
    last = blocks["down"]  # the last: the others would have moved by the time it is met
    if lost == "all":
        for block in blocks.values():
            block.hold(None, None)
    elif lost == "one":
        last.hold(None, None)
    elif lost == "another":
        last.hold(last.basis, last.basis_index - 1)
    elif lost == "rank":
        last.hold(last.basis[:2], last.basis_index)
    before = digest_blocks(blocks)
    match = "goes on with the basis of .* that travelled in update" if lost in ("all", "one", "another") else "rank 3"
    update = make_update(8).incremental()
    if lost == "shape":
        factor = replace(make_update(8).factors["down"], basis=torch.zeros(RANK, 19, dtype=torch.int8))
        update, match = replace(update, factors={**update.factors, "down": factor}), "basis of shape"
    with pytest.raises(WrongBaseError, match=match):
        apply_blocks(blocks, update)
    assert digest_blocks(blocks) == before
    apply_blocks(blocks, make_update(8))  # the same one, with its bases: mended
    apply_blocks(twin, make_update(8).incremental())
    for index in (9, 10, 11):
        for holder in (blocks, twin):
            apply_blocks(holder, make_update(index).incremental())
    assert digest_blocks(blocks) == digest_blocks(twin)


def test_a_model_without_blocks_says_where_to_go():
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(8, 12, bias=False)})
    factor = replace(make_update(1).factors["q"], name="q.weight", basis=None)
    update = replace(make_update(1), factors={"q.weight": factor})
    with pytest.raises(WrongBaseError, match=r"none is held: apply the Updates in order .* an anchor or a checkpoint"):
        apply_update(model, update)
    with pytest.raises(WrongBaseError, match=r"logra\.sync\.Replica"):
        update.basis_block("q.weight", range(8))


def test_a_holder_keeps_a_copy_of_its_own():
    """A sender that refreshes its basis in place must not reach into those who apply its Updates in the same process."""
    blocks, twin = make_blocks(), make_blocks()
    for index in range(4):
        update = make_update(index)
        apply_blocks(blocks, update, {name: f.basis for name, f in update.factors.items()} if index % 2 else None)
        apply_blocks(twin, make_update(index))
        for factor in update.factors.values():
            factor.basis.zero_()
    for holder in (blocks, twin):
        apply_blocks(holder, make_update(4).incremental())
    assert digest_blocks(blocks) == digest_blocks(twin)


def test_a_basis_that_cannot_be_this_blocks_is_not_held():
    block = make_blocks()["q"]
    good = torch.zeros(RANK, 8, dtype=torch.int8)
    block.hold(good, 0)
    for basis, index, match in (
        (good, None, "without the index"),
        (None, 3, "without the index"),
        (good.float(), 3, "int8"),
        (good[:, :7], 3, r"\(rank, 8\)"),
        (good[0], 3, r"\(rank, 8\)"),
    ):
        with pytest.raises(UpdateError, match=match):
            block.hold(basis, index)
        with pytest.raises(UpdateError, match=match):
            Block("q", block.value, basis=basis, basis_index=index)
    assert block.basis is good and block.basis_index == 0


# -- the wire ----------------------------------------------------------------------------------------------------------


def changed(update, name="up", **fields):
    return replace(update, factors={**update.factors, name: replace(update.factors[name], **fields)})


def test_the_wire_keeps_the_index_and_the_basis():
    for index in (0, 3, 4):
        for update in (make_update(index), make_update(index).incremental()):
            back = Update.from_bytes(update.to_bytes())
            assert (back.basis, back.index, back.basis_index) == ("aligned", index, index)
            for name, factor in update.factors.items():
                assert back.factors[name].basis_index == factor.basis_index
                if factor.basis is None:
                    assert back.factors[name].basis is None
                else:
                    assert torch.equal(back.factors[name].basis, factor.basis)


BAD = {
    "no index": (lambda u: changed(u, basis_index=None), "basis_index None"),
    "a later index": (lambda u: changed(u, basis_index=6), "basis_index 6, not a number up to 5"),
    "a negative index": (lambda u: changed(u, basis_index=-1), "basis_index -1"),
    "an index that is true": (lambda u: changed(u, basis_index=True), "basis_index True"),
    "new and not there": (lambda u: changed(u, basis=None, basis_index=5), "lacks its basis"),
    "-128": (lambda u: changed(u, basis=torch.full((RANK, 7), -128).to(torch.int8)), "beyond 127"),
    "wide": (lambda u: changed(u, basis=torch.zeros(RANK, 8, dtype=torch.int8)), "another shape or type"),
    "int16": (lambda u: changed(u, basis=torch.zeros(RANK, 7, dtype=torch.int16)), "another shape or type"),
    "another key": (lambda u: replace(u, basis_index=4), "its own index"),
    "inexact": (
        lambda u: replace(
            u, bits=15, rank=9,
            factors={"w": Factor("w", 1, 9, torch.zeros(1, 9, dtype=torch.int16), torch.zeros(1, dtype=torch.int8),
                                 torch.zeros(9, 9, dtype=torch.int8), 5)},
        ),
        r"exceeds 2\^24",
    ),
    "random": (lambda u: replace(u, basis="random"), "has a basis_index, and the basis is random"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_aligned_update_is_refused_by_both_sides(case, monkeypatch):
    change, match = BAD[case]
    update = change(make_update(5))
    with pytest.raises(UpdateError, match=f"(?s)cannot be sent.*{match}|{match}"):
        update.to_bytes()
    if case in ("int16", "wide"):
        return  # the bytes would say something else
    from logra.sketch import wire

    with monkeypatch.context() as patch:  # a sender without checks
        for check in ("_check_fields", "_check_factor"):
            patch.setattr(wire, check, lambda *_: None)
        message = update.to_bytes()
    if case == "no index":
        assert b'"basis_index":null' in message
    if case == "random":  # the table of a random Update has no place for an index: put one there
        message = with_index(message)
    with pytest.raises(DamagedUpdateError, match=match):
        Update.from_bytes(message)


def with_index(message):
    size = HEAD.unpack_from(message)[2]
    header = json.loads(message[HEAD.size : HEAD.size + size])
    header["factors"][0]["basis_index"] = 1
    text = json.dumps(header, separators=(",", ":")).encode()
    whole = len(message) + len(text) - size
    body = HEAD.pack(b"LGRU", 2, len(text), whole) + text + message[HEAD.size + size : -16]
    return body + hashlib.blake2b(body, digest_size=16).digest()


@pytest.mark.parametrize(
    ("explicit", "bits", "checksum"),
    [
        (False, 8, "ffcfa145f03268eee2258d8f3451a534"),
        (False, 15, "9741cdc783f7b29719299074820a0b05"),
        (True, 8, "2537788791ca1f9f25745925bc438ee4"),
        (True, 15, "7cae5e3ad05901718ff9bd34e89806c6"),
    ],
)
def test_random_updates_have_the_bytes_they_always_had(explicit, bits, checksum):
    """Recorded before aligned bases came: format version 2 is unchanged for whoever does not use them."""
    q = (torch.arange(15) % 13 - 6).reshape(5, 3).to(BITS[bits])
    basis = (torch.arange(12) % 9 - 128).to(torch.int8).reshape(3, 4) if explicit else None
    factor = Factor("w", 5, 4, q, torch.arange(-5, 0).to(torch.int8), basis)
    update = Update(7, "random", 7, 42, 3, bits, {"w": factor}, 0.25, {"b": torch.arange(5.0)[:, None]})
    assert update.to_bytes({"run": "ab"})[-16:].hex() == checksum
    assert update.incremental() is update


# -- the real sketcher ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("weights", ["fp32", "split"])
def test_what_a_sketcher_makes_goes_on_from_any_of_its_states(arch, weights, ids):
    """One holder follows from the start, one begins at each version with the sketcher's own blocks (an anchor, a checkpoint)."""
    model, follower = tiny_model(arch), blocks_of(tiny_model(arch), attach(tiny_model(arch), rank=8).names)
    sketcher = attach(model, rank=8, basis="aligned", refresh_every=3, weights=weights, weight_decay=0.1)
    left_out = 0
    for index in range(8):
        late = {n: Block(n, b.master(), basis=b.basis, basis_index=b.basis_index) for n, b in sketcher.blocks().items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=weights == "split"):
            loss = model(input_ids=ids.roll(index, 1)).logits.float().square().mean()
        loss.backward()
        update = sketcher.apply(sketcher.propose(1e-2))
        alone = Update.from_bytes(update.to_bytes())
        assert all(factor.basis is not None for factor in alone.factors.values())
        sent = Update.from_bytes(update.incremental().to_bytes())
        left_out += sum(factor.basis is None for factor in sent.factors.values())
        assert (index > 0) or not left_out
        for blocks in (follower, late):
            apply_blocks(blocks, sent)
            assert digest_blocks(blocks) == sketcher.digest()
    assert left_out > 3 * len(sketcher.names)
