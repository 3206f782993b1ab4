"""Packed rows against each rollout by itself: log-probs, gradients and sketches, and who may not be packed."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import logra
from logra.head import plain_head
from logra.memory.meter import Meter
from logra.rl import layout as rl_layout
from logra.rl.batch import collate
from logra.rl.layout import layout
from logra.rl.models import prepare
from logra.rl.packing import NAME, may_pack, packable, packed_states, worth_packing
from logra.rl.step import LossSettings, Tally, accumulate, logprobs_of
from logra.rl.types import Prompt, Rollout
from logra.rl.world import deal

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**SMALL, **options)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, eos_token_id=1, bos_token_id=1, **NO_DROPOUT)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, head_dim=8, layer_types=["sliding_attention", "full_attention", "full_attention"])
    ),
    "mistral": lambda **options: MistralForCausalLM(MistralConfig(**SMALL, head_dim=8, **options)),
    "moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SMALL,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            experts_implementation="eager",
        )
    ),
}
PACKED, PADDED = LossSettings(), LossSettings(packed=False)


def model_of(name="llama", dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = MODELS[name](**options)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def batch_of(*groups, prompts=None, seed=0):
    """groups: the completion lengths of each prompt's rollouts; prompts: its length."""
    generator, rollouts = torch.Generator().manual_seed(seed), []
    for number, lengths in enumerate(groups):
        width = prompts[number] if prompts else 9 + number
        own = tuple(torch.randint(0, VOCABULARY, (width,), generator=generator).tolist())
        for index, length in enumerate(lengths):
            tokens = tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())
            rollouts.append(Rollout(Prompt(number, "", own), index, tokens, (-2.0,) * length, "eos", "", 0))
    return collate(rollouts, 0).with_advantages(torch.randn(len(rollouts), generator=generator))


MIXED = ((3, 7, 1, 5), (2, 0, 8, 8), (4, 1, 6, 2))


@pytest.fixture
def seen(monkeypatch):
    """Tokens of every packed row that the train step computed."""
    sizes = []

    def note(head, at):
        sizes.append(at.size)
        return packed_states(head, at)

    monkeypatch.setattr("logra.rl.step.packed_states", note)
    return sizes


def alone(model, batch):
    """Log-probs (B, C) of each rollout from a pass of its own, without padding, mask or anything of ours."""
    found = torch.zeros(batch.completion_ids.shape, dtype=torch.float64)
    for row in range(len(batch)):
        prompt, tokens = (
            batch.prompt_ids[row][batch.prompt_mask[row]],
            batch.completion_ids[row][batch.completion_mask[row]],
        )
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        found[row, : len(tokens)] = logits.log_softmax(-1)[range(len(tokens)), tokens]
    return found


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- the layout ----------------------------------------------------------------------------------------------------------------


@given(
    groups=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    prompts=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=100)
