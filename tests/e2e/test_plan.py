"""`logra plan` and the refusal of `logra train`, as a user meets them."""

import json
from pathlib import Path

import pytest

from logra.cli.main import main

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny.yaml")
CPU = ["--model.device", "cpu"]
SMALL = ["--model", "builtin:tiny-llama", "--length", "32", "--decoded", "2", "--rank", "4", *CPU]


def test_a_plan_without_recipe(capsys):
    assert main(["plan", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "without a recipe" in text and "method.weights=split" in text and "sync buffers" in text
    assert max(map(len, text.splitlines())) <= 120 and text.isascii()


def test_a_plan_of_a_recipe(capsys):
    assert main(["plan", TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] + found["response"] <= 256 and found["fits"] and found["device_limit"] is None
    assert set(found["phases"]) == {"rollout", "gradient", "update"}
    for phase in found["phases"].values():
        assert phase["peak_bytes"] == sum(phase["peak"].values()) and all(
            type(v) is int for v in phase["peak"].values()
        )
    assert found["peak_bytes"] == max(phase["peak_bytes"] for phase in found["phases"].values())


def test_what_does_not_fit_ends_with_3_and_says_why(capsys):
    assert main(["plan", *SMALL, "--gpu-memory", "100kB"]) == 3
    text = capsys.readouterr().out
    assert "does not fit" in text and "where weights goes over" in text and "largest that fits" in text
    assert main(["plan", *SMALL, "--gpu-memory", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fault"] is None and found["largest"]["microbatch"] >= 1


def test_a_comparison(capsys):
    assert main(["plan", *SMALL, "--compare", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["compare"]
    assert compared["galore"]["by_formula"] and not compared["dense"]["by_formula"]
    assert compared["logra-random"]["state"] < compared["lora"]["state"] < compared["dense"]["state"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give a recipe, or --model"),
        (["plan", "--model", "shape:gpt9"], "no shape 'gpt9'"),
        (["plan", *SMALL, "--method", "adagrad"], "--method adagrad: use logra"),
        (["plan", *SMALL, "--gpu-memory", "big"], "no size of memory"),
        (["plan", *SMALL, "--prompt-length", "32"], "must be below the length"),
        (["plan", "--model", "builtin:tiny-llama", "--length", "5000"], "positions"),
        (["plan", *SMALL, "--gpus", "0"], "--gpus"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_training_that_cannot_fit_is_refused_before_anything_is_made(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["train", TINY, "--plain", "--output_dir", str(folder), "--memory.limit", "2MiB"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "this run needs" in error and "memory.check=warn" in error and "activations" in error
    assert not folder.exists()
