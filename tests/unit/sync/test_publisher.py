"""Publisher and subscriber: restarts, branches, damaged logs and anchors."""

import pytest

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError
from logra.sync import Acknowledgement, Journal, NotYetError, Publisher, Replica, Subscriber, SubscriberError, bring_to
from sync_kit import Trainer, both_bases, digest_at, make_blocks, make_update, new_journal, new_memory

basis = both_bases()
pytestmark = pytest.mark.usefixtures("basis")


def test_answers_of_an_earlier_start_do_not_count(tmp_path):
    folder = tmp_path / "journal"
    with new_journal(folder) as journal, Journal.open(folder) as source:
        trainer = Trainer(journal)
        trainer.train(2)
        subscriber = Subscriber(source, Replica(make_blocks()), "a")
        subscriber.sync()
        trainer.publisher.wait_for(["a"], 2, timeout_s=1)
        journal.close()
        with Journal.open(folder, write=True) as again:
            publisher = Publisher(again)
            with pytest.raises(SubscriberError, match="nothing heard"):
                publisher.wait_for(["a"], 2, timeout_s=0.05)
            subscriber.sync()
            publisher.wait_for(["a"], 2, timeout_s=1)


def test_a_subscriber_ahead_of_a_resumed_trainer_comes_back_by_an_anchor(tmp_path):
    with new_journal(tmp_path / "journal") as journal:
        trainer = Trainer(journal)
        trainer.train(3)
        ahead = Subscriber(journal, Replica(make_blocks()), "a")
        ahead.sync()
        journal.truncate(1)
        with pytest.raises(UpdateOrderError, match=r"at version 3 of a branch that the trainer left.*no usable anchor"):
            ahead.sync()
        publisher = Publisher(journal)
        with pytest.raises(SubscriberError, match="a at version 3, reports: UpdateOrderError"):
            publisher.check()
        journal.truncate(0)
        publisher.check()  # what was said about the dropped branch no longer counts
        resumed = Trainer(journal, salt=1)
        resumed.train(1)
        resumed.anchor()
        assert ahead.sync().version == 1 and ahead.rejoined == 1
        resumed.train(4)
        assert ahead.sync().digest == digest_at(5, salt=1)


@pytest.mark.parametrize("grown", [2, 3, 5])
def test_a_subscriber_on_an_abandoned_branch_notices_whatever_the_length(grown):
    """The trainer went back to 2 and took another way; shorter, as long, or longer than what the subscriber holds (3)."""
    log = new_memory()
    trainer = Trainer(log)
    trainer.train(3)
    replica = Replica(make_blocks())
    bring_to(log, replica)
    other = new_memory()
    second = Trainer(other, salt=1)
    second.train(grown, digest_every=100)
    for _ in range(2):
        with pytest.raises(UpdateOrderError):
            Subscriber(other, replica, "a").sync()
    second.anchor()
    subscriber = Subscriber(other, replica, "a")
    assert subscriber.sync().version == grown and subscriber.rejoined == 1
    assert replica.digest() == digest_at(grown, salt=1)


def test_a_redone_update_with_the_same_bits_is_the_same_history(tmp_path):
    with new_journal(tmp_path / "journal") as journal:
        Trainer(journal).train(3)
        subscriber = Subscriber(journal, Replica(make_blocks()), "a")
        subscriber.sync()
        journal.truncate(2)
        trainer = Trainer(journal)
        trainer.go_to(2)
        trainer.train(3)
        assert subscriber.sync().digest == digest_at(5) and subscriber.rejoined == 0


def test_a_damaged_anchor_is_passed_over(tmp_path, caplog):
    folder = tmp_path / "journal"
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(5)
        trainer.anchor()
        trainer.train(5)
        trainer.anchor()
        path = folder / "anchor_10.safetensors"
        path.write_bytes(path.read_bytes()[:-8] + b"12345678")
        assert Subscriber(journal, Replica(make_blocks()), "a").sync().digest == digest_at(10)
        assert "anchor 10 is not used" in caplog.text
        subscriber = Subscriber(journal, Replica(make_blocks()), "b")
        assert subscriber.rejoin().digest == digest_at(10)  # from anchor 5
        (folder / "anchor_5.safetensors").unlink()
        with pytest.raises(UpdateOrderError, match=r"no usable anchor .*anchor 10 is damaged.*anchor 5"):
            subscriber.rejoin()


def test_a_damaged_log_is_followed_as_far_as_it_goes_and_then_reported(tmp_path):
    folder = tmp_path / "journal"
    with new_journal(folder, segment_bytes=1500) as journal:
        Trainer(journal).train(9)
    _, lost, after, *_ = sorted(folder.glob("segment_*"))
    lost.unlink()
    first, last = int(lost.name.split("_")[1]), int(after.name.split("_")[1]) - 1
    with Journal.open(folder) as source:
        subscriber = Subscriber(source, Replica(make_blocks()), "a")
        match = rf"damaged behind version {first}.*updates {first} to {last} are missing"
        with pytest.raises(DamagedUpdateError, match=match):
            subscriber.sync()
        ack = source.acknowledgements()["a"]
        assert (
            subscriber.version == first == ack.version
            and first > 1
            and ack.error.startswith("DamagedUpdateError: the log is damaged")
        )
        with pytest.raises(DamagedUpdateError, match="missing"):
            subscriber.sync(first + 1, timeout_s=1)


