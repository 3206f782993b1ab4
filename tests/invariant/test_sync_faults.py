"""kill -9 and full disks at random points: after a restart everything agrees, or an error says what is missing.

52 rounds in all, seeded: a trainer killed by time or at one of its system calls (20), subscribers killed behind HTTP and behind a
folder (16), a limit on file sizes hit at random bytes (16); half of each with Updates that go on with aligned bases. Children are
forked from a server that has torch loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from logra.errors import UpdateError
from logra.sketch.block import apply_blocks, digest_blocks
from logra.sync import HttpSource, Journal, Packet, Replica, Subscriber, bring_to, serve
from sync_kit import (
    RUN,
    TOKEN,
    Trainer,
    base_digest,
    both_bases,
    digest_at,
    make_blocks,
    make_update,
    new_journal,
    new_memory,
    use,
)

pytest.importorskip("starlette")
pytest.importorskip("httpx")

basis = both_bases()
_open = os.open  # the one that `die_at` leaves alone
SIZE = 64  # values of the trainer's state
CALLS = ("fsync", "replace", "writev", "unlink", "ftruncate", "open")
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["sync_kit", __name__])


@pytest.fixture(autouse=True, scope="module")
def _preload():
    """Python 3.11's fork server does not look for what it preloads in our sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        forkserver.ensure_running()
        yield


def say(out: str, *words: object) -> None:
    """One line in the file `out`, written in one go: it survives the kill."""
    handle = _open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, (" ".join(map(str, words)) + "\n").encode())
    os.close(handle)


def heard(out: Path) -> list[list[str]]:
    return [line.split() for line in out.read_text().splitlines()] if out.exists() else []


def last_heard(out: Path, *words: str) -> int:
    return max((int(line[1]) for line in heard(out) if line[0] in words), default=0)


def run(target, *args: object, until=None, seconds: float = 0.0) -> int:
    """Run a child; kill -9 it `seconds` after `until()` has become true, unless it ends by itself. Returns its exit code."""
    process = processes.Process(target=target, args=args)
    process.start()
    deadline = time.monotonic() + 60
    while until is not None and not until() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    if until is not None:
        process.join(seconds)
        process.kill()
    process.join(60)
    code = process.exitcode
    process.close()
    assert code is not None
    return code


# --- what children do


def state_of(version: int) -> dict[str, torch.Tensor]:
    return {"moment": torch.full((SIZE,), float(version))}


def resume(journal: Journal) -> Trainer:
    """As a trainer resumes: the newest state, the journal cut back to it, the weights from the journal (or an anchor)."""
    found, reason = journal.read_state()
    version = found.version if found is not None else 0
    if found is None:
        assert "does not exist" in reason, reason
    else:
        assert torch.equal(found.tensors["moment"], state_of(version)["moment"]) and found.values == {
            "version": version
        }
        assert journal.next - version in (0, 1)
    journal.truncate(version)
    trainer = Trainer(journal)
    replica = Replica(trainer.blocks)
    bring_to(journal, replica, version)
    trainer.version = version
    return trainer


def one_step(trainer: Trainer) -> None:
    """Train, keep the state; sometimes an anchor, sometimes compaction."""
    trainer.train()
    journal, version = trainer.log, trainer.version
    journal.write_state(version, version, state_of(version), {"version": version})
    if version % 4 == 0:
        trainer.anchor()
    if version % 12 == 0:
        journal.compact(version - 4)


def train_for_ever(basis: str, folder: str, out: str, countdown: int, seed: int) -> None:
    """countdown > 0: die at that system call, a write possibly in its middle."""
    torch.set_num_threads(1)
    use(basis)
    if countdown:
        die_at(countdown, random.Random(seed))
    with Journal.open(folder, write=True) as journal:
        trainer = resume(journal)
        say(out, "resumed", trainer.version, bool(journal.repaired))
        while True:
            one_step(trainer)
            say(out, "kept", trainer.version)


def die_at(countdown: int, dice: random.Random) -> None:
    """Make the countdown-th of the calls that change files the last thing this process does, or does not do, or half does."""
    left = countdown

    def mortal(name: str, call):
        def wrapper(*args, **options):
            nonlocal left
            left -= 1
            if left == 0:
                fate = dice.random()
                try:
                    if name == "writev":
                        data = b"".join(args[1])
                        os.write(args[0], data[: int(fate * len(data))])
                    elif fate < 0.5:
                        call(*args, **options)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, mortal(name, getattr(os, name)))


def follow(address: str, out: str, until: int) -> None:
    torch.set_num_threads(1)
    source = HttpSource(address, TOKEN) if address.startswith("http") else Journal.open(address)
    subscriber = Subscriber(source, Replica(make_blocks(kind="split")), "child")
    subscriber.sync(0)
    say(out, "at", 0)
    while subscriber.version < until:
        subscriber.sync(subscriber.version + 1, 30)
        say(out, "at", subscriber.version)
    say(out, "digest", subscriber.version, subscriber.replica.digest())
    source.close()


