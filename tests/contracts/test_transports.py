"""One contract for every transport: in-process, directory, HTTP. Each test with either kind of Updates."""

import threading
import time
from contextlib import ExitStack

import pytest
import torch

from logra.errors import UpdateError, UpdateOrderError, WrongBaseError
from logra.sync import (
    Acknowledgement,
    HttpSource,
    Journal,
    NotYetError,
    Packet,
    Replica,
    Subscriber,
    SubscriberError,
    bring_to,
    serve,
)
from sync_kit import (
    DENSE,
    RUN,
    SHAPES,
    TOKEN,
    Trainer,
    base_digest,
    both_bases,
    digest_at,
    make_blocks,
    new_journal,
    new_memory,
)

pytest.importorskip("starlette")
pytest.importorskip("httpx")
basis = both_bases()
pytestmark = pytest.mark.usefixtures("basis")


class Transport:
    """log: the trainer's side. connect(): a new source of the subscriber's side."""

    def __init__(self, kind: str, folder, stack: ExitStack) -> None:
        self.log = (
            new_memory() if kind in ("memory", "http memory") else stack.enter_context(new_journal(folder / "journal"))
        )
        self.kind, self.stack, self.folder = kind, stack, folder
        self.server = stack.enter_context(serve(self.log, TOKEN)) if kind.startswith("http") else None

    def connect(self):
        if self.server is not None:
            return self.stack.enter_context(HttpSource(self.server.url, TOKEN, patience_s=1.0, folder=self.folder))
        if self.kind == "directory":
            return self.stack.enter_context(Journal.open(self.folder / "journal"))
        return self.log


@pytest.fixture(params=["memory", "directory", "http memory", "http journal"])
def transport(request, tmp_path):
    with ExitStack() as stack:
        yield Transport(request.param, tmp_path, stack)


@pytest.fixture
def trainer(transport, basis):
    return Trainer(transport.log)


def subscribe(transport, name: str = "a", **options) -> Subscriber:
    return Subscriber(transport.connect(), Replica(make_blocks(**options)), name)


def test_info_says_what_there_is(transport, trainer):
    source = transport.connect()
    empty = source.info()
    assert (empty.run, empty.base, empty.first, empty.next, empty.head) == (RUN, base_digest(), 0, 0, base_digest())
    trainer.train(3)
    trainer.anchor()
    info = source.info()
    assert info == transport.log.info()
    assert info.next == 3 and [a.version for a in info.anchors] == [3] and info.anchors[0].digest == digest_at(3)
    assert info.targets == tuple((name, *shape) for name, shape in SHAPES.items()) and info.problem is None
    assert info.packet_bytes == sum(len(source.read(index)) for index in range(3)) // 3


def test_packets_arrive_as_they_were_sent(transport, trainer):
    trainer.train(3)
    source = transport.connect()
    for index in (2, 0, 1):
        packet = Packet.from_bytes(source.read(index))
        assert packet.index == index and packet.step == index + 1 and packet.digest == digest_at(index + 1)


def test_a_packet_not_made_yet_is_waited_for_and_then_refused(transport, trainer):
    source = transport.connect()
    started = time.monotonic()
    with pytest.raises(NotYetError, match="update 0 is not there yet"):
        source.read(0, timeout_s=0.2)
    assert 0.15 < time.monotonic() - started < 2.0
    late = threading.Timer(0.2, trainer.train)
    late.start()
    assert Packet.from_bytes(source.read(0, timeout_s=10)).index == 0
    late.join()


def test_version_0_is_acknowledged_before_the_first_step(transport, trainer):
    subscriber = subscribe(transport)
    with pytest.raises(SubscriberError, match=r"a \(nothing heard\); b"):
        trainer.publisher.wait_for(["a", "b"], timeout_s=0.05)
    ack = subscriber.sync()
    assert (ack.version, ack.digest, ack.error) == (0, base_digest(), None)
    trainer.publisher.wait_for(["a"], timeout_s=5)
    with pytest.raises(SubscriberError, match=r"version 1 .*a at version 0"):
        trainer.publisher.wait_for(["a"], version=1, timeout_s=0.05)


def test_subscribers_follow_and_agree(transport, trainer):
    one, two = subscribe(transport, "one"), subscribe(transport, "two", kind="split")
    for count in (1, 2, 4):
        trainer.train(count)
        one.sync()
    ack = two.sync(7, timeout_s=5)
    trainer.publisher.wait_for(["one", "two"], version=7, timeout_s=5)
    assert ack.digest == digest_at(7) == one.replica.digest()
    assert (ack.applied, ack.missing_count, ack.unexpected_count) == (len(SHAPES), 0, 0)


def test_dense_parameters_travel_whole(transport, trainer):
    trainer.train(2)
    subscriber = subscribe(transport)
    subscriber.sync()
    assert torch.equal(subscriber.replica.blocks[DENSE].value, trainer.blocks[DENSE].value)


def test_a_follower_in_a_thread_keeps_up(transport, trainer):
    subscriber, acks = subscribe(transport), []
    thread = threading.Thread(target=lambda: acks.append(subscriber.follow(until=12, wait_s=0.2)))
    thread.start()
    for _ in range(12):
        trainer.train()
    thread.join(20)
    assert acks and acks[0].version == 12 and acks[0].digest == digest_at(12)


