"""Plans: the bytes of a training step before anything is loaded, by rehearsing it on tensors without data.

One device: what the rehearsal allocates is the plan. Several (FSDP2): what is sharded is divided, what is gathered is added;
activations of one microbatch stay whole. Of models of many equal layers, or layers that take turns, a few are rehearsed, which
gives the bytes of any number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from logra import config as cfg
from logra.build.rehearsal import Shape, rehearse
from logra.errors import ConfigError, ModelError
from logra.memory.fake import Phase
from logra.memory.formulas import STATE, Formula
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE
from logra.memory.plan import Bytes, Fault, Ledger, PhasePlan, at_layers, first_fault, shard_of
from logra.memory.shapes import PREFIX, SHAPES, shape_of
from logra.rl.models import BUILTIN
from logra.rl.tiny import tiny_model
from logra.sketch.targets import select_targets

RUNTIME = 512 << 20  # CUDA context, cuBLAS workspace and the like, on every accelerator
LINK = 25e9  # bytes/s between host and device: PCIe 4.0 x16 in practice
_STREAM = 2 * 2 * (1 << 20)  # two chunks of an int16 residual on their way (logra.sketch.block)
_FEW = 6  # layers up to which all are rehearsed
PAPER = "logra-paper"  # S and A in float32, whole on every device, ordinary logits (arXiv 2610.06647)
# Method of a comparison -> the trainer's method that is rehearsed
METHODS = {
    "logra-random": "logra", "logra-aligned": "logra", PAPER: "logra", "dense": "dense",
    "adamw_8bit": "dense", "lora": "lora", "dora": "lora",
    **dict.fromkeys(STATE, "dense"),
}  # fmt: skip
_rehearsed: dict[tuple[Any, ...], dict[str, Phase]] = {}  # of this process


@dataclass(frozen=True)
class Question:
    """What is planned: a configuration on a model, the tokens in use, and the machine.

    device_limit, host_limit: bytes of one accelerator and of the host; None: not asked. label: one of `METHODS`, if the method
    is not the configuration's own. accelerator: plan for CUDA (else for this code on a CPU).
    """

    config: cfg.Config
    model: PretrainedConfig
    shape: Shape
    gpus: int = 1
    device_limit: int | None = None
    host_limit: int | None = None
    label: str = ""
    accelerator: bool = True
    link: float = LINK

    @property
    def length(self) -> int:
        return self.shape.prompt + self.shape.response


@dataclass(frozen=True)
class Plan:
    """phases: by name. host: bytes by what they are for, of all processes together. link_bytes: between host and devices, in one
    update, of one device. by_formula: the optimizer's state is from the literature, not from code of ours."""

    question: Question
    phases: dict[str, PhasePlan]
    host: Bytes
    link_bytes: int
    num_parameters: int
    num_trained: int
    by_formula: bool = False
    largest: dict[str, int | None] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: self.phases[name].peak_bytes)

    @property
    def peak(self) -> int:
        return self.phases[self.worst].peak_bytes

    @property
    def mean(self) -> int:
        """Of gradient and update phases, each as long as it lasts; rollouts are not part of it."""
        trained = [self.phases[name] for name in (GRADIENT, UPDATE) if name in self.phases]
        weight = sum(phase.weight for phase in trained)
        return round(sum(phase.mean_bytes * phase.weight for phase in trained) / weight)

    @property
    def fault(self) -> Fault | None:
        return first_fault(self.phases, self.question.device_limit)

    @property
    def host_bytes(self) -> int:
        """Loading is over before the rest begins."""
        return max(self.host.get("loading", 0), sum(v for k, v in self.host.items() if k != "loading"))

    @property
    def fits(self) -> bool:
        limit = self.question.host_limit
        return self.fault is None and (limit is None or self.host_bytes <= limit)


# -- the model -----------------------------------------------------------------------------------------------------------------


