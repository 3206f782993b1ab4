"""Checkpoints: bit-identical, whole or absent, whoever dies when."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from logra import files
from logra.errors import CheckpointError, ConfigError
from logra.rl import checkpoint
from logra.rl.checkpoint import CheckpointStore, is_whole, restore_rng, rng_state

BOUNDARIES = ["created", "state.safetensors", "state.json", "model", "flushed", "manifest.json"]


def some_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 5, generator=generator), "b": torch.arange(7) + seed}


def write_model(folder):
    (folder / "weights.bin").write_bytes(b"w" * 100)
    (folder / "sub").mkdir()
    (folder / "sub" / "config.json").write_text("{}")


def save(store, step, **more):
    return store.save(step, tensors=some_tensors(step), state={"step": step}, write_model=write_model, **more)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype):
    source = torch.randint(0, 256, (240,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    values = (source[:120] % 2).bool() if dtype == torch.bool else source.view(dtype)
    shapes = {
        "vector": values[:15].clone(),
        "matrix": values[:12].clone().reshape(3, 4),
        "scalar": values[3].clone(),
        "empty": values[:0].clone(),
        "empty_2d": values[:0].clone().reshape(0, 4),
    }
    path = CheckpointStore(tmp_path).save(1, tensors=shapes, state={})
    loaded = CheckpointStore(tmp_path).load(path).tensors
    assert loaded.keys() == shapes.keys()
    for name, tensor in shapes.items():
        assert loaded[name].dtype == dtype and loaded[name].shape == tensor.shape
        assert raw_bytes(loaded[name]) == raw_bytes(tensor)  # bits, so NaN patterns count too


def test_views_transposes_and_shared_storages_are_stored_apart(tmp_path):
    base = torch.randn(6, 4)
    base.requires_grad_(True)
    tensors = {
        "whole": base,
        "same": base,
        "row": base[2],
        "t": base.T,
        "slice": base[1:3],
        "expand": base[:1].expand(3, 4),
    }
    loaded = CheckpointStore(tmp_path).load(CheckpointStore(tmp_path).save(3, tensors=tensors, state={})).tensors
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.detach())
    assert base.requires_grad


def test_round_trip_of_state_and_model_files(tmp_path):
    state = {
        "lr": 0.1,
        "text": "\u00e9\n",
        "none": None,
        "nested": {"list": [1, 2.5, "x", True]},
        "big": 2**63,
    }
    path = CheckpointStore(tmp_path).save(12, tensors={}, state=state, write_model=write_model)
    loaded = CheckpointStore(tmp_path).load(path)
    assert (loaded.step, loaded.state, loaded.tensors, loaded.path) == (12, state, {}, tmp_path / "step_12")
    assert (loaded.path / "model" / "weights.bin").read_bytes() == b"w" * 100
    modes = {file.stat().st_mode for file in loaded.path.rglob("*") if file.is_file() and file.name != "manifest.json"}
    assert len(modes) == 1


def test_loaded_tensors_outlive_their_file(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    loaded = store.load(save(store, 1))
    file = loaded.path / "state.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(loaded.tensors["a"], some_tensors(1)["a"])


@pytest.mark.parametrize("state", [{1: "int key"}, {"x": {2: 0}}, {"x": [torch.ones(1)]}, {"x": {1, 2}}], ids=str)
def test_state_that_json_would_change_is_refused_before_anything_is_written(tmp_path, state):
    with pytest.raises(TypeError, match="JSON"):
        CheckpointStore(tmp_path / "new").save(1, tensors={}, state=state)
    assert not (tmp_path / "new").exists()


def test_latest_is_by_number_and_none_without_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    assert store.latest() is None and store.steps() == {}
    for step in (9, 100, 20):
        save(store, step)
    assert store.latest() == tmp_path / "checkpoints" / "step_100"
    assert list(store.steps()) == [9, 20, 100]


def test_keep_counts_whole_checkpoints_only(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        save(store, step)
    assert names(tmp_path) == ["step_2", "step_3"]
    (tmp_path / "step_3" / "state.json").unlink()
    save(store, 4)
    assert names(tmp_path) == ["step_2", "step_3", "step_4"]  # 2 is still needed: 3 is damaged
    save(store, 5)
    assert names(tmp_path) == ["step_4", "step_5"]


def test_the_checkpoint_just_written_is_never_deleted(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 50)
    save(store, 10)
    assert names(tmp_path) == ["step_10"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_must_be_positive(tmp_path, keep):
    with pytest.raises(ConfigError, match="at least 1"):
        CheckpointStore(tmp_path, keep=keep)


def test_discard_after(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2, 3):
        save(store, step)
    assert store.discard_after(1) == [2, 3]
    assert names(tmp_path) == ["step_1"]


def test_an_existing_step_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    store.save(5, tensors={"new": torch.ones(2)}, state={"new": True})
    loaded = store.load(store.latest())
    assert loaded.state == {"new": True} and list(loaded.tensors) == ["new"]
    assert names(tmp_path) == ["step_5"] and not (loaded.path / "model").exists()


# Damage


def damage_cases():
    return {
        "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        "torn manifest": (
            lambda path: os.truncate(path / "manifest.json", 40),
            "manifest.json is unreadable",
        ),
        "not a manifest": (
            lambda path: (path / "manifest.json").write_text("[1]"),
            "manifest.json is unreadable",
        ),
        "empty manifest": (
            lambda path: (path / "manifest.json").write_text('{"format": 1, "step": 2, "files": {}}'),
            "does not describe",
        ),
        "truncated tensors": (
            lambda path: os.truncate(path / "state.safetensors", 50),
            "state.safetensors has 50 bytes",
        ),
        "missing state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        "missing model file": (
            lambda path: (path / "model/sub/config.json").unlink(),
            "model/sub/config.json is missing",
        ),
        "another step": (lambda path: swap_step(path), "does not describe"),
    }


def swap_step(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"step": 7}))


@pytest.mark.parametrize("case", damage_cases())
def test_incomplete_checkpoints_are_passed_over_and_reported(tmp_path, case):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2)
    assert is_whole(path)
    damage, message = damage_cases()[case]
    damage(path)
    assert not is_whole(path)
    latest, skipped = store.latest_with_report()
    assert latest == tmp_path / "step_1" == store.latest()
    assert len(skipped) == 1 and message in skipped[0] and "step_2" in skipped[0]
    with pytest.raises(CheckpointError, match=message) as raised:
        store.load(path)
    assert "resume" in str(raised.value)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "model/weights.bin"])
def test_a_flipped_bit_is_found_on_load(tmp_path, name):
    store = CheckpointStore(tmp_path)
    file = save(store, 1) / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    assert store.latest() is None
    with pytest.raises(CheckpointError, match=f"{name} has changed"):
        store.load(tmp_path / "step_1")


def test_unknown_format_and_missing_folder(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        store.load(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.load(tmp_path / "step_77")


def test_a_copy_under_another_name_loads(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 4).rename(tmp_path / "best")
    assert store.load(tmp_path / "best").step == 4
    assert store.latest() is None


# Writers that die

WRITERS = """
    # One interpreter imports torch; each writer is a fork of it. Arguments: folder, boundary, step, ...
    import os, signal, sys
    from pathlib import Path
    import torch
    from logra.rl import checkpoint

    def write(folder, boundary, step):
        def at(name):
            if name == boundary:
                os.kill(os.getpid(), signal.SIGKILL)

        def write_model(path):
            (path / "one").write_bytes(b"1" * 1000)
            at("inside model")
            (path / "two").write_bytes(b"2" * 1000)

        rename, renames = os.rename, []
        def counted(source, target):
            at(f"before rename {len(renames)}")
            rename(source, target)
            renames.append(target)

        checkpoint._at, os.rename = at, counted
        store = checkpoint.CheckpointStore(folder, keep=2)
        store.save(step, tensors={"a": torch.ones(9)}, state={"by": "writer"}, write_model=write_model)

    for folder, boundary, step in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
        child = os.fork()
        if child == 0:
            write(Path(folder), boundary, int(step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
"""


NEW = [*BOUNDARIES, "inside model", "before rename 0"]  # of step 3, beside 1 and 2
LATE = [
    "renamed",
    "before rename 1",
    "deleting",
    "deleted",
]  # of step 3: it is in place, step 1 is being deleted
SWAP = ["inside model", "before rename 0", "before rename 1", "renamed"]  # of another step 2


def test_a_killed_writer_costs_only_its_own_checkpoint(tmp_path):
    cases = [(boundary, 3) for boundary in NEW + LATE] + [(boundary, 2) for boundary in SWAP]
    folders = [tmp_path / str(index) for index in range(len(cases))]
    for folder in folders:
        save(CheckpointStore(folder), 1)
        save(CheckpointStore(folder), 2)
    arguments = [str(text) for folder, case in zip(folders, cases, strict=True) for text in (folder, *case)]
    command = [sys.executable, "-c", textwrap.dedent(WRITERS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [int(code) for code in done.stdout.split()] == [-signal.SIGKILL] * len(cases), done.stderr
    for folder, case in zip(folders, cases, strict=True):
        store = CheckpointStore(folder, keep=2)
        latest, skipped = store.latest_with_report()
        loaded = store.load(latest)
        expected = {"by": "writer"} if case in [("renamed", 2), *((at, 3) for at in LATE)] else {"step": 2}
        assert (skipped, loaded.state) == ([], expected), case
        save(store, 4)  # the next writer cleans up after the dead one
        assert names(folder) == [f"step_{loaded.step}", "step_4"], case


def test_clean_up_leaves_unknown_names_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    for name in ("step_1.tmp-0a1b2c3d", "step_2.del-00000000", "notes", "step_x", "step_1.tmp"):
        (tmp_path / name).mkdir()
    save(store, 3)
    assert names(tmp_path) == ["notes", "step_1.tmp", "step_3", "step_x"]


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path):
    store = CheckpointStore(tmp_path)

    def write_during_write(folder):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* is writing checkpoints"):
            save(CheckpointStore(tmp_path), 2)

    store.save(1, tensors={}, state={}, write_model=write_during_write)
    assert names(tmp_path) == ["step_1"]
    save(store, 2)


# Disks that fill up


def no_space():
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("step", [2, 3])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, monkeypatch, boundary, step):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)

    def fail(name):
        if name == boundary:
            raise no_space()

    monkeypatch.setattr(checkpoint, "_at", fail)
    with pytest.raises(CheckpointError, match=r"No space left on device.* need 116 bytes"):
        save(store, step)
    assert names(tmp_path) == ["step_1", "step_2"]
    assert store.load(store.latest()).state == {"step": 2}
    monkeypatch.undo()
    save(store, 3)


@pytest.mark.parametrize("call", range(12))
def test_a_failing_flush_leaves_the_earlier_checkpoints(tmp_path, monkeypatch, call):
    store = CheckpointStore(tmp_path)
    save(store, 2)
    calls = []

    def failing(handle, fsync=os.fsync):
        calls.append(handle)
        if len(calls) == call + 1:
            raise no_space()
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", failing)
    if call < 11:
        with pytest.raises(CheckpointError, match="No space left"):
            save(store, 3)
    else:
        save(store, 3)  # shows that 11 flushes are all there are
    monkeypatch.undo()
    latest = store.load(store.latest())
    assert latest.step in ((2,) if call < 10 else (2, 3))
    assert all(is_whole(path) for path in store.steps().values())


def test_a_real_write_limit(tmp_path, file_limit):
    """safetensors' own writer meets the limit, not a fake."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with file_limit(2048), pytest.raises(CheckpointError, match=r"step_2 could not be .* need 40,000 bytes"):
        store.save(2, tensors={"a": torch.ones(10_000)}, state={})
    with file_limit(2048), pytest.raises(CheckpointError, match="step_2 could not be written"):
        store.save(2, tensors={}, state={"long": "x" * 3000})
    assert names(tmp_path) == ["step_1"]
    assert store.load(store.latest()).step == 1


def test_any_other_failure_of_the_model_writer_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def broken(folder):
        (folder / "half").write_bytes(b"x")
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError):
        store.save(2, tensors={}, state={}, write_model=broken)
    assert names(tmp_path) == ["step_1"]
    save(store, 2)  # and the lock is free again


def test_a_file_in_the_way_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot write checkpoints into"):
        save(CheckpointStore(tmp_path / "file"), 1)


def test_undeletable_old_checkpoints_do_not_fail_the_save(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def refuse(path):
        raise PermissionError("no")

    monkeypatch.setattr(checkpoint, "_delete", refuse)
    assert save(store, 2) == tmp_path / "step_2"
    assert "could not delete the old checkpoint" in caplog.text


# Random numbers


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(3).tolist()


def test_rng_round_trip_through_a_checkpoint(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.randn()  # leaves a cached second gaussian in both
    tensors, state = rng_state()
    expected = draw()
    path = CheckpointStore(tmp_path).save(1, tensors=tensors | {"other": torch.ones(1)}, state={"rng": state})
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert draw() != expected
    loaded = CheckpointStore(tmp_path).load(path)
    assert restore_rng(loaded.tensors, loaded.state["rng"]) == []
    assert draw() == expected


@pytest.mark.parametrize("part", ["rng.python", "rng.numpy", "rng.torch"])
def test_incomplete_rng_state_changes_nothing(part):
    tensors, state = rng_state()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    for broken in ({k: v for k, v in tensors.items() if k != part}, tensors | {part: tensors[part][:5]}):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        expected = draw()
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        with pytest.raises(CheckpointError, match="incomplete"):
            restore_rng(broken, state)
        assert draw() == expected
    with pytest.raises(CheckpointError, match="incomplete"):
        restore_rng(tensors, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts the report of a missing device")
def test_rng_of_a_device_that_is_not_here_is_reported():
    tensors, state = rng_state()
    missing = restore_rng(tensors | {"rng.cuda.0": torch.zeros(16, dtype=torch.uint8)}, state)
    assert len(missing) == 1 and "CUDA device 0" in missing[0]
