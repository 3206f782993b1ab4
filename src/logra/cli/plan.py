"""`logra plan`: the memory of a training step, before anything is loaded. Exit code 3: it does not fit."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from logra import config as cfg
from logra.build.fitting import WHAT, largest
from logra.build.plan import (
    METHODS,
    PAPER,
    Plan,
    Question,
    as_method,
    compare,
    model_config_of,
    plan_memory,
    positions_of,
    with_layers,
    worst_case,
)
from logra.build.refusal import check_memory
from logra.build.rehearsal import Shape, makes_whole_logits
from logra.cli.console import Console
from logra.config.sizes import parse_size
from logra.errors import ConfigError, ModelError
from logra.memory.formulas import STATE
from logra.memory.gauge import UPDATE
from logra.memory.plan import ROWS

DOES_NOT_FIT = 3
_WIDTH = 118
_LABELS = {
    "logra-random": "logra, random", "logra-aligned": "logra, aligned", PAPER: "LoGRA as published",
    "dense": "dense AdamW", "lora": "LoRA", "dora": "DoRA",
    **{name: formula.label for name, formula in STATE.items()},
}  # fmt: skip
_HOST = {
    "residual": "residual of split weights, pinned", "offloaded": "offloaded activations, pinned",
    "loading": "while the model is loaded", "export": "float32 copy while a checkpoint is written",
}  # fmt: skip


def plan(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Plan, print, and say by the exit code whether it fits."""
    question, notes = ask(arguments, flags)
    found = plan_memory(question)
    if question.device_limit is not None:
        found = replace(found, largest={what: largest(found, what) for what in WHAT if _matters(question, what)})
    others = compare(question) if arguments.compare else {}
    if arguments.json:
        print(json.dumps(as_json(found, notes, others), indent=1))
    else:
        console = Console(file=sys.stdout, width=_WIDTH, highlight=False, soft_wrap=False)
        show(console, found, notes)
        if others:
            show_comparison(console, others)
    return 0 if found.fits else DOES_NOT_FIT


def _matters(question: Question, what: str) -> bool:
    is_sampled_here = question.config.rollout.engine == "hf" and question.gpus == 1
    return not (what == "rank" and question.config.method.name == "dense") and (what != "decoded" or is_sampled_here)


def refuse(config: cfg.Config, ranks: int = 1) -> None:
    """Raise `ConfigError` if a run cannot fit (`memory.check`), after the plan was printed; only say so with warn."""
    found = check_memory(config, ranks)
    if found is None or found.fault is None or found.question.device_limit is None:
        return
    console = Console(file=sys.stderr, width=_WIDTH, highlight=False)
    notes = ["planned for the longest prompt of the data with a response of rollout.max_new_tokens"]
    notes += [] if UPDATE in found.phases else ["the update was left out: it does not matter any more"]
    show(console, found, notes)
    if config.memory.check == "warn":
        return
    raise ConfigError(
        f"this run needs {readable(found.peak)} in the {found.worst} phase, there are {readable(found.question.device_limit)}: "
        f"{remedy(found)}; or set memory.check=warn to try it all the same"
    )


# -- the question --------------------------------------------------------------------------------------------------------------


