"""The planned bytes against those of a real step on the CPU, measured tensor by tensor.

The same code, so nearly the same bytes. Every other prompt is a token shorter: rows of equal lengths need no attention mask, and
plans are for rows that do.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
)

from logra import config as cfg
from logra.build.model import build_method
from logra.build.plan import Question, model_config_of, plan_memory, with_layers
from logra.build.rehearsal import Shape, _packed_row, makes_whole_logits, rehearse
from logra.build.run import training_plan
from logra.head import plain_head
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE
from logra.memory.meter import Meter
from logra.memory.plan import at_layers
from logra.region import region
from logra.rl.batch import collate
from logra.rl.models import prepare
from logra.rl.packing import packed_states
from logra.rl.step import Tally, accumulate, logprobs_of
from logra.rl.types import Prompt, Rollout

SHAPE = Shape(prompt=16, response=48, rows=4, decoded=6)
CLOSE = 0.01


def llama(layers=2, vocabulary=3000, hidden=128):
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip


def gpt2():
    return GPT2Config(vocab_size=3000, n_embd=128, n_layer=2, n_head=4, n_positions=128)


SMALL = {
    "vocab_size": 3000, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def gemma(layers=2, **options):
    """It caps its logits, and layers of sliding and of full attention take turns."""
    options = {"num_hidden_layers": layers, "head_dim": 32, "sliding_window": 32} | options
    return Gemma2Config(**SMALL, **options)


def granite(**options):
    return GraniteConfig(**SMALL, **{"num_hidden_layers": 2, "logits_scaling": 8.0} | options)


def cohere(**options):
    return CohereConfig(**SMALL, num_hidden_layers=2, eos_token_id=1, **options)


def make_config(**sections):
    data = {
        "model": {"name_or_path": "x", "device": "cpu"}, "data": {"name": "x"}, "trust": {"enabled": False},
        "reward": {"functions": [{"function": "x"}]}, "method": {"rank": 8}, "train": {"packed": False},
    }  # fmt: skip
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return cfg.make_config(data)


def full_batch(rows, shape, vocabulary, group=1):
    """Every token of it is real, but one of every other prompt; so many rows share one."""
    ids = torch.randint(
        0, vocabulary, (rows, shape.prompt + shape.response), generator=torch.Generator().manual_seed(0)
    ).tolist()
    rollouts = [
        Rollout(Prompt(0, "", tuple(ids[index // group][1 - index // group % 2 : shape.prompt]), {}), index,
                tuple(row[shape.prompt :]), (-5.0,) * shape.response, "length", "", 0)
        for index, row in enumerate(ids)
    ]  # fmt: skip
    return collate(rollouts, 0).with_advantages(torch.linspace(-1.0, 1.0, rows))


def build(config, model_config):
    dtype = torch.bfloat16 if config.method.weights == "split" else torch.float32
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation="sdpa")


def measure(config, model_config, shape=SHAPE, group=1):
    """Phase -> (peak, bytes by kind then) of one real update of two microbatches."""
    model = build(config, model_config)
    prepare(model, config.model.gradient_checkpointing)
    method, plan = build_method(config, model), training_plan(config)
    batch = full_batch(2 * shape.rows, shape, model_config.vocab_size, group)
    rows = list(range(plan.probe_rollouts))
    part = batch.probe(rows, plan.probe_max_tokens)
    completion = torch.cat([torch.zeros_like(part.prompt_mask), part.completion_mask], dim=1)
    contexts = {"input_ids": part.input_ids, "attention_mask": part.attention_mask, "completion_mask": completion}
    if hasattr(method, "sketcher"):
        method.sketcher.basis_block(method.sketcher.names[0])
    reference = build(config, model_config).eval().requires_grad_(False) if config.algorithm.kl_coef else None
    with Meter() as meter:
        for kind, tensors in method.held().items():
            meter.register(kind, tensors)
        if reference is not None:
            meter.register("weights", reference.parameters())
        meter.watch_gradients(method.model.parameters())
        method.zero()
        with meter.phase(GRADIENT), region("activations"):
            old = of_reference = None
            if plan.updates_per_step > 1:
                old = logprobs_of(method.model, batch, shape.rows, plan.loss)
            if reference is not None:
                of_reference = logprobs_of(reference, batch, shape.rows, plan.loss)
            accumulate(
                method.model, batch, shape.rows, plan.loss, old_logp=old, reference_logp=of_reference, tally=Tally()
            )
        with meter.phase(UPDATE), region("workspace"):
            assert method.step(lambda: contexts, 1.0).applied
        return {name: (meter.reading(name).peak, meter.reading(name).by_kind) for name in (GRADIENT, UPDATE)}


def as_measured(kinds):
    """A rehearsal's kinds as a meter names them."""
    found = {}
    for kind, size in kinds.items():
        name = "workspace" if kind in ("proposal", "sync", "other") else kind
        found[name] = found.get(name, 0) + size
    return found


