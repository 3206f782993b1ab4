import json
import os
import random
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError

from logra.errors import DataError
from logra.rl.sources import HASH_ORDER_TASKS, load_rows

ROWS = [
    {"prompt": "1+1", "answer": "2", "level": 3},
    {"prompt": [{"role": "user", "content": "caf\u00e9\u2028?"}], "tags": ["a"]},
    {"prompt": "", "answer": None},
]
UNIFORM = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(600)]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def lines(rows, **options) -> str:
    return "".join(json.dumps(row, **options) + "\n" for row in rows)


def check_sequence(rows) -> None:
    assert list(rows) == [rows[i] for i in range(len(rows))]
    assert rows[-1] == rows[len(rows) - 1]
    assert all(tuple(row) == rows.columns for row in rows)
    with pytest.raises(IndexError):
        rows[len(rows)]


# Files


@pytest.mark.parametrize("as_ascii", [True, False])
def test_json_lines(tmp_path, as_ascii):
    text = lines(ROWS, ensure_ascii=as_ascii).replace("\n", "\r\n") + "\n  \n"
    rows = load_rows(write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + text.encode()))
    check_sequence(rows)
    assert rows.columns == ("prompt", "answer", "level", "tags")
    assert rows[1] == {"prompt": ROWS[1]["prompt"], "answer": None, "level": None, "tags": ["a"]}
    assert len(rows) == 3