def ask(arguments: argparse.Namespace, flags: Sequence[str]) -> tuple[Question, list[str]]:
    """(the question, notes on what was assumed)."""
    if arguments.gpus < 1:
        raise ConfigError(f"--gpus {arguments.gpus}: at least 1")
    overrides, label = _overrides(arguments, flags)
    notes: list[str] = []
    if arguments.recipe is not None:
        data = cfg.read_yaml(arguments.recipe)
    elif "model.name_or_path" not in overrides:
        raise ConfigError("give a recipe, or --model with a folder, a hub name or a shape such as shape:qwen2.5-7b")
    else:
        data, assumed = _defaults(label or "logra", overrides)
        notes.append(f"without a recipe: {assumed}")
    config = cfg.make_config(cfg.apply_overrides(data, overrides))
    model_config, note = model_config_of(config.model.name_or_path, config.model.revision)
    notes += [note] if note else []
    if makes_whole_logits(with_layers(model_config, 1)):
        notes.append("this model caps or scales its logits: they are made whole, not in chunks")
    shape = _shape(config, model_config, arguments)
    question = Question(
        config, model_config, shape,
        gpus=arguments.gpus,
        device_limit=_size(arguments.gpu_memory, "--gpu-memory"),
        host_limit=_size(arguments.host_memory, "--host-memory"),
        accelerator=config.model.device != "cpu",
        link=arguments.link * 1e9,
    )  # fmt: skip
    if arguments.gpus > 1:
        notes.append(
            "several devices: FSDP2, which the trainer does not have yet; rollouts are then an engine's of its own"
        )
    if label not in (None, "logra", "dense", "lora"):
        question = as_method(question, label)
    return question, notes


