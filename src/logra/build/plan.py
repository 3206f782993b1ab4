"""Plans: the bytes of a training step before anything is loaded, by rehearsing it on tensors without data.

One device: what the rehearsal allocates is the plan. Several (FSDP2): what is sharded is divided, what is gathered is added;
activations of one microbatch stay whole. Of models of many equal layers a few are rehearsed, which gives the bytes of any number.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from logra import config as cfg
from logra.build.rehearsal import Shape, rehearse
from logra.config.sizes import parse_size
from logra.errors import ConfigError, ModelError, UserError
from logra.memory.fake import Phase
from logra.memory.formulas import STATE, Formula
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE
from logra.memory.host import free_memory
from logra.memory.plan import Bytes, Fault, Ledger, PhasePlan, at_layers, first_fault, shard_of
from logra.memory.shapes import PREFIX, SHAPES, shape_of
from logra.rl.models import BUILTIN, pick_device
from logra.rl.tiny import tiny_model
from logra.sketch.targets import select_targets

logger = logging.getLogger(__name__)

RUNTIME = 512 << 20  # CUDA context, cuBLAS workspace and the like, on every accelerator
LINK = 25e9  # bytes/s between host and device: PCIe 4.0 x16 in practice
_STREAM = 2 * 2 * (1 << 20)  # two chunks of an int16 residual on their way (logra.sketch.block)
_FEW = 6  # layers up to which all are rehearsed
# Method of a comparison -> the trainer's method that is rehearsed
METHODS = {
    "logra-random": "logra", "logra-aligned": "logra", "dense": "dense", "adamw_8bit": "dense", "lora": "lora", "dora": "lora",
    "galore": "dense", "apollo": "dense", "fira": "dense", "blockllm": "dense", "lora_pre": "dense",
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


def plan_memory(question: Question, phases: Collection[str] = PHASES, *, exact_mean: bool = True) -> Plan:
    """The plan. phases: those wanted; without exact_mean the means are within a few percent, in half the time."""
    config, formula = question.config, STATE.get(question.label)
    if question.gpus > 1:  # rollouts are an engine's of its own then
        phases = [name for name in phases if name != ROLLOUT]
    sizes = sizes_of(config, question.model)
    few = _phases(question, phases, exact_mean)
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


def _phases(question: Question, wanted: Collection[str], exact_mean: bool) -> dict[str, Phase]:
    """Of all layers, from a few of them if they are alike. Kept for the next question of this process."""
    config, model_config = question.config, question.model
    is_sharded = question.gpus > 1
    if is_sharded and config.method.name == "logra" and config.method.weights == "fp32":
        # what FSDP gathers is bfloat16, which float32 targets cannot be; the masters are counted afterwards
        config = _with(config, weights="split")
    options: dict[str, Any] = {
        "phases": tuple(name for name in PHASES if name in wanted), "accelerator": question.accelerator, "low": is_sharded,
        "dora": question.label == "dora",
    }  # fmt: skip
    count = int(getattr(model_config, "num_hidden_layers", 0))
    kinds = set(getattr(model_config, "layer_types", None) or ())
    key = (config.model_dump_json(), repr(model_config), question.shape, *options.values(), exact_mean)
    if key not in _rehearsed:
        if count <= _FEW or len(kinds) > 1:
            _rehearsed[key] = rehearse(config, model_config, question.shape, **options)
        else:
            few = {n: rehearse(config, with_layers(model_config, n), question.shape, **options) for n in (2, 3)}
            if exact_mean and GRADIENT in wanted:  # the update is short: its mean may be rough
                third: dict[str, Any] = options | {
                    "phases": tuple(name for name in options["phases"] if name != UPDATE)
                }
                few[4] = rehearse(config, with_layers(model_config, 4), question.shape, **third)
            _rehearsed[key] = at_layers(few, count)
    return dict(_rehearsed[key])


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

    weighted = {k: v * phase.weight for k, v in changed(phase.mean).items()}
    return Phase(phase.name, {place: changed(kinds) for place, kinds in phase.tops.items()}, weighted, phase.weight)


def _ledger(question: Question, sizes: Sizes, formula: Formula | None) -> Ledger:
    config, gpus = question.config, question.gpus
    on_host = config.method.residual == "cpu" and question.accelerator
    factors: dict[str, float] = {"offloaded": 0.0}
    added: Bytes = {"runtime": RUNTIME} if question.accelerator else {}
    if on_host:
        added["workspace"] = _STREAM
    if gpus == 1:
        return Ledger(factors | ({"residual": 0.0} if on_host else {}), added)
    share, is_split = shard_of(sizes.parameters, gpus), config.method.weights == "split"
    wide = 2 if config.method.name == "dense" and formula is None else 1  # rehearsed in bfloat16, float32 in truth
    factors |= {
        "weights": (1 if is_split else 2) * share, "residual": share if is_split and not on_host else 0.0, "sketch": share,
        "proposal": share, "sync": share, "optimizer": wide * share,
        "gradients": (2 if config.method.name == "dense" else 1) * share,
    }  # fmt: skip
    gathered = 2 * (2 * sizes.layer + sizes.outside)
    if config.method.name == "dense":
        factors["workspace"] = wide * share  # AdamW's, which is as large as what it trains
        gathered += (2 + 4) * sizes.layer  # one layer's gradients, and the float32 buffer they are reduced in
    elif config.method.name == "logra":
        added["gathered"] = gathered  # the update runs the model too, for its predicted KL
        gathered = 4 * (config.method.rank or 64) * sum(p for p, _ in sizes.targets) // _layers(question.model)
    during = {"gathered": gathered}
    return Ledger(factors, added, during)


def _layers(model_config: PretrainedConfig) -> int:
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
        found["residual"] = 2 * sizes.num_targets
        link += 2 * found["residual"] // gpus  # there and back
    found["export"] = 4 * sizes.num_targets if is_split else 0
    return {k: v for k, v in found.items() if v}, link


# -- before training -----------------------------------------------------------------------------------------------------------


def check_memory(config: cfg.Config) -> Plan | None:
    """The plan of a run's longest rows if they would exceed the limit (`memory.limit`, or what is free on the device); else None.

    Costs next to nothing where a generous estimate is within half of the limit. What cannot be planned is let through, with
    a note.
    """
    device = pick_device(config.model.device)
    limit = parse_size(config.memory.limit) if config.memory.limit else free_memory(device)
    if config.memory.check == "off" or limit is None:
        return None
    try:
        model_config, _ = model_config_of(config.model.name_or_path, config.model.revision)
        shape = worst_case(config, model_config)
        if generous_estimate(config, model_config, shape) <= limit // 2:
            return None
        question = Question(config, model_config, shape, device_limit=limit, accelerator=device.type != "cpu")
        plan = plan_memory(question, exact_mean=False)
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
    return None if plan.fault is None else plan


def generous_estimate(config: cfg.Config, model_config: PretrainedConfig, shape: Shape) -> int:
    """Bytes that a step surely stays below, without a rehearsal: everything in float32, nothing freed, nothing in chunks."""
    sizes = sizes_of(config, model_config)
    length, sides = shape.prompt + shape.response, sum(p + q for p, q in sizes.targets)
    vocabulary = int(getattr(model_config.get_text_config(), "vocab_size", 0))
    heads = int(getattr(model_config.get_text_config(), "num_attention_heads", 1))
    layers, rows = _layers(model_config), max(shape.rows, config.trust.probe_rollouts)
    scores = length if config.model.attn_implementation == "eager" else 256
    static = 28 * sizes.num_parameters + 48 * (config.method.rank or 64) * sides
    forward = 16 * rows * length * (sides + heads * scores * layers + vocabulary)
    decoding = 16 * shape.decoded * (length * sides + vocabulary)
    return static + forward + decoding


# -- other methods, and what would fit -----------------------------------------------------------------------------------------


def as_method(question: Question, label: str) -> Question:
    """The same question of another method, all else equal."""
    if label not in METHODS:
        raise ConfigError(f"no method {label!r} to compare: use one of {', '.join(METHODS)}")
    own, name = question.config.method, METHODS[label]
    method: dict[str, Any] = {"name": name, "rank": own.rank, "targets": own.targets}
    if name == "logra":
        method["basis"] = label.removeprefix("logra-")
        if own.name == "logra":
            method |= {"weights": own.weights, "residual": own.residual}
    return replace(question, label=label, config=question.config.model_copy(update={"method": cfg.Method(**method)}))


def _with(config: cfg.Config, **values: Any) -> cfg.Config:
    """A copy with values of its method changed, not validated."""
    return config.model_copy(update={"method": config.method.model_copy(update=values)})


def compare(question: Question, labels: Sequence[str] = tuple(METHODS)) -> dict[str, Plan]:
    return {label: plan_memory(as_method(question, label), exact_mean=False) for label in labels}


WHAT = ("microbatch", "length", "rank", "decoded")
# what -> phases to rehearse again. The update of logra is scaled instead: rehearsing its KL probe takes longest.
_AGAIN = {"microbatch": (GRADIENT,), "length": (ROLLOUT, GRADIENT), "rank": (GRADIENT,), "decoded": (ROLLOUT,)}
_BY_RANK = ("sketch", "basis", "optimizer", "sync")


def largest(plan: Plan, what: str) -> int | None:
    """About the largest microbatch, length, rank or number of responses decoded at once that fits the device; None: not even
    the least. Peaks grow with each nearly along a straight line, so a few rehearsals tell."""
    question = plan.question
    assert question.device_limit is not None
    again = _AGAIN[what]
    if what == "rank" and question.config.method.name == "lora":
        again = (GRADIENT, UPDATE)
    rest = {name: phase for name, phase in plan.phases.items() if name not in again}

    def peak(value: int) -> int:
        changed = plan_memory(_changed(question, what, value), again, exact_mean=False)
        others = [_scaled(phase, question, what, value) for phase in rest.values()]
        return max(*(phase.peak_bytes for phase in changed.phases.values()), *others, 0)

    least = 8 if what == "length" else 1
    return search(peak, _value(question, what), plan.peak, question.device_limit, least, _most(question, what))


def _scaled(phase: PhasePlan, question: Question, what: str, value: int) -> int:
    """The peak of a phase that is not rehearsed again."""
    ratio = value / _value(question, what)
    if what == "rank":
        return round(sum(size * (ratio if row in _BY_RANK else 1.0) for row, size in phase.peak.items()))
    if what == "length" and question.config.trust.enabled:
        most = question.config.trust.probe_max_tokens  # of the KL probe, whose workspace is linear in its tokens
        ratio = max(1.0, min(value, most) / min(question.length, most))
        return round(sum(size * (ratio if row == "workspace" else 1.0) for row, size in phase.peak.items()))
    return phase.peak_bytes


def _value(question: Question, what: str) -> int:
    values = {"microbatch": question.shape.rows, "length": question.length, "decoded": question.shape.decoded}
    return (question.config.method.rank or 64) if what == "rank" else values[what]


def _most(question: Question, what: str) -> int:
    if what == "rank":
        return int(getattr(question.model, "hidden_size", 1 << 12))
    if what == "length":
        return positions_of(question.model) or 1 << 20
    return 1 << 12


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


def _changed(question: Question, what: str, value: int) -> Question:
    shape = question.shape
    if what == "rank":
        return replace(question, config=_with(question.config, rank=value))
    if what == "length":
        prompt = max(1, round(value * shape.prompt / question.length))
        return replace(question, shape=replace(shape, prompt=prompt, response=max(1, value - prompt)))
    return replace(question, shape=replace(shape, **{"rows" if what == "microbatch" else "decoded": value}))


def search(peak: Callable[[int], int], start: int, known: int, limit: int, least: int, most: int) -> int | None:
    """The largest value from `least` to `most` with peak(value) <= limit, up to 3 % below it; peak(start) is `known`.

    Secants: the value whose peak the line through the last two puts at the limit, until it fits and the next would hardly.
    """
    points = {start: known}
    best = start if known <= limit else None
    guess = min(most, 2 * start) if known <= limit else max(least, start // 2)
    for _ in range(4):
        if guess in points:
            break
        points[guess] = peak(guess)
        if points[guess] <= limit:
            best = max(best or 0, guess)
        low, high = _around(points, limit)
        slope = max(1e-9, (points[high] - points[low]) / (high - low))
        guess = min(most, max(least, math.floor(low + (limit - points[low]) / slope)))
        if best is not None and best <= guess <= best * 1.03:
            break
    return best


def _around(points: Mapping[int, int], limit: int) -> tuple[int, int]:
    """Two values, one on each side of the limit if there are such, the nearest ones."""
    below = sorted(value for value, size in points.items() if size <= limit)
    above = sorted(value for value, size in points.items() if size > limit)
    if below and above and below[-1] < above[0]:
        return below[-1], above[0]
    low, high = sorted(points)[-2:] if below else sorted(points)[:2]
    return low, high
