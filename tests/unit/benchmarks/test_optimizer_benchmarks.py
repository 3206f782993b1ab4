"""The benchmarks of optimizers on a few numbers: that they run, resume and report; never how fast."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import optimizer_time
import pretrain

FLAGS = [
    "--model", "9m", "--steps", "2", "--rows", "2", "--length", "16", "--vocabulary", "300", "--no-record", "--lrs",
    "1e-3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(
        pretrain, "documents", lambda text: [f"def f{i}(x):\n    return x + {i}\n" * 20 for i in range(40)]
    )
    pretrain.tokens.cache_clear()
    pretrain.digest.cache_clear()
    yield
    pretrain.tokens.cache_clear()
    pretrain.digest.cache_clear()


def test_pretraining_runs_once_and_is_summarised(tmp_path, capsys):
    flags = [*FLAGS, "--store", str(tmp_path), "--arms", "adamw", "blockllm", "galore-4", "muon"]
    assert pretrain.main([*flags, "--summary"]) == 1
    assert pretrain.main(flags) == 0
    files = sorted(tmp_path.glob("*.json"))
    assert [f.name.split("_")[1] for f in files] == ["adamw", "blockllm", "galore-4", "muon"]
    first = {f: f.stat().st_mtime_ns for f in files}
    capsys.readouterr()
    assert pretrain.main(flags) == 0
    assert {f: f.stat().st_mtime_ns for f in files} == first and "perplexity" in capsys.readouterr().out
    states = [json.loads(f.read_text())["bytes"]["state"] for f in files]
    assert states[2] < states[3] < states[0]


def test_the_grid_is_searched_outwards(tmp_path, monkeypatch):
    best_at = {0.1: 3.0, 0.2: 2.0, 0.4: 1.0, 0.8: 5.0, 0.05: 9.0}
    monkeypatch.setattr(
        pretrain, "execute", lambda run, threads: {"lr": run.lr, "perplexity": best_at[run.lr], "wall_s": 0}
    )
    options = pretrain.parse(
        [*FLAGS[:-1], "0.05", "0.1", "0.2", "0.4", "0.8", "--arms", "adamw", "--store", str(tmp_path)]
    )
    pretrain.work(options, pretrain.Console(quiet=True))
    assert sorted(run.lr for run in pretrain.runs_of(options, "adamw")) == [0.1, 0.2, 0.4, 0.8]


@pytest.mark.parametrize("arm", ["sgd", "galore", "muon-4"])
def test_an_arm_that_is_none_is_refused(arm):
    with pytest.raises(SystemExit):
        pretrain.parse(["--arms", arm])


def test_times_stand_beside_the_reference(capsys, monkeypatch):
    monkeypatch.setattr(optimizer_time, "LAYER", ((12, 8), (8, 12)))
    names = ["galore", "galore range", "apollo", "apollo_mini", "fira", "muon", "lora_pre", "blockllm"]
    flags = ["--layers", "1", "--refresh-layers", "1", "--rank", "2", "--rounds", "2", "--no-record", "--only", *names]
    assert optimizer_time.main(flags) == 0
    shown = capsys.readouterr().out
    assert shown.count("galore-torch") >= 1 and "torch Muon" in shown and "every basis anew" in shown
