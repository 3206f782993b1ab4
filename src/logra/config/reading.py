"""A recipe with flags laid over it, validated whole; faults are explained with the nearest valid key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from logra.config.schema import Config, Section, nearest
from logra.config.yaml_text import parse_value, read_yaml
from logra.errors import ConfigError


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--section.key value` or `--section.key=value` pairs, as a flat mapping of dotted keys."""
    result: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ConfigError(f"expected --section.key VALUE, got {flag!r}")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} needs a value")
            value = rest.pop(0)
        result[key.replace("-", "_")] = parse_value(value)
    return result


def apply_overrides(data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy of `data` with dotted keys set; a dotted key through something that is no mapping is refused."""
    result = _copy(data)
    for dotted, value in overrides.items():
        *path, last = dotted.split(".")
        node: Any = result
        for part in path:
            if isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
                continue
            if not isinstance(node, dict):
                raise ConfigError(f"--{dotted}: {part} is not inside a section")
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if isinstance(node, list) and last.isdigit() and int(last) < len(node):
            node[int(last)] = value
        elif isinstance(node, dict):
            node[last] = value
        else:
            raise ConfigError(f"--{dotted}: {'.'.join(path)} is not a section")
    return result


def _copy(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _copy(v) for k, v in node.items()}
    return [_copy(v) for v in node] if isinstance(node, list) else node


def load_config(path: str | Path, arguments: Sequence[str] = ()) -> Config:
    """Read a recipe, lay the flags over it, validate it whole. `ConfigError` lists every fault with its fix."""
    return make_config(apply_overrides(read_yaml(path), parse_overrides(arguments)))


def make_config(data: dict[str, Any]) -> Config:
    """Validate a mapping; every fault is listed in one `ConfigError`."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        raise ConfigError("the configuration is not valid:\n" + "\n".join(f"  - {line}" for line in lines)) from error


def _explain(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        valid = _valid_keys(detail["loc"][:-1])
        key = str(detail["loc"][-1])
        return f"{where}: unknown key; {_known_elsewhere(key) or _elsewhere(key) or nearest(key, valid)}"
    if detail["type"] == "missing":
        return f"{where}: required and not given"
    message = detail["msg"].removeprefix("Value error, ")
    given = "" if isinstance(detail["input"], dict) else f" (got {detail['input']!r})"
    return f"{where}: {message}{given}" if where else message


# TRL's flat names, which users bring with them
FROM_TRL = {
    "model_name_or_path": "model.name_or_path",
    "dataset_name": "data.name",
    "num_generations": "rollout.rollouts_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "per_device_train_batch_size": "train.microbatch_size",
    "max_steps": "train.steps",
    "learning_rate": "method.lr",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "loss_type": "algorithm.loss",
    "scale_rewards": "algorithm.advantage_params.scale",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "reward_funcs": "reward.functions",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "report_to": "log.trackers",
    "resume_from_checkpoint": "resume",
}


def _known_elsewhere(key: str) -> str:
    return f"TRL's {key} is {FROM_TRL[key]} here" if key in FROM_TRL else ""


def _valid_keys(location: tuple[Any, ...]) -> list[str]:
    section: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        kind = section.model_fields[section.yaml_keys()[part]].annotation
        candidates = [kind, *getattr(kind, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return list(section.yaml_keys())


def _elsewhere(key: str) -> str:
    """Where exactly this key belongs, when it was put in the wrong section."""
    places = [key] if key in Config.model_fields else []
    for name, field in Config.model_fields.items():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section) and key in kind.yaml_keys():
                places.append(f"{name}.{key}")
    return f"did you mean {' or '.join(places)}?" if places else ""
