"""Run folders: one owner, nothing overwritten in silence, files that are whole."""

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pyarrow.parquet
import pytest
import torch

from logra.errors import CheckpointError, ConfigError, UserError
from logra.rl import run_dir
from logra.rl.checkpoint import CheckpointStore
from logra.rl.run_dir import CompletionsWriter, MetricsWriter, RunDir, iterate_metrics, read_metrics
from logra.rl.types import Prompt, Rollout


def checkpoint(run, step):
    return CheckpointStore(run.checkpoints, keep=None).save(step, tensors={"a": torch.ones(1)}, state={})


# Opening


def test_a_new_folder_is_created(tmp_path):
    with RunDir(tmp_path / "runs" / "one") as run:
        assert run.open() is None
        run.write_config("seed: 1\n")
        run.write_config("seed: 2\n")
        assert run.config.read_text() == "seed: 2\n"
        assert sorted(path.name for path in run.path.iterdir()) == [".lock", "config.yaml"]


@pytest.mark.parametrize("result", ["metrics", "completions", "checkpoints", "journal", "final", "report"])
def test_a_folder_with_a_run_is_never_taken_in_silence(tmp_path, result):
    run = RunDir(tmp_path / "run")
    path = getattr(run, result)
    if path.suffix:
        path.parent.mkdir()
        path.write_text("x")
    else:
        path.mkdir(parents=True)
        (path / "file").touch()
    with pytest.raises(ConfigError, match="choose another output_dir, or continue it with resume=auto"):
        run.open(resume="never")
    with pytest.raises(ConfigError, match="another output_dir"):  # and the lock is free: not "process N"
        RunDir(tmp_path / "run").open()


def test_a_configuration_and_empty_folders_are_no_run(tmp_path):
    run = RunDir(tmp_path)
    run.write_config("seed: 1\n")
    run.checkpoints.mkdir()
    run.metrics.touch()
    (tmp_path / "notes.txt").write_text("mine")
    assert not run.holds_run()
    assert run.open() is None
    run.close()


def test_auto_takes_the_newest_usable_checkpoint_and_tells_what_it_passed_over(tmp_path):
    run = RunDir(tmp_path)
    assert run.open(resume="auto") is None
    checkpoint(run, 5)
    (checkpoint(run, 10) / "state.json").unlink()
    run.close()
    assert run.open(resume="auto") == tmp_path / "checkpoints" / "step_5"
    assert len(run.skipped) == 1 and "step_10" in run.skipped[0]
    run.close()


def test_a_path_may_be_a_checkpoint_or_a_run(tmp_path):
    old, new = RunDir(tmp_path / "old"), RunDir(tmp_path / "new")
    five, ten = checkpoint(old, 5), checkpoint(old, 10)
    for resume, expected in ((five, five), (str(five), five), (old.path, ten)):
        with new:
            assert new.open(resume=resume) == expected
    with old:
        assert old.open(resume=five) == five  # its own checkpoint: the run goes on
    new.metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        new.open(resume=five)
    for wrong in (tmp_path / "nowhere", tmp_path / "new"):
        with pytest.raises(CheckpointError, match="neither a checkpoint"):
            RunDir(tmp_path / "third").open(resume=wrong)


def test_an_unwritable_place_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Choose another output_dir"):
        RunDir(tmp_path / "file" / "run").open()


def test_two_owners_are_refused_by_name(tmp_path):
    with RunDir(tmp_path) as run:
        run.open()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .*choose another output_dir"):
            RunDir(tmp_path).open(resume="auto")
    with RunDir(tmp_path) as again:
        again.open()


