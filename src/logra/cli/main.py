"""`logra`: parse first, import torch after. Exit code 2: the user can mend it; 1: a failure of ours."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from logra.errors import LograError, UserError

DESCRIPTION = """Reinforcement learning of language models in memory people have: low-rank gradient sketches,
steps sized by predicted KL, exact updates."""

_FIRST_WORD_S = 10.0  # how long other ranks wait for the first one's message

OPTIONS = (
    "--help", "--version", "--traceback", "--dry-run", "--plain", "--recipe", "--json", "--output", "--step", "--dtype",
    "--verify", "--compact",
)  # fmt: skip
# Of `logra plan` alone: elsewhere they are keys that do not exist, and are told the nearest that does.
OF_PLAN = (
    "--rank", "--gpus", "--gpu-memory", "--host-memory", "--length", "--prompt-length", "--microbatch",
    "--decoded", "--link", "--compare",
)  # fmt: skip
OF_LAUNCH = ("--train-gpus", "--rollout-gpus", "--cpu", "--vllm-python")  # likewise


def _version() -> str:
    try:
        return importlib.metadata.version("logra")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    option: dict[str, Any] = {"action": "store_true", "help": "show the whole traceback of an error"}
    common.add_argument("--traceback", default=argparse.SUPPRESS, **option)
    top = argparse.ArgumentParser(prog="logra", description=DESCRIPTION, allow_abbrev=False)
    top.add_argument("--traceback", **option)
    top.add_argument("--version", action="version", version=f"logra {_version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    strict: dict[str, Any] = {"parents": [common], "allow_abbrev": False}

    train = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train by a recipe. Every key of the recipe can be set by a flag: --method.lr 1e-5.",
        usage="logra train [options] RECIPE [--section.key VALUE ...]",
        **strict,
    )
    train.add_argument("recipe", help="YAML file, such as recipes/demo.yaml")
    train.add_argument("--dry-run", action="store_true", help="resolve and check the configuration, print it, end")
    train.add_argument("--plain", action="store_true", help="one line a step instead of a live display")

    _add_launch(commands, strict)
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a checkpoint, a run or any model",
        description="Evaluate on a recipe's held-out prompts. MODEL is a run folder, a checkpoint, a model folder or "
        "a hub name; a run brings its own recipe. Flags set keys as in train: --eval.num_prompts 50.",
        usage="logra eval [options] MODEL [--section.key VALUE ...]",
        **strict,
    )
    evaluate.add_argument("model", help="run folder, checkpoint, model folder or hub name")
    evaluate.add_argument("--recipe", help="recipe with the eval section; default: the run's own configuration")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.add_argument("--output", help="also write the responses to this .parquet file")

    _add_plan(commands, strict)
    checkout = commands.add_parser(
        "checkout",
        help="write the policy of any step as a model folder",
        description="Rebuild the policy after any step of a run, bit for bit, from its journal, and write it as a Hugging "
        "Face folder.",
        usage="logra checkout [options] RUN --step N",
        **strict,
    )
    checkout.add_argument("run", help="run folder")
    checkout.add_argument("--step", type=int, required=True, help="training step; 0 is the model before training")
    checkout.add_argument("--output", help="folder to write; default: RUN/checkouts/step_N")
    checkout.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32, which is exact")

    journal = commands.add_parser(
        "journal",
        help="show, verify or compact a run's journal",
        description="Show what a run's journal holds.",
        usage="logra journal [options] RUN",
        **strict,
    )
    journal.add_argument("run", help="run folder")
    journal.add_argument("--verify", action="store_true", help="read every update and anchor and check it")
    journal.add_argument(
        "--compact", type=int, metavar="STEP", help="drop history that the last anchor before STEP covers"
    )
    journal.add_argument("--json", action="store_true", help="print one JSON object")

    doctor = commands.add_parser(
        "doctor",
        help="check this installation and machine",
        description="Check this installation and machine.",
        **strict,
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return top


def _add_launch(commands: Any, strict: dict[str, Any]) -> None:
    launch = commands.add_parser(
        "launch",
        help="train with vLLM servers, all started on this machine",
        description="Start vLLM servers and training on this machine, print their commands and logs, and end them together. A "
        "server that dies is started again. Flags set keys as in train: --method.lr 1e-5.",
        usage="logra launch [options] RECIPE [--section.key VALUE ...]",
        **strict,
    )
    launch.add_argument("recipe", help="YAML file, such as recipes/demo.yaml")
    launch.add_argument("--train-gpus", type=int, default=1, metavar="N", help="devices that train; default: 1")
    launch.add_argument(
        "--rollout-gpus",
        type=int,
        default=1,
        metavar="N",
        help="devices of vLLM servers, rollout.vllm.tensor_parallel_size each; 0: the trainer samples by itself; default: 1",
    )
    launch.add_argument("--cpu", action="store_true", help="use no GPU: the numbers are of processes then")
    launch.add_argument("--vllm-python", metavar="PATH", help="the Python that has vLLM, if it is not this one")
    launch.add_argument("--dry-run", action="store_true", help="check the recipe, print the commands, end")


def _add_plan(commands: Any, strict: dict[str, Any]) -> None:
    plan = commands.add_parser(
        "plan",
        help="show the memory of a training step before anything is loaded",
        description="Show where the memory of a training step goes, and whether it fits, from the model's configuration alone. "
        "--model: a folder with a config.json, a hub name or a shape such as shape:qwen2.5-7b. --method: logra, logra-random, "
        "dense, lora, galore and so on (--compare shows all). Other flags set keys as in train: --train.head_chunk 0. Exit code "
        "3: it does not fit.",
        usage="logra plan [options] [RECIPE] [--model MODEL] [--method METHOD] [--section.key VALUE ...]",
        **strict,
    )
    plan.add_argument("recipe", nargs="?", help="YAML file; without one, give --model")
    plan.add_argument("--rank", type=int)
    plan.add_argument("--gpus", type=int, default=1, help="devices that share the model (FSDP2)")
    plan.add_argument("--gpu-memory", metavar="SIZE", help="of one device, such as 80GB or 24GiB")
    plan.add_argument("--host-memory", metavar="SIZE", help="of the host")
    plan.add_argument(
        "--length", type=int, help="tokens of a row, prompt and response; default: 4096, or the recipe's most"
    )
    plan.add_argument("--prompt-length", type=int, help="tokens of the prompt among them")
    plan.add_argument("--microbatch", type=int, help="rows a microbatch")
    plan.add_argument("--decoded", type=int, help="responses that are sampled at once")
    plan.add_argument("--link", type=float, default=25.0, metavar="GB/S", help="between host and device; default: 25")
    plan.add_argument("--compare", action="store_true", help="the other methods side by side")
    plan.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what argparse reads, `--section.key VALUE` flags), in any order; a flag's value may begin with a dash."""
    own: list[str] = []
    flags: list[str] = []
    rest = list(argv)
    own_options = {"plan": OF_PLAN, "launch": OF_LAUNCH}
    known = {*OPTIONS, *own_options.get(next((t for t in rest if not t.startswith("-")), ""), ())}
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        if name.replace("_", "-") in known:
            own.append(name.replace("_", "-") + equals + value)
        elif not token.startswith("--"):
            own.append(token)
        else:
            flags += [token, *rest[:1]] if not equals else [token]
            rest = rest if equals else rest[1:]
    return own, flags


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. One of several ranks ends here."""
    code = _main(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # at once: torch.distributed's threads can abort the process while the interpreter takes it down (seen with gloo)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    own, rest = split_flags(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(own)
    if rest and arguments.command in ("doctor", "checkout", "journal"):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return _run(arguments, rest)
    except UserError as error:
        return _report(error, arguments.traceback, 2)
    except LograError as error:
        return _report(error, arguments.traceback, 1)
    except KeyboardInterrupt:
        print("\ninterrupted" + "; resume with --resume auto" * (arguments.command == "train"), file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing to say
        return 141


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.command == "train":
        from logra.cli.train import train

        return train(arguments.recipe, rest, dry_run=arguments.dry_run, plain=arguments.plain)
    if arguments.command == "launch":
        from logra.cli.launch import launch

        return launch(
            arguments.recipe,
            rest,
            num_train=arguments.train_gpus,
            num_rollout=arguments.rollout_gpus,
            on_cpu=arguments.cpu,
            vllm_python=arguments.vllm_python,
            dry_run=arguments.dry_run,
        )
    if arguments.command == "eval":
        from logra.cli.evaluate import evaluate

        return evaluate(arguments.model, arguments.recipe, rest, as_json=arguments.json, output=arguments.output)
    if arguments.command == "plan":
        from logra.cli.plan import plan

        return plan(arguments, rest)
    if arguments.command == "checkout":
        from logra.cli.checkout import checkout

        return checkout(arguments.run, arguments.step, arguments.output, arguments.dtype)
    if arguments.command == "journal":
        from logra.cli.checkout import journal

        return journal(arguments.run, verify=arguments.verify, compact=arguments.compact, as_json=arguments.json)
    from logra.cli.doctor import doctor

    return doctor(as_json=arguments.json)


def _report(error: LograError, show_traceback: bool, code: int) -> int:
    if show_traceback:
        traceback.print_exception(error)
    rank = os.environ.get("RANK", "0")
    if getattr(error, "is_shared", False):  # the first rank says it: the launcher ends all when one has gone
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_FIRST_WORD_S)
    else:
        print(f"logra{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
