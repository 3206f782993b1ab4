"""Before training: is there enough memory? Nothing is loaded, and hardly anything done where a rough bound settles it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import replace

import torch
from transformers import AutoTokenizer, PretrainedConfig

from logra import config as cfg
from logra.build.data import build_data
from logra.build.plan import (
    Plan,
    Question,
    Sizes,
    layers_of,
    model_config_of,
    plan_memory,
    sizes_of,
    with_layers,
    worst_case,
)
from logra.build.rehearsal import Shape, makes_whole_logits
from logra.config.sizes import parse_size
from logra.errors import UserError
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE
from logra.memory.host import free_memory
from logra.rl.models import BUILTIN, pick_device, set_chat_template
from logra.rl.tiny import char_tokenizer
from logra.trust import probe

logger = logging.getLogger(__name__)
# Rows of the gradient phase that are gone when the update begins
_GONE = ("activations", "logits", "workspace")


def check_memory(config: cfg.Config, ranks: int = 1) -> Plan | None:
    """The plan of a run if its longest rows (longest prompt, whole response) would exceed the limit; else None.

    The limit, of one rank, is `memory.limit` or what is free on its device; the ranks of a machine share its host memory. Costs
    next to nothing where a generous estimate is within half of it. Phases that nothing depends on are left out. What cannot be
    planned is let through, with a note.
    """
    device = pick_device(config.model.device)
    limit = parse_size(config.memory.limit) if config.memory.limit else _own_share(device)
    if config.memory.check == "off" or limit is None:
        return None
    try:
        model_config, _ = model_config_of(config.model.name_or_path, config.model.revision)
        shape = worst_case(config, model_config)
        if generous_estimate(config, model_config, shape) <= limit // 2:
            return None
        question = Question(
            config, model_config, shape, gpus=ranks, device_limit=limit, accelerator=device.type != "cpu"
        )
        plan = plan_if_too_large(question)
        if plan is None:
            return None
        real = longest_prompt(config)  # takes reading the data, which is worth it now
        if real >= shape.prompt:
            return plan
        return plan_if_too_large(replace(question, shape=replace(shape, prompt=real)), _too_large(plan))
    except UserError:
        return None  # building the run says it better
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        logger.warning("the memory of %s cannot be planned (%s): not checked", config.model.name_or_path, error)
        return None


def _own_share(device: torch.device) -> int | None:
    """What is free on a device, of host memory this rank's part."""
    free = free_memory(device)
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    return None if free is None else free // sharing


def plan_if_too_large(question: Question, phases: Collection[str] = (ROLLOUT, GRADIENT)) -> Plan | None:
    """The plan if it exceeds its limit; without the update if another phase does, or if a bound of it does not.

    phases: those before the update that may be too large.
    """
    assert question.device_limit is not None
    plan = plan_memory(question, {GRADIENT, *phases})
    if plan.fault is None and generous_update(question, plan) > question.device_limit:
        plan = plan_memory(question, {*PHASES} if ROLLOUT in phases else {GRADIENT, UPDATE})
    return None if plan.fault is None else plan


def _too_large(plan: Plan) -> list[str]:
    limit = plan.question.device_limit or 0
    return [name for name, phase in plan.phases.items() if name != UPDATE and phase.peak_bytes > limit]


def longest_prompt(config: cfg.Config) -> int:
    """Tokens of the longest training prompt."""
    name, revision = config.model.name_or_path, config.model.revision
    options = {"revision": revision} if revision else {}
    tokenizer = char_tokenizer() if name.startswith(BUILTIN) else AutoTokenizer.from_pretrained(name, **options)
    set_chat_template(tokenizer, config.model.chat_template)
    return len(build_data(config.data, tokenizer, config.seed).longest_prompt().token_ids)


def generous_estimate(config: cfg.Config, model_config: PretrainedConfig, shape: Shape) -> int:
    """Bytes that a step surely stays below, without a rehearsal: everything in float32, nothing freed, nothing in chunks."""
    sizes, text = sizes_of(config, model_config), model_config.get_text_config()
    length, sides = shape.prompt + shape.response, sum(p + q for p, q in sizes.targets)
    layers, rows = layers_of(model_config), max(shape.rows, config.trust.probe_rollouts)
    static = 28 * sizes.num_parameters + 48 * (config.method.rank or 64) * sides
    forward = 16 * rows * length * (sides + layers * _scores(config, model_config, length) + text.vocab_size)
    decoding = 16 * shape.decoded * (length * (text.hidden_size * layers + sides // layers) + text.vocab_size)
    return static + forward + decoding


def _scores(config: cfg.Config, model_config: PretrainedConfig, length: int) -> int:
    """Attention scores of a token in one layer."""
    heads = int(getattr(model_config.get_text_config(), "num_attention_heads", 1))
    return heads * (length if config.model.attn_implementation == "eager" else 256)


def generous_update(question: Question, plan: Plan) -> int:
    """Bytes that the update surely stays below, given a plan of the gradient phase.

    What is kept, what a step is made of, a few float32 copies of the largest matrix (moved some rows at a time), and the probe:
    one layer at a time, nothing freed within it, all of it in float32 twice over.
    """
    config, sizes = question.config, sizes_of(question.config, question.model)
    kept = sum(size for row, size in plan.phases[GRADIENT].peak.items() if row not in _GONE)
    if config.method.name != "logra":
        return kept + 4 * sizes.num_targets + 16 * max(p * q for p, q in sizes.targets)
    sides = sum(p + q for p, q in sizes.targets)
    made = 48 * (config.method.rank or 64) * sides + 24 * max(p * q for p, q in sizes.targets)
    return kept + made + (_generous_probe(question, sizes) if config.trust.enabled else 0)


def _generous_probe(question: Question, sizes: Sizes) -> int:
    config, model_config = question.config, question.model
    text, length = model_config.get_text_config(), min(question.length, config.trust.probe_max_tokens)
    tokens = min(max(probe._TOKENS, length), length * config.trust.probe_rollouts)
    sides = sum(p + q for p, q in sizes.targets) // layers_of(model_config)
    width = sides + _scores(config, model_config, length) + 16 * text.hidden_size + 2 * length
    logits = tokens * text.vocab_size if makes_whole_logits(with_layers(model_config, 1)) else probe._CHUNK_BYTES
    return 48 * tokens * width + 64 * logits