def test_json_list_and_json_lines_under_json_name(tmp_path):
    as_list = load_rows(write(tmp_path / "a.json", json.dumps(ROWS, indent=2)))
    as_lines = load_rows(write(tmp_path / "b.json", lines(ROWS)))
    check_sequence(as_list)
    assert list(as_list) == list(as_lines)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": }\n{"a": 2}\n', "line 3 is not valid JSON"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "b', "line 2 .*half-written"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"line 2 is \[1\], not an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is not valid JSON"),
        ("a.jsonl", "", "holds no rows"),
        ("a.json", '[{"a": 1}, {"a"', "not valid JSON, or was cut off"),
        ("a.json", '[{"a": 1}, 2]', "entry 1 is 2"),
        ("a.json", '{"data": []}', "make it a list of objects"),
        ("a.json", "[]", "holds no rows"),
        ("a.parquet", b"PAR1 cut", "not a complete Parquet file"),
        ("a.csv", "a,b\n", r"use a \.jsonl, \.json, \.parquet file"),
    ],
)
def test_unusable_files(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        load_rows(write(tmp_path / name, text))


def test_half_written_line_is_only_suspected_at_the_end(tmp_path):
    with pytest.raises(DataError) as caught:
        load_rows(write(tmp_path / "a.jsonl", '{"a": \n{"a": 1}'))
    assert "line 1" in str(caught.value) and "half-written" not in str(caught.value)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(UNIFORM), path, row_group_size=100)
    rows = load_rows(str(path))
    check_sequence(rows)
    assert list(rows) == UNIFORM
    data = path.read_bytes()
    with pytest.raises(DataError, match="not a complete Parquet file"):
        load_rows(write(tmp_path / "b.parquet", data[: len(data) // 2]))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_fingerprint_follows_the_content_and_not_the_place(tmp_path, suffix):
    def save(name: str, rows) -> str:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
            return str(path)
        return write(path, lines(rows) if suffix == "jsonl" else json.dumps(rows))

    changed = [*UNIFORM[:-1], {**UNIFORM[-1], "answer": "0"}]
    first, same, other = (load_rows(save(n, r)) for n, r in (("a", UNIFORM), ("b", UNIFORM), ("c", changed)))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    int(first.fingerprint, 16)


@pytest.mark.parametrize("name", ["no/such/file.jsonl", "nothing.parquet", "./folder", "/no/such", "~/no/such"])
def test_missing_path(name):
    with pytest.raises(DataError, match="no such file or folder"):
        load_rows(name)


# Saved folders


def test_saved_dataset(tmp_path):
    datasets.Dataset.from_list(UNIFORM).save_to_disk(tmp_path / "d")
    rows = load_rows(str(tmp_path / "d"))
    check_sequence(rows)
    assert list(rows) == UNIFORM
    assert rows.fingerprint == load_rows(str(tmp_path / "d")).fingerprint
    with pytest.raises(DataError, match="saved without splits"):
        load_rows(str(tmp_path / "d"), split="test")


def test_saved_splits(tmp_path):
    parts = {"train": UNIFORM[:4], "test": UNIFORM[4:6]}
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(tmp_path / "d")
    assert list(load_rows(str(tmp_path / "d"), split="test")) == parts["test"]
    with pytest.raises(DataError, match=r"no split 'dev': it has \['test', 'train'\]"):
        load_rows(str(tmp_path / "d"), split="dev")


def test_half_copied_folder_and_folder_of_files(tmp_path):
    datasets.Dataset.from_list(UNIFORM).save_to_disk(tmp_path / "d")
    arrow = next((tmp_path / "d").glob("*.arrow"))
    os.truncate(arrow, arrow.stat().st_size // 2)
    with pytest.raises(DataError, match=r"not a complete save_to_disk data set .*again"):
        load_rows(str(tmp_path / "d"))
    arrow.unlink()
    with pytest.raises(DataError, match="not a complete save_to_disk data set"):
        load_rows(str(tmp_path / "d"))
    (tmp_path / "e").mkdir()
    write(tmp_path / "e" / "part.jsonl", lines(ROWS))
    with pytest.raises(DataError, match=r"name one of its files.*part\.jsonl"):
        load_rows(str(tmp_path / "e"))


# The hub (no network: `datasets.load_dataset` is replaced)


def test_hub_arguments_and_rows(monkeypatch):
    seen = {}

    def fake(name, subset, **options):
        seen.update(name=name, subset=subset, **options)
        return datasets.Dataset.from_list(UNIFORM)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    rows = load_rows("owner/name", split="test[:600]", subset="main", revision="abc")
    assert seen == {"name": "owner/name", "subset": "main", "split": "test[:600]", "revision": "abc"}
    check_sequence(rows)
    assert list(rows) == UNIFORM


@pytest.mark.parametrize(
    ("error", "is_offline", "message"),
    [
        (ConnectionError("Couldn't reach 'o/n'"), True, "HF_HUB_OFFLINE is set"),
        (ConnectionError("Couldn't reach 'o/n'"), False, "Check the network"),
        (DatasetNotFoundError("Dataset 'o/n' doesn't exist"), False, "hf auth login"),
        (
            ValueError("Unknown split \"x\". Should be one of ['test']"),
            False,
            r"one of \['test'\].*split names",
        ),
        (RuntimeError("Dataset scripts are no longer supported"), False, "name a local file"),
    ],
)
def test_hub_errors_become_data_errors_with_the_fix(monkeypatch, error, is_offline, message):
    def fake(*args, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fake)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: is_offline)
    with pytest.raises(DataError, match=message):
        load_rows("o/n", split="x")


def test_offline_hub_is_honoured(tmp_path):
    code = "from logra.rl.sources import load_rows; load_rows('owner/not-in-the-cache')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "DataError" in done.stderr and "HF_HUB_OFFLINE is set" in done.stderr


# Options that do not apply


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.jsonl", {"split": "test"}, "only 'train'"),
        ("a.jsonl", {"subset": "main"}, "subset='main' is only for data sets on the Hugging Face hub"),
        ("a.jsonl", {"revision": "abc"}, "revision='abc'"),
        ("a.jsonl", {"size": 5}, "size=5 is only for reasoning_gym"),
        ("owner/name", {"params": {"a": 1}}, "params=.* is only for reasoning_gym"),
        ("reasoning_gym:chain_sum", {"split": "test"}, "another seed of a generated task"),
        ("reasoning_gym:chain_sum", {"subset": "main"}, "subset='main'"),
    ],
)
def test_options_that_do_not_apply_are_refused(tmp_path, monkeypatch, name, options, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", lines(ROWS))
    with pytest.raises(DataError, match=message):
        load_rows(name, **options)


# Generated tasks


def test_generated_rows_and_their_scorer():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    rows = load_rows("reasoning_gym:chain_sum", params={"min_terms": 2, "max_terms": 2}, seed=3, size=5)
    check_sequence(rows)
    assert (rows.default_prompt, rows.default_answer, len(rows)) == ("question", "answer", 5)
    reference = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, seed=3, size=5)
    for i, row in enumerate(rows):
        assert row["entry"] == reference[i]
        assert {k: row[k] for k in ("question", "answer", "metadata")} == reference[i]
        score = reasoning_gym.get_score_answer_fn(row["task"])
        assert score(answer=row["answer"], entry=row["entry"]) == 1.0
        assert score(answer="no", entry=row["entry"]) < 0.5


def test_generated_fingerprint_follows_the_recipe():
    def fingerprint(**options):
        return load_rows("reasoning_gym:chain_sum", **({"seed": 0, "size": 5} | options)).fingerprint

    assert fingerprint() == fingerprint()
    others = [fingerprint(seed=1), fingerprint(size=6), fingerprint(params={"max_terms": 3})]
    assert len({fingerprint(), *others}) == 4


@pytest.mark.parametrize("task", ["codeio", "pool_matrix"])
def test_tasks_that_use_global_random_state_are_repeatable_and_leave_it_alone(task):
    # On their own, `codeio` reads the global state and `pool_matrix` seeds numpy's.
    random.seed(1)
    np.random.seed(1)
    first = list(load_rows(f"reasoning_gym:{task}", seed=5, size=25))
    after = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    assert after == (random.random(), np.random.random())
    again = load_rows(f"reasoning_gym:{task}", seed=5, size=25)
    assert [again[i] for i in reversed(range(25))] == first[::-1]


def test_tasks_that_depend_on_string_hashing_need_it_fixed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if sys.flags.hash_randomization:
        for task in sorted(HASH_ORDER_TASKS):
            with pytest.raises(DataError, match="PYTHONHASHSEED=0"):
                load_rows(f"reasoning_gym:{task}")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(load_rows("reasoning_gym:word_ladder", size=3)) == 3


def test_composite_task():
    parts = [{"name": "chain_sum", "params": {"max_terms": 3}}, {"name": "gcd", "weight": 2.0}]
    rows = load_rows("reasoning_gym:composite", params={"datasets": parts}, size=20)
    assert {row["task"] for row in rows} == {"chain_sum", "gcd"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("", {}, "no task ''"),
        ("chain_sum", {"params": {"min_term": 2}}, "no parameter 'min_term': did you mean 'min_terms'"),
        ("chain_sum", {"params": {"seed": 2}}, "give seed beside params"),
        ("chain_sum", {"params": {"min_terms": 0}}, "refuses .*min_terms must be positive"),
        ("chain_sum", {"params": {"min_terms": "two"}}, "refuses .*TypeError"),
        ("chain_sum", {"size": -1}, "refuses|size"),
        ("composite", {}, "a list of {name, weight, params}"),
        ("composite", {"params": {"datasets": [{"name": "gdc"}]}}, "did you mean 'gcd'"),
        ("composite", {"params": {"datasets": [{"name": "gcd", "config": {}}]}}, "unknown keys"),
        (
            "composite",
            {"params": {"datasets": [{"name": "gcd", "params": {"mim": 1}}]}},
            "no parameter 'mim'",
        ),
    ],
)
def test_wrong_task_or_parameter(name, options, message):
    with pytest.raises(DataError, match=message):
        load_rows(f"reasoning_gym:{name}", **options)


def test_generation_error_names_task_and_entry(monkeypatch):
    rows = load_rows("reasoning_gym:chain_sum", size=3)

    class Broken:
        def __getitem__(self, index):
            raise IndexError("empty range")

    monkeypatch.setattr(rows, "_generator", Broken())
    with pytest.raises(DataError, match="'chain_sum' could not make its entry 2"):
        rows[2]


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'logra\[tasks\]'"):
        load_rows("reasoning_gym:chain_sum")
