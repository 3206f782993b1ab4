"""The benchmark of packed rows runs on the tiny model and reports what it measured. No time is asserted."""

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
record = importlib.import_module("record")
packing = importlib.import_module("packing")


@pytest.fixture(autouse=True)
def provenance(monkeypatch):
    monkeypatch.setattr(record, "git_state", lambda: {"commit": "0" * 40, "dirty": False})
    monkeypatch.setattr(sys, "argv", ["benchmarks/packing.py"])


def test_it_reports_tokens_bytes_and_differences(tmp_path):
    path = tmp_path / "record.json"
    flags = ["--model", "builtin:tiny-llama", "--rounds", "1", "--rank", "8", "--shapes", "demo", "alone"]
    assert packing.main([*flags, "--record", str(path)]) == 0
    found = json.loads(path.read_text())["results"]
    assert set(found) == {"demo", "alone"}
    for of in found.values():
        assert (
            of["tokens"]["packed"] < of["tokens"]["padded"] and of["peak_bytes"]["packed"] < of["peak_bytes"]["padded"]
        )
        assert of["sketch_difference"] < 1e-5 and of["speedup"]["median"] > 0
    assert found["demo"]["tokens"] == {"padded": 16 * (59 + 20), "packed": 224}
