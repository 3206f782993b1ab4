"""From a configuration to objects: the only package that knows both."""

from logra.build.data import build_data, build_eval_data, build_evaluator, build_rewards
from logra.build.engine import build_engine, build_hf_engine
from logra.build.model import build_method, build_model, model_card
from logra.build.run import Run, build_run

__all__ = [
    "Run",
    "build_data",
    "build_engine",
    "build_eval_data",
    "build_evaluator",
    "build_hf_engine",
    "build_method",
    "build_model",
    "build_rewards",
    "build_run",
    "model_card",
]
