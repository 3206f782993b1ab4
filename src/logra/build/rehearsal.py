"""One training step on tensors without data: the same model, method, loss and optimizer code, so the plan is what will happen.

Needs the model's configuration only, no weights, no accelerator, seconds of one core.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from logra import config as cfg
from logra import hashing, head
from logra.build.model import build_method
from logra.build.run import training_plan
from logra.memory.fake import FakeMeter, Phase, fake_tensors
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE
from logra.region import region
from logra.rl import packing, step
from logra.rl.batch import TrainBatch
from logra.rl.engines.sampling import choose
from logra.rl.layout import Layout, layout
from logra.rl.methods import dense
from logra.rl.methods.base import Method
from logra.rl.models import offload_inputs, prepare
from logra.rl.packing import takes_part, worth_packing
from logra.rl.step import LossSettings, Tally, accumulate, logprobs_of
from logra.sketch import aligned, capture, sketcher
from logra.sketch.block import Block
from logra.sketch.update import Update
from logra.trust import probe

_COPIES = 1.1  # what a token of a packed row takes, of what it takes in padded ones: attention has copies of its own


@dataclass(frozen=True)
class Shape:
    """What a plan is for, beside the configuration: tokens of a prompt and of a response, all of them in use.

    rows: rollouts of one microbatch. decoded: responses that are sampled at once.
    """

    prompt: int
    response: int
    rows: int
    decoded: int


def rehearse(
    config: cfg.Config,
    model_config: PretrainedConfig,
    shape: Shape,
    *,
    phases: Collection[str] = PHASES,
    accelerator: bool = False,
    low: bool = False,
    dora: bool = False,
    whole_logits: bool = False,
    group: int | None = None,
) -> dict[str, Phase]:
    """Bytes by kind at the peaks of each phase of one step, and on average.

    Two microbatches, so that the second meets what the first left. Everything lives on one device; `residual` and `offloaded`
    are kinds of their own, so whoever plans may count them elsewhere, and so are `proposal` (U) and `sync`
    (the integers of the Update), which a meter sees as workspace. phases: those wanted; UPDATE includes GRADIENT. accelerator:
    as the code runs on CUDA. low: all weights in bfloat16, as FSDP gathers them; what is made of them (gradients, moments) is
    too. dora: LoRA's adapters with DoRA's magnitudes. whole_logits: as trainers do that do not make them in chunks. group:
    rollouts of a prompt that are computed together; None: the configuration's.
    """
    if low:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    plan, packed = training_plan(config), _packed_row(shape, group or config.rollout.rollouts_per_prompt)
    allowed = _allowed(low, dora, whole_logits, packed)
    with fake_tensors() as meter, _shortened(meter), allowed, _as_on_cuda(accelerator):
        with _nothing_drawn():
            model = _model(config, model_config, low)
            prepare(model, config.model.gradient_checkpointing)
            if accelerator and config.model.offload_activations:
                offload_inputs(model)
            method = build_method(config, model)
            _register(meter, method)
            head.plain_head(method.model)  # looked at once, in no phase
        meter.watch_gradients(method.model.parameters())
        reference = None
        if config.algorithm.kl_coef:
            reference = _model(config, model_config, low).requires_grad_(False)
            head.plain_head(reference)
        if ROLLOUT in phases:
            with meter.plan_phase(ROLLOUT), region("workspace"):
                _decode(meter, model, shape, config)
        if phases == (ROLLOUT,):
            return meter.planned
        with meter.plan_phase(GRADIENT), region("activations"):
            batch = _batch(2 * shape.rows, _most(shape, packed, method.model, plan.loss))
            _gradient(method, batch, shape, plan.loss, plan.updates_per_step, reference)
        if UPDATE not in phases:
            return meter.planned
        contexts = _probe(plan.probe_rollouts, min(shape.prompt + shape.response, plan.probe_max_tokens))
        tokens = contexts["input_ids"].shape[1]
        meter.filled = min(1.0, shape.response / max(1, tokens - 1))
        meter.first = max(0, tokens - 1 - shape.response)
        with meter.plan_phase(UPDATE), region("workspace"):
            method.step(lambda: contexts, plan.loss.temperature)
    return meter.planned


def _model(config: cfg.Config, model_config: PretrainedConfig, low: bool) -> PreTrainedModel:
    dtype = torch.bfloat16 if low or config.method.weights == "split" else torch.float32
    with region("weights"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=config.model.attn_implementation
        )
    head._noted.add(model)  # planning says it in its own words
    return model


def _register(meter: FakeMeter, method: Method) -> None:
    """By kind; what the step draws or makes when it is first used is there beforehand, as from the second step on."""
    own = getattr(method, "sketcher", None)
    if own is not None:
        own.basis_block(own.names[0])
        _name_the_step(own)
    for kind, tensors in method.held().items():
        meter.register(kind, tensors)


def _name_the_step(own: sketcher.Sketcher) -> None:
    """What a step is made of, as kinds of its own from its making on: sharding divides it by rows, and it is what engines are
    sent. The pieces it is made in go with it, a few MiB."""
    propose, quantize = own.propose, own.quantize

    def named_propose(*arguments: Any, **options: Any) -> sketcher.Proposal:
        with region("proposal"):
            return propose(*arguments, **options)

    def named_quantize(*arguments: Any, **options: Any) -> Update:
        with region("sync"):
            return quantize(*arguments, **options)

    own.propose, own.quantize = named_propose, named_quantize  # type: ignore[method-assign]


def _decode(meter: FakeMeter, model: PreTrainedModel, shape: Shape, config: cfg.Config) -> None:
    """Every distinct prompt once, its cache copied to its group, then the last token of every response (`HFEngine`)."""
    rows, group = shape.decoded, config.rollout.rollouts_per_prompt
    distinct = min(rows, -(-rows // group) + (rows % group > 0), config.rollout.prompts_per_step)
    autocast = config.model.dtype == "bfloat16"
    with head.quiet(model), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ids = torch.zeros(distinct, shape.prompt, dtype=torch.int64)
        mask = torch.ones(rows, shape.prompt + shape.response, dtype=torch.int64)
        output = model(input_ids=ids, attention_mask=mask[:distinct, : shape.prompt], use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        cache.reorder_cache(torch.zeros(rows, dtype=torch.int64))
        meter.register("kv_cache", [part for layer in cache.layers for part in (layer.keys, layer.values)])
        for index, layer in enumerate(cache.layers):
            grown = [
                layer.keys.new_empty(*t.shape[:2], shape.response - 1, t.shape[3]) for t in (layer.keys, layer.values)
            ]
            layer.update = region("kv_cache")(layer.update)
            cache.update(*grown, index)
            del grown
        output = model(
            input_ids=mask[:, :1], attention_mask=mask, position_ids=mask[:, -1:], past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        with region("logits"):
            choose(output.logits[:, -1], torch.zeros(rows, dtype=torch.float64), 1.0)
        for layer in cache.layers:
            del layer.update  # it would keep the layer, and so the cache, alive


def _gradient(
    method: Method,
    batch: TrainBatch,
    shape: Shape,
    loss: LossSettings,
    updates: int,
    reference: nn.Module | None,
) -> None:
    method.zero()
    old = logprobs_of(method.model, batch, shape.rows, loss) if updates > 1 else None
    of_reference = logprobs_of(reference, batch, shape.rows, loss) if reference is not None else None
    accumulate(method.model, batch, shape.rows, loss, old_logp=old, reference_logp=of_reference, tally=Tally())


class _FullBatch(TrainBatch):
    """A batch whose every token is real: slices need no look at the masks."""

    def slice(self, indices: Sequence[int] | Tensor) -> TrainBatch:
        return _FullBatch(**{f.name: getattr(self, f.name)[: len(indices)] for f in fields(self)})


def _batch(rows: int, shape: Shape) -> TrainBatch:
    def ids(columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.int64)

    def of_rows(dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, dtype=dtype)

    return _FullBatch(
        prompt_ids=ids(shape.prompt), prompt_mask=ids(shape.prompt).bool(), completion_ids=ids(shape.response),
        completion_mask=ids(shape.response).bool(), rollout_logprobs=ids(shape.response).float(),
        advantages=of_rows(torch.float32), weights=of_rows(torch.float32), group_ids=of_rows(torch.int64),
        dropped=of_rows(torch.bool), terminated=of_rows(torch.bool),
    )  # fmt: skip


def _packed_row(shape: Shape, group: int) -> Layout:
    """Of one microbatch whose every token is real; where groups do not divide it, it has parts of one more."""
    rows = shape.rows
    prompts = min(rows, (group - math.gcd(rows, group) + rows - 1) // group + 1)
    batch = _batch(rows, shape)
    owner = torch.arange(rows) * prompts // rows
    full = {
        "prompt_ids": owner[:, None].expand(-1, shape.prompt), "prompt_mask": torch.ones(rows, shape.prompt).bool(),
        "completion_mask": torch.ones(rows, shape.response).bool(),
    }  # fmt: skip
    return layout(replace(batch, **full), full["completion_mask"])


def _most(shape: Shape, packed: Layout, model: nn.Module, loss: LossSettings) -> Shape:
    """Prompts and responses up to these lengths that take most: where rows are packed, short prompts may lead to padded rows with
    more tokens than the packed one has."""
    parts, rows = step.plain_head(model) if loss.packed else None, shape.rows
    if parts is None or not takes_part(parts.decoder) or not worth_packing(parts, packed, _batch(rows, shape)):
        return shape
    prompts, share = len(packed.prompts), packing.LARGEST_SHARE_FULL
    # prompts p + rows (response - 1) > share rows (p + response)
    longest = math.ceil(rows * ((1 - share) * shape.response - 1) / (share * rows - prompts)) - 1
    padded = rows * (longest + shape.response)
    return replace(shape, prompt=longest) if 0 < longest < shape.prompt and padded > _COPIES * packed.size else shape


def _without_data(at: Layout) -> Layout:
    tensors = {f.name: v for f in fields(at) if isinstance(v := getattr(at, f.name), Tensor)}
    return replace(at, **{name: torch.zeros(value.shape, dtype=value.dtype) for name, value in tensors.items()})


def _probe(rows: int, tokens: int) -> dict[str, Tensor]:
    return {
        name: torch.ones(rows, tokens, dtype=torch.int64) for name in ("input_ids", "attention_mask", "completion_mask")
    }


@contextlib.contextmanager
def _allowed(low: bool, dora: bool, whole_logits: bool, packed: Layout) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(head, "_is_all", is_all_without_data))
        stack.enter_context(mock.patch.object(packing, "_difference", lambda model, head, device: ""))
        stack.enter_context(mock.patch.object(step, "layout", lambda batch, mask: _without_data(packed)))
        for module in (step, probe) if whole_logits else ():
            stack.enter_context(mock.patch.object(module, "plain_head", lambda model: None))
        if low:
            stack.enter_context(mock.patch.object(dense, "check_float32", lambda targets: None))
            stack.enter_context(mock.patch.object(sketcher, "check_float32", lambda targets: None))
        if dora:
            import peft

            made = functools.partial(peft.LoraConfig, use_dora=True)
            stack.enter_context(mock.patch.object(peft, "LoraConfig", made))
        yield


@contextlib.contextmanager
def _as_on_cuda(wanted: bool) -> Iterator[None]:
    """Where the code does something else there: bfloat16 products that accumulate in float32 without copies, larger chunks of
    logits, the fused AdamW.

    torch's fused AdamW is one operation in place, on CPU tensors too, so that fake ones show what it allocates: nothing.
    """
    if not wanted:
        yield
        return

    def accumulate_sketch(sketch_dr: Tensor, grad: Tensor, projected_Nr: Tensor, scale: float) -> None:
        sketch_dr.add_(torch.empty_like(sketch_dr))  # the product, in float32

    def power_step(x_Nk: Tensor, grad_Nd: Tensor, projected_Nr: Tensor) -> Tensor:
        weighted_Nr = projected_Nr.float() * torch.linalg.vector_norm(grad_Nd, dim=1, keepdim=True, dtype=torch.float32)
        weighted_Nr.to(x_Nk.dtype)
        return x_Nk.new_empty(x_Nk.shape[1], projected_Nr.shape[1], dtype=torch.float32)

    adamw = torch.optim.AdamW

    def fused_adamw(*arguments: Any, **options: Any) -> torch.optim.AdamW:
        return adamw(*arguments, **options | {"fused": True})

    with (
        mock.patch.object(capture, "accumulate", accumulate_sketch),
        mock.patch.object(aligned, "power_step", power_step),
        mock.patch.dict(head.CHUNK_BYTES, cpu=head.CHUNK_BYTES_ACCELERATOR),
        mock.patch.object(torch.optim, "AdamW", fused_adamw),
    ):
        yield


@contextlib.contextmanager
def _shortened(meter: FakeMeter) -> Iterator[None]:
    """What repeats in equal chunks is done twice, which allocates all that it ever does; modules stay where they are.

    Moving a module is for its data, and there is none: peft moves adapters, which fake parameters do not survive.
    """

    def to(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return module

    def twice(loop: Any) -> Any:
        return lambda *arguments: itertools.islice(loop(*arguments), 2)

    def groups(batch: probe.Batch) -> Iterator[probe.Batch]:
        found = list(all_groups(batch))
        yield found[0]
        if len(found) > 1:  # meets what the first left; the others do no more
            with meter.repeated(len(found) - 1):
                yield found[1]

    all_groups = probe.groups
    with (
        mock.patch.object(nn.Module, "to", to),
        mock.patch.object(head, "_slices", twice(head._slices)),
        mock.patch.object(probe.Contexts, "logits", twice(probe.Contexts.logits)),
        mock.patch.object(Block, "_chunks", twice(Block._chunks)),
        mock.patch.object(probe, "groups", groups),
        mock.patch.object(probe, "attend", functools.partial(_attend, meter, probe.attend)),
    ):
        yield


def _attend(
    meter: FakeMeter, attend: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """`probe.attend` with the last two full blocks of queries (the second meets what the first left) and the rest after them,
    computed beside the results of all blocks before."""
    length, size = query.shape[-2], probe._QUERIES
    skipped = max(0, length // size - 2) * size
    mask = options.get("attn_mask")
    if not skipped or rest:
        return attend(query, key, value, *rest, **options)
    done = value.new_empty(*query.shape[:-2], skipped, value.shape[-1])
    if any(forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)):
        done = forward_ad.make_dual(done, torch.empty_like(done))
    if mask is not None and mask.shape[-2] > 1:
        options["attn_mask"] = mask[..., skipped:, :]
    with meter.repeated(length / (length - skipped)):
        last = attend(query[..., skipped:, :], key, value, **options)
    return torch.cat([done, last], dim=-2)


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Signs of bases as they are kept: whole words of 32 rows where one matrix is drawn alone."""

    def signs(key: int, rows: range, columns: range, device: Any = "cpu") -> Tensor:
        return torch.empty(-(-rows.stop // 32) * 32, len(columns), dtype=torch.int8, device=device)[: len(rows)]

    def signs_of_many(keys: Sequence[int], rows: range, columns: Sequence[range], device: Any = "cpu") -> list[Tensor]:
        return [torch.empty(len(rows), len(c), dtype=torch.int8, device=device) for c in columns]

    with mock.patch.object(hashing, "signs", signs), mock.patch.object(hashing, "signs_of_many", signs_of_many):
        yield


# -- what the head does --------------------------------------------------------------------------------------------------------


class _Changes(TorchDispatchMode):
    """Whether an operation that changes numbers comes while it is `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.seen = False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_by_one = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.div) and args[1] == 1
        self.seen |= self.on and func.namespace == "aten" and not func.is_view and not is_by_one
        return func(*args, **(kwargs or {}))


_is_all: dict[tuple[str, str], bool] = {}  # of this process, by class and configuration but for the number of layers


def is_all_without_data(model: nn.Module, parts: head.Head) -> bool:
    """Do decoder and head give the model's logits? As `logra.head` asks, but by what operations come between them and after:
    models that cap or scale their logits have some. (Another input of the decoder than the model's would not be seen.)"""
    values: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
    kept = {k: v for k, v in values.items() if k not in ("num_hidden_layers", "n_layer", "layer_types")}
    key = (type(model).__name__, repr(kept))
    if key not in _is_all:
        _is_all[key] = not _changes(model, parts)
    return _is_all[key]


def _changes(model: nn.Module, parts: head.Head) -> bool:
    """Runs two tokens through."""
    ids, changes, handles = torch.arange(2)[None], _Changes(), []

    def switch(on: bool) -> Any:
        def hook(*_: Any) -> None:
            changes.on = on

        return hook

    try:
        handles.append(parts.decoder.register_forward_hook(switch(True)))
        handles.append(parts.linear.register_forward_pre_hook(switch(False)))
        handles.append(parts.linear.register_forward_hook(switch(True)))
        with head.quiet(model), changes:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return changes.seen


def makes_whole_logits(model_config: PretrainedConfig) -> bool:
    """Whether the trainer cannot make this model's logits in chunks, as it caps or scales them."""
    with fake_tensors():
        model = AutoModelForCausalLM.from_config(model_config)
        parts = head._take_apart(model)
        return parts is None or not is_all_without_data(model, parts)