def test_follow_stops_when_told(transport, trainer):
    trainer.train(1)
    stop, subscriber = threading.Event(), subscribe(transport)
    thread = threading.Thread(target=lambda: subscriber.follow(stop, wait_s=0.1))
    thread.start()
    trainer.publisher.wait_for(["a"], version=1, timeout_s=5)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_late_joiner_starts_from_an_anchor_when_the_beginning_is_gone(transport, trainer):
    trainer.train(4)
    trainer.anchor()
    trainer.train(2)
    assert transport.log.compact(6) == 4
    with pytest.raises(UpdateOrderError, match=r"update 1 was compacted away: updates exist from 4 on.*anchor 4"):
        transport.connect().read(1)
    subscriber = subscribe(transport)
    assert subscriber.sync().digest == digest_at(6) and subscriber.rejoined == 0
    with pytest.raises(UpdateOrderError, match="compacted away"):
        bring_to(transport.connect(), Replica(make_blocks()), 3)


def test_an_anchor_that_moves_fewer_bytes_is_preferred(transport, trainer):
    trainer.train(8)
    trainer.anchor()
    trainer.train(1)
    source, reads = transport.connect(), []
    read = source.read
    source.read = lambda index, timeout_s=0.0: (reads.append(index), read(index, timeout_s))[1]
    assert Subscriber(source, Replica(make_blocks()), "a").sync().digest == digest_at(9)
    assert reads == [8]
    near = Replica(make_blocks())
    bring_to(transport.connect(), near, 7)
    source.read_anchor = None
    reads.clear()
    assert Subscriber(source, near, "a").sync().version == 9 and reads == [7, 8]


def test_a_missing_or_unexpected_target_is_reported_and_raised(transport, trainer):
    trainer.train(1)
    blocks = make_blocks()
    blocks["other.weight"] = blocks.pop(DENSE)
    subscriber = Subscriber(transport.connect(), Replica(blocks), "a")
    with pytest.raises(WrongBaseError):
        subscriber.sync()
    subscriber.replica._base = base_digest()
    with pytest.raises(WrongBaseError, match=rf"lacks 1 targets \({DENSE}\) and holds 1 .*\(other.weight\)"):
        subscriber.sync()
    ack = transport.log.acknowledgements()["a"]
    assert (ack.missing, ack.unexpected, ack.missing_count, ack.version) == ((DENSE,), ("other.weight",), 1, 0)
    with pytest.raises(SubscriberError, match=rf"a at version 0, lacks 1 .*{DENSE}.*WrongBaseError"):
        trainer.train(1)
    assert transport.log.info().next == 2  # what was published is kept


def test_another_base_is_refused(transport, trainer):
    trainer.train(1)
    with pytest.raises(WrongBaseError, match="another base model"):
        subscribe(transport, seed=1).sync()


def test_a_diverged_subscriber_is_named(transport, trainer):
    trainer.train(2)
    subscriber = subscribe(transport)
    subscriber.sync()
    good = transport.log.acknowledgements()["a"]
    transport.connect().acknowledge(Acknowledgement(**good.__dict__ | {"digest": "00" * 16}))
    with pytest.raises(
        SubscriberError, match=rf"a has diverged: at version 2 its digest is {'00' * 16}, the trainer's is"
    ):
        trainer.publisher.check()


def test_a_drifted_replica_reports_and_rejoins(transport, trainer):
    trainer.train(2)
    subscriber = subscribe(transport)
    subscriber.sync()
    subscriber.replica.blocks["layers.0.q.weight"].value[1, 1] += 1.0
    trainer.train(1)
    with pytest.raises(UpdateError, match="not the policy"):
        subscriber.sync()
    with pytest.raises(SubscriberError, match="a at version 3, reports: UpdateError"):
        trainer.publisher.check()
    with pytest.raises(UpdateOrderError, match="no usable anchor"):
        subscriber.rejoin()
    trainer.anchor()
    assert subscriber.rejoin().digest == digest_at(3)
    trainer.publisher.check()


def test_names_and_errors_from_subscribers_are_bounded(transport):
    source, info = transport.connect(), transport.log.info()
    ack = Acknowledgement(
        "x", info.run, info.session, 0, missing_count=500, missing=tuple(f"n{i}" * 40 for i in range(20))
    )
    source.acknowledge(ack)
    assert transport.log.acknowledgements()["x"] == ack
    for number in range(63):
        source.acknowledge(Acknowledgement(f"s{number}", info.run, info.session, 0))
    with pytest.raises(UpdateError, match="one subscriber too many"):
        source.acknowledge(Acknowledgement("late", info.run, info.session, 0))


def test_an_anchor_streams_rows_and_columns(transport, trainer):
    trainer.train(1)
    trainer.anchor()
    with transport.connect().read_anchor(1) as anchor:
        assert anchor.names == sorted(SHAPES) and anchor.shape(DENSE) == (8, 1)
        name = "layers.0.up.weight"
        expected = trainer.blocks[name].value
        assert torch.equal(anchor.tensor(name), expected)
        assert torch.equal(anchor.tensor(name, range(3, 9), range(2, 5)), expected[3:9, 2:5])
    with pytest.raises(UpdateOrderError, match="no anchor of version 2"):
        transport.connect().read_anchor(2)
    assert not list(transport.folder.glob("logra_anchor_*"))
