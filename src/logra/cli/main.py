"""`logra`: parse first, import torch after. Exit code 2 for what the user can mend, 1 for a failure of ours."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from logra.errors import LograError, UserError

DESCRIPTION = """Reinforcement learning of language models in memory people have: low-rank gradient sketches,
steps sized by predicted KL, exact updates."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="logra", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"logra {importlib.metadata.version('logra')}")
    top.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train by a recipe. Every key of the recipe can be set by a flag: --method.lr 1e-5.",
    )
    train.add_argument("recipe", help="YAML file, such as recipes/demo.yaml")
    train.add_argument("--dry-run", action="store_true", help="resolve and check the configuration, print it, end")
    train.add_argument("--plain", action="store_true", help="one line a step instead of a live display")

    evaluate = commands.add_parser(
        "eval",
        help="evaluate a checkpoint, a run or any model",
        description="Evaluate on a recipe's held-out prompts. MODEL is a run folder, a checkpoint, a model folder or a "
        "hub name; a run brings its own recipe.",
    )
    evaluate.add_argument("model", help="run folder, checkpoint, model folder or hub name")
    evaluate.add_argument("--recipe", help="recipe with the eval section; default: the run's own configuration")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.add_argument("--output", help="also write the responses to this .parquet file")

    doctor = commands.add_parser("doctor", help="check this installation and machine")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments, rest = parser().parse_known_args(argv)
    if rest and arguments.command == "doctor":
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return _run(arguments, rest)
    except UserError as error:
        return _report(error, arguments.traceback, 2)
    except LograError as error:
        return _report(error, arguments.traceback, 1)
    except KeyboardInterrupt:
        print("\ninterrupted; resume with --resume auto", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing to say
        return 141


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.command == "train":
        from logra.cli.train import train

        return train(arguments.recipe, rest, dry_run=arguments.dry_run, plain=arguments.plain)
    if arguments.command == "eval":
        from logra.cli.evaluate import evaluate

        return evaluate(arguments.model, arguments.recipe, rest, as_json=arguments.json, output=arguments.output)
    from logra.cli.doctor import doctor

    return doctor(as_json=arguments.json)


def _report(error: LograError, traceback: bool, code: int) -> int:
    if traceback:
        raise error
    print(f"logra: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