def train_with_little_room(basis: str, folder: str, out: str, seed: int, steps: int) -> None:
    """Take `steps` steps while the allowed file size changes at random; a failed write is repeated with room."""
    torch.set_num_threads(1)
    use(basis)
    dice, hard = random.Random(seed), resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def room(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    def attempt(action) -> None:
        room(dice.choice((dice.randrange(1500), dice.randrange(8000))))
        try:
            action()
        except UpdateError as error:
            room(hard)
            say(out, "failed", 1, str(error)[:60].replace(" ", "_"))
            action()
        room(hard)

    with Journal.open(folder, write=True) as journal:
        trainer = resume(journal)
        for _ in range(steps):
            update = make_update(trainer.version)
            apply_blocks(trainer.blocks, update)
            digest, version = digest_blocks(trainer.blocks), trainer.version + 1
            attempt(lambda: trainer.publisher.publish(update, version, digest))  # noqa: B023
            trainer.version = version
            attempt(lambda: journal.write_state(version, version, state_of(version), {"version": version}))  # noqa: B023
            if version % 3 == 0:
                attempt(trainer.anchor)
            say(out, "kept", version)
        for _ in range(20):  # and end for want of room
            room(dice.randrange(3000))
            try:
                one_step(trainer)
            except UpdateError:
                return
            finally:
                room(hard)
            say(out, "kept", trainer.version)


# --- what must hold afterwards


def check_journal(folder: Path, kept: int) -> int:
    """All that was kept is there, whole and right; returns the newest version."""
    with Journal.open(folder) as journal:
        info = journal.info()
        assert info.problem is None
        assert kept <= info.next <= kept + 1, (kept, info)
        for index in range(info.first, info.next):
            packet = Packet.from_bytes(journal.read(index))
            assert (packet.index, packet.run, packet.base) == (index, RUN, base_digest())
        replica = Replica(make_blocks())
        bring_to(journal, replica)
        assert replica.digest() == digest_at(info.next)
        for anchor in info.anchors:
            with journal.read_anchor(anchor.version) as loaded:
                replica.load_anchor(loaded)
        state, reason = journal.read_state()
        if kept:
            assert state is not None, reason
            assert kept <= state.version <= info.next <= state.version + 1
    return info.next


def test_a_trainer_killed_at_10_random_points_loses_at_most_the_step_in_progress(tmp_path, basis):
    dice, folder, out = random.Random(1), tmp_path / "journal", tmp_path / "out"
    with new_journal(folder, segment_bytes=3000) as journal:
        Trainer(journal).anchor()
    deaths = {"time": 0, "call": 0}
    with Journal.open(folder) as reader:  # a subscriber that lives through it all
        subscriber = Subscriber(reader, Replica(make_blocks(kind="split")), "witness")
        for round_ in range(10):
            before = len(heard(out))
            countdown = dice.randrange(1, 120) if round_ % 2 else 0
            started = lambda before=before: len(heard(out)) > before + 1  # noqa: E731
            until = None if countdown else started
            code = run(
                train_for_ever,
                basis,
                str(folder),
                str(out),
                countdown,
                round_,
                until=until,
                seconds=dice.random() * 0.15,
            )
            assert code == -signal.SIGKILL
            deaths["call" if countdown else "time"] += 1
            newest = check_journal(folder, last_heard(out, "kept", "resumed"))
            ack = subscriber.sync()
            assert (ack.version, ack.digest) == (newest, digest_at(newest))
    assert deaths == {"time": 5, "call": 5} and newest > 12


@pytest.mark.usefixtures("basis")
def test_subscribers_killed_at_8_random_points_start_again_and_agree(tmp_path):
    dice, last = random.Random(2), 30
    memory = new_memory()
    with new_journal(tmp_path / "journal") as journal, serve(memory, TOKEN) as server:
        for log in (memory, journal):
            trainer = Trainer(log)
            trainer.train(last // 2)
            if log is journal:
                trainer.anchor()
            trainer.train(last - last // 2)
        for round_ in range(8):
            log, address = ((memory, server.url), (journal, str(journal.folder)))[round_ % 2]
            out = tmp_path / f"out{round_}"
            code = run(follow, address, str(out), last + 1, until=out.exists, seconds=dice.random() * 0.1)
            assert code == -signal.SIGKILL
            killed_at = log.acknowledgements()["child"]
            assert killed_at.error is None and killed_at.version >= last_heard(out, "at")
            if killed_at.digest is not None:
                assert killed_at.digest == digest_at(killed_at.version)
            assert run(follow, address, str(out), last) == 0  # a new process, from the base model, to the end
            assert heard(out)[-1] == ["digest", str(last), digest_at(last)]
            assert log.acknowledgements()["child"].digest == digest_at(last)


def test_a_disk_that_fills_up_at_random_bytes_in_8_rounds_loses_nothing(tmp_path, basis):
    folder, failures, kept = tmp_path / "journal", [], 0
    new_journal(folder, segment_bytes=3000).close()
    for round_ in range(8):
        out = tmp_path / f"out{round_}"
        assert run(train_with_little_room, basis, str(folder), str(out), round_, 6) == 0
        assert last_heard(out, "kept") >= kept + 6
        kept = last_heard(out, "kept")
        check_journal(folder, kept)
        failures += [line[2] for line in heard(out) if line[0] == "failed"]
    assert len(failures) > 20
    for kind in ("update_", "anchor_", "the_state_of_step"):
        assert any(text.startswith(kind) for text in failures)
