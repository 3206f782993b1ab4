"""`logra eval`: a recipe's held-out evaluation of any model. Nothing is trained, no run folder is written to."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from logra import config as cfg
from logra.cli.console import Console
from logra.errors import CheckpointError, ConfigError, ModelError, UserError

if TYPE_CHECKING:
    from logra.rl.evaluate import EvalResult
    from logra.rl.rewards.pool import RewardPool
    from logra.rl.rewards.result import RewardResult
    from logra.rl.types import Rollout

BUILTIN = "builtin:"
NO_EVAL = (
    "there is no eval section: add one to the recipe (`eval: {num_prompts: 100}`), or give a flag of it "
    "(--eval.num_prompts 100)"
)
_CARD_STEPS = re.compile(r", (\d+) steps\.")  # as `logra.rl.export.model_card` writes it


@dataclass(frozen=True)
class Source:
    """What is evaluated. model: what `load_model` takes. run: the run folder it belongs to, if any.

    step: finished training steps of the run, None where unknown. notes: what to tell the user of the choice.
    """

    model: str
    run: Path | None = None
    step: int | None = None
    notes: tuple[str, ...] = ()


def evaluate(model: str, recipe: str | None, flags: Sequence[str], *, as_json: bool, output: str | None) -> int:
    """Evaluate and print a table, or one JSON object. Returns the exit code; errors are raised."""
    _check_output(output)
    source = find_source(model)
    config = eval_config(source, recipe, flags)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    for note in source.notes:
        messages.print(note, markup=False)
    with messages.status("evaluating"):
        version = version_of(source)
        result, rewards = run_evaluation(config, version or 0)
    for name, message in rewards.messages.items():
        messages.print(f"reward {name}: {message}", markup=False)
    facts = {"model": source.model, "step": source.step, **result.metrics(), "eval/version": version}
    print_json(facts, config, rewards) if as_json else print_table(facts, result)
    if output is not None:
        write_rollouts(Path(output), source.step or 0, result, rewards)
    return 0


# -- which model ---------------------------------------------------------------------------------------------


def find_source(model: str) -> Source:
    """The model meant by MODEL: a run folder, a checkpoint, a model folder, a hub name, or a built-in model.

    Raises `CheckpointError` for a checkpoint that is not whole, `ModelError` for a path that is not there.
    """
    from logra.rl.checkpoint import MANIFEST, MODEL

    path = Path(model).expanduser()
    if model.startswith(BUILTIN) or not path.is_dir():
        _check_not_a_path(model, path)
        return Source(model)
    folder = path.parent if path.name == MODEL and (path.parent / MANIFEST).is_file() else path
    is_model = (folder / "config.json").is_file()
    if (folder / MANIFEST).is_file() or (re.fullmatch(r"step_\d+", folder.name) and not is_model):
        return _from_checkpoint(folder)
    if is_model:
        run = _run_of(path)
        return Source(str(path), run, _step_on_card(path) if run else None)
    if (path / "config.yaml").is_file():
        return _from_run(path)
    raise ModelError(
        f"{model} is no run folder (config.yaml), no checkpoint ({MANIFEST}) and no model folder "
        "(config.json): name one of these, a hub name or builtin:tiny-llama"
    )


def _check_not_a_path(model: str, path: Path) -> None:
    """A path that is not there must not be looked for on the hub."""
    looks_local = (
        model.startswith((".", "/", "~")) or model.count("/") > 1 or (path.parent != Path() and path.parent.is_dir())
    )
    if path.is_file():
        raise ModelError(f"{model} is a file: name the folder of a run, a checkpoint or a model")
    if looks_local and not model.startswith(BUILTIN):
        there = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        raise ModelError(f"there is no folder {model}" + (f": did you mean {path.parent / near[0]}?" if near else ""))


def _from_checkpoint(folder: Path, notes: tuple[str, ...] = ()) -> Source:
    from logra.rl.checkpoint import MODEL, load_checkpoint

    step = load_checkpoint(folder).step  # reads and verifies every file
    if not (folder / MODEL / "config.json").is_file():
        raise CheckpointError(f"the checkpoint {folder} holds no model: evaluate another checkpoint or the final model")
    return Source(str(folder / MODEL), _run_of(folder), step, notes)


def _from_run(run: Path) -> Source:
    """The newest whole checkpoint, or the final model where that is of a later step."""
    from logra.rl.checkpoint import CheckpointStore
    from logra.rl.run_dir import RunDir

    folder = RunDir(run)
    newest, skipped = CheckpointStore(folder.checkpoints).latest_with_report()
    notes = tuple(f"passed over: {reason}" for reason in skipped)
    final_step = _step_on_card(folder.final) if (folder.final / "config.json").is_file() else None
    has_final = (folder.final / "config.json").is_file()
    if newest is None and not has_final:
        raise CheckpointError(
            f"the run {run} has no whole checkpoint and no final model yet: wait for its first checkpoint (checkpoint.every), "
            "write the policy of a step with logra checkout, or evaluate another model with --recipe"
            + "".join(f"; {note}" for note in notes)
        )
    if newest is not None and (final_step is None or final_step <= _number(newest)):
        return _from_checkpoint(newest, (*notes, f"evaluating {newest}"))
    return Source(str(folder.final), run, final_step, (*notes, f"evaluating {folder.final}"))


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_").partition(".")[0])


def _run_of(path: Path) -> Path | None:
    """The run that holds a model: RUN/final, RUN/checkpoints/step_N or RUN/checkpoints/step_N/model."""
    inner = path.resolve()
    for run in [*inner.parents][:3]:
        if (run / "config.yaml").is_file() and inner.relative_to(run).parts[0] in ("final", "checkpoints"):
            return run
    return None


def _step_on_card(folder: Path) -> int | None:
    """The step an exported model was written at, from its model card."""
    try:
        found = _CARD_STEPS.search((folder / "README.md").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def version_of(source: Source) -> int | None:
    """The number of updates in the policy, as the run's own metrics tell it; None where they do not."""
    from logra.rl.run_dir import RunDir, read_metrics

    if source.run is None or source.step is None or not RunDir(source.run).metrics.is_file():
        return None
    records = read_metrics(RunDir(source.run).metrics)
    return next((int(r["num_updates"]) for r in records if r.get("step") == source.step and "num_updates" in r), None)


