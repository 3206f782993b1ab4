"""`logra launch`: vLLM servers and training on one machine, started, watched and ended together. Imports no torch."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from logra.cli.launch_plan import Machine, make_plan, read_recipe
from logra.cli.supervise import Supervisor
from logra.errors import ConfigError
from logra.rl.engines.vllm_serve import KEY_VARIABLE

_FIND = "import importlib.util as u, json; print(json.dumps([n for n in {names!r} if u.find_spec(n) is None]))"
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_QUESTION_S = 120.0


def launch(
    recipe: str,
    flags: Sequence[str],
    *,
    num_train: int,
    num_rollout: int,
    on_cpu: bool = False,
    vllm_python: str | None = None,
    dry_run: bool = False,
) -> int:
    """Print the commands, run them, return the exit code of training. Raises what can be found wrong before that."""
    config = read_recipe(recipe, flags, num_train, num_rollout, on_cpu=on_cpu)
    python = vllm_python or sys.executable
    if dry_run:
        gpus = None if on_cpu else [str(number) for number in range(num_train + num_rollout)]
    else:
        gpus = None if on_cpu else visible_gpus()
        if num_rollout:
            check_packages(python, ("vllm", "logra"))
            check_packages(sys.executable, ("httpx",))
    machine = Machine(gpus, sys.executable, serve_command(python, on_cpu), os.environ)
    plan = make_plan(config, recipe, flags, num_train, num_rollout, machine, free_ports(num_rollout))
    print(plan.shown())
    if plan.servers:
        print(f"# all of them share a random key in {KEY_VARIABLE}, which is not shown", flush=True)
    if dry_run:
        return 0
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    environment = {**os.environ, KEY_VARIABLE: key} if plan.servers else dict(os.environ)
    return Supervisor(plan, environment, secret=key).run()


def serve_command(python: str, on_cpu: bool) -> list[str]:
    """What the model's folder is appended to: `vllm serve` of that Python; builds for CPU may lack it."""
    if on_cpu:
        return [python, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    script = Path(shutil.which(python) or python).parent / "vllm"
    return [str(script), "serve"] if script.is_file() else [python, "-m", "vllm.entrypoints.cli.main", "serve"]


def check_packages(python: str, names: Sequence[str]) -> None:
    """Raise `ConfigError` naming the package that a Python lacks."""
    missing = json.loads(_ask(python, _FIND.format(names=list(names))))
    if missing:
        fixes = {"vllm": "'logra[vllm]'", "httpx": "'logra[sync]'", "logra": "logra"}
        raise ConfigError(
            f"{python} has no package {missing[0]}: pip install {fixes[missing[0]]}"
            + (" there, or name a Python that has vLLM and logra with --vllm-python" if missing[0] != "httpx" else "")
        )


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES, of those that are visible now."""
    count = int(_ask(sys.executable, _COUNT_GPUS))
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if given is None else [name.strip() for name in given.split(",")]
    return names[:count]


def _ask(python: str, code: str) -> str:
    """The last line that a Python prints. A process of its own: asking torch here would take a GPU's memory."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=_QUESTION_S, check=True)
        return done.stdout.strip().splitlines()[-1]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        words = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else [error]
        raise ConfigError(f"{python} does not answer: {' '.join(map(str, words))}. Is it a working Python?") from error


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
