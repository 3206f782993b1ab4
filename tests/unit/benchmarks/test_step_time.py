"""The step-time benchmark runs on the tiny model and reports what it measured. No time is asserted."""

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from logra.rl.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
record = importlib.import_module("record")
step_time = importlib.import_module("step_time")

TINY = [
    "--model",
    "builtin:tiny-llama",
    "--batch",
    "2",
    "--length",
    "16",
    "--rank",
    "8",
    "--repeats",
    "1",
    "--threads",
    "1",
]
MATRICES = [
    m for m in tiny_model().parameters() if m.ndim == 2 and m.shape[0] != 51
]  # all but embedding and output head
ROWS, COLUMNS, NUMEL = (sum(n) for n in zip(*((*m.shape, m.numel()) for m in MATRICES), strict=True))


@pytest.fixture(autouse=True)
def provenance(monkeypatch):
    monkeypatch.setattr(record, "git_state", lambda: {"commit": "0" * 40, "dirty": True})
    monkeypatch.setattr(sys, "argv", ["benchmarks/step_time.py"])


def test_one_round_gives_a_complete_record(tmp_path, capsys):
    path = tmp_path / "x.json"
    methods = ["dense", "lora", "logra", "logra15"]
    assert step_time.main([*TINY, "--record", str(path), "--methods", *methods]) == 0
    written = json.loads(path.read_text())
    assert written["name"] == "step_time" and written["seed"] == 0
    config = written["config"]
    assert (config["batch"], config["length"], config["rank"], config["repeats"], config["threads"]) == (2, 16, 8, 1, 1)
    results = written["results"]
    assert results["target_parameters"] == NUMEL == 73728
    assert results["orders"] == [methods]
    assert len(results["rounds"]) == len(results["losses"]) == 1
    assert len(set(results["first_loss"].values())) == 1  # the same weights and batch, to the bit
    for phases in results["rounds"][0].values():
        parts = [phases[phase]["wall_s"] for phase in ("forward", "backward", "update")]
        assert min(parts) > 0 and phases["total"]["wall_s"] == pytest.approx(sum(parts))
        assert set(phases["total"]) == {"wall_s", "cpu_s"}
    assert {pair: ratio["target"] for pair, ratio in results["ratios"].items()} == {
        "logra/dense": 0.78, "logra/lora": 0.92, "logra15/dense": None, "logra15/lora": None,
    }  # fmt: skip
    assert all(len(loads) == 3 for loads in results["load_average"].values())
    shown = capsys.readouterr().out
    assert all(text in shown for text in (*methods, "0.78", "0.92", "load average"))


def test_state_bytes_are_those_of_the_tensors():
    options = step_time.parse([*TINY, "--methods", "dense", "lora", "logra", "aligned"])
    contenders, ids, _ = step_time.prepare_contenders(options)
    _, sizes = step_time.warm_up(contenders, ids)
    adapters = 4 * 8 * (ROWS + COLUMNS)
    ours = {"gradients": 0, "sketch": 4 * 8 * ROWS, "basis": 8 * COLUMNS, "optimizer_state": 4 * ROWS}
    assert sizes == {
        "dense": {"gradients": 4 * NUMEL, "optimizer_state": 8 * NUMEL + 4 * len(MATRICES)},
        "lora": {
            "gradients": adapters,
            "adapters": adapters,
            "optimizer_state": 2 * adapters + 4 * 2 * len(MATRICES),
        },
        "logra": ours | {"next_basis": 0},
        "aligned": ours | {"next_basis": 4 * 8 * COLUMNS},  # in the first update all are due
    }


def test_every_method_trains_the_same_matrices_and_moves_only_them():
    options = step_time.parse([*TINY, "--methods", "dense", "logra"])
    contenders, ids, _ = step_time.prepare_contenders(options)
    before = {n: p.detach().clone() for n, p in contenders["dense"].model.named_parameters()}
    step_time.warm_up(contenders, ids)
    for contender in contenders.values():
        moved = {n for n, p in contender.model.named_parameters() if not torch.equal(p, before[n])}
        assert len(moved) == len(MATRICES) and all(n.split(".")[-2] in step_time.PROJECTIONS for n in moved)


def test_methods_that_start_from_other_weights_are_refused():
    options = step_time.parse([*TINY, "--methods", "dense", "logra"])
    contenders, ids, _ = step_time.prepare_contenders(options)
    with torch.no_grad():
        next(contenders["dense"].model.parameters()).mul_(1.5)
    with pytest.raises(RuntimeError, match="same loss"):
        step_time.warm_up(contenders, ids)


def test_orders_give_every_method_every_place_equally_often():
    orders = [tuple(step_time.order_of("abc", index)) for index in range(6)]
    assert len(set(orders)) == 6
    for place in range(3):
        assert Counter(order[place] for order in orders) == {"a": 2, "b": 2, "c": 2}


def rounds_of(**totals):
    """Rounds with the given totals; a phase takes a third; CPU time is twice the wall time."""

    def phases(total):
        clocks = {"wall_s": total, "cpu_s": 2 * total}
        third = {clock: value / 3 for clock, value in clocks.items()}
        return {"forward": third, "backward": third, "update": third, "total": clocks}

    return [{m: phases(t) for m, t in zip(totals, some, strict=True)} for some in zip(*totals.values(), strict=True)]


def test_ratios_are_paired_within_rounds_and_no_round_is_dropped():
    rounds = rounds_of(dense=[1.0, 2.0, 10.0, 4.0, 5.0], logra=[0.9, 1.0, 9.0, 1.0, 4.0])  # ratios .9 .5 .9 .25 .8
    wall = step_time.paired_ratios(rounds)["logra/dense"]["wall_s"]
    assert wall == pytest.approx({"median": 0.8, "q1": 0.5, "q3": 0.9, "min": 0.25})  # of the medians it would be 0.25
    summary = step_time.summarise(rounds)["dense"]
    assert summary["total"]["wall_s"] == {"median": 4.0, "q1": 2.0, "q3": 5.0, "min": 1.0}
    assert summary["update"]["cpu_s"]["median"] == pytest.approx(8.0 / 3)


def test_only_check_makes_a_missed_target_an_error(monkeypatch, capsys):
    for total, code in ((0.9, 1), (0.7, 0)):
        fake = {"rounds": rounds_of(dense=[1.0], lora=[1.0], logra=[total]), "state_bytes": {}}
        fake["load_average"] = {"before": list(os.getloadavg()), "after": list(os.getloadavg())}
        monkeypatch.setattr(step_time, "measure", lambda *_, fake=fake: fake)
        assert step_time.main([*TINY, "--no-record"]) == 0
        assert "above the target" not in capsys.readouterr().err
        assert step_time.main([*TINY, "--no-record", "--check"]) == code
        assert ("above the target: logra/dense" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "builtin:tiny-gpt2", "--no-record"], "q_proj"),
        (["--model", "./no/such/model", "--no-record"], "config.json"),
        (["--rank", "65", "--no-record"], "rank 65"),
    ],
)
def test_mendable_faults_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert step_time.main([*TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_missing_provenance_stops_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(record, "git_state", lambda: {})
    monkeypatch.setattr(step_time, "prepare_contenders", lambda _: pytest.fail("measured without provenance"))
    assert step_time.main(TINY) == 2
    assert "commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--batch", "0"], ["--threads", "-1"], ["--repeats", "x"], ["--check", "--methods", "logra"]]
)
def test_bad_flags_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_code:
        step_time.parse([*TINY, *arguments])
    assert exit_code.value.code == 2
    assert "error" in capsys.readouterr().err
