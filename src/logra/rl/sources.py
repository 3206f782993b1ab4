"""Rows of a data set from wherever it lies: a file, a saved folder, the Hugging Face hub, or reasoning-gym.

Rows stay in the form they came in (raw JSON lines, Arrow) and become Python objects one at a time. The heavy
packages are imported by the loader that needs them. `load_rows` is the way in.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from logra.errors import DataError
from logra.hashing import derive_key
from logra.rl.data import ListRows, Row, Rows, new_digest, union_of_columns, update_digest

if TYPE_CHECKING:
    import datasets

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
GENERATED = "reasoning_gym:"
# Measured on reasoning-gym 0.1.25: their questions change with PYTHONHASHSEED (they iterate over sets).
HASH_ORDER_TASKS = frozenset(
    [
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    ]
)


class JsonLinesRows(Rows):
    """Rows from JSON Lines, kept as bytes and parsed on access. DataError names the first bad line."""

    def __init__(self, data: bytes, origin: str) -> None:
        self.fingerprint = new_digest(data).hexdigest()
        numbered = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        lines = [(number, line) for number, line in numbered if line.strip()]
        self._lines = [line for _, line in lines]
        is_cut = bool(lines) and not data.endswith(b"\n")
        self.columns = union_of_columns(
            _parse_line(line, number, origin, is_cut and line is lines[-1][1]) for number, line in lines
        )

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        return dict.fromkeys(self.columns) | json.loads(self._lines[index])


class DatasetRows(Rows):
    """Rows from a `datasets.Dataset`, which decodes them from Arrow one at a time."""

    def __init__(self, dataset: datasets.Dataset, fingerprint: str | None = None) -> None:
        self._dataset = dataset
        self.columns = tuple(dataset.column_names)
        self.fingerprint = fingerprint or dataset._fingerprint  # there is no public name for it

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return self._dataset[index]

    def __iter__(self) -> Iterator[Row]:
        return cast(Iterator[Row], iter(self._dataset))


class GeneratedRows(Rows):
    """Rows from a reasoning-gym task, each made when first asked for, then kept.

    Columns: question, answer (may be None: then only the task's scorer can judge), metadata, task (the name
    by which `reasoning_gym.get_score_answer_fn` finds the scorer), entry (whole, as that scorer takes it).
    """

    columns = ("question", "answer", "metadata", "task", "entry")
    default_prompt = "question"
    default_answer = "answer"

    def __init__(self, generator: Any, task: str, recipe: Any) -> None:
        """recipe: everything the entries depend on; it is what the fingerprint covers."""
        self._generator = generator
        self._task = task
        self._entries: list[Row | None] = [None] * len(generator)
        digest = new_digest()
        update_digest(digest, recipe)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]
        entry = self._entries[index] = self._entries[index] or self._generate(index)
        task = entry["metadata"].get("source_dataset", self._task)
        return {**{key: entry[key] for key in self.columns[:3]}, "task": task, "entry": entry}

    def _generate(self, index: int) -> Row:
        try:
            with _own_random_state(derive_key("reasoning_gym", self.fingerprint, index)):
                return self._generator[index]
        except _GENERATOR_ERRORS as error:
            raise DataError(
                f"reasoning-gym task {self._task!r} could not make its entry {index} ({_describe(error)}): "
                "change data.params, the seed or the size"
            ) from error


_GENERATOR_ERRORS = (
    AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def load_rows(
    name: str,
    *,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    size: int | None = None,
) -> Rows:
    """Open a data set.

    name: `reasoning_gym:TASK`; a .jsonl, .json or .parquet file; a folder written by `save_to_disk`; or the
        name of a data set on the Hugging Face hub (from the local cache when HF_HUB_OFFLINE is set).
    split: of a hub data set or saved folder. A file or a generated task has the one split "train".
    subset, revision: of a hub data set only.
    params, size, seed: of a generated task only (an unused seed is not an error; size None: the task's 500).

    Raises DataError if there is no such data, it cannot be read, it is empty, or an option does not apply.
    """
    is_generated = name.startswith(GENERATED)
    is_local = not is_generated and _is_path(name)
    if not is_generated:
        _refuse(name, "is only for reasoning_gym: data (to use fewer rows, set a limit)", params=params, size=size)
    if is_generated or is_local:
        _refuse(name, "is only for data sets on the Hugging Face hub", subset=subset, revision=revision)
    if is_generated:
        _require_train_split(name, split)
        rows = _load_generated(name.removeprefix(GENERATED), dict(params or {}), seed, size)
    elif is_local:
        rows = _load_path(Path(name).expanduser(), split)
    else:
        rows = _load_hub(name, split, subset, revision)
    if len(rows) == 0:
        raise DataError(f"the data set {name!r} holds no rows")
    return rows


def _refuse(name: str, why: str, **options: Any) -> None:
    for option, value in options.items():
        if value not in (None, {}):
            raise DataError(f"data set {name!r}: {option}={value!r} {why}: remove it")


def _require_train_split(name: str, split: str) -> None:
    if split != "train":
        raise DataError(
            f"data set {name!r} has no split {split!r}, only 'train': for held-out data name another file, "
            "or another seed of a generated task"
        )


def _is_path(name: str) -> bool:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    return looks_local or Path(name).suffix in FILE_SUFFIXES or Path(name).exists()


def _load_path(path: Path, split: str) -> Rows:
    if path.is_dir():
        return _load_folder(path, split)
    if not path.exists():
        raise DataError(f"no such file or folder: {str(path)!r} (relative to {str(Path.cwd())!r})")
    readers = {".jsonl": _read_json_lines, ".json": _read_json, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"cannot read {str(path)!r}: use a {', '.join(FILE_SUFFIXES)} file or a saved data set folder")
    _require_train_split(str(path), split)
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {_describe(error)}") from error


def _read_json_lines(path: Path) -> Rows:
    return JsonLinesRows(path.read_bytes(), str(path))


def _read_json(path: Path) -> Rows:
    data = path.read_bytes()
    try:
        rows = json.loads(data)
    except ValueError as error:
        if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return JsonLinesRows(data, str(path))  # many files named .json hold JSON Lines
        raise DataError(f"{str(path)!r} is not valid JSON, or was cut off while written: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{str(path)!r} holds one {type(rows).__name__}: make it a list of objects, or use JSON Lines")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{str(path)!r}: entry {index} is {_shorten(row)}, not an object with the columns as keys")
    return ListRows(rows)


def _read_parquet(path: Path) -> Rows:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        dataset = datasets.Dataset(pyarrow.parquet.read_table(path))
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(
            f"{str(path)!r} is not a complete Parquet file ({_describe(error)}): write or download it again"
        ) from error
    with path.open("rb") as file:
        return DatasetRows(dataset, hashlib.file_digest(file, new_digest).hexdigest())


def _load_folder(path: Path, split: str) -> Rows:
    import datasets
    import pyarrow

    try:
        loaded = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        is_saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
        found = [] if is_saved else sorted(str(p) for s in FILE_SUFFIXES for p in path.rglob(f"*{s}"))
        raise DataError(
            f"the folder {str(path)!r} is not a complete save_to_disk data set ({_describe(error)}): "
            + (f"name one of its files, for example {found[:5]}" if found else "save or copy it again")
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"the data set {str(path)!r} has no split {split!r}: it has {sorted(loaded)}")
        return DatasetRows(loaded[split])
    if split not in ("train", str(loaded.split)):
        raise DataError(
            f"the data set {str(path)!r} was saved without splits, so there is no {split!r}: leave split out"
        )
    return DatasetRows(loaded)


def _load_hub(name: str, split: str, subset: str | None, revision: str | None) -> Rows:
    import datasets
    import pyarrow
    from datasets.exceptions import DatasetsError

    errors = (OSError, ValueError, RuntimeError, DatasetsError, pyarrow.ArrowException)
    try:
        loaded = datasets.load_dataset(name, subset, split=split, revision=revision)
    except errors as error:
        asked = ", ".join(f"{k} {v!r}" for k, v in (("subset", subset), ("split", split), ("revision", revision)) if v)
        raise DataError(
            f"cannot load the data set {name!r} ({asked}) from the Hugging Face hub: "
            f"{_describe(error)}. {_hub_fix(error)}"
        ) from error
    return DatasetRows(loaded)


def _hub_fix(error: Exception) -> str:
    import huggingface_hub
    from datasets.exceptions import DatasetNotFoundError

    if isinstance(error, ConnectionError) and huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set and the local cache lacks the data: unset it, or load once while online"
    if isinstance(error, ConnectionError):
        return "Check the network, or name a local file or folder"
    if isinstance(error, DatasetNotFoundError):
        return "Check the spelling, log in (`hf auth login`) if it is gated, or name a local file or folder"
    return "Check the subset and split names, or name a local file or folder"


def _load_generated(task: str, params: dict[str, Any], seed: int, size: int | None) -> Rows:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("reasoning_gym: data needs the reasoning-gym package: pip install 'logra[tasks]'") from error
    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}{_nearest(task, DATASETS)}")
    _check_params(task, params, DATASETS[task][1])
    options = {"seed": seed} if size is None else {"seed": seed, "size": size}
    recipe = {"version": reasoning_gym.__version__, "task": task, "params": params, **options}
    if task == "composite":
        params = {**params, "datasets": _composite_specs(params.get("datasets"))}
    try:
        with _own_random_state(seed):
            generator = reasoning_gym.create_dataset(task, **params, **options)
    except _GENERATOR_ERRORS as error:
        raise DataError(
            f"reasoning-gym task {task!r} refuses {recipe['params']!r} with {options}: {_describe(error)}"
        ) from error
    return GeneratedRows(generator, task, recipe)


def _check_params(task: str, params: dict[str, Any], config: type) -> None:
    _require_fixed_hashing(task)
    valid = {field.name for field in fields(config)} - {"seed", "size"}
    for param in params:
        if param in ("seed", "size"):
            raise DataError(f"reasoning-gym task {task!r}: give {param} beside params, not in it")
        if param not in valid:
            raise DataError(f"reasoning-gym task {task!r} has no parameter {param!r}{_nearest(param, valid)}")


def _composite_specs(specs: Any) -> list[Any]:
    """The parts of the `composite` task, given as dicts with name, weight (default 1) and params."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if not isinstance(specs, list) or not all(isinstance(spec, dict) and "name" in spec for spec in specs):
        raise DataError("reasoning-gym task 'composite' needs params.datasets: a list of {name, weight, params}")
    for spec in specs:
        if wrong := spec.keys() - {"name", "weight", "params"}:
            raise DataError(
                f"a part of the 'composite' task has unknown keys {sorted(wrong)}: use name, weight, params"
            )
        if spec["name"] not in DATASETS:
            raise DataError(f"reasoning-gym has no task {spec['name']!r}{_nearest(spec['name'], DATASETS)}")
        _check_params(spec["name"], spec.get("params", {}), DATASETS[spec["name"]][1])
    return [DatasetSpec(spec["name"], spec.get("weight", 1.0), dict(spec.get("params", {}))) for spec in specs]


def _require_fixed_hashing(task: str) -> None:
    is_random = sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED", "random") in ("", "random")
    if task in HASH_ORDER_TASKS and is_random:
        raise DataError(
            f"the questions of reasoning-gym task {task!r} depend on Python's string hashing, which differs "
            "in every process, so no run could be resumed: set the environment variable PYTHONHASHSEED=0"
        )


@contextlib.contextmanager
def _own_random_state(key: int) -> Iterator[None]:
    """Some tasks read or seed the global generators: give them a fixed state and put the caller's back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _parse_line(line: bytes, number: int, origin: str, is_cut: bool) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        hint = ": the file ends inside it, it looks half-written" if is_cut else ""
        raise DataError(f"{origin!r}, line {number} is not valid JSON ({error}){hint}") from error
    if not isinstance(row, dict):
        raise DataError(f"{origin!r}, line {number} is {_shorten(row)}, not an object with the columns as keys")
    return row


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.5)
    return f": did you mean {' or '.join(map(repr, close))}?" if close else f": it must be one of {sorted(valid)}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