def check(config, model_config, shape=SHAPE, group=1):
    planned, real = (
        rehearse(config, model_config, shape, phases=(GRADIENT, UPDATE)),
        measure(config, model_config, shape, group),
    )
    for name, (peak, by_kind) in real.items():
        plan = as_measured(planned[name].peak)
        assert sum(plan.values()) == pytest.approx(peak, rel=CLOSE), (name, plan, by_kind)
        measured = as_measured(by_kind)
        for kind in {kind for kind, size in {**measured, **plan}.items() if size > peak / 100}:
            near = pytest.approx(measured.get(kind, 0), rel=0.05, abs=peak / 100)
            assert plan.get(kind, 0) == near, (name, kind, plan, measured)


LOGRA = {
    "random": {"basis": "random", "optimizer": "row_adam"},
    "aligned": {"basis": "aligned", "optimizer": "row_adam"},
    "aligned adam": {"basis": "aligned", "optimizer": "adam"},
    "beside": {"basis": "random", "optimizer": "row_adam", "dense_params": ["norms", "head"]},
}
SPLIT = {"weights": "split"}


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("weights", ["fp32", "split"])
@pytest.mark.parametrize("method", ["random", "aligned", "aligned adam"])
def test_logra(method, weights, trust):
    model = {"dtype": "bfloat16"} if weights == "split" else {}
    check(make_config(method={**LOGRA[method], "weights": weights}, trust={"enabled": trust}, model=model), llama())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["dense", "lora"])
def test_adamw(method, checkpointing):
    check(make_config(method={"name": method}, model={"gradient_checkpointing": checkpointing}), llama())


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"gradient_checkpointing": True}},
        {"model": {"gradient_checkpointing": True, "dtype": "bfloat16"}, "method": SPLIT},
        {"model": {"dtype": "bfloat16"}, "method": {"name": "dense"}},
        {"algorithm": {"kl_coef": 0.1}},
        {"algorithm": {"updates_per_step": 2}},
        {"train": {"head_chunk": 0}},
        {"trust": {"enabled": True, "mode": "finite_difference"}},
        {"method": LOGRA["beside"]},
    ],
    ids=[
        "checkpoints",
        "checkpoints split",
        "autocast",
        "reference",
        "two updates",
        "whole logits",
        "differences",
        "beside",
    ],
)
def test_settings(sections):
    check(make_config(**sections), llama())


def qwen():
    return Qwen3Config(**SMALL, num_hidden_layers=2, head_dim=32)


@pytest.mark.parametrize(
    "sections",
    [
        {"method": LOGRA["aligned adam"]},
        {"model": {"gradient_checkpointing": True, "dtype": "bfloat16"}, "method": SPLIT},
        {"method": {"name": "dense"}},
        {"method": {"name": "lora"}, "algorithm": {"kl_coef": 0.1}},
        {"algorithm": {"updates_per_step": 2}},
    ],
    ids=["aligned", "checkpoints split", "dense", "lora", "two updates"],
)
@pytest.mark.parametrize("model_config, group", [(llama(), 4), (gpt2(), 4), (qwen(), 2)], ids=["llama", "gpt2", "qwen"])
def test_packed_rows(model_config, group, sections, monkeypatch):
    """Whole groups of two and of four to a microbatch of four."""
    sizes = []
    monkeypatch.setattr(
        "logra.rl.step.packed_states", lambda head, at: (sizes.append(at.size), packed_states(head, at))[1]
    )
    rollout = {"rollouts_per_prompt": group}
    config = make_config(**{**sections, "train": {"packed": True}, "rollout": rollout})
    shape = Shape(prompt=96, response=32, rows=4, decoded=6)  # no shorter rows take more, padded
    check(config, model_config, shape, group)
    assert len(sizes) > 2 and max(sizes) == 4 // group * shape.prompt + 4 * (shape.response - 1)


@pytest.mark.parametrize("rows, group, prompts", [(4, 8, 1), (4, 4, 1), (8, 4, 2), (6, 4, 2), (3, 2, 2), (3, 1, 3)])
def test_prompts_of_a_microbatch(rows, group, prompts):
    """As many as it can have; the first and the last of its groups may be parts."""
    assert len(_packed_row(Shape(5, 3, rows, 1), group).prompts) == prompts


