"""A replica takes what follows and refuses everything else, before anything moves."""

import pytest
import torch

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError, WrongBaseError
from logra.sketch.block import Block, digest_blocks
from logra.sketch.digest import add_sums, combine
from logra.sync import ForkedError, Packet, Replica, bring_to
from sync_kit import (
    DENSE,
    RUN,
    SHAPES,
    Trainer,
    base_digest,
    both_bases,
    digest_at,
    make_blocks,
    make_update,
    new_memory,
)

basis = both_bases()
pytestmark = pytest.mark.usefixtures("basis")


def packets(count: int, salt: int = 0) -> list[bytes]:
    log = new_memory()
    Trainer(log, salt).train(count)
    return [log.read(index) for index in range(count)]


def refuses(replica: Replica, packet: Packet | bytes, kind: type[Exception], match: str) -> None:
    """The packet is refused, nothing has moved, and the right one is still taken."""
    before = digest_blocks(replica.blocks)
    with pytest.raises(kind, match=match):
        replica.apply(packet)
    assert digest_blocks(replica.blocks) == before


@pytest.mark.parametrize("kind", ["fp32", "split", "transposed"])
def test_replicas_of_every_kind_agree(kind):
    replica = Replica(make_blocks(kind=kind))
    for data in packets(6):
        replica.apply(data)
    assert replica.version == 6 and replica.run == RUN and replica.base == base_digest()
    assert replica.digest() == digest_at(6) == replica.known_digest


def test_gap_replay_and_reordering_are_named():
    data, replica = packets(4), Replica(make_blocks())
    refuses(replica, data[1], UpdateOrderError, "update 1 leaves a gap: update 0 comes next.*reordered")
    replica.apply(data[0])
    refuses(replica, data[0], UpdateOrderError, "update 0 is a replay: this replica is at version 1")
    refuses(replica, data[3], UpdateOrderError, "gap")
    for index in (1, 2, 3):
        replica.apply(data[index])
    assert replica.digest() == digest_at(4)


def test_damage_is_refused():
    data, replica = packets(1)[0], Replica(make_blocks())
    refuses(replica, data[:-1], DamagedUpdateError, "cut short")
    refuses(replica, data[:99] + bytes([data[99] ^ 1]) + data[100:], DamagedUpdateError, "corrupted")
    replica.apply(data)


def test_another_run_base_or_model_is_refused():
    replica = Replica(make_blocks(), run=RUN)
    refuses(replica, Packet(make_update(0), "ff", base_digest(), 1), WrongBaseError, "belongs to run ff")
    refuses(replica, Packet(make_update(0), RUN, base_digest(1), 1), WrongBaseError, "another base model")
    good = make_update(0)
    lacking = Packet(good.__class__(**good.__dict__ | {"dense": {}}), RUN, base_digest(), 1)
    refuses(replica, lacking, WrongBaseError, f"{DENSE} is one of 1 .*does not move.*another model")
    more = Packet(
        good.__class__(**good.__dict__ | {"dense": good.dense | {"b": torch.zeros(2, 1)}}), RUN, base_digest(), 1
    )
    refuses(replica, more, WrongBaseError, "b is one of 1 .*not held here")
    other = Packet(good.__class__(**good.__dict__ | {"dense": {DENSE: torch.zeros(9, 1)}}), RUN, base_digest(), 1)
    refuses(replica, other, WrongBaseError, "9 x 1")
    replica.apply(packets(1)[0])


def test_the_base_is_computed_and_compared():
    assert Replica(make_blocks()).base == base_digest()
    with pytest.raises(WrongBaseError, match="another base model"):
        Replica(make_blocks(1), base=base_digest())
    with pytest.raises(UpdateError, match="give base="):
        Replica(make_blocks(), version=3)
    with pytest.raises(UpdateError, match="at least one block"):
        Replica({})


def test_another_branch_is_refused_although_index_and_base_fit():
    ours, theirs = packets(3), packets(4, salt=1)
    replica = Replica(make_blocks())
    for data in ours:
        replica.apply(data)
    refuses(replica, theirs[3], ForkedError, "another way before version 3")


def test_failing_midway_poisons_until_an_anchor_is_loaded(monkeypatch):
    log = new_memory()
    trainer = Trainer(log)
    trainer.train(3)
    trainer.anchor()
    replica = Replica(make_blocks())
    apply, names = Block.apply, list(SHAPES)

    def fail_on_the_second(self, update, basis=None):
        if self.name == names[1]:
            raise RuntimeError("device lost")
        apply(self, update, basis)

    with monkeypatch.context() as patch:
        patch.setattr(Block, "apply", fail_on_the_second)
        with pytest.raises(RuntimeError, match="device lost"):
            replica.apply(log.read(0))
    for use in (
        lambda: replica.version,
        replica.digest,
        lambda: replica.apply(log.read(0)),
        lambda: replica.apply(log.read(1)),
    ):
        with pytest.raises(UpdateError, match=r"unusable.*update 0 failed midway.*load an anchor"):
            use()
    assert replica.last_version == 0
    with log.read_anchor(3) as anchor:
        replica.load_anchor(anchor)
    assert replica.version == 3 and replica.digest() == digest_at(3)


def test_drift_is_found_by_the_digest_and_poisons():
    replica = Replica(make_blocks())
    data = packets(2)
    replica.apply(data[0])
    replica.blocks["layers.0.q.weight"].value[0, 0] += 1e-3
    with pytest.raises(UpdateError, match=r"the trainer's is .* not the policy"):
        replica.apply(data[1])
    with pytest.raises(UpdateError, match="unusable"):
        _ = replica.version


def test_shards_apply_and_load_their_part():
    log = new_memory()
    trainer = Trainer(log)
    trainer.train(2)
    trainer.anchor()
    trainer.train(2)
    holders = []
    for part in (slice(0, 5), slice(5, None)):
        blocks = {
            n: Block(n, b.value[part].clone(), shape=b.shape, row_start=part.start) for n, b in make_blocks().items()
        }
        with pytest.raises(UpdateError, match="give base="):
            Replica(blocks)
        holders.append(Replica(blocks, base=base_digest()))
    assert bring_to(log, holders[0]) == 4
    with log.read_anchor(2) as anchor:
        holders[1].load_anchor(anchor)
    assert bring_to(log, holders[1]) == 4
    with pytest.raises(UpdateError, match="shards have no digest"):
        holders[0].digest()
    parts = {n: (shape, add_sums(*(h.blocks[n].sums() for h in holders))) for n, shape in SHAPES.items()}
    assert combine(parts) == digest_at(4)


def test_an_anchor_of_another_base_or_model_is_refused():
    log = new_memory()
    trainer = Trainer(log)
    trainer.train(1)
    trainer.anchor()
    with log.read_anchor(1) as anchor:
        with pytest.raises(WrongBaseError, match="on base"):
            Replica(make_blocks(1)).load_anchor(anchor)
        blocks = make_blocks()
        del blocks[DENSE]
        with pytest.raises(WrongBaseError, match="another model"):
            Replica(blocks, version=1, base=base_digest()).load_anchor(anchor)
        with pytest.raises(WrongBaseError, match="run ff"):
            Replica(make_blocks(), run="ff").load_anchor(anchor)
