"""Anchors hold the aligned bases in force: who starts from one goes on with Updates that leave their bases out."""

import hashlib
import io
import json
from contextlib import closing
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import sync_kit
from logra.errors import CheckpointError, DamagedUpdateError, UpdateError, WrongBaseError
from logra.rl.history import hold_bases
from logra.sketch.block import Block, digest_blocks
from logra.sketch.digest import add_sums, combine
from logra.sync import Anchor, AnchorInfo, Journal, Packet, Replica, bring_to
from logra.sync.anchors import encode_tensors
from sync_kit import (
    DENSE,
    RUN,
    SHAPES,
    TARGETS,
    Trainer,
    base_digest,
    digest_at,
    make_basis,
    make_blocks,
    new_journal,
    new_memory,
)

TARGET_NAMES = [name for name in SHAPES if name != DENSE]


@pytest.fixture(autouse=True)
def aligned():
    sync_kit.use("aligned")
    yield
    sync_kit.use("random")


@pytest.fixture(params=["file", "bytes"])
def log(request, tmp_path):
    """At version 5: Updates 0 to 4, an anchor of version 4. Update 4 leaves a basis out."""
    with closing(new_journal(tmp_path)) if request.param == "file" else new_memory_log() as made:
        trainer = Trainer(made)
        trainer.train(4)
        trainer.anchor()
        trainer.train(1)
        yield made


def new_memory_log():
    log = new_memory()
    log.close = lambda: None
    return closing(log)


def test_the_bases_in_force_come_back(log):
    with log.read_anchor(4) as anchor:
        assert anchor.names == sorted(SHAPES) and anchor.basis(DENSE) == (None, None)
        for name in TARGET_NAMES:
            expected, first = make_basis(name, 3)
            basis, index = anchor.basis(name)
            assert torch.equal(basis, expected) and index == first
            assert torch.equal(anchor.basis(name, range(2, 7))[0], expected[:, 2:7])
        assert len({anchor.basis(name)[1] for name in TARGET_NAMES}) == 2  # they do not all change at once


def test_who_starts_there_goes_on(log):
    packet = Packet.from_bytes(log.read(4))
    assert any(factor.basis is None for factor in packet.update.factors.values())
    for kind in ("fp32", "split", "transposed"):
        # other weights, and no bases: everything must come from the anchor
        replica = Replica(make_blocks(1, kind), version=3, run=RUN, base=base_digest())
        with log.read_anchor(4) as anchor:
            replica.load_anchor(anchor)
        replica.apply(packet)
        assert replica.digest() == digest_at(5)


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_hold_their_columns(log, axis):
    holders = []
    for part in (slice(0, 5), slice(5, None)):
        blocks = {}
        for name, block in make_blocks(1).items():
            own = part if block.shape[axis] > 5 else slice(0, None)
            place = (own, slice(None)) if axis == 0 else (slice(None), own)
            start = {("row_start", "column_start")[axis]: own.start}
            blocks[name] = Block(name, block.value[place].clone(), shape=block.shape, **start)
        replica = Replica(blocks, version=3, run=RUN, base=base_digest())
        with log.read_anchor(4) as anchor:
            replica.load_anchor(anchor)
        for name in TARGET_NAMES:
            columns = slice(blocks[name].columns.start, blocks[name].columns.stop)
            assert torch.equal(blocks[name].basis, make_basis(name, 3)[0][:, columns])
        assert bring_to(log, replica) == 5
        holders.append(blocks)
    sums = {
        name: (shape, add_sums(*(h[name].sums() for h in holders)) if shape[axis] > 5 else holders[0][name].sums())
        for name, shape in SHAPES.items()
    }
    assert combine(sums) == digest_at(5)


def test_without_them_the_next_update_moves_nothing(log):
    blocks = make_blocks()
    replica = Replica(blocks)
    bring_to(log, replica, 4)
    info, file = anchor_file({name: block.master() for name, block in blocks.items()}, digest_at(4))
    with Anchor.from_bytes(info, file) as bare:
        replica.load_anchor(bare)
    assert blocks[TARGET_NAMES[0]].basis is None
    replica._head = None  # that anchor's description names another packet
    before = digest_blocks(blocks)
    with pytest.raises(WrongBaseError, match=r"goes on with the basis of .* and here none is held"):
        replica.apply(log.read(4))
    assert digest_blocks(blocks) == before == digest_at(4) and replica.version == 4
    with log.read_anchor(4) as anchor:
        replica.load_anchor(anchor)
    replica.apply(log.read(4))
    assert replica.digest() == digest_at(5)


