"""What `logra launch` starts: commands, environments, addresses. Pure; imports no torch.

Everything is started as one would by hand, so that what is printed can be copied: servers by `vllm serve`, training by
`logra train`, on several devices under torchrun.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from logra.config import Config, apply_overrides, make_config, parse_overrides, read_yaml
from logra.errors import ConfigError
from logra.rl.engines.vllm_serve import SERVE_ENVIRONMENT, serve_options

BUILTIN = "builtin:"
HOST = "127.0.0.1"  # the weight-transfer routes have no authentication: nobody else may reach them
_OURS = ("rollout.engine", "rollout.vllm.url")
_KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class Command:
    """A process to start. environment: what is set beside that of the launcher; no secret is in it. url: a server's."""

    name: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    url: str | None = None

    def shown(self) -> str:
        """A line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True)
class LaunchPlan:
    servers: list[Command]
    trainer: Command

    def shown(self) -> str:
        """All commands, each under a comment with its name."""
        return "\n".join(f"# {command.name}\n{command.shown()}" for command in [*self.servers, self.trainer])


@dataclass(frozen=True)
class Machine:
    """Where commands run. gpus: ids for CUDA_VISIBLE_DEVICES, or None: CPUs alone. python: that trains. serve: what a model's
    folder is appended to. environment: the launcher's."""

    gpus: Sequence[str] | None
    python: str
    serve: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def read_recipe(recipe: str, flags: Sequence[str], num_train: int, num_rollout: int, *, on_cpu: bool) -> Config:
    """The configuration that training will have, but for the servers' addresses. Raises `ConfigError`, with the fix."""
    if num_train < 1 or num_rollout < 0:
        raise ConfigError(
            f"--train-gpus {num_train} --rollout-gpus {num_rollout}: training needs at least 1, rollouts at least 0 "
            "(0: the trainer samples by itself)"
        )
    overrides, data = parse_overrides(flags), read_yaml(recipe)
    given = apply_overrides(data, overrides)
    rollout = given.get("rollout")
    vllm = rollout.get("vllm") if isinstance(rollout, dict) else None
    if num_rollout and (any(key in overrides for key in _OURS) or (isinstance(vllm, dict) and vllm.get("url"))):
        raise ConfigError(
            "logra launch starts the vLLM servers and sets rollout.engine and rollout.vllm.url itself: leave them out; or use "
            "logra train with servers of your own"
        )
    # as many addresses as there will be at most: what is checked here is what will run
    urls = [f"http://{HOST}:{number + 1}" for number in range(num_rollout)]
    config = make_config(apply_overrides(data, parse_overrides([*flags, *_set_by_us(urls, on_cpu)])))
    _check(config, num_rollout)
    return config


def _check(config: Config, num_rollout: int) -> None:
    section = config.rollout.vllm
    if not num_rollout:
        return
    if num_rollout % section.tensor_parallel_size:
        raise ConfigError(
            f"--rollout-gpus {num_rollout} is not divisible by rollout.vllm.tensor_parallel_size="
            f"{section.tensor_parallel_size}: each server takes so many"
        )
    if config.model.name_or_path.startswith(BUILTIN):
        raise ConfigError(
            f"{config.model.name_or_path} has no folder that a vLLM server could load: give model.name_or_path a folder or a hub "
            "name, or --rollout-gpus 0"
        )
    if section.fetch:
        raise ConfigError(
            "rollout.vllm.fetch is for servers elsewhere: those that logra launch starts get updates through requests and files; "
            "leave it out"
        )
    if section.colocated:
        raise ConfigError(
            "rollout.vllm.colocated is for an engine that shares the trainer's devices: servers have their own; leave it out"
        )


def make_plan(
    config: Config,
    recipe: str,
    flags: Sequence[str],
    num_train: int,
    num_rollout: int,
    machine: Machine,
    ports: Sequence[int],
) -> LaunchPlan:
    """Trainer on the first devices, servers on the next ones. ports: at least one for each server.

    Raises `ConfigError` if there are fewer devices.
    """
    gpus, per_server = machine.gpus, config.rollout.vllm.tensor_parallel_size
    if gpus is not None and len(gpus) < num_train + num_rollout:
        raise ConfigError(
            f"{num_train} + {num_rollout} GPUs are asked for, and {len(gpus)} are there: lower --train-gpus or --rollout-gpus; "
            "--rollout-gpus 0 lets the trainer sample by itself, --cpu uses no GPU"
        )
    servers = []
    for number in range(num_rollout // per_server):
        own = None if gpus is None else gpus[num_train + number * per_server :][:per_server]
        servers.append(_server(config, number, own, machine, ports[number]))
    urls = [server.url for server in servers if server.url]
    return LaunchPlan(servers, _trainer(recipe, flags, num_train, machine, urls))


def _server(config: Config, number: int, gpus: Sequence[str] | None, machine: Machine, port: int) -> Command:
    section, model = config.rollout.vllm, config.model
    name = model.name_or_path
    words = [*machine.serve, str(Path(name).expanduser()) if name.startswith("~") else name]
    words += ["--host", HOST, "--port", str(port), "--dtype", section.dtype or model.dtype]
    words += serve_options()
    settings: dict[str, object] = {
        "revision": model.revision,
        "max_model_len": section.max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "tensor_parallel_size": section.tensor_parallel_size if section.tensor_parallel_size > 1 else None,
        # the default is for an engine beside the trainer; a server has its devices for itself, and vLLM's own default
        "gpu_memory_utilization": section.memory if "memory" in section.model_fields_set else None,
        "enforce_eager": section.enforce_eager or None,
        "uvicorn_log_level": "warning",  # else a line a rollout
        **({} if gpus is not None else {"enable_chunked_prefill": False}),
    }
    clash = sorted(section.options.keys() & {*settings, "host", "port", "dtype", "model"})
    if clash:
        raise ConfigError(f"rollout.vllm.options: {', '.join(clash)} cannot be given there, logra launch sets it")
    environment = dict(SERVE_ENVIRONMENT)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif _KV_CACHE not in machine.environment:
        environment[_KV_CACHE] = "2"
    return Command(
        f"vllm {number}", [*words, *options_of({**settings, **section.options})], environment, f"http://{HOST}:{port}"
    )


def options_of(settings: Mapping[str, object]) -> list[str]:
    """Arguments of `vllm.LLM` as options of `vllm serve`; None: left out."""
    words = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _trainer(recipe: str, flags: Sequence[str], count: int, machine: Machine, urls: Sequence[str]) -> Command:
    words = [machine.python]
    if count > 1:
        words += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(count),
        ]  # torchrun, of this Python
    words += ["-m", "logra", "train", recipe, *flags, *_set_by_us(urls, machine.gpus is None)]
    environment = {} if machine.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[:count])}
    return Command("train", words, environment)


def _set_by_us(urls: Sequence[str], on_cpu: bool) -> list[str]:
    device = ["--model.device", "cpu"] if on_cpu else []
    if not urls:
        return [*device, "--rollout.engine", "hf"]
    return [*device, "--rollout.engine", "vllm", "--rollout.vllm.url", json.dumps(list(urls))]