@pytest.mark.parametrize("method", [{"basis": "random", "optimizer": "row_adam"}, {"name": "dense"}, {"name": "lora"}])
def test_gpt2(method):
    check(make_config(method=method), gpt2())


def test_what_has_no_forward_derivative_without_data_is_planned_with_differences():
    """Layer norms have one in truth."""
    config = make_config(method=LOGRA["random"], trust={"enabled": True})
    plan = plan_memory(Question(config, gpt2(), SHAPE, accelerator=False))
    real = measure(config, gpt2())
    for name in (GRADIENT, UPDATE):
        assert plan.phases[name].peak_bytes == pytest.approx(real[name][0], rel=0.1), name


@pytest.mark.parametrize(
    "model_config",
    [llama(), gpt2(), gemma(), granite(), cohere(), gemma(final_logit_softcapping=None), granite(logits_scaling=1.0)],
    ids=["llama", "gpt2", "gemma", "granite", "cohere", "gemma uncapped", "granite unscaled"],
)
def test_whose_logits_are_made_whole(model_config):
    """The plan finds out without numbers what the trainer finds by comparing them."""
    real = AutoModelForCausalLM.from_config(model_config)
    assert makes_whole_logits(model_config) == (plain_head(real) is None)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("model_config", [gemma(), granite()], ids=["gemma", "granite"])
def test_whole_logits(model_config, trust):
    config = make_config(method=LOGRA["random"], trust={"enabled": trust})
    check(config, model_config)
    planned = rehearse(config, model_config, SHAPE, phases=(GRADIENT,))[GRADIENT].peak
    chunked = rehearse(config, llama(), SHAPE, phases=(GRADIENT,))[GRADIENT].peak
    of_logits = 4 * SHAPE.rows * SHAPE.response * 3000
    assert sum(planned.values()) > sum(chunked.values()) + 2 * of_logits


def test_a_probe_of_several_groups_of_rows_and_blocks_of_queries():
    """Of which two each are rehearsed."""
    config = make_config(method=LOGRA["random"], trust={"enabled": True, "probe_rollouts": 8})
    check(config, llama(vocabulary=300, hidden=256), Shape(prompt=64, response=1200, rows=4, decoded=1))


def test_smollm2_shape():
    """One of the demo's size, with random weights."""
    config = make_config(model={"gradient_checkpointing": True}, method={"rank": 64, **LOGRA["random"]})
    check(config, with_layers(model_config_of("shape:smollm2-135m")[0], 6), Shape(16, 112, 2, 2))


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"name": "dense"}},
        {"method": LOGRA["aligned adam"], "trust": {"enabled": True}},
        {"method": {"name": "lora"}, "model": {"gradient_checkpointing": True}},
    ],
    ids=["dense", "aligned", "lora"],
)
def test_a_few_layers_tell_of_many(sections):
    config = make_config(**sections)
    few = {n: rehearse(config, llama(n), SHAPE) for n in (2, 3)}
    planned, whole = at_layers(few, 7), rehearse(config, llama(7), SHAPE)
    for name in PHASES:
        assert sum(planned[name].peak.values()) == pytest.approx(sum(whole[name].peak.values()), rel=0.002), name
        assert planned[name].weight == pytest.approx(whole[name].weight, rel=0.002), name
        mean = sum(whole[name].mean.values())
        assert sum(planned[name].mean.values()) == pytest.approx(mean, rel=0.01), name


def test_caches_grow_with_what_is_decoded():
    config = make_config()
    one, many = (rehearse(config, llama(), Shape(16, 48, 1, rows), phases=(ROLLOUT,)) for rows in (8, 16))
    cache = 2 * 2 * 64 * 2 * 32 * 4  # layers, keys and values, tokens, heads, their size, bytes
    assert many[ROLLOUT].peak["kv_cache"] - one[ROLLOUT].peak["kv_cache"] == 8 * cache
    assert set(one) == {ROLLOUT}


@pytest.mark.parametrize("prompt, response", [(64, 16), (16, 64), (32, 64), (12, 100)])
def test_shorter_rows_never_need_more_than_the_plan(prompt, response):
    """Not even where they are padded, because packing them would gain too little."""
    shape = Shape(prompt, response, rows=4, decoded=1)
    config = make_config(train={"packed": True}, rollout={"rollouts_per_prompt": 4})
    planned = sum(rehearse(config, llama(), shape, phases=(GRADIENT,))[GRADIENT].peak.values())
    for used in {2, prompt // 4, prompt // 3, prompt // 2, prompt}:
        peak, by_kind = measure(config, llama(), Shape(used, response, rows=4, decoded=1), group=4)[GRADIENT]
        assert peak <= 1.02 * planned, (used, by_kind)