def anchor_file(tensors, digest, metadata=None, version=4):
    """(its description, its bytes), written by the safetensors library."""
    data = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()}, metadata)
    sha256 = hashlib.sha256(data).hexdigest()
    return AnchorInfo(RUN, base_digest(), version, version, "ab", digest, sha256, len(data)), data


NAME = TARGET_NAMES[1]
MALFORMED = {
    "no json": ({"bases": "{"}, {}, "malformed way"),
    "nested": ({"bases": "[" * 100_000}, {}, "malformed way"),
    "a list": ({"bases": "[]"}, {}, "malformed way"),
    "an index that is true": ({"bases": json.dumps({NAME: True})}, {}, "malformed way"),
    "an index that is text": ({"bases": json.dumps({NAME: "1"})}, {}, "malformed way"),
    "a later index": ({"bases": json.dumps({NAME: 5})}, {}, "still to come"),
    "a negative index": ({"bases": json.dumps({NAME: -1})}, {}, "still to come"),
    "a stranger": ({"bases": json.dumps({"other": 1})}, {}, "is not there"),
    "no tensor": ({"bases": json.dumps({NAME: 1})}, {f"basis.{NAME}": None}, "is not there"),
    "no index": ({}, {}, "another model"),
    "int16": ({"bases": json.dumps({NAME: 1})}, {f"basis.{NAME}": torch.zeros(4, 8, dtype=torch.int16)}, "malformed"),
    "narrow": ({"bases": json.dumps({NAME: 1})}, {f"basis.{NAME}": torch.zeros(4, 7, dtype=torch.int8)}, "malformed"),
    "flat": ({"bases": json.dumps({NAME: 1})}, {f"basis.{NAME}": torch.zeros(8, dtype=torch.int8)}, "malformed"),
    "-128": ({"bases": json.dumps({NAME: 1})}, {f"basis.{NAME}": torch.full((4, 8), -128).to(torch.int8)}, "beyond 127"),
}  # fmt: skip


@pytest.mark.parametrize("where", ["file", "bytes"])
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_anchor_is_refused_before_anything_moves(case, where, tmp_path):
    metadata, changes, match = MALFORMED[case]
    replica = Replica(make_blocks(), run=RUN)
    tensors = {name: block.master() + 1 for name, block in make_blocks().items()}
    tensors |= {f"basis.{NAME}": torch.zeros(4, 8, dtype=torch.int8)} | changes
    info, data = anchor_file({n: t for n, t in tensors.items() if t is not None}, "ab", metadata)
    path = tmp_path / "anchor"
    path.write_bytes(data)
    with pytest.raises((DamagedUpdateError, WrongBaseError), match=match):  # noqa: SIM117
        with Anchor.from_file(info, path) if where == "file" else Anchor.from_bytes(info, data) as anchor:
            replica.load_anchor(anchor)
    assert replica.version == 0 and digest_blocks(replica.blocks) == base_digest()


def test_the_whole_bases_of_a_good_file_of_others_are_taken(tmp_path):
    """The cases above differ from this in one thing each."""
    blocks = make_blocks()
    tensors = {name: block.master() for name, block in blocks.items()}
    tensors |= {f"basis.{NAME}": torch.full((4, 8), -127).to(torch.int8)}
    info, data = anchor_file(tensors, base_digest(), {"bases": json.dumps({NAME: 4}), "format": "pt"})
    with Anchor.from_bytes(info, data) as anchor:
        Replica(blocks, run=RUN).load_anchor(anchor)
    assert blocks[NAME].basis_index == 4 and blocks[NAME].basis.eq(-127).all()


def test_a_parameter_of_that_name_is_refused(tmp_path):
    blocks = make_blocks()
    blocks[NAME].hold(*make_basis(NAME, 0))
    clash = {**blocks, f"basis.{NAME}": Block(f"basis.{NAME}", torch.zeros(2, 8))}
    with (tmp_path / "x").open("wb") as file, pytest.raises(UpdateError, match="rename"):
        encode_tensors(file, clash, [*TARGETS, [f"basis.{NAME}", 2, 8]])


def test_an_anchor_without_bases_has_the_bytes_it_always_had():
    """Recorded before aligned bases came."""
    blocks = {"a": Block("a", torch.arange(6.0).reshape(2, 3)), "v": Block("v", torch.arange(3.0)[:, None])}
    sha256, size = encode_tensors(io.BytesIO(), blocks, [["a", 2, 3], ["v", 3, 1]])
    assert (sha256, size) == ("d13e59be8d2d03d085bd42b2f1babb52c0a6ec269884e4f76c85dd4ef28522ab", 164)


