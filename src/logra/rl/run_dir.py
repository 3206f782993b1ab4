"""The folder of one run: who may write it, its configuration, its metrics, its completions.

    config.yaml  metrics.jsonl  completions/step_NNNNNN.parquet  memory/step_NNNNNN.json  checkpoints/  journal/  final/
    report.html

Only `config.yaml`, `metrics.jsonl`, `completions/` and the lock are written here; the names of the others are
kept here so that all modules agree.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from logra.errors import CheckpointError, ConfigError, UserError
from logra.files import FileLock, write_atomic
from logra.rl.checkpoint import MANIFEST, CheckpointStore
from logra.rl.types import Rollout

UNUSED_JOURNAL = re.compile(r"header\.json|acks|anchor_.*")  # what is in that of a start that made no update
# A folder with one of these holds something worth keeping: it is a run.
RESULTS = ("metrics.jsonl", "completions", "checkpoints", "journal", "final", "report.html")


class RunDir:
    """Paths and ownership of one run folder. Usable as a context manager around `open` and `close`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.completions = self.path / "completions"
        self.memory = self.path / "memory"
        self.checkpoints = self.path / "checkpoints"
        self.journal = self.path / "journal"
        self.final = self.path / "final"
        self.report = self.path / "report.html"
        self.skipped: list[str] = []
        self.verified: Path | None = None  # a checkpoint whose hashes `open` has compared
        self._lock = FileLock(self.path / ".lock")

    def open(self, resume: str | Path = "never") -> Path | None:
        """Create and lock the folder; returns the checkpoint to resume from, or None to start from the
        beginning.

        resume: "never" refuses a folder that holds a run; "auto" takes its newest usable checkpoint, or None
        where there is none yet (what was passed over is in `skipped`); a path names a `step_N` folder or a
        run folder.
        Raises ConfigError if the folder holds a run and may not, or another process writes it;
        CheckpointError if the named checkpoint does not exist. Does not check that the checkpoint belongs to
        this configuration.
        """
        self._acquire()
        try:
            return self._resume_from(resume)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def holds_run(self) -> bool:
        """Whether there is a result of an earlier run here; a configuration, or a journal without updates, is none."""
        for path in (self.path / name for name in RESULTS):
            if path.is_dir():
                names = {p.name for p in path.iterdir()} - {".lock"}
                unused = path == self.journal and all(UNUSED_JOURNAL.fullmatch(name) for name in names)
                if names and not unused:
                    return True
            elif path.is_file() and path.stat().st_size > 0:
                return True
        return False

    def write_config(self, text: str) -> None:
        """Replace `config.yaml`. Raises UserError if the disk is full."""
        try:
            write_atomic(self.config, text.encode())
        except OSError as error:
            raise UserError(
                f"cannot write {self.config}: {error}. Free some space, or choose another output_dir"
            ) from error

    def rewind(self, step: int) -> None:
        """Drop what was written of steps after `step` (-1: all), which a resumed run is about to do again."""
        MetricsWriter(self.metrics).truncate(step)
        for folder, suffix in ((self.completions, "parquet"), (self.memory, "json")):
            for path in folder.glob(f"step_*.{suffix}"):
                number = path.stem.removeprefix("step_")
                if number.isdigit() and int(number) > step:
                    path.unlink()
            for path in folder.glob(f".step_*.{suffix}.tmp-*"):  # of a writer that was killed
                path.unlink()

    def _acquire(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path} is being written by {error.strerror}: wait for it, stop it, or choose another output_dir"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {self.path}: {error}. Choose another output_dir") from error

    def _resume_from(self, resume: str | Path) -> Path | None:
        if resume == "auto" or (resume != "never" and Path(resume).resolve() == self.path.resolve()):
            self.verified, self.skipped = CheckpointStore(self.checkpoints).latest_with_report()
            return self.verified
        checkpoint = None if resume == "never" else find_checkpoint(Path(resume))
        own = checkpoint is not None and checkpoint.resolve().is_relative_to(self.path.resolve())
        if not own and self.holds_run():
            raise ConfigError(
                f"{self.path} already holds a run: choose another output_dir, or continue it with resume=auto"
            )
        return checkpoint


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by `path`: a checkpoint folder, or the newest usable one of a run folder."""
    if (path / MANIFEST).is_file():
        return path
    latest, skipped = CheckpointStore(path / "checkpoints").latest_with_report()
    if latest is None:
        passed_over = " ".join(f"Passed over: {reason}." for reason in skipped)
        raise CheckpointError(
            f"resume={path} is neither a checkpoint (a step_N folder with {MANIFEST}) nor a run folder with "
            f"a usable checkpoint. {passed_over}".rstrip()
        )
    return latest


class MetricsWriter:
    """`metrics.jsonl`: one JSON object a line, flushed as it is written. Opening repairs a torn last line."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._drop_torn_line()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record: numbers, strings, booleans, None, lists and dicts of them, one-element tensors.

        NaN and infinities become null, since JSON has none. Raises UserError if the disk is full; no part of
        the line stays then.
        """
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, size)
            raise UserError(
                f"cannot write metrics to {self.path}: {error}. Free some space and resume the run"
            ) from error

    def truncate(self, step: int) -> int:
        """Drop the lines of steps after `step` and unreadable lines; returns how many. Atomic."""
        if not self.path.exists():
            return 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        parsed = [(line, _parse(line)) for line in lines]
        kept = [line for line, record in parsed if record is not None and not _is_after(record, step)]
        if len(kept) < len(lines):
            write_atomic(self.path, b"".join(kept))
        return len(lines) - len(kept)

    def _drop_torn_line(self) -> None:
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, possibly of a run in progress: unreadable lines are left out."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The same, one at a time: those of a long run take several hundred MB together."""
    with Path(path).open("rb") as file:
        for line in file:
            if (record := _parse(line)) is not None:
                yield record


