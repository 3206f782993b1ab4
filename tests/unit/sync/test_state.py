"""The trainer's state beside the journal: whole, or absent with a reason."""

import errno
import os

import pytest
import torch

from logra.errors import UpdateError, UpdateOrderError
from logra.sync import Journal
from sync_kit import Trainer, make_update, new_journal

TENSORS = {
    "m": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "rng": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 4),
    "view": torch.arange(12.0).reshape(3, 4).t(),
}
VALUES = {"lr": 0.1 + 0.2, "order": [3, 1, 2], "b": None, "a": "text"}


@pytest.fixture
def journal(tmp_path):
    with new_journal(tmp_path / "journal") as journal:
        yield journal


def write(journal, step: int, **tensors) -> None:
    journal.write_state(step, journal.next, TENSORS | tensors, VALUES)


def test_there_is_none_at_first(journal):
    found, reason = journal.read_state()
    assert found is None and "does not exist" in reason


def test_the_state_comes_back_bit_for_bit(journal):
    trainer = Trainer(journal)
    trainer.train(2)
    write(journal, 2)
    trainer.train(1)
    write(journal, 4, m=TENSORS["m"] + 1)
    found, reason = journal.read_state()
    assert reason == "" and (found.step, found.version, found.values) == (4, 3, VALUES)
    assert list(found.values) == list(VALUES)
    for name, tensor in (TENSORS | {"m": TENSORS["m"] + 1}).items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)
    assert len(list(journal.folder.glob("state_*.safetensors"))) == 1
    with pytest.raises(UpdateOrderError, match="the journal is at 3"):
        journal.write_state(5, 4, {}, {})


def test_damage_is_a_reason_not_an_error(journal):
    Trainer(journal).train(1)
    write(journal, 1)
    for path in (journal.folder / "state.json", next(journal.folder.glob("state_*.safetensors"))):
        whole = path.read_bytes()
        for place in range(0, len(whole), 13):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            found, reason = journal.read_state()
            assert found is None and reason, place
        path.write_bytes(whole[: len(whole) // 2])
        assert journal.read_state()[0] is None
        path.write_bytes(whole)
        assert journal.read_state()[0] is not None
        path.unlink()
        assert "does not exist" in journal.read_state()[1]
        path.write_bytes(whole)


def test_a_state_that_the_journal_does_not_reach_is_not_used(journal):
    trainer = Trainer(journal)
    trainer.train(3)
    write(journal, 3)
    journal.truncate(2)
    assert journal.read_state() == (None, "the state is of version 3, the journal ends at 2")
    trainer.publisher.publish(make_update(2, salt=5), 3)  # the same version, another way
    found, reason = journal.read_state()
    assert found is None and "another branch" in reason


def test_updates_after_the_state_are_no_hindrance(journal):
    trainer = Trainer(journal)
    trainer.train(1)
    write(journal, 1)
    trainer.train(1)
    found, _ = journal.read_state()
    assert found.version == 1 and journal.next == 2
    with Journal.open(journal.folder) as reader:
        assert reader.read_state()[0].version == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_older_state(journal, monkeypatch, call):
    trainer = Trainer(journal)
    trainer.train(1)
    write(journal, 1)
    trainer.train(1)

    def fail(*args):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(UpdateError, match=r"state of step 2 .*no space.*older one stays"):
            write(journal, 2)
    assert journal.read_state()[0].step == 1
    assert len(list(journal.folder.glob("*state_*"))) == 1
    write(journal, 2)
    assert journal.read_state()[0].step == 2


def test_values_that_json_cannot_hold_are_an_error(journal):
    with pytest.raises(TypeError):
        journal.write_state(1, 0, {}, {"x": object()})
    with pytest.raises(UpdateError, match="cannot be stored"):
        journal.write_state(1, 0, {"x": torch.zeros(2, dtype=torch.complex64)}, {})
    assert not list(journal.folder.glob("state*"))
