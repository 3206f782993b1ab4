"""The command line's front: help without torch, flags in any order, exit codes."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logra import config as cfg
from logra.cli import main as front
from logra.errors import ConfigError, NonFiniteError

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.yaml"
COMMANDS = ("train", "launch", "eval", "doctor")


def test_help_takes_less_than_a_second_and_imports_no_torch():
    times = []
    for _ in range(2):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "logra", "--help"], capture_output=True, text=True, check=True
        )
        times.append(time.perf_counter() - started)
    assert min(times) < 1.0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "transformers", "datasets", "numpy", "pyarrow", "pydantic", "rich", "yaml"}
    assert all(command in done.stdout for command in COMMANDS)


def test_importing_the_configuration_imports_no_torch():
    code = (
        "import sys, logra.config, logra.errors; print(sorted({'torch', 'transformers', 'datasets'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS), ["--version"]])
def test_help_and_version_end_with_0(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        front.main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("logra " if "--version" in arguments else "usage: logra")


@pytest.mark.parametrize(
    "arguments",
    [[], ["trian"], ["train"], ["eval"], ["train", "a", "b"], ["doctor", "--data.size", "1"], ["doctor", "x"]],
)
def test_a_wrong_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        front.main(arguments)
    assert ended.value.code == 2
    assert "usage: logra" in capsys.readouterr().err


def test_the_options_known_to_split_flags_are_those_of_the_parser():
    top = front.parser()
    commands = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    parsers = [top, *commands.choices.values()]
    options = {option for p in parsers for action in p._actions for option in action.option_strings}
    assert {option for option in options if option.startswith("--")} == {
        *front.OPTIONS,
        *front.OF_PLAN,
        *front.OF_LAUNCH,
    }
    assert not {option.removeprefix("--") for option in options} & set(cfg.Config.model_fields)


@pytest.mark.parametrize(
    ("argv", "own", "flags"),
    [
        (["train", "--method.lr", "1e-5", "r.yaml"], ["train", "r.yaml"], ["--method.lr", "1e-5"]),
        (["train", "r.yaml", "--a.b", "--c", "--plain"], ["train", "r.yaml", "--plain"], ["--a.b", "--c"]),
        (["train", "r.yaml", "--a.b=-1", "--dry_run"], ["train", "r.yaml", "--dry-run"], ["--a.b=-1"]),
        (["eval", "m", "--recipe", "r", "--output=o", "--output_dir", "d"], ["eval", "m", "--recipe", "r", "--output=o"],
         ["--output_dir", "d"]),
        (["train", "r.yaml", "--seed"], ["train", "r.yaml"], ["--seed"]),
        (["train", "--dry", "r.yaml"], ["train"], ["--dry", "r.yaml"]),
    ],
)  # fmt: skip
def test_flags_stand_anywhere_and_are_never_abbreviated(argv, own, flags):
    assert front.split_flags(argv) == (own, flags)


def test_a_dry_run_prints_yaml_that_reads_back_equal(tmp_path, capsys):
    flags = [
        "--method.lr",
        "1e-6",
        "--data.prompt_suffix",
        " =\n",
        "--output_dir",
        str(tmp_path / "run"),
        "--eval.seed",
        "-1",
    ]
    assert front.main(["train", str(RECIPE), "--dry-run", *flags]) == 0
    printed = tmp_path / "resolved.yaml"
    printed.write_text(capsys.readouterr().out)
    config = cfg.load_config(printed)
    assert config == cfg.load_config(RECIPE, flags)
    assert (config.method.lr, config.data.prompt_suffix, config.eval.seed) == (1e-6, " =\n", -1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("error", "code"), [(ConfigError("mend it"), 2), (NonFiniteError("ours"), 1)])
@pytest.mark.parametrize("arguments", [["doctor"], ["--traceback", "doctor"], ["doctor", "--traceback"]])
def test_exit_codes_of_errors_and_tracebacks_on_request(error, code, arguments, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(front, "_run", fail)
    assert front.main(arguments) == code
    err = capsys.readouterr().err
    assert err.endswith(f"logra: {error}\n")
    assert ("Traceback" in err) == ("--traceback" in arguments)


def test_an_interrupted_run_says_how_to_go_on(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(front, "_run", interrupt)
    assert front.main(["train", "r.yaml"]) == 130
    assert "--resume auto" in capsys.readouterr().err
    assert front.main(["doctor"]) == 130
    assert "--resume" not in capsys.readouterr().err
