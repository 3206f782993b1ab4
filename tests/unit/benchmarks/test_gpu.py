"""The accelerator benchmark, as far as a CPU can tell: it runs, measures, plans, and survives what does not fit."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
gpu = importlib.import_module("gpu")


def test_a_dry_run_measures_and_plans_every_arm(tmp_path, capsys):
    path = tmp_path / "record.json"
    assert gpu.main(["--cpu", "--steps", "2", "--record", str(path)]) == 0
    record = json.loads(path.read_text())
    results = record["results"]
    assert list(results) == [f"builtin:tiny-llama {arm}" for arm in gpu.ARMS]
    for found in results.values():
        assert set(found["median_s"]) == set(gpu.PHASES) and len(found["steps"]) == 2
        measured = found["steps"][1]["memory/gradient_peak_bytes"]
        assert found["planned"]["gradient"] == pytest.approx(measured, rel=0.05)


def test_what_does_not_fit_is_recorded_and_the_next_begins(monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Process 1 has ...")

    monkeypatch.setattr(gpu, "run", refuse)
    assert gpu.attempt("shape:qwen2.5-7b", "random-16", argparse.Namespace(device="cpu")) == {
        "out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB. "
    }


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--cpu" in capsys.readouterr().err
