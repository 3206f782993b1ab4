"""One training step on tensors without data: the same model, method, loss and optimizer code, so the plan is what will happen.

Needs the model's configuration only, no weights, no accelerator, seconds of one core.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from logra import config as cfg
from logra import head
from logra.build.model import build_method
from logra.build.run import training_plan
from logra.memory.fake import FakeMeter, Phase, fake_tensors
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE
from logra.region import region
from logra.rl.batch import TrainBatch
from logra.rl.engines.sampling import choose
from logra.rl.methods import dense
from logra.rl.methods.base import Method
from logra.rl.models import offload_inputs, prepare
from logra.rl.step import LossSettings, Tally, accumulate, logprobs_of
from logra.sketch import aligned, capture, sketcher
from logra.sketch.block import Block
from logra.sketch.update import Update
from logra.trust import probe


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
) -> dict[str, Phase]:
    """Bytes by kind at the peaks of each phase of one step, and on average.

    Two microbatches, so that the second meets what the first left. Everything lives on one device; `residual` and `offloaded`
    are kinds of their own, so whoever plans may count them elsewhere, and so are `proposal` (U and the next moments) and `sync`
    (the integers of the Update), which a meter sees as workspace. phases: those wanted; UPDATE includes GRADIENT. accelerator:
    as the code runs on CUDA. low: all weights in bfloat16, as FSDP gathers them; what is made of them (gradients, moments) is
    too. dora: LoRA's adapters with DoRA's magnitudes.
    """
    if low:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    plan = training_plan(config)
    with fake_tensors() as meter, _shortened(), _allowed(low, dora), _as_on_cuda(accelerator):
        model = _model(config, model_config, low)
        prepare(model, config.model.gradient_checkpointing)
        if accelerator and config.model.offload_activations:
            offload_inputs(model)
        method = build_method(config, model)
        _register(meter, method)
        meter.watch_gradients(method.model.parameters())
        reference = None
        if config.algorithm.kl_coef:
            with region("weights"):
                reference = _model(config, model_config, low).requires_grad_(False)
        if ROLLOUT in phases:
            with meter.plan_phase(ROLLOUT), region("workspace"):
                _decode(meter, model, shape, config)
        if phases == (ROLLOUT,):
            return meter.planned
        with meter.plan_phase(GRADIENT), region("activations"):
            batch = _batch(2 * shape.rows, shape)
            _gradient(method, batch, shape, plan.loss, plan.updates_per_step, reference)
        if UPDATE not in phases:
            return meter.planned
        contexts = _probe(plan.probe_rollouts, min(shape.prompt + shape.response, plan.probe_max_tokens))
        tokens = contexts["input_ids"].shape[1]
        meter.filled = min(1.0, shape.response / max(1, tokens - 1))
        with meter.plan_phase(UPDATE), region("workspace"):
            method.step(lambda: contexts, plan.loss.temperature)
    return meter.planned


def _model(config: cfg.Config, model_config: PretrainedConfig, low: bool) -> PreTrainedModel:
    dtype = torch.bfloat16 if low or config.method.weights == "split" else torch.float32
    with region("weights"):
        return AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=config.model.attn_implementation
        )


def _register(meter: FakeMeter, method: Method) -> None:
    """By kind; what the step draws or makes when it is first used is there beforehand, as from the second step on."""
    own = getattr(method, "sketcher", None)
    if own is not None:
        own.basis_block(own.names[0])
        _name_the_step(meter, own)
    for kind, tensors in method.held().items():
        meter.register(kind, tensors)


def _name_the_step(meter: FakeMeter, own: sketcher.Sketcher) -> None:
    """What a step is made of, as kinds of its own: sharding divides it by rows, and it is what engines are sent."""
    propose, quantize = own.propose, own.quantize

    def named_propose(*arguments: Any, **options: Any) -> sketcher.Proposal:
        proposal = propose(*arguments, **options)
        meter.register("proposal", [proposal.factors])
        return proposal

    def named_quantize(*arguments: Any, **options: Any) -> Update:
        update = quantize(*arguments, **options)
        meter.register("sync", [part for f in update.factors.values() for part in (f.q, f.exponent)])
        return update

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


def _probe(rows: int, tokens: int) -> dict[str, Tensor]:
    return {
        name: torch.ones(rows, tokens, dtype=torch.int64) for name in ("input_ids", "attention_mask", "completion_mask")
    }


@contextlib.contextmanager
def _allowed(low: bool, dora: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
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
    logits, AdamW on all parameters at once."""
    if not wanted:
        yield
        return

    def accumulate_sketch(sketch_dr: Tensor, grad: Tensor, projected_Nr: Tensor, scale: float) -> None:
        sketch_dr.add_(torch.empty_like(sketch_dr))  # the product, in float32

    def power_step(x_Nk: Tensor, grad_Nd: Tensor, projected_Nr: Tensor) -> Tensor:
        weighted_Nr = projected_Nr.float() * torch.linalg.vector_norm(grad_Nd, dim=1, keepdim=True, dtype=torch.float32)
        weighted_Nr.to(x_Nk.dtype)
        return x_Nk.new_empty(x_Nk.shape[1], projected_Nr.shape[1], dtype=torch.float32)

    with (
        mock.patch.object(capture, "accumulate", accumulate_sketch),
        mock.patch.object(aligned, "power_step", power_step),
        mock.patch.dict(head.CHUNK_BYTES, cpu=head.CHUNK_BYTES_ACCELERATOR),
        mock.patch.object(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, foreach=True)),
    ):
        yield


@contextlib.contextmanager
def _shortened() -> Iterator[None]:
    """What repeats in equal chunks is done twice, which allocates all that it ever does; modules stay where they are.

    Moving a module is for its data, and there is none: peft moves adapters, which fake parameters do not survive.
    """

    def to(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return module

    def twice(loop: Any) -> Any:
        return lambda *arguments: itertools.islice(loop(*arguments), 2)

    with (
        mock.patch.object(nn.Module, "to", to),
        mock.patch.object(head, "_slices", twice(head._slices)),
        mock.patch.object(probe.Contexts, "logits", twice(probe.Contexts.logits)),
        mock.patch.object(Block, "_chunks", twice(Block._chunks)),
    ):
        yield
