"""The fidelity benchmarks: the cosines are what they say, allocation keeps its budget, the commands run."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
fidelity = importlib.import_module("fidelity")
allocation = importlib.import_module("allocation")

SMALL = [
    "--model", "builtin:tiny-llama", "--recipe", str(ROOT / "recipes" / "tiny.yaml"), "--threads", "1", "--past", "2",
    "--later", "1", "--ranks", "4", "--prompts", "4", "--tokens", "6",
]  # fmt: skip


def test_cosine_is_that_of_gradient_and_reconstruction():
    generator = torch.Generator().manual_seed(0)
    gradient, basis = torch.randn(7, 12, generator=generator), torch.randn(3, 12, generator=generator)
    image = gradient @ basis.t() @ basis
    expected = torch.nn.functional.cosine_similarity(gradient.flatten(), image.flatten(), dim=0)
    assert fidelity.cosine(gradient, basis) == pytest.approx(float(expected), abs=1e-6)
    x = torch.randn(50, 12, generator=generator) * torch.linspace(0.1, 3.0, 12)
    outputs, moved = (x @ gradient.t()).flatten(), (x @ image.t()).flatten()
    expected = torch.nn.functional.cosine_similarity(outputs, moved, dim=0)
    assert fidelity.felt(gradient, basis, x.t() @ x) == pytest.approx(float(expected), abs=1e-5)


def test_an_allocation_spends_its_budget_where_there_is_most_to_gain():
    gains = {"rich": [8.0, 4.0, 2.0, 1.0, 0.5, 0.25], "poor": [0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6]}
    costs = {"rich": 10, "poor": 10}
    assert allocation.allocate(gains, costs, 80) == {"rich": 6, "poor": 2}
    ranks = allocation.allocate(gains, {"rich": 30, "poor": 10}, 165)
    assert ranks["rich"] * 30 + ranks["poor"] * 10 <= 165 and ranks["rich"] > 2


def test_the_benchmark_runs_and_records(tmp_path, monkeypatch):
    record = importlib.import_module("record")
    monkeypatch.setattr(record, "git_state", lambda: {"commit": "0" * 40, "dirty": False})
    monkeypatch.setattr(sys, "argv", ["benchmarks/fidelity.py"])
    monkeypatch.chdir(ROOT)
    path = tmp_path / "record.json"
    assert fidelity.main([*SMALL, "--record", str(path)]) == 0
    (row,) = json.loads(path.read_text())["results"]["by_rank"]
    assert row["count"] == 14
    assert row["random"] < row["aligned"] <= row["best"] and row["aligned"] > 0.6


@pytest.mark.parametrize("program", ["ablations", "allocation"])
def test_the_other_commands_run(program, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    arguments = [*SMALL, "--no-record"]
    assert (fidelity.main([*arguments, "--ablations"]) if program == "ablations" else allocation.main(arguments)) == 0
    assert capsys.readouterr().out