def _overrides(arguments: argparse.Namespace, flags: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """The dotted flags, with the short options among them; and the method that is planned."""
    found = cfg.parse_overrides(flags)
    if "model" in found:
        found["model.name_or_path"] = str(found.pop("model"))
    if arguments.rank is not None:
        found["method.rank"] = arguments.rank
    if arguments.microbatch is not None:
        found["train.microbatch_size"] = arguments.microbatch
    label = str(found.pop("method")) if "method" in found else None
    if label in METHODS and label not in ("dense", "lora"):
        found["method.name"] = METHODS[label]
        if label.startswith("logra-") and label != PAPER:
            found["method.basis"] = label.removeprefix("logra-")
    elif label in ("logra", "dense", "lora"):
        found["method.name"] = label
    elif label is not None:
        raise ConfigError(f"--method {label}: use logra, {', '.join(METHODS)}")
    return found, label


def _defaults(label: str, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What suits an accelerator, where there is no recipe."""
    is_logra = METHODS.get(label, label) == "logra" and overrides.get("method.name", "logra") == "logra"
    is_wide = label == PAPER or overrides.get("model.dtype") == "float32"
    data: dict[str, Any] = {
        "model": {"dtype": "bfloat16", "gradient_checkpointing": True},
        "method": {"weights": "split"} if is_logra and not is_wide else {},
        "data": {"name": "none"}, "reward": {"functions": [{"function": "none"}]}, "train": {"microbatch_size": 1},
    }  # fmt: skip
    assumed = ["model.dtype=bfloat16", "model.gradient_checkpointing=true", "train.microbatch_size=1"]
    assumed += ["method.weights=split"] if data["method"] else []
    names = {item.split("=")[0] for item in assumed} & overrides.keys()
    return data, ", ".join(item for item in assumed if item.split("=")[0] not in names) or "nothing is assumed"


def _shape(config: cfg.Config, model_config: Any, arguments: argparse.Namespace) -> Shape:
    """--length and --prompt-length, else 4096 tokens, or the longest row that the recipe allows."""
    positions = positions_of(model_config)
    shape = worst_case(config, model_config)
    length = arguments.length
    if length is None and arguments.recipe is None:
        length = min(4096, positions or 4096)
    if length is not None or arguments.prompt_length is not None:
        length = length or shape.prompt + shape.response
        prompt = arguments.prompt_length or max(1, min(config.data.max_prompt_tokens, length // 4))
        if prompt >= length:
            raise ConfigError(
                f"--prompt-length {prompt} must be below the length, {length}: part of it is the response"
            )
        shape = replace(shape, prompt=prompt, response=length - prompt)
    if positions is not None and shape.prompt + shape.response > positions:
        raise ModelError(f"a row of {shape.prompt + shape.response} tokens is above the model's {positions} positions")
    return replace(shape, decoded=arguments.decoded or shape.decoded)


def _size(text: str | None, option: str) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


# -- the answer ----------------------------------------------------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / (1 << 30):.2f}"


def readable(size: float) -> str:
    """With its unit."""
    return f"{gib(size)} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def title(plan: Plan) -> str:
    question = plan.question
    config, shape = question.config, question.shape
    method = _LABELS.get(question.label, "") or config.method.name
    if config.method.name == "logra" and question.label != PAPER:
        method = f"logra, {config.method.basis} basis, {config.method.weights} weights"
        method += ", residual on the host" if config.method.residual == "cpu" else ""
    rank = "" if config.method.name == "dense" and not plan.by_formula else f", rank {config.method.rank}"
    where = f"{question.gpus} devices" if question.gpus > 1 else "one device" if question.accelerator else "CPU"
    return (
        f"{config.model.name_or_path} ({plan.num_parameters / 1e9:.2f} billion parameters), {method}{rank}, {where}; rows of "
        f"{question.length} tokens ({shape.prompt} prompt), {shape.rows} a microbatch, {shape.decoded} decoded at once"
    )


def table(plan: Plan) -> Table:
    """Bytes by row and phase."""
    is_small = plan.peak < 1 << 30
    unit = "MiB" if is_small else "GiB"
    result = Table(box=None, pad_edge=False)
    result.add_column(f"{unit} a device" if plan.question.gpus > 1 else unit)

    def shown(size: float) -> str:
        return f"{size / (1 << (20 if is_small else 30)):.2f}"

    for name in plan.phases:
        result.add_column(name, justify="right")
    for row, label in ROWS.items():
        sizes = [phase.peak.get(row, 0) for phase in plan.phases.values()]
        if any(sizes):
            result.add_row(label, *(shown(size) if size else "-" for size in sizes))
    result.add_section()
    result.add_row("peak", *(shown(phase.peak_bytes) for phase in plan.phases.values()))
    result.add_row("mean", *(shown(phase.mean_bytes) for phase in plan.phases.values()))
    return result


def _say(console: Console, text: str) -> None:
    console.print(textwrap.fill(text, _WIDTH, subsequent_indent="  "), soft_wrap=True)


def show(console: Console, plan: Plan, notes: Sequence[str]) -> None:
    _say(console, title(plan))
    for note in notes:
        _say(console, f"note: {note}")
    if plan.by_formula:
        _say(console, "note: optimizer state and update workspace by formula, with the optimizer's default options")
    console.print(table(plan))
    console.print(
        f"peak {readable(plan.peak)} in the {plan.worst} phase; mean of gradient and update {readable(plan.mean)}"
    )
    if plan.host:
        parts = ", ".join(f"{_HOST[kind]} {readable(size)}" for kind, size in plan.host.items())
        _say(console, f"host: {readable(plan.host_bytes)} at most ({parts})")
    if plan.link_bytes:
        seconds = plan.link_bytes / plan.question.link
        _say(
            console,
            f"link: {readable(plan.link_bytes)} an update, {seconds:.2f} s at {plan.question.link / 1e9:g} GB/s each device",
        )
    for line in verdict(plan):
        _say(console, line)


def verdict(plan: Plan) -> list[str]:
    """Whether it fits, what breaks it first, and what would fit."""
    question, fault, lines = plan.question, plan.fault, []
    if fault is not None and question.device_limit is not None:
        lines.append(
            f"does not fit {readable(question.device_limit)}: {readable(fault.missing)} too much in the {fault.phase} phase, "
            f"where {ROWS[fault.kind]} goes over; {remedy(plan)}"
        )
    elif question.device_limit is not None:
        lines.append(f"fits {readable(question.device_limit)}, {readable(question.device_limit - plan.peak)} to spare")
    if question.host_limit is not None and plan.host_bytes > question.host_limit:
        lines.append(f"does not fit the host, {readable(question.host_limit)}: it needs {readable(plan.host_bytes)}")
    if plan.largest:
        shown = {"microbatch": "microbatch", "length": "length", "rank": "rank", "decoded": "responses decoded at once"}
        found = ", ".join(f"{shown[what]} {value or 'none'}" for what, value in plan.largest.items())
        lines.append(f"largest that fits, all else equal: {found}")
    return lines


def remedy(plan: Plan) -> str:
    """The one change that helps most."""
    fault, config = plan.fault, plan.question.config
    kind = fault.kind if fault is not None else ""
    shape = plan.question.shape
    if (
        fault is not None
        and fault.phase == "rollout"
        and kind in ("kv_cache", "workspace", "logits")
        and shape.decoded > 1
    ):
        return f"set rollout.batch_size below {shape.decoded}"
    if config.method.name == "dense":
        return "use method.name=logra, or a larger device"
    if kind in ("activations", "logits", "kv_cache", "workspace") and not config.model.gradient_checkpointing:
        return "set model.gradient_checkpointing=true"
    if kind in ("activations", "logits", "workspace") and shape.rows > 1:
        return f"set train.microbatch_size below {shape.rows}"
    if config.method.name == "logra" and config.method.weights == "fp32":
        return "set model.dtype=bfloat16 and method.weights=split"
    if config.method.name == "logra" and config.method.residual == "device" and config.method.weights == "split":
        return "set method.residual=cpu"
    return "use shorter rows (rollout.max_new_tokens, data.max_prompt_tokens) or a larger device"


def show_comparison(console: Console, others: Mapping[str, Plan]) -> None:
    """All methods side by side."""
    first = next(iter(others.values())).question
    result = Table(box=None, pad_edge=False)
    for heading in ("method", "state", "gradients", "activations", "peak", "mean", "fits", ""):
        result.add_column(heading, justify="left" if heading in ("method", "") else "right")
    for label, plan in others.items():
        row = comparison(plan)
        fits = "-" if first.device_limit is None else "yes" if plan.fault is None else "no"
        sizes = (gib(row[name]) for name in ("state", "gradients", "activations", "peak", "mean"))
        result.add_row(_LABELS[label], *sizes, fits, "state by formula" if plan.by_formula else "")
    console.print()
    _say(console, f"all methods at rank {first.config.method.rank}, GiB a device")
    console.print(result)


def comparison(plan: Plan) -> dict[str, int]:
    """state: what is kept beside the weights; gradients, activations (with logits): the most in any phase."""
    peaks = [phase.peak for phase in plan.phases.values()]

    def most(*rows: str) -> int:
        return max(sum(peak.get(row, 0) for row in rows) for peak in peaks)

    return {
        "state": most("sketch", "basis", "optimizer"), "gradients": most("gradients"),
        "activations": most("activations", "logits"), "peak": plan.peak, "mean": plan.mean,
    }  # fmt: skip


def as_json(plan: Plan, notes: Sequence[str], others: Mapping[str, Plan]) -> dict[str, Any]:
    """Everything, in bytes."""
    question, fault = plan.question, plan.fault
    shape = question.shape
    return {
        "model": question.config.model.name_or_path, "method": question.label or question.config.method.name,
        "num_parameters": plan.num_parameters, "num_trained": plan.num_trained, "gpus": question.gpus,
        "prompt": shape.prompt, "response": shape.response, "microbatch": shape.rows, "decoded": shape.decoded,
        "phases": {
            name: {"peak_bytes": p.peak_bytes, "mean_bytes": p.mean_bytes, "peak": p.peak, "mean": p.mean}
            for name, p in plan.phases.items()
        },
        "peak_bytes": plan.peak, "mean_bytes": plan.mean, "worst_phase": plan.worst, "by_formula": plan.by_formula,
        "host": plan.host, "host_bytes": plan.host_bytes, "link_bytes": plan.link_bytes,
        "link_seconds": plan.link_bytes / question.link, "device_limit": question.device_limit,
        "host_limit": question.host_limit, "fits": plan.fits,
        "fault": None if fault is None else {"phase": fault.phase, "kind": fault.kind, "missing_bytes": fault.missing},
        "largest": plan.largest, "notes": list(notes),
        "compare": {label: {**comparison(p), "fits": p.fault is None, "by_formula": p.by_formula} for label, p in others.items()},
    }  # fmt: skip