def test_a_log_that_begins_later_begins_with_an_anchor_that_holds_them(tmp_path):
    with Journal.create(tmp_path, run=RUN, base=digest_at(4), targets=TARGETS, origin=4, origin_step=4) as journal:
        trainer = Trainer(journal)
        trainer.go_to(4)
        trainer.anchor()
        trainer.train(3)
        replica = Replica(make_blocks(1), version=4, base=digest_at(4))
        with journal.read_anchor(4) as anchor:
            replica.load_anchor(anchor)
        assert bring_to(journal, replica) == 7 and replica.digest() == digest_at(7)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(version):
    """(tensors, state) as a checkpoint of the trainer has them."""
    bases = {name: make_basis(name, version) for name in TARGET_NAMES}
    tensors = {f"method.sketcher.basis.{name}": basis for name, (basis, _) in bases.items()}
    return tensors, {"method": {"sketcher": {"basis_index": {name: first for name, (_, first) in bases.items()}}}}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_checkpoint_holds_them(log, ahead):
    """ahead: the sketcher takes the next basis right after an Update, so a checkpoint may have those of the next one."""
    blocks = make_blocks()
    bring_to(log, Replica(blocks), 4)
    fresh = {name: Block(name, block.master()) for name, block in blocks.items()}
    hold_bases(fresh, *saved(3 + ahead))
    replica = Replica(fresh, version=4, run=RUN, base=base_digest(), head=None)
    assert bring_to(log, replica) == 5 and replica.digest() == digest_at(5)


def test_a_checkpoint_of_random_bases_has_none():
    blocks = make_blocks()
    hold_bases(blocks, {}, {"method": {"sketcher": {"update_index": 4}}})
    assert all(block.basis is None for block in blocks.values())


@pytest.mark.parametrize("what", ["lacking", "narrow", "stranger"])
def test_a_checkpoint_that_does_not_fit_is_refused(what):
    tensors, state = saved(3)
    if what == "lacking":
        del tensors[f"method.sketcher.basis.{NAME}"]
    elif what == "narrow":
        tensors[f"method.sketcher.basis.{NAME}"] = torch.zeros(4, 7, dtype=torch.int8)
    else:
        state["method"]["sketcher"]["basis_index"]["other"] = 1
    with pytest.raises(CheckpointError, match="lacks a fitting basis"):
        hold_bases(make_blocks(), tensors, state)


# -- packets -----------------------------------------------------------------------------------------------------------


def test_the_publisher_sends_and_keeps_the_incremental_form(log):
    for index in range(5):
        update = Packet.from_bytes(log.read(index)).update
        for name, factor in update.factors.items():
            expected, first = make_basis(name, index)
            assert factor.basis_index == first and (factor.basis is not None) == (first == index)
            assert factor.basis is None or torch.equal(factor.basis, expected)


@pytest.mark.parametrize("version", [3, 4])
def test_weights_without_bases_go_on_from_an_anchor_further_on(log, version):
    """As of a replica that starts from an exported model."""
    source = Replica(make_blocks())
    bring_to(log, source, version)
    blocks = {name: Block(name, block.master()) for name, block in source.blocks.items()}
    replica = Replica(blocks, version=version, run=RUN, base=base_digest())
    assert bring_to(log, replica) == 5 and replica.digest() == digest_at(5)


def test_weights_without_bases_and_without_such_an_anchor_are_refused(log):
    blocks = make_blocks()
    bring_to(log, source := Replica(blocks), 4)
    replica = Replica(
        {n: Block(n, b.master()) for n, b in source.blocks.items()}, version=4, run=RUN, base=base_digest()
    )
    with log.read_anchor(4) as anchor:
        info, file = anchor_file({name: anchor.tensor(name) for name in anchor.names}, digest_at(4))
    log.read_anchor = lambda version: Anchor.from_bytes(info, file)  # no bases, and the head of another history
    with pytest.raises(UpdateError, match=r"goes on with the basis|another history"):  # and no endless loading
        bring_to(log, replica)


def test_a_packet_that_skips_a_basis_is_refused_by_a_replica_without_it(log):
    """The right index, run and parent, and yet a basis that was never here."""
    replica = Replica(make_blocks())
    bring_to(log, replica, 4)
    update = sync_kit.make_update(4).incremental()
    factors = {n: replace(f, basis=None, basis_index=max(0, f.basis_index - 1)) for n, f in update.factors.items()}
    before = replica.digest()
    with pytest.raises(WrongBaseError, match="goes on with the basis"):
        replica.apply(Packet(replace(update, factors=factors), RUN, base_digest(), 5, parent=replica.head))
    assert digest_blocks(replica.blocks) == before and replica.version == 4
    assert bring_to(log, replica) == 5 and replica.digest() == digest_at(5)