class CompletionsWriter:
    """`completions/step_NNNNNN.parquet`: every rollout of a step with its rewards and advantage."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        reward: Sequence[float | None],
        rewards: Mapping[str, Sequence[float | None]],
        advantage: Sequence[float | None],
    ) -> Path:
        """Write one file, replacing one of the same step; all sequences are aligned with `rollouts`.

        Columns: step, prompt_id, rollout, prompt (chat messages as JSON), completion, reward, `rewards/NAME`
        for each reward function, advantage, num_tokens, stop, version.
        """
        path = self.folder / f"step_{step:06d}.parquet"
        data = io.BytesIO()
        pyarrow.parquet.write_table(
            pyarrow.table(_columns(step, rollouts, reward, rewards, advantage)), data, compression="zstd"
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data.getvalue())
        except OSError as error:
            raise UserError(
                f"cannot write completions to {path}: {error}. Free some space and resume the run"
            ) from error
        return path


def _columns(
    step: int,
    rollouts: Sequence[Rollout],
    reward: Sequence[float | None],
    rewards: Mapping[str, Sequence[float | None]],
    advantage: Sequence[float | None],
) -> dict[str, pyarrow.Array]:
    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    columns = {
        "step": ([step] * len(rollouts), whole),
        "prompt_id": ([r.prompt.id for r in rollouts], whole),
        "rollout": ([r.index for r in rollouts], whole),
        "prompt": ([_text(r.prompt.content) for r in rollouts], text),
        "completion": ([_text(r.text) for r in rollouts], text),
        "reward": (list(reward), real),
        **{f"rewards/{name}": (list(values), real) for name, values in rewards.items()},
        "advantage": (list(advantage), real),
        "num_tokens": ([len(r.token_ids) for r in rollouts], whole),
        "stop": ([r.stop for r in rollouts], text),
        "version": ([r.version for r in rollouts], whole),
    }
    for name, (values, _) in columns.items():
        if len(values) != len(rollouts):
            raise ValueError(f"column {name} has {len(values)} values for {len(rollouts)} rollouts")
    return {name: pyarrow.array(values, type=kind) for name, (values, kind) in columns.items()}


def _text(content: str | list[dict[str, str]]) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # data sets may hold lone surrogates, parquet may not


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it. Objects with `.item()` are tensors and numpy numbers."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if callable(getattr(value, "item", None)):
        return _plain(value.item())
    raise TypeError(f"cannot write a {type(value).__name__} as a metric")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_after(record: Mapping[str, Any], step: int) -> bool:
    number = record.get("step")
    return isinstance(number, int | float) and number > step