def test_every_asked_token_is_predicted_from_its_own_past(groups, prompts, seed):
    """Walk the layout as the attention does, and compare with the rollouts; the mask may have holes."""
    batch = batch_of(*groups, prompts=prompts, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask = batch.completion_mask & (torch.rand(batch.completion_mask.shape, generator=generator) < 0.7)
    at = layout(batch, mask)
    past = {}  # place in the row -> the ids that its state has seen
    for places, count in zip(at.prompt_at, at.prompts, strict=True):
        past |= {int(places[i]): at.ids[0, places[: i + 1]].tolist() for i in range(count)}
    for places, count, owner in zip(at.rollout_at, at.rollouts, at.owner, strict=True):
        before = at.ids[0, at.prompt_at[owner, : at.prompts[owner]]].tolist()
        past |= {int(places[i]): before + at.ids[0, places[: i + 1]].tolist() for i in range(count)}
    expected = []
    for row, column in mask.nonzero().tolist():
        expected.append(
            batch.prompt_ids[row][batch.prompt_mask[row]].tolist() + batch.completion_ids[row, :column].tolist()
        )
    places = at.predicting(torch.arange(at.size)[:, None]).flatten().tolist()
    assert [past[place] for place in places] == expected
    assert sorted(past) == list(range(at.size))  # no padding, nothing twice
    assert all(len(ids) - 1 == int(at.positions[0, place]) for place, ids in past.items())
    laid_out = torch.cat([at.prompt_at.flatten(), at.rollout_at.flatten()])
    assert laid_out[at.back].tolist() == list(range(at.size))


def test_tokens_that_predict_nothing_are_left_out():
    batch = batch_of((5, 3), (4, 0), prompts=[6, 9])
    assert layout(batch, batch.completion_mask).size == 6 + 4 + 2 + 9 + 3
    first = batch.completion_mask & (torch.arange(5) < 2)
    assert layout(batch, first).size == 6 + 1 + 1 + 9 + 1
    nothing = layout(batch, torch.zeros_like(first))
    assert nothing.size == 6 and len(nothing.predicting(torch.zeros(6, 2))) == 0


def test_equal_prompts_of_different_numbers_are_computed_once():
    batch = batch_of((2, 3), (3, 2))
    same = dataclasses.replace(
        batch, prompt_ids=batch.prompt_ids[[0, 0, 0, 0]], prompt_mask=batch.prompt_mask[[0, 0, 0, 0]]
    )
    assert len(layout(same, same.completion_mask).prompts) == 1


# -- the same results ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_each_rollout_alone(name, seen):
    model, batch = model_of(name).eval(), batch_of(*MIXED)
    found = logprobs_of(model, batch, 12, PACKED)
    with torch.no_grad():
        torch.testing.assert_close(found, alone(model, batch).float(), rtol=0, atol=2e-6)  # kept in float32
    assert len(seen) == 1 and seen[0] < 0.5 * batch.input_ids.numel()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_each_rollout_alone(name, checkpointing, seen):
    model, batch = model_of(name).train(), batch_of(*MIXED)
    if checkpointing:
        prepare(model, True)
    tally = Tally()
    accumulate(model, batch, 12, PACKED, tally=tally)
    found = gradients(model)
    assert seen and found
    model.zero_grad()
    logp = alone(model, batch)
    weights = torch.exp(logp.detach() - batch.rollout_logprobs).clamp(max=PACKED.importance_cap)
    ratio = torch.exp(logp - logp.detach())
    loss = -(batch.weights[:, None] * batch.advantages[:, None] * weights * ratio * batch.loss_mask).sum()
    loss.backward()
    for key, grad in gradients(model).items():
        torch.testing.assert_close(found[key], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()), msg=key)
    assert tally.sums["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)


@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_sketches_are_those_of_padded_rows(basis, seen):
    sketches = []
    for chosen in (PACKED, PADDED):
        model = model_of(dtype=torch.float32)
        sketcher = logra.attach(model, rank=4, basis=basis)
        accumulate(model, batch_of(*MIXED), 12, chosen, tally=Tally())
        sketches.append({name: sketcher.sketch(name).clone() for name in sketcher.names})
    assert len(seen) == 1
    for name, expected in sketches[1].items():
        assert float((sketches[0][name] - expected).norm()) <= 2e-6 * float(expected.norm()), name


@pytest.mark.parametrize("size", [1, 5, 12])
def test_microbatches_add_up(size):
    found = []
    for count in (12, size):
        model = model_of()
        accumulate(model, batch_of(*MIXED), count, PACKED, tally=Tally())
        found.append(gradients(model))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-7)


def test_few_rollouts_a_call_give_the_same(monkeypatch, seen):
    """Long rollouts: the masks of a few of them exist at once."""
    found = []
    for scores in (rl_layout.SCORES, 1):
        monkeypatch.setattr(rl_layout, "SCORES", scores)
        model = model_of()
        accumulate(model, batch_of(*MIXED), 12, PACKED, tally=Tally())
        found.append(gradients(model))
    assert len(seen) == 2
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-9)


def test_twice_is_the_same_to_the_bit():
    found = []
    for _ in range(2):
        model = model_of(dtype=torch.float32)
        accumulate(model, batch_of(*MIXED), 12, PACKED, tally=Tally())
        found.append(gradients(model))
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


def test_lora_and_bfloat16(seen):
    peft = pytest.importorskip("peft")
    losses = []
    for chosen in (PACKED, PADDED):
        torch.manual_seed(3)
        model = peft.get_peft_model(
            model_of(dtype=torch.float32), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
        )
        settings = dataclasses.replace(chosen, autocast=True)
        tally = Tally()
        accumulate(model, batch_of(*MIXED), 12, settings, tally=tally)
        losses.append((tally.sums["entropy"], gradients(model)))
    assert len(seen) == 1 and losses[0][0] == pytest.approx(losses[1][0], rel=0.01)
    for name, grad in losses[1][1].items():
        assert float((losses[0][1][name] - grad).norm()) <= 0.05 * float(grad.norm()) + 1e-6, name


@pytest.mark.parametrize("dropped", [(0,), (4, 5, 6, 7), tuple(range(12))])
def test_dropped_rollouts_leave_no_trace(dropped):
    """Not even if all are: the loss is an exact 0 that is connected to the graph."""
    mask = torch.zeros(12, dtype=torch.bool)
    mask[list(dropped)] = True
    found = []
    for chosen in (PACKED, PADDED):
        model, batch = model_of(), batch_of(*MIXED)
        accumulate(model, batch.with_advantages(batch.advantages, dropped=mask), 12, chosen, tally=Tally())
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-5, atol=1e-7)


# -- who may not be packed -------------------------------------------------------------------------------------------------------


def test_the_models_own_attention_is_back_afterwards(seen):
    model = model_of()
    accumulate(model, batch_of(*MIXED), 12, PACKED, tally=Tally())
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ZeroDivisionError), packable(model, plain_head(model), torch.device("cpu")) as packs:
        assert packs and model.config._attn_implementation == NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa" and NAME not in str(model.config.to_dict())