def model_config_of(name: str, revision: str | None = None) -> tuple[PretrainedConfig, str]:
    """(configuration, a note on where it is from, or nothing): of a folder, the hub, a built-in model or a known shape.

    No weights are read. Raises `ModelError` with the fix if there is no configuration.
    """
    if name.startswith(BUILTIN):
        return tiny_model(name.removeprefix(BUILTIN).removeprefix("tiny-")).config, ""
    values = shape_of(name) if name.startswith(PREFIX) else None
    if name.startswith(PREFIX) and values is None:
        raise ModelError(f"no shape {name.removeprefix(PREFIX)!r}: use one of {', '.join(sorted(SHAPES))}")
    note = ""
    if values is None:
        try:
            return AutoConfig.from_pretrained(name, **({"revision": revision} if revision else {})), ""
        except (OSError, ValueError, KeyError) as error:
            values, note = shape_of(name), f"{name} cannot be read here: planned from its published shape"
            if values is None:
                reason = " ".join(str(error).split())[:200]
                raise ModelError(
                    f"cannot read the configuration of {name!r}: {reason} (a plan needs only its config.json: give a folder that "
                    "holds one, or a shape such as shape:qwen2.5-7b)"
                ) from error
    return AutoConfig.for_model(values.pop("model_type"), **values), note


@dataclass(frozen=True)
class Sizes:
    """Shapes of a model's parameters: all, the targets' (out, in), and those of one decoder layer and of the largest outside."""

    parameters: list[tuple[int, ...]]
    targets: list[tuple[int, int]]
    layer: int
    outside: int

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters)

    @property
    def num_targets(self) -> int:
        return sum(p * q for p, q in self.targets)


def sizes_of(config: cfg.Config, model_config: PretrainedConfig) -> Sizes:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    named = dict(model.named_parameters())
    layers: dict[str, int] = {}
    outside = [0]
    for name, parameter in named.items():
        numbers = [part for part in name.split(".") if part.isdigit()]
        if numbers:
            layers[numbers[0]] = layers.get(numbers[0], 0) + parameter.numel()
        else:
            outside.append(parameter.numel())
    targets = select_targets(model, config.method.targets)[0]
    return Sizes(
        [tuple(p.shape) for p in named.values()],
        [(t.out_features, t.in_features) for t in targets],
        max(layers.values(), default=0),
        max(outside),
    )


# -- the plan ------------------------------------------------------------------------------------------------------------------


def plan_memory(question: Question, phases: Collection[str] = PHASES) -> Plan:
    """The plan. phases: those wanted."""
    if not question.label and question.config.method.name in STATE:
        question = as_method(question, question.config.method.name)
    config, formula = question.config, STATE.get(question.label)
    if question.gpus > 1:  # rollouts are an engine's of its own then
        phases = [name for name in phases if name != ROLLOUT]
    sizes = sizes_of(config, question.model)
    few = _phases(question, phases)
    if formula is not None:
        few = {name: _by_formula(phase, formula, sizes, config.method.rank or 64) for name, phase in few.items()}
    ledger = _ledger(question, sizes, formula)
    planned = {name: ledger.plan(phase) for name, phase in few.items()}
    microbatches = max(1, _rollouts(config) // config.algorithm.updates_per_step // question.shape.rows)
    if GRADIENT in planned:  # two microbatches were rehearsed
        planned[GRADIENT] = replace(planned[GRADIENT], weight=planned[GRADIENT].weight * microbatches / 2)
    if config.rollout.engine == "vllm":
        planned = {name: _beside_vllm(question, name, phase) for name, phase in planned.items()}
    host, link = _host(question, sizes, few)
    trained = sizes.num_targets if config.method.name != "lora" else 0
    return Plan(question, planned, host, link, sizes.num_parameters, trained, formula is not None)


def _rollouts(config: cfg.Config) -> int:
    return config.rollout.prompts_per_step * config.rollout.rollouts_per_prompt


def _phases(question: Question, wanted: Collection[str]) -> dict[str, Phase]:
    """Of all layers, from a few of them if they are alike. Kept for the next question of this process."""
    config, model_config = question.config, question.model
    is_sharded = question.gpus > 1
    if is_sharded and config.method.name == "logra" and config.method.weights == "fp32":
        # what FSDP gathers is bfloat16, which float32 targets cannot be; the masters are counted afterwards
        config = with_method(config, weights="split")
    options: dict[str, Any] = {
        "phases": tuple(name for name in PHASES if name in wanted), "accelerator": question.accelerator, "low": is_sharded,
        "dora": question.label == "dora", "whole_logits": question.label == PAPER, "group": _group(question),
    }  # fmt: skip
    count, period = int(getattr(model_config, "num_hidden_layers", 0)), period_of(model_config)
    least = 2 * period + count % period
    key = (config.model_dump_json(), repr(model_config), question.shape, *options.values())
    if key not in _rehearsed:
        if count <= max(_FEW, least + period):
            _rehearsed[key] = _rehearse(config, model_config, question.shape, options)
        else:
            counts = (least, least + period)
            few = {n: _rehearse(config, with_layers(model_config, n), question.shape, options) for n in counts}
            _rehearsed[key] = at_layers(few, count)
    return dict(_rehearsed[key])


def _rehearse(
    config: cfg.Config, model_config: PretrainedConfig, shape: Shape, options: Mapping[str, Any]
) -> dict[str, Phase]:
    """By central differences where a model's forward derivative (GPT-2's, of layer norms) cannot be taken without data."""
    try:
        return rehearse(config, model_config, shape, **options)
    except FakeTensorDeviceMismatchError:
        if config.trust.mode == "finite_difference":
            raise
        trust = config.trust.model_copy(update={"mode": "finite_difference"})
        return rehearse(config.model_copy(update={"trust": trust}), model_config, shape, **options)


def _group(question: Question) -> int:
    """Rollouts of a prompt that are computed together: over devices only where prompts divide (`logra.rl.world.deal`)."""
    config = question.config
    group, updates = config.rollout.rollouts_per_prompt, config.algorithm.updates_per_step
    return group if config.rollout.prompts_per_step // updates % question.gpus == 0 else 1


def period_of(model_config: PretrainedConfig) -> int:
    """After how many layers their kinds (sliding and full attention, say) come again in the same order; 1 if all are alike."""
    kinds = list(getattr(model_config, "layer_types", None) or ())
    return next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), max(1, len(kinds)))


