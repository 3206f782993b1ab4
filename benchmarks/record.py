"""Benchmark records: one JSON file a measurement, refused unless it says where its numbers come from.

A record holds the schema version, name, UTC date, command line, git commit (and whether the tree differed from it), hardware,
package versions, config, seed and results. It never holds a host name, a user name or an absolute path.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import logra
from logra.files import write_atomic

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PACKAGES = ("torch", "transformers", "peft", "logra")
HARDWARE = ("cpu", "cores", "threads", "memory_bytes", "accelerator")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABSOLUTE = re.compile(r"(?<![\w.:/)~])~?/(?=[\w.])|\b[A-Za-z]:\\|file:/")  # not "tokens/s", "1/2" or "https://"


def write_record(
    path: Path | None, *, name: str, config: Mapping[str, Any], results: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Check a record, write it atomically and return it.

    path: None is benchmarks/records/NAME_DATE_COMMIT.json. Absolute paths in config become relative to the repository.
    Raises `ValueError` for missing commit, hardware, versions, config or seed, for NaN, infinity and anything that is not
    plain JSON, and for text that names this machine; nothing is written then.
    """
    return finish_record(path, begin_record(name=name, config=config, seed=seed), results)


def begin_record(*, name: str, config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A checked record that lacks only its results. Call it before measuring: it fails early, and it names the commit whose
    code was imported."""
    record = {"schema": SCHEMA, "name": name, **provenance(), "config": _relative(config), "seed": seed}
    check_record(record | {"results": {"pending": True}})
    return record


def finish_record(path: Path | None, begun: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Add the results to what `begin_record` gave, check, write, return the record. Arguments and errors: `write_record`."""
    record = {**begun, "results": results}
    check_record(record)
    path = default_path(record) if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())
    return record


def default_path(record: Mapping[str, Any]) -> Path:
    """Where a record goes if no path is given: its name, UTC date with time, and ten digits of the commit."""
    date = re.sub(r"[-:]", "", record["date"])
    return RECORDS / f"{record['name']}_{date}_{record['git']['commit'][:10]}.json"


def provenance() -> dict[str, Any]:
    """Date, command line, git state, hardware and versions of this moment. `ValueError` if git or a package is missing."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ["python", *(_relative(argument) for argument in sys.argv)],
        "git": git_state(),
        "hardware": hardware(),
        "versions": versions(),
    }


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """{"commit": 40 hex digits, "dirty": bool}; untracked files count as dirty, records do not."""
    if root == ROOT and ROOT not in Path(logra.__file__).resolve().parents:
        raise ValueError(
            "logra was not imported from this checkout, so its commit says nothing about the code that ran: "
            "`pip install -e .` here, or set PYTHONPATH=src"
        )
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/records")
    return {"commit": commit, "dirty": bool(changes)}


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError("a record needs its commit, and git is not installed: install git") from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[0]
        raise ValueError(f"a record needs its commit; run from a git checkout with a commit (git: {reason})") from error
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, torch's threads, memory in bytes, and the accelerator ("none" without one)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of python, torch, transformers, peft and logra. `ValueError` names a package that is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            if package != "logra":
                raise ValueError(f"a record needs the version of {package}: pip install {package}") from error
            found[package] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return found


def check_record(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` that names the first thing a record lacks or must not hold."""
    for key in ("date", "command", "hardware", "versions", "config", "results"):
        if not record.get(key):
            raise ValueError(f"a record without {key} is refused")
    seed = record.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"a record needs an integer seed, got {seed!r}")
    if not isinstance(record.get("name"), str) or not _NAME.fullmatch(record["name"]):
        raise ValueError(f"a record's name becomes a file name: a-z, 0-9, _ and - only, got {record.get('name')!r}")
    git = record.get("git") or {}
    if not _COMMIT.fullmatch(str(git.get("commit"))) or not isinstance(git.get("dirty"), bool):
        raise ValueError(f"a record needs its full commit and whether the tree was dirty, got {git!r}")
    for part, keys in (("hardware", HARDWARE), ("versions", ("python", *PACKAGES))):
        missing = [key for key in keys if not record[part].get(key)]
        if missing:
            raise ValueError(f"a record without {part} is refused; missing: {', '.join(missing)}")
    _check_values(record)


def _check_values(record: Mapping[str, Any]) -> None:
    secrets = _machine_words()
    for where, value in _leaves(record, "record"):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} is {value}: a record holds finite numbers only")
        if value is not None and type(value) not in (str, int, float, bool):
            raise ValueError(f"{where} is a {type(value).__name__}: use plain strings, numbers, lists and dicts")
        if isinstance(value, str) and (_ABSOLUTE.search(value) or any(word in value for word in secrets)):
            raise ValueError(f"{where} holds an absolute path or names this machine or its user: {value!r}")


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every key and every plain value, each with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: keys are strings")
            yield f"the key {where}.{key}", key
            yield from _leaves(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def _machine_words() -> list[str]:
    """Host and user name, where they are distinctive enough not to be a word of the record by chance."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        user = ""
    return [word for word in (socket.gethostname(), user) if len(word) >= 8 and word != "localhost"]


def _relative(value: Any) -> Any:
    """The same value with absolute paths inside the repository made relative to it, and others cut to their last part."""
    if isinstance(value, Mapping):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_relative(item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return value
    option, equals, text = value.partition("=") if value.startswith("-") else ("", "", value)
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if not path.is_absolute():
        return value
    inside = next((p.relative_to(ROOT) for p in (path, path.resolve()) if p.is_relative_to(ROOT)), None)
    return option + equals + (path.name if inside is None else inside.as_posix())