def test_the_lock_ends_with_its_process_even_if_a_forked_worker_lives_on(tmp_path):
    code = """
        import os, signal, sys
        from logra.rl.run_dir import RunDir
        run = RunDir(sys.argv[1])
        run.open()
        worker = os.fork()
        if worker == 0:
            os.close(1)
            signal.pause()
        print(worker, flush=True)
        signal.pause()
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    worker = int(trainer.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f"process {trainer.pid} on"):
            RunDir(tmp_path).open()
        trainer.kill()
        trainer.wait(timeout=10)
        os.kill(worker, 0)  # still there
        with RunDir(tmp_path) as run:
            run.open()
    finally:
        trainer.kill()
        trainer.stdout.close()
        os.kill(worker, 9)


# Metrics


def test_metrics_are_there_line_by_line(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    records = []
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5, "name": "\u00e9\n", "flag": True, "none": None, "list": [1, 2.0]})
        records.append({"step": step, "loss": 0.5, "name": "\u00e9\n", "flag": True, "none": None, "list": [1, 2.0]})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == records


def test_numbers_of_all_kinds(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write(
        {
            "nan": math.nan,
            "inf": -math.inf,
            "tensor": torch.tensor(1.5),
            "nan_tensor": torch.tensor(math.nan),
            "int_tensor": torch.tensor([3]),
            "np": np.float32(0.25),
            "np_int": np.int64(7),
            "np_bool": np.bool_(True),
            "deep": {"x": [np.float64("inf")]},
        }
    )
    strict = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda text: pytest.fail(text))
    assert strict == {
        "nan": None,
        "inf": None,
        "tensor": 1.5,
        "nan_tensor": None,
        "int_tensor": 3,
        "np": 0.25,
        "np_int": 7,
        "np_bool": True,
        "deep": {"x": [None]},
    }


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x"], ids=["object", "set", "bytes"])
def test_other_values_are_refused_and_leave_no_line(tmp_path, value):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="metric"):
        writer.write({"step": 1, "x": value})
    assert not (tmp_path / "m.jsonl").exists()


def test_opening_drops_a_torn_last_line(tmp_path):
    path = tmp_path / "m.jsonl"
    for torn in ('{"step": 1}\n{"step": 2, "lo', '{"step": 1}\n{"step": 2}'):
        path.write_text(torn)
        assert read_metrics(path) == [{"step": 1}]
        MetricsWriter(path).write({"step": 2, "again": True})
        assert read_metrics(path) == [{"step": 1}, {"step": 2, "again": True}]
    path.write_text('{"st')
    MetricsWriter(path)
    assert path.read_bytes() == b""


def test_truncate_drops_later_and_unreadable_lines_only(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [
        '{"step": 1}',
        '{"event": "start"}',
        '{"step": 2, "x": 0.5}',
        "rubbish",
        '{"step": 3}',
        '{"step": 2}',
    ]
    path.write_text("\n".join([*lines, '{"st']))
    writer = MetricsWriter(path)
    assert writer.truncate(2) == 2
    assert read_metrics(path) == [
        {"step": 1},
        {"event": "start"},
        {"step": 2, "x": 0.5},
        {"step": 2},
    ]
    before = path.stat().st_ino
    assert writer.truncate(2) == 0 and path.stat().st_ino == before
    assert writer.truncate(0) == 3
    assert MetricsWriter(tmp_path / "other.jsonl").truncate(1) == 0


def test_a_full_disk_leaves_whole_lines(tmp_path, file_limit):
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    written = 0
    with file_limit(1000), pytest.raises(UserError, match="Free some space"):
        for step in range(100):
            writer.write({"step": step, "text": "x" * 83})
            written += 1
    assert 5 < written < 15
    assert path.read_bytes().count(b"\n") == written == len(read_metrics(path))


def test_a_failing_rewrite_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    writer = MetricsWriter(path)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        writer.truncate(1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


# Completions


def rollout(index, content="1+1=", text="2"):
    prompt = Prompt(id=7, content=content, token_ids=(5, 6))
    return Rollout(prompt, index, (8, 1), (-0.1, -0.2), "eos", text, version=3)


def test_completions_have_every_column(tmp_path):
    chat = [{"role": "user", "content": "caf\u00e9?"}]
    rollouts = [rollout(0), rollout(1, content=chat, text="bad \ud800 text")]
    path = CompletionsWriter(tmp_path / "completions").write(
        12,
        rollouts,
        reward=[1.0, None],
        rewards={"exact": [1.0, None], "step": [0.5, math.nan]},
        advantage=[0.7, 0.0],
    )
    assert path == tmp_path / "completions" / "step_000012.parquet"
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == [
        "step",
        "prompt_id",
        "rollout",
        "prompt",
        "completion",
        "reward",
        "rewards/exact",
        "rewards/step",
        "advantage",
        "num_tokens",
        "stop",
        "version",
    ]
    first, second = table.to_pylist()
    assert first == {
        "step": 12,
        "prompt_id": 7,
        "rollout": 0,
        "prompt": "1+1=",
        "completion": "2",
        "reward": 1.0,
        "rewards/exact": 1.0,
        "rewards/step": 0.5,
        "advantage": 0.7,
        "num_tokens": 2,
        "stop": "eos",
        "version": 3,
    }
    assert json.loads(second["prompt"]) == chat and "caf\u00e9" in second["prompt"]
    assert second["completion"] == "bad ? text" and second["reward"] is None
    assert math.isnan(second["rewards/step"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_columns_have_the_same_types_without_any_row(tmp_path):
    writer = CompletionsWriter(tmp_path)
    full = writer.write(1, [rollout(0)], reward=[1.0], rewards={"f": [1]}, advantage=[0.0])
    empty = writer.write(2, [], reward=[], rewards={"f": []}, advantage=[])
    assert pyarrow.parquet.read_schema(full) == pyarrow.parquet.read_schema(empty)


@pytest.mark.parametrize("name", ["reward", "rewards/f", "advantage"])
def test_misaligned_columns_are_refused_by_name(tmp_path, name):
    columns = {"reward": [1.0], "rewards/f": [1.0], "advantage": [1.0]} | {name: [1.0, 2.0]}
    with pytest.raises(ValueError, match=f"column {name} has 2 values for 1 rollouts"):
        CompletionsWriter(tmp_path).write(
            1,
            [rollout(0)],
            reward=columns["reward"],
            rewards={"f": columns["rewards/f"]},
            advantage=columns["advantage"],
        )
    assert list(tmp_path.iterdir()) == []


def test_completions_on_a_full_disk(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir, "write_atomic", full)
    with pytest.raises(UserError, match="Free some space"):
        CompletionsWriter(tmp_path).write(1, [rollout(0)], reward=[1.0], rewards={}, advantage=[0.0])


def test_rewind_drops_what_will_be_done_again(tmp_path):
    run = RunDir(tmp_path)
    run.rewind(3)  # nothing there yet
    for step in (1, 3, 4):
        MetricsWriter(run.metrics).write({"step": step})
        CompletionsWriter(run.completions).write(step, [rollout(0)], reward=[1.0], rewards={}, advantage=[0.0])
    (run.completions / ".step_000005.parquet.tmp-00ff").touch()
    (run.completions / "step_notes.parquet").touch()
    run.memory.mkdir()
    for name in ("step_000002.json", "step_000004.json", "notes.json", ".step_000003.json.tmp-00ff"):
        (run.memory / name).touch()
    run.rewind(3)
    assert sorted(path.name for path in run.memory.iterdir()) == ["notes.json", "step_000002.json"]
    assert read_metrics(run.metrics) == [{"step": 1}, {"step": 3}]
    assert sorted(path.name for path in run.completions.iterdir()) == [
        "step_000001.parquet",
        "step_000003.parquet",
        "step_notes.parquet",
    ]


def test_metrics_of_a_long_run_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps({"step": n, "text": "x" * 500}).encode() + b"\n" for n in range(4000)))
    tracemalloc.start()
    try:
        assert sum(record["step"] for record in iterate_metrics(path)) == 4000 * 3999 // 2
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4
