"""The journal keeps every Update, says what is damaged, and never reads past it."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError, UserError, WrongBaseError
from logra.sync import Journal, NotYetError, Packet, Replica, bring_to, segments
from sync_kit import RUN, TARGETS, Trainer, base_digest, both_bases, digest_at, make_blocks, make_update, new_journal

basis = both_bases()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run" / "journal"


def filled(folder: Path, count: int = 5, **options) -> Path:
    """A closed journal of `count` Updates; returns its one segment."""
    with new_journal(folder, **options) as journal:
        Trainer(journal).train(count)
    return segment(folder)


def segment(folder: Path, which: int = -1) -> Path:
    return sorted(folder.glob("segment_*"))[which]


def starts(path: Path) -> list[int]:
    """Offsets of the records of a segment, and its end."""
    found = segments.Segment(path, int(path.name.split("_")[1]))
    segments.scan(found)
    return [r.start for r in found.records] + [found.end]


def digest_of(folder: Path, version: int | None = None) -> str:
    with Journal.open(folder) as journal:
        replica = Replica(make_blocks())
        bring_to(journal, replica, version)
        return replica.digest()


@pytest.mark.usefixtures("basis")
def test_the_policy_at_any_version(folder):
    filled(folder)
    for version in range(6):
        assert digest_of(folder, version) == digest_at(version)
    with pytest.raises(NotYetError):
        digest_of(folder, 6)


@pytest.mark.usefixtures("basis")
def test_a_journal_goes_on_after_reopening(folder):
    filled(folder, 3)
    with Journal.open(folder, write=True) as journal:
        assert journal.repaired is None and (journal.first, journal.next) == (0, 3)
        trainer = Trainer(journal)
        trainer.go_to(3)
        trainer.train(2)
    assert digest_of(folder) == digest_at(5)


def test_append_refuses_what_readers_would_refuse(folder):
    with new_journal(folder) as journal:
        Trainer(journal).train(2)
        for packet, kind, match in (
            (Packet(make_update(3), RUN, base_digest(), 4), UpdateOrderError, "gap: the next one is 2"),
            (Packet(make_update(1), RUN, base_digest(), 4), UpdateOrderError, "was appended before"),
            (Packet(make_update(2), "ff", base_digest(), 4), WrongBaseError, "run ff"),
            (Packet(make_update(2), RUN, "ff", 4), WrongBaseError, "base ff"),
            (Packet(make_update(2), RUN, base_digest(), 4, parent="ff"), UpdateOrderError, "another branch"),
            (
                Packet(make_update(2).__class__(**make_update(2).__dict__ | {"dense": {}}), RUN, base_digest(), 4),
                WrongBaseError,
                "other targets",
            ),
            (b"nonsense", DamagedUpdateError, "not a logra Update"),
        ):
            with pytest.raises(kind, match=match):
                journal.append(packet)
        journal.append(Packet(make_update(2), RUN, base_digest(), 4).to_bytes())
        assert journal.next == 3


def test_one_writer_only(folder):
    with new_journal(folder):
        with pytest.raises(UserError, match=rf"being written by process {os.getpid()}"):
            Journal.open(folder, write=True)
        with Journal.open(folder) as reader, pytest.raises(UpdateError, match="read-only"):
            reader.append(b"")
    journal = Journal.open(folder, write=True)
    journal.close()
    with pytest.raises(UpdateError, match="closed"):
        Trainer(journal).train()


def test_making_and_opening_say_what_is_wrong(folder):
    with pytest.raises(UserError, match="holds no journal"):
        Journal.open(folder)
    filled(folder)
    with pytest.raises(UserError, match="already holds a journal"):
        new_journal(folder)
    header = folder / "header.json"
    text = header.read_text()
    header.write_text(text.replace(base_digest(), "00" * 16))
    with pytest.raises(UserError, match=r"header.json is unreadable: its hash does not match"):
        Journal.open(folder)
    header.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"header.json is unreadable"):
        Journal.open(folder)
    header.unlink()
    with pytest.raises(UserError, match=r"without its header.json"):
        new_journal(folder)
    with pytest.raises(UpdateError, match="twice"):
        Journal.create(folder.parent / "b", run=RUN, base="ab", targets=[*TARGETS, TARGETS[0]])


# --- torn tails: an append that a crash cut off


def test_an_append_cut_at_any_byte_is_dropped_and_said(folder, tmp_path):
    path = filled(folder, 3)
    last, end = starts(path)[-2:]
    whole = path.read_bytes()
    for cut in [*range(last + 1, last + 40), *range(last + 40, end, 37), end - 1]:
        path.write_bytes(whole[:cut])
        with Journal.open(folder) as reader:
            assert reader.next == 2 and reader.info().problem is None
            with pytest.raises(NotYetError):
                reader.read(2)
        assert path.stat().st_size == cut  # a reader mends nothing
        with Journal.open(folder, write=True) as journal:
            assert journal.repaired and f"{cut - last} bytes of update 2" in journal.repaired
            assert journal.next == 2
        with Journal.open(folder, write=True) as journal:
            assert journal.repaired is None
    path.write_bytes(whole[:last])
    with Journal.open(folder, write=True) as journal:
        assert journal.repaired is None and journal.next == 2


@pytest.mark.parametrize("zeros", [(0, None), (0, 512), (600, 1112), (100, None)])
def test_blocks_of_zeros_that_never_reached_the_disk_are_a_torn_tail(folder, zeros):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(2)
        path = segment(folder)
        last = path.stat().st_size
        trainer.train(1)
    data = bytearray(path.read_bytes())
    start, stop = last + zeros[0], len(data) if zeros[1] is None else min(len(data), last + zeros[1])
    start, stop = (start, stop) if stop == len(data) else (start // 512 * 512, stop // 512 * 512)
    start = max(start, last)
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    with Journal.open(folder) as reader:
        with pytest.raises(NotYetError):
            reader.read(2)
        assert reader.read(1)
    with Journal.open(folder, write=True) as journal:
        assert journal.repaired and "update 2" in journal.repaired and journal.next == 2
        trainer = Trainer(journal)
        trainer.go_to(2)
        trainer.train(1)
    assert digest_of(folder) == digest_at(3)


def test_an_empty_segment_of_a_killed_writer_is_harmless(folder):
    filled(folder, 2)
    (folder / segments.segment_name(2)).touch()
    (folder / ".header.json.tmp-0a1b2c3d").write_text("{")
    with Journal.open(folder, write=True) as journal:
        assert journal.next == 2 and len(list(folder.glob("segment_*"))) == 1
        assert not list(folder.glob(".header*"))


# --- damage: never skipped, never taken for a torn tail


@pytest.mark.parametrize("place", ["magic", "index", "length", "crc", "packet"])
def test_damage_in_the_middle_names_update_and_place(folder, place):
    path = filled(folder, 5)
    at = starts(path)[2]
    data = bytearray(path.read_bytes())
    data[at + {"magic": 0, "index": 4, "length": 22, "crc": 28, "packet": 300}[place]] ^= 0x10
    path.write_bytes(data)
    with Journal.open(folder, write=True) as journal:
        assert journal.repaired is None
        assert journal.read(1)
        with pytest.raises(DamagedUpdateError, match=rf"update 2 at byte {at} of {path.name} is damaged"):
            journal.read(2)
        if place != "packet":  # found by looking at heads: no appending behind a hole
            with pytest.raises(DamagedUpdateError, match="update 2"):
                journal.append(Packet(make_update(2), RUN, base_digest(), 3))
    with pytest.raises(DamagedUpdateError, match="update 2"):
        digest_of(folder)
    assert digest_of(folder, 2) == digest_at(2)
    with Journal.open(folder, write=True) as journal:  # the way out: back to before it
        journal.truncate(2)
        trainer = Trainer(journal)
        trainer.go_to(2)
        trainer.train(3)
    assert digest_of(folder) == digest_at(5)


def test_a_zeroed_sector_in_the_middle_is_damage(folder):
    path = filled(folder, 5)
    data = bytearray(path.read_bytes())
    at = next(s for s in starts(path) if s > 600)
    first = at // 512 * 512
    data[first : first + 1024] = bytes(1024)
    path.write_bytes(data)
    with Journal.open(folder, write=True) as journal:
        assert journal.repaired is None
        with pytest.raises(DamagedUpdateError, match="damaged"):
            for index in range(5):
                journal.read(index)


def test_a_damaged_last_update_is_not_taken_for_a_torn_one(folder):
    path = filled(folder, 3)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with Journal.open(folder) as reader, pytest.raises(DamagedUpdateError, match="update 2 at byte"):
        reader.read(2)
    with Journal.open(folder, write=True) as journal:
        assert journal.repaired is None and "update 2" in journal.problem
        with pytest.raises(DamagedUpdateError, match="update 2"):
            journal.append(Packet(make_update(2), RUN, base_digest(), 3))
        journal.truncate(2)
        assert journal.problem is None
    assert path.stat().st_size == starts(path)[-1]
    assert digest_of(folder) == digest_at(2)


def test_a_lost_segment_is_named(folder):
    filled(folder, 6, segment_bytes=1000)
    assert len(list(folder.glob("segment_*"))) == 3
    segment(folder, 1).unlink()
    with Journal.open(folder) as reader:
        assert "updates 2 to 3 are missing" in reader.info().problem
        assert reader.read(1)
        with pytest.raises(DamagedUpdateError, match="updates 2 to 3 are missing"):
            reader.read(4)
    segment(folder, 0).unlink()
    with Journal.open(folder) as reader, pytest.raises(DamagedUpdateError, match="updates 0 to 3 are missing"):
        bring_to(reader, Replica(make_blocks()))


def test_a_copied_segment_is_named(folder):
    path = filled(folder, 3)
    shutil.copy(path, folder / segments.segment_name(1))
    with Journal.open(folder) as reader:
        assert reader.info().problem


# --- writes that fail


def failing_write(kind: int, allowed: int):
    """os.writev that writes `allowed` bytes in all, then fails."""
    left = allowed

    def writev(handle, parts):
        nonlocal left
        if left == 0:
            raise OSError(kind, os.strerror(kind))
        written = os.write(handle, b"".join(parts)[:left])
        left -= written
        return written

    return writev


@pytest.mark.parametrize("allowed", [0, 1, 31, 32, 33, 400])
def test_a_full_disk_leaves_nothing_half_appended(folder, monkeypatch, allowed):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(2)
        size, reader = segment(folder).stat().st_size, Journal.open(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", failing_write(errno.ENOSPC, allowed))
            with pytest.raises(
                UpdateError, match=r"update 2 could not be written .*disk is full.*Nothing of it was kept"
            ):
                trainer.train(1)
        assert segment(folder).stat().st_size == size and journal.next == 2 == reader.info().next
        trainer.publisher.publish(make_update(2), 3)
        assert journal.next == 3 == reader.info().next
        assert len(list(folder.glob("segment_*"))) == 2  # no file grows over what a reader may have seen
    assert digest_of(folder) == digest_at(3)


def test_after_a_failed_flush_the_journal_must_be_opened_again(folder, monkeypatch):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(2)

        def fail(handle):
            raise OSError(errno.EIO, "broken disk")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(UpdateError, match="broken disk"):
                trainer.train(1)
        with pytest.raises(UpdateError, match="open the journal again"):
            trainer.publisher.publish(make_update(2), 3)
    with Journal.open(folder, write=True) as journal:
        assert journal.next == 2
    assert digest_of(folder) == digest_at(2)


def test_a_file_that_grew_behind_our_back_is_noticed(folder):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(1)
        with segment(folder).open("ab") as file:
            file.write(b"x")
        with pytest.raises(UpdateError, match="changed by something else"):
            trainer.train(1)


# --- readers beside the writer


@pytest.mark.usefixtures("basis")
def test_a_reader_sees_what_the_writer_does(folder):
    with new_journal(folder, segment_bytes=1500) as journal, Journal.open(folder) as reader:
        trainer = Trainer(journal)
        assert reader.info().next == 0
        trainer.train(4)
        assert reader.info().next == 4 and reader.read(3) == journal.read(3)
        trainer.anchor()
        trainer.train(3)
        journal.compact(5)
        with pytest.raises(UpdateOrderError, match="updates exist from 4 on"):
            reader.read(0)
        assert reader.info() == journal.info()
        old = reader.read(5)
        journal.truncate(5)
        assert reader.info().next == 5
        other = Trainer(journal, salt=1)
        for index in (5, 6, 7):
            other.publisher.publish(make_update(index, salt=1), index + 1)
        assert reader.read(5) != old and reader.read(5) == journal.read(5)
        assert reader.info() == journal.info() and reader.info().next == 8


def test_a_reader_that_remembers_offsets_is_not_misled_by_going_back(folder):
    with new_journal(folder) as journal, Journal.open(folder) as reader:
        Trainer(journal).train(4)
        reader.info()
        for round_ in range(1, 4):  # the journal goes back and regrows between two looks of the reader
            journal.truncate(1)
            trainer = Trainer(journal, salt=round_)
            for index in range(1, 6):
                trainer.publisher.publish(make_update(index, salt=round_), index + 1)
            for index in range(6):
                assert reader.read(index) == journal.read(index)
        assert reader.info() == journal.info()


# --- going back, anchors, compaction


def test_steps_lead_to_versions(folder):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        for index, step in enumerate((2, 3, 7)):  # steps 1, 4, 5, 6 had no signal
            trainer.publisher.publish(make_update(index), step)
        assert [journal.version_at(step) for step in range(9)] == [0, 0, 1, 2, 2, 2, 2, 3, 3]


@pytest.mark.usefixtures("basis")
def test_a_journal_may_begin_at_a_later_version(folder):
    """A run that was trained without a journal and goes on with one."""
    with Journal.create(folder, run=RUN, base=digest_at(4), targets=TARGETS, origin=4, origin_step=9) as journal:
        trainer = Trainer(journal)
        trainer.go_to(4)
        assert (journal.first, journal.next, journal.head, journal.version_at(9)) == (4, 4, digest_at(4), 4)
        with pytest.raises(UpdateOrderError, match="begins with version 4"):
            journal.version_at(8)
        trainer.anchor()
        trainer.train(2, digest_every=100)
        journal.truncate(5)
        journal.truncate(4)
        with pytest.raises(UpdateOrderError, match="has versions 4 to 4"):
            journal.truncate(3)
        again = Trainer(journal)
        again.go_to(4)
        again.train(2)
    with Journal.open(folder) as journal:
        blocks = make_blocks(1)
        replica = Replica(blocks, version=4, base=digest_at(4))
        with journal.read_anchor(4) as anchor:
            replica.load_anchor(anchor)
        assert bring_to(journal, replica) == 6 and replica.digest() == digest_at(6)


@pytest.mark.usefixtures("basis")
def test_truncate_drops_what_follows_with_its_anchors(folder):
    with new_journal(folder, segment_bytes=1500) as journal:
        trainer = Trainer(journal)
        for _ in range(4):
            trainer.train(2)
            trainer.anchor()
        journal.truncate(5)
        assert journal.next == 5 and [a.version for a in journal.anchors] == [2, 4]
        assert journal.head == Packet.from_bytes(journal.read(4)).checksum
        with pytest.raises(UpdateOrderError, match="cannot go back to version 6"):
            journal.truncate(6)
        journal.compact(4)
        with pytest.raises(UpdateOrderError, match="has versions 4 to 5"):
            journal.truncate(3)
        journal.truncate(4)
        assert (journal.first, journal.next, journal.head) == (4, 4, journal.anchors[0].head)
        trainer = Trainer(journal)
        trainer.go_to(4)
        trainer.train(3)
    assert digest_of(folder) == digest_at(7)


@pytest.mark.usefixtures("basis")
def test_compaction_needs_an_anchor_and_keeps_the_rest(folder):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(3)
        with pytest.raises(UpdateOrderError, match="no anchor at or below version 3"):
            journal.compact(3)
        trainer.anchor()
        trainer.train(3)
        trainer.anchor()
        trainer.train(1)
        assert journal.compact(5) == 3 and [a.version for a in journal.anchors] == [3, 6]
        assert journal.version_at(3) == 3 and journal.version_at(5) == 5
        with pytest.raises(UpdateOrderError, match="history begins with version 3"):
            journal.version_at(2)
        assert journal.compact(99) == 6 and journal.compact(99) == 6
        for version in (6, 7):
            assert digest_of(folder, version) == digest_at(version)
        with pytest.raises(UpdateOrderError, match="compacted away"):
            digest_of(folder, 5)


@pytest.mark.usefixtures("basis")
def test_compaction_of_everything_goes_on(folder):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(3)
        trainer.anchor()
        assert journal.compact(3) == 3 and not list(folder.glob("segment_*"))
    with Journal.open(folder, write=True) as journal:
        assert (journal.first, journal.next) == (3, 3) and journal.version_at(3) == 3
        trainer = Trainer(journal)
        trainer.go_to(3)
        trainer.train(2)
    assert digest_of(folder) == digest_at(5)


@pytest.mark.usefixtures("basis")
def test_a_compaction_that_was_cut_off_is_finished(folder, monkeypatch):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(3)
        trainer.anchor()
        trainer.train(1)

        def die(first):
            raise KeyboardInterrupt

        monkeypatch.setattr(journal._index, "drop_before", die)
        with pytest.raises(KeyboardInterrupt):
            journal.compact(3)
    assert len(list(folder.glob("segment_*"))) == 2
    with Journal.open(folder) as reader:
        assert (reader.first, reader.next) == (3, 4)
    with Journal.open(folder, write=True) as journal:
        assert (journal.first, journal.next) == (3, 4) and len(list(folder.glob("segment_*"))) == 1


@pytest.mark.usefixtures("basis")
def test_damaged_anchors_are_refused_and_passed_over(folder, caplog):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(4)
        trainer.anchor()
        trainer.train(4)
        trainer.anchor()
        path = folder / "anchor_8.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedUpdateError, match="anchor 8 is damaged: its sha256"):
            journal.read_anchor(8)
        with pytest.raises(DamagedUpdateError, match="anchor 8"):
            journal.compact(8)  # nothing is deleted on the strength of a damaged anchor
        assert journal.first == 0 and digest_of(folder) == digest_at(8)
        path.write_bytes(data[:-1])
        with pytest.raises(DamagedUpdateError, match="cut short"):
            journal.read_anchor(8)
        path.unlink()
        with pytest.raises(DamagedUpdateError, match="gone"):
            journal.read_anchor(8)
        (folder / "anchor_8.json").write_text(
            (folder / "anchor_8.json").read_text().replace('"version": 8', '"version": 7')
        )
        assert [a.version for a in journal.anchors] == [4] and "anchor_8.json" in caplog.text


def test_anchors_cover_the_target_table_exactly(folder):
    with new_journal(folder) as journal:
        blocks = make_blocks()
        with pytest.raises(UpdateOrderError, match="newest version, 0, not at 1"):
            journal.write_anchor(1, blocks, "ab")
        masters = {name: block.master() for name, block in blocks.items()}
        for wrong in (
            {k: v for k, v in masters.items() if k != "norm.weight"},
            masters | {"x": masters["norm.weight"]},
            masters | {"norm.weight": masters["norm.weight"][:4]},
            masters | {"norm.weight": masters["norm.weight"].double()},
        ):
            with pytest.raises(WrongBaseError, match="anchor"):
                journal.write_anchor(0, wrong, "ab")
        assert not list(folder.glob("*anchor*"))
        journal.write_anchor(0, masters, base_digest())
        replica = Replica(make_blocks())
        with journal.read_anchor(0) as anchor:
            replica.load_anchor(anchor)
        assert replica.version == 0 and replica.digest() == base_digest()


@pytest.mark.usefixtures("basis")
def test_an_anchor_on_a_full_disk_does_not_count(folder, monkeypatch):
    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(1)

        def fail(source, target):
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(UpdateError, match=r"anchor 1 could not be written .*no space"):
                trainer.anchor()
        assert not list(folder.glob("*anchor*")) and not journal.anchors
        trainer.anchor()
        trainer.train(1)
    assert digest_of(folder) == digest_at(2)


def test_info_survives_json(folder):
    from logra.sync import LogInfo

    with new_journal(folder) as journal:
        trainer = Trainer(journal)
        trainer.train(1)
        trainer.anchor()
        values = json.loads(json.dumps(journal.info().to_dict()))
        assert LogInfo.from_dict(values) == journal.info()
        for change in (
            {"next": -1},
            {"run": "x"},
            {"targets": []},
            {"anchors": [{}]},
            {"more": 1},
            {"model": 3},
            {"anchors": 3},
        ):
            with pytest.raises(DamagedUpdateError, match="malformed"):
                LogInfo.from_dict(values | change)
