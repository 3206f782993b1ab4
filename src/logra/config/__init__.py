"""The configuration: strict pydantic models, YAML below flags, dotted overrides. Imports no torch.

An unknown key is an error that names the nearest valid one. Scalars are those of YAML 1.2: `1e-6` is a number.
"""

from logra.config.identity import IDENTITY, differences, identity
from logra.config.reading import FROM_TRL, apply_overrides, load_config, make_config, parse_overrides
from logra.config.schema import (
    Algorithm,
    Checkpoint,
    Config,
    Data,
    Evaluation,
    Journal,
    Log,
    Memory,
    Method,
    Model,
    Reward,
    Rewards,
    RolloutSection,
    Section,
    Sync,
    Train,
    Trust,
    Vllm,
)
from logra.config.yaml_text import parse_value, read_yaml, to_yaml

__all__ = [
    "FROM_TRL",
    "IDENTITY",
    "Algorithm",
    "Checkpoint",
    "Config",
    "Data",
    "Evaluation",
    "Journal",
    "Log",
    "Memory",
    "Method",
    "Model",
    "Reward",
    "Rewards",
    "RolloutSection",
    "Section",
    "Sync",
    "Train",
    "Trust",
    "Vllm",
    "apply_overrides",
    "differences",
    "identity",
    "load_config",
    "make_config",
    "parse_overrides",
    "parse_value",
    "read_yaml",
    "to_yaml",
]