# -- which prompts and rewards -------------------------------------------------------------------------------


def eval_config(source: Source, recipe: str | None, flags: Sequence[str]) -> cfg.Config:
    """The recipe, or the run's own configuration, with the flags over it and the model in it."""
    if recipe is None and source.run is None:
        raise ConfigError(
            f"{source.model} belongs to no run, so nothing says what to evaluate it on: add --recipe RECIPE.yaml"
        )
    own = source.run / "config.yaml" if source.run is not None else Path()
    overrides = cfg.parse_overrides(flags)
    if "model.name_or_path" in overrides:
        raise ConfigError("the model to evaluate is the argument MODEL: leave out --model.name_or_path")
    data = cfg.apply_overrides(cfg.read_yaml(recipe if recipe is not None else own), overrides)
    if data.get("eval") is None:
        raise ConfigError(NO_EVAL)
    config = cfg.make_config(data)
    section = {**config.model_dump()["model"], "name_or_path": source.model}
    if source.model != config.model.name_or_path and "model.revision" not in overrides:
        section["revision"] = None
    if recipe is None and "model.chat_template" not in overrides:
        section["chat_template"] = None  # the exported tokenizer has it; the file it came from may be gone
    method = {**config.model_dump()["method"], "weights": "fp32", "residual": "device"}  # nothing is trained
    return cfg.make_config({**config.model_dump(), "model": section, "method": method})


class _Recorder:
    """Stands in for the pool and keeps its last result: the evaluation itself takes only the total from it."""

    def __init__(self, pool: RewardPool):
        self.pool = pool
        self.last: RewardResult | None = None

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> RewardResult:
        self.last = self.pool.score_rollouts(rollouts)
        return self.last


def run_evaluation(config: cfg.Config, version: int) -> tuple[EvalResult, RewardResult]:
    """Build the model, data, rewards and engine, evaluate once, end the reward workers whatever happened."""
    import torch

    from logra import build
    from logra.rl.models import prepare

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, tokenizer = build.build_model(config)
    prompts = build.build_eval_data(config, tokenizer)
    prepare(model, gradient_checkpointing=False)
    engine = build.build_hf_engine(config, model, tokenizer)
    engine.publish(version, None)
    with build.build_rewards(config.reward) as pool:
        pool.warmup(sorted(prompts[0].columns))
        recorder = _Recorder(pool)
        result = build.build_evaluator(config, engine, prompts, recorder)()  # type: ignore[arg-type]
    assert recorder.last is not None
    return result, recorder.last


# -- what is shown -------------------------------------------------------------------------------------------


def print_table(facts: Mapping[str, Any], result: EvalResult) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", facts["model"])
    for name, key in (("step", "step"), ("policy version", "eval/version")):
        table.add_row(name, "unknown" if facts[key] is None else str(facts[key]))
    for k, value in result.pass_at.items():
        table.add_row(f"pass@{k}", f"{value:.4f}")
    table.add_row(f"avg@{result.num_rollouts}", f"{result.mean_score:.4f}")
    table.add_row("mean length", f"{result.mean_length:.1f}")
    table.add_row("clipped ratio", f"{result.clipped_ratio:.4f}")
    table.add_row("unscored ratio", f"{result.unscored_ratio:.4f}")
    table.add_row("prompts", f"{result.num_prompts} x {result.num_rollouts} rollouts")
    Console(highlight=False, markup=False).print(table)


def print_json(facts: Mapping[str, Any], config: cfg.Config, rewards: RewardResult) -> None:
    assert config.eval is not None
    settings = config.eval.model_dump(mode="json", exclude={"every", "before", "after"})
    print(json.dumps({**facts, **rewards.metrics(), "settings": settings}))


def _check_output(output: str | None) -> None:
    """Fail before the evaluation, not after it."""
    if output is None:
        return
    path = Path(output).expanduser()
    if path.suffix != ".parquet" or path.is_dir():
        raise ConfigError(f"--output {output}: name a .parquet file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"--output {output}: the folder {path.parent} does not exist or cannot be written: make it first"
        )


def write_rollouts(path: Path, step: int, result: EvalResult, rewards: RewardResult) -> None:
    """The rollouts in the columns of a run's completions, without advantages. Atomic."""
    from logra.rl.run_dir import CompletionsWriter

    path = path.expanduser()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.tmp-", dir=path.parent) as folder:
            written = CompletionsWriter(Path(folder)).write(
                step,
                result.rollouts,
                reward=rewards.total,
                rewards=rewards.per_function,
                advantage=[None] * len(result.rollouts),
            )
            os.replace(written, path)
    except (OSError, UserError) as error:
        raise UserError(
            f"cannot write {path}: {error.__cause__ or error}. Free some space or name another file"
        ) from error