def test_damage_on_the_way_names_the_update():
    log = new_memory()
    Trainer(log).train(2)
    log._packets[1] = log._packets[1][:-1]
    subscriber = Subscriber(log, Replica(make_blocks()), "a")
    with pytest.raises(DamagedUpdateError, match="update 1 arrived damaged"):
        subscriber.sync()
    assert subscriber.version == 1 and "update 1 arrived damaged" in log.acknowledgements()["a"].error


def test_going_back_is_refused_and_waiting_ends():
    log = new_memory()
    trainer = Trainer(log)
    trainer.train(2)
    subscriber = Subscriber(log, Replica(make_blocks()), "a")
    with pytest.raises(NotYetError):
        subscriber.sync(3, timeout_s=0.01)
    assert log.acknowledgements()["a"].version == 2 and log.acknowledgements()["a"].error is None
    with pytest.raises(UpdateOrderError, match="cannot go back to 1"):
        subscriber.sync(1)


def test_digests_are_compared_where_they_are_known():
    log = new_memory()
    trainer = Trainer(log)
    trainer.train(4, digest_every=2)
    info = log.info()
    assert [bool(trainer.publisher._digests.get(v)) for v in range(5)] == [True, False, True, False, True]
    log.acknowledge(Acknowledgement("a", info.run, info.session, 3, digest="ff"))
    trainer.publisher.check()
    trainer.publisher.know(3, digest_at(3))
    with pytest.raises(SubscriberError, match="a has diverged: at version 3"):
        trainer.publisher.check()
    other = Acknowledgement("a", "ff", info.session, 3, digest="ff")
    log.acknowledge(other)
    trainer.publisher.check()  # of another run: not heard
    log.acknowledge(Acknowledgement("a", info.run, info.session, 9))
    with pytest.raises(SubscriberError, match="a is at version 9, but the newest is 4"):
        trainer.publisher.check()


def test_the_memory_log_can_be_bounded():
    log = new_memory(keep=3)
    trainer = Trainer(log)
    trainer.train(5)
    assert (log.info().first, log.info().next) == (2, 5)
    with pytest.raises(UpdateOrderError, match=r"update 1 was compacted away.*no anchor"):
        log.read(1)
    with pytest.raises(UpdateOrderError, match="no usable anchor"):
        bring_to(log, Replica(make_blocks()))
    trainer.anchor()
    assert bring_to(log, Replica(make_blocks())) == 5
    with pytest.raises(UpdateError, match="at least 1"):
        new_memory(keep=0)


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a.json", ".a", "a" * 65, "a\n", None])
def test_names_that_are_no_file_names_are_refused(tmp_path, name):
    log = new_memory()
    with pytest.raises(UpdateError, match="subscriber's name"):
        Subscriber(log, Replica(make_blocks()), name)
    with new_journal(tmp_path / "journal") as journal:
        info = journal.info()
        with pytest.raises(UpdateError, match="subscriber's name"):
            journal.acknowledge(Acknowledgement(name, info.run, info.session, 0))


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"version": "1"},
        {"version": True},
        {"digest": "x"},
        {"missing": ["a"] * 21},
        {"missing": [3]},
        {"missing": "abc"},
        {"error": "x" * 3000},
        {"error": 3},
        {"run": None},
        {"more": 1},
        {"name": "../../etc/x"},
    ],
)
def test_acknowledgements_from_outside_are_checked(change):
    import json

    values = json.loads(Acknowledgement("a", "ab", "cd", 1).to_json())
    assert Acknowledgement.from_json(json.dumps(values).encode()) == Acknowledgement("a", "ab", "cd", 1)
    with pytest.raises(UpdateError):
        Acknowledgement.from_json(json.dumps(values | change).encode())
    for data in (b"", b"[]", b"\xff", b"[" * 60_000, b" " * 70_000):
        with pytest.raises(UpdateError):
            Acknowledgement.from_json(data)


def test_a_foreign_file_among_the_acknowledgements_is_left_out(tmp_path, caplog):
    with new_journal(tmp_path / "journal") as journal:
        info = journal.info()
        journal.acknowledge(Acknowledgement("a", info.run, info.session, 0))
        (journal.folder / "acks" / "b.json").write_text("{")
        (journal.folder / "acks" / "c.json").write_bytes((journal.folder / "acks" / "a.json").read_bytes())
        assert list(journal.acknowledgements()) == ["a"] and "b.json is not read" in caplog.text


def test_the_error_of_a_subscriber_stops_the_trainer_after_the_update_is_kept():
    log = new_memory()
    trainer = Trainer(log)
    info = log.info()
    log.acknowledge(Acknowledgement("a", info.run, info.session, 0, error="out of memory"))
    with pytest.raises(SubscriberError, match="a at version 0, reports: out of memory"):
        trainer.publisher.publish(make_update(0), 1)
    assert log.info().next == 1


def test_a_tolerant_publisher_is_stopped_only_by_those_it_waited_for(caplog):
    from logra.sync.acknowledge import Acknowledgement

    log = new_memory()
    publisher = Publisher(log, tolerant=True)
    info = log.info()
    said = {"run": info.run, "session": info.session, "version": 0, "digest": info.base, "applied": 0}
    log.acknowledge(Acknowledgement(name="mine", **said))
    publisher.wait_for(1, 0, timeout_s=1)
    log.acknowledge(Acknowledgement(name="stranger", **said | {"error": "another base model"}))
    publisher.check()
    publisher.check()
    assert caplog.text.count("stranger") == 1
    assert publisher.drain(0.0) == []
    log.acknowledge(Acknowledgement(name="mine", **said | {"error": "out of memory"}))
    with pytest.raises(SubscriberError, match="out of memory"):
        publisher.check()