def with_layers(model_config: PretrainedConfig, count: int) -> PretrainedConfig:
    """A copy with so many decoder layers."""
    changed = copy.deepcopy(model_config)
    changed.num_hidden_layers = count
    if getattr(changed, "layer_types", None):
        changed.layer_types = changed.layer_types[:count]
    return changed


def _by_formula(phase: Phase, formula: Formula, sizes: Sizes, rank: int) -> Phase:
    """Another optimizer's state instead of AdamW's, and what its update needs instead."""
    state = formula.state_bytes(sizes.targets, rank)
    workspace = formula.workspace_bytes(sizes.targets, rank)
    is_update = phase.name == UPDATE

    def changed(kinds: Mapping[str, float]) -> dict[str, Any]:
        gradients = kinds.get("gradients", 0) * formula.share
        found = {**kinds, "optimizer": state, "gradients": gradients}
        return found | ({"workspace": workspace} if is_update else {})

    tops = {place: changed(kinds) for place, kinds in phase.tops.items()}
    weighted = {kind: size * phase.weight for kind, size in changed(phase.mean).items()}
    return Phase(phase.name, tops, {(): phase.weight}, {(): weighted})


def _ledger(question: Question, sizes: Sizes, formula: Formula | None) -> Ledger:
    config, gpus = question.config, question.gpus
    on_host = config.method.residual == "cpu" and question.accelerator
    factors: dict[str, float] = {"offloaded": 0.0}
    added: Bytes = {"runtime": RUNTIME} if question.accelerator else {}
    if on_host:
        added["workspace"] = _STREAM
    if question.label == PAPER:
        factors["basis"] = 4.0  # float32 instead of int8
    if gpus == 1:
        return Ledger(factors | ({"residual": 0.0} if on_host else {}), added)
    parts = max(1, gpus // config.distributed.replicas)
    share, is_split = shard_of(sizes.parameters, parts), config.method.weights == "split"
    wide = 2 if config.method.name == "dense" and formula is None else 1  # rehearsed in bfloat16, float32 in truth
    of_sketch = 1.0 if question.label == PAPER else share
    factors |= {
        "weights": (1 if is_split else 2) * share, "residual": share if is_split and not on_host else 0.0,
        "sketch": of_sketch, "proposal": of_sketch, "sync": of_sketch, "optimizer": wide * share,
        "gradients": (2 if config.method.name == "dense" else 1) * share,
    }  # fmt: skip
    gathered = 2 * (2 * sizes.layer + sizes.outside)
    if config.method.name == "dense":
        factors["workspace"] = wide * share
        if formula is not None:
            # works on whole matrices, each on the rank that owns it, where its rows are put together
            factors["workspace"], added["gathered"] = 1.0, 8 * max(p * q for p, q in sizes.targets)
        gathered += (2 + 4) * sizes.layer  # one layer's gradients, and the float32 buffer they are reduced in
    elif config.method.name == "logra":
        added["gathered"] = gathered  # the update runs the model too, for its predicted KL
        gathered = 4 * (config.method.rank or 64) * sum(p for p, _ in sizes.targets) // layers_of(question.model)
        gathered = 0 if question.label == PAPER else gathered  # of one layer's sketches, before they are reduced
    during = {"gathered": gathered}
    return Ledger(factors, added, during)


def layers_of(model_config: PretrainedConfig) -> int:
    return max(1, int(getattr(model_config, "num_hidden_layers", 1)))


def _beside_vllm(question: Question, name: str, phase: PhasePlan) -> PhasePlan:
    """vLLM has a model and caches of its own, within its share; while it samples, the trainer holds what it keeps."""
    section, peak, mean = question.config.rollout.vllm, dict(phase.peak), dict(phase.mean)
    if name == ROLLOUT:
        peak = {k: v for k, v in peak.items() if k not in ("kv_cache", "workspace", "logits", "activations")}
        mean = dict(peak)
    is_here = section.url is None and (name == ROLLOUT or not section.colocated)
    if is_here and question.device_limit is not None:
        peak["engine"] = mean["engine"] = int(section.memory * question.device_limit)
    return PhasePlan(peak, mean, phase.weight)


def _host(question: Question, sizes: Sizes, phases: Mapping[str, Phase]) -> tuple[Bytes, int]:
    """(host bytes by what they are for, bytes over the link of one device in one update)."""
    config, gpus = question.config, question.gpus
    if not question.accelerator:
        return {}, 0
    is_split, count = config.method.weights == "split", sizes.num_parameters
    found = {"loading": (2 if is_split else 4) * count}
    offloaded = max((m.get("offloaded", 0) for p in phases.values() for m in p.tops.values()), default=0)
    link = 2 * offloaded
    if offloaded:
        found["offloaded"] = offloaded * gpus
    if config.method.residual == "cpu":
        replicas = config.distributed.replicas if gpus > 1 else 1
        found["residual"] = 2 * sizes.num_targets * replicas
        link += 2 * found["residual"] // gpus  # there and back
    found["export"] = 4 * sizes.num_targets if is_split else 0
    return {k: v for k, v in found.items() if v}, link


# -- other methods -----------------------------------------------------------------------------------------------------------


def as_method(question: Question, label: str) -> Question:
    """The same question of another method, all else equal."""
    if label not in METHODS:
        raise ConfigError(f"no method {label!r} to compare: use one of {', '.join(METHODS)}")
    own, name = question.config.method, METHODS[label]
    method: dict[str, Any] = {"name": name, "rank": own.rank, "targets": own.targets}
    if label == PAPER:
        method |= {"basis": "random", "variant": "paper"}
    elif name == "logra":
        method["basis"] = label.removeprefix("logra-")
        if own.name == "logra":
            method |= {"weights": own.weights, "residual": own.residual}
    return replace(question, label=label, config=question.config.model_copy(update={"method": cfg.Method(**method)}))


def with_method(config: cfg.Config, **values: Any) -> cfg.Config:
    """A copy with values of its method changed, not validated."""
    return config.model_copy(update={"method": config.method.model_copy(update=values)})


def compare(question: Question, labels: Sequence[str] = tuple(METHODS)) -> dict[str, Plan]:
    return {label: plan_memory(as_method(question, label)) for label in labels}


# -- rows --------------------------------------------------------------------------------------------------------------------


def positions_of(model_config: PretrainedConfig) -> int | None:
    """How many tokens a row may have at most, where the model has such a limit."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


def worst_case(config: cfg.Config, model_config: PretrainedConfig) -> Shape:
    """The longest rows that a configuration allows, all of their tokens in use."""
    positions, response = positions_of(model_config), config.rollout.max_new_tokens
    prompt = config.data.max_prompt_tokens
    if positions is not None:
        prompt = max(1, min(prompt, positions - response))
    decoded = config.rollout.batch_size or _rollouts(config)
    return Shape(prompt, response, config.train.microbatch_size, decoded)