def test_within_it_other_passes_are_as_ever():
    model = model_of().eval()
    batch = batch_of(*MIXED)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    with torch.no_grad():
        before = model(**inputs).logits
        with packable(model, plain_head(model), torch.device("cpu")):
            assert torch.equal(model(**inputs).logits, before)


class Remembers(nn.Module):
    """Mixes each token's state with that of the one before it, as a convolution does."""

    def forward(self, states):
        return states + torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)


def test_a_model_that_mixes_tokens_elsewhere_is_noticed(seen, caplog):
    model = model_of()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, Remembers())
    results = []
    for chosen in (PACKED, PADDED):
        results.append(logprobs_of(model, batch_of(*MIXED), 12, chosen))
    assert not seen and torch.equal(*results)
    assert sum("padded rows" in record.message for record in caplog.records) == 1


class OwnMask(nn.Module):
    """Attention with a mask that the model makes itself, as Doge does."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        columns = hidden_states.shape[1]
        mask = torch.ones(columns, columns, dtype=torch.bool).tril()[None, None]
        return self.attention(hidden_states, attention_mask=mask, **kwargs)


def test_a_mask_of_the_models_own_is_noticed(seen, caplog):
    model = model_of()
    model.model.layers[1].self_attn = OwnMask(model.model.layers[1].self_attn)
    assert may_pack(model)  # as far as its parts tell
    logprobs_of(model, batch_of(*MIXED), 12, PACKED)
    assert not seen and not may_pack(model)
    assert any("mask or a bias of its own" in record.message for record in caplog.records)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_of_a_pass_stay_padded(kind, seen):
    half = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8, **half}
    logprobs_of(model_of(rope_parameters=rope), batch_of(*MIXED), 12, PACKED)
    assert not seen


@pytest.mark.parametrize("last, packed", [(8, 0), (7, 1)])
def test_full_rows_are_packed_only_where_it_saves_more(last, packed, seen):
    """Padded ones need no mask then. 31 and 30 of 44 tokens."""
    logprobs_of(model_of(), batch_of((8, 8, 8, last), prompts=[3]), 4, PACKED)
    assert len(seen) == packed


def test_a_window_of_0_is_none(seen):
    """Qwen2-MoE's way of saying so."""
    torch.manual_seed(0)
    small = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **small))
    assert model.config.sliding_window == 0
    logprobs_of(model, batch_of(*MIXED), 12, PACKED)
    assert len(seen) == 1


def test_eager_attention_stays_padded(seen):
    model = model_of()
    model.set_attn_implementation("eager")
    logprobs_of(model, batch_of(*MIXED), 12, PACKED)
    assert not seen


@pytest.mark.parametrize("window, expected", [(17, 1), (16, 0)])
def test_rollouts_longer_than_a_window_stay_padded(window, expected, seen):
    """The longest has 9 + 9 tokens, of which the last is no input."""
    model = model_of("mistral", sliding_window=window)
    batch = batch_of((9, 1, 1, 1))
    found = logprobs_of(model, batch, 4, PACKED)
    assert len(seen) == expected
    torch.testing.assert_close(found, logprobs_of(model, batch, 4, PADDED), rtol=0, atol=2e-6)


def test_full_rows_of_different_prompts_stay_padded(seen):
    model = model_of()
    logprobs_of(model, batch_of((8,), (8,), (8,), prompts=[8, 8, 8]), 3, PACKED)
    assert not seen


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_packed_row_never_takes_more_memory_than_the_padded_rows(checkpointing):
    """At the largest share that is packed at all, and without a shared prompt: the least favourable case."""
    batch = batch_of((32,), (32,), (20,), (20,), prompts=[32, 32, 24, 28])
    peaks = []
    for chosen in (PACKED, PADDED):
        model = model_of(dtype=torch.float32)
        prepare(model, checkpointing)
        head = plain_head(model)
        with packable(model, head, torch.device("cpu")) as packs:
            at = layout(batch, batch.loss_mask)
            assert packs and worth_packing(head, at, batch)
            assert at.size > 0.8 * batch.input_ids.numel()
        with Meter() as meter, meter.phase("gradient"):
            accumulate(model, batch, 4, chosen, tally=Tally())
        peaks.append(meter.reading("gradient").peak)
    assert peaks[0] <= peaks[1]


# -- rows of ranks ---------------------------------------------------------------------------------------------------------------


@given(groups=st.integers(1, 8), together=st.integers(1, 5), ranks=st.integers(1, 4), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=100)
def test_rollouts_of_a_prompt_stay_on_a_rank(groups, together, ranks, seed):
    count = groups * together
    costs = torch.randint(1, 50, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = deal(costs, ranks, together)
    assert sorted(row for own in rows for row in own) == list(range(count))
    assert max(map(len, rows)) <= -(-count // ranks)
    if groups % ranks == 0:
        assert all(len({row // together for row in own}) == groups // ranks for own in rows)
        assert len({len(own) for own in rows}) == 1
