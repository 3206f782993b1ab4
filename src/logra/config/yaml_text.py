"""YAML as recipes and flags have it: the scalars of YAML 1.2, and no key twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from logra.config.schema import Config
from logra.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2, which refuses a key given twice.

    YAML 1.1, PyYAML's own, reads 1e-6 as a string, 010 as 8, 1:30 as 90, `on` as true, 2026-01-02 as a date.
    """

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}


_FLOAT = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
for _tag, _pattern, _first in (
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("merge", re.compile(r"<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    keys = [loader.construct_object(key, deep=True) for key in own]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes each string that `_Loader` or a YAML 1.1 reader would take for something else."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Line breaks other than \\n come back as \\n unless they are escaped."""
    style = '"' if {*text} & {*"\r\x85\u2028\u2029"} else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_value(text: str) -> Any:
    """A flag's value: a YAML scalar (number, true, false, null, quoted text), or a list or mapping in [] or {}.

    Anything else is the text itself, with its spaces, colons and # signs; the empty text too.
    """
    start = text.strip()[:1]
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, str):
        return value if start in ("'", '"') else text
    if value is None:
        return None if text.strip() in ("~", "null", "Null", "NULL") else text
    if isinstance(value, bool | int | float):
        return value
    return value if start in ("[", "{") else text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file; `ConfigError` with the line if it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.load(text, Loader=_Loader)
    except FileNotFoundError as error:
        raise ConfigError(f"no recipe at {path}: give the path of a YAML file, such as recipes/demo.yaml") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, it holds {type(data).__name__}")
    return data


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same value."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
