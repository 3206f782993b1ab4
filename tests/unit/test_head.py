"""The chunked output head against whole logits in float64, and that whole logits never exist."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import logra
from logra import head
from logra.memory.fake import fake_tensors
from logra.rl.batch import collate
from logra.rl.step import LossSettings, Tally, accumulate, logprobs_of
from logra.rl.tiny import tiny_model
from logra.rl.types import Prompt, Rollout
from logra.trust.kl import measure_kl, predict_kl

V, H = 37, 8


def case(count, seed=0, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=generator) * size for n in (count, V))
    bias = torch.randn(V, generator=generator)
    ids = torch.randint(0, V, (count,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), ids


def batch_of(rows, tokens):
    """Rollouts of up to `tokens` tokens, prompts of three to five, advantages of both signs."""
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for row in range(rows):
        ids = torch.randint(4, 40, (5 + tokens,), generator=generator).tolist()
        response = tuple(ids[5 : 5 + tokens - row % 3])
        rollouts.append(
            Rollout(Prompt(row, "", tuple(ids[: 3 + row % 3]), {}), 0, response, (-3.0,) * len(response), "eos", "", 0)
        )
    return collate(rollouts, 0).with_advantages(torch.linspace(-1, 1, rows))


def twin(hidden, weight, bias, ids, temperature):
    """Log-probs and entropies from whole logits in float64."""
    logits = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p[torch.arange(len(ids)), ids], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 12, 100, 0, None])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_those_of_whole_logits(chunk, has_bias, temperature):
    hidden, weight, bias, ids = case(11)
    bias = bias if has_bias else None
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    upstream = torch.linspace(-1, 2, 11)
    logp, entropy = head.token_logprobs(hidden, weight, bias, ids, temperature=temperature, chunk=chunk)
    found = torch.autograd.grad((logp * upstream).sum(), leaves)
    expected_logp, expected_entropy = twin(hidden, weight, bias, ids, temperature)
    expected = torch.autograd.grad((expected_logp * upstream).sum(), leaves)
    torch.testing.assert_close(logp.double(), expected_logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 9), chunk=st.integers(1, 12), seed=st.integers(0, 1000), size=st.sampled_from([0.1, 1.0, 30.0])
)
def test_the_chunk_size_changes_nothing(count, chunk, seed, size):
    hidden, weight, bias, ids = case(count, seed, torch.float64, size)
    hidden.requires_grad_()
    results = []
    for some in (chunk, 0):
        logp, entropy = head.token_logprobs(hidden, weight, bias, ids, chunk=some)
        (gradient,) = torch.autograd.grad(logp.sum(), hidden)
        results.append((logp.detach(), entropy, gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_autograd_agrees_with_differences_in_float64():
    hidden, weight, bias, ids = case(5, dtype=torch.float64)
    leaves = tuple(t.requires_grad_() for t in (hidden, weight, bias))
    assert torch.autograd.gradcheck(
        lambda h, w, b: head.token_logprobs(h, w, b, ids, temperature=0.7, chunk=2)[0], leaves
    )


def test_extreme_logits_stay_finite():
    hidden, weight, bias, ids = case(6, size=300.0)
    hidden.requires_grad_()
    logp, entropy = head.token_logprobs(hidden, weight, bias, ids, chunk=4)
    logp.sum().backward()
    assert all(bool(torch.isfinite(t).all()) for t in (logp, entropy, hidden.grad))
    torch.testing.assert_close(logp.double(), twin(hidden, weight, bias, ids, 1.0)[0], rtol=1e-4, atol=1e-2)


def test_bfloat16_computes_as_the_model_would_and_reduces_in_float32():
    hidden, weight, bias, ids = case(9, dtype=torch.bfloat16)
    hidden.requires_grad_()
    logp, _ = head.token_logprobs(hidden, weight, bias, ids, chunk=4)
    logits = nn.functional.linear(hidden, weight, bias).float()
    expected = torch.log_softmax(logits, -1)[torch.arange(9), ids]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, expected)
    (mine,), (right,) = (torch.autograd.grad(x.sum(), hidden, retain_graph=True) for x in (logp, expected))
    torch.testing.assert_close(mine, right, rtol=2e-2, atol=2e-2)


def test_autocast_is_followed_with_float32_weights():
    hidden, weight, bias, ids = case(7)
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = head.token_logprobs(hidden, weight, bias, ids, chunk=3)
        logits = nn.functional.linear(hidden, weight, bias).float()
    torch.testing.assert_close(logp, torch.log_softmax(logits, -1)[torch.arange(7), ids])


# -- in the training step and the probe ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of any tensor made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return output


@pytest.fixture
def wide(monkeypatch):
    """A tiny model with a large vocabulary, and chunks that hold few of its logits."""
    model = tiny_model()
    model.resize_token_embeddings(3000, mean_resizing=False)
    monkeypatch.setattr(head, "CHUNK_BYTES", {"cpu": 4 * 3000 * head.LEAST})
    monkeypatch.setattr("logra.trust.probe._CHUNK_BYTES", 8 * 3000 * head.LEAST)
    assert head.plain_head(model) is not None
    return model


def test_no_tensor_of_tokens_by_vocabulary_exists(wide):
    sketcher = logra.attach(wide, rank=4)
    batch = batch_of(12, 14)
    tokens = int(batch.completion_mask.sum())
    assert tokens > 5 * head.LEAST
    probe = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with Largest() as largest:
        logprobs_of(wide, batch, 12, LossSettings())
        accumulate(wide, batch, 12, LossSettings(), tally=Tally())
        proposal = sketcher.propose(1e-3)
        for mode in ("forward", "finite_difference"):
            predict_kl(wide, sketcher, proposal, probe, mode=mode)
        measure_kl(wide, sketcher, proposal, probe)
    limit = max(3000 * head.LEAST, wide.lm_head.weight.numel())
    assert largest.size <= limit < 3000 * tokens


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_the_step_is_that_of_whole_logits(arch, monkeypatch):
    batch, results = batch_of(6, 9), []
    for whole in (False, True):
        model = tiny_model(arch)
        sketcher = logra.attach(model, rank=4)
        if whole:
            monkeypatch.setattr("logra.rl.step.plain_head", lambda _: None)
        tally = Tally()
        accumulate(model, batch, 4, LossSettings(temperature=0.8, head_chunk=5), tally=tally)
        results.append((sketcher._sketches.clone(), tally.sums["loss"], tally.sums["entropy"]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert results[0][1:] == pytest.approx(results[1][1:], rel=1e-5)


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_a_trained_head_gets_the_gradient_of_whole_logits(arch, tied, monkeypatch):
    batch, results = batch_of(6, 9), []
    for whole in (False, True):
        model = tiny_model(arch, tied=tied)
        if whole:
            monkeypatch.setattr("logra.rl.step.plain_head", lambda _: None)
        accumulate(model, batch, 4, LossSettings(temperature=0.8, head_chunk=5), tally=Tally())
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, right in results[1].items():
        torch.testing.assert_close(results[0][name], right, rtol=1e-4, atol=1e-6, msg=name)


def test_the_probe_leaves_autocast_as_it_was():
    model = tiny_model()
    sketcher = logra.attach(model, rank=4)
    batch = batch_of(4, 6)
    accumulate(model, batch, 4, LossSettings(autocast=True), tally=Tally())
    proposal = sketcher.propose(1e-3)
    probe = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.autocast("cpu", torch.bfloat16):
        for compute in (predict_kl, measure_kl):
            compute(model, sketcher, proposal, probe)
            assert torch.is_autocast_enabled("cpu"), compute


def test_a_batch_without_a_token_in_the_loss_still_goes_through_backward():
    model = tiny_model()
    sketcher = logra.attach(model, rank=4)
    batch = batch_of(4, 6)
    batch = batch.with_advantages(batch.advantages, dropped=torch.ones(4, dtype=torch.bool))
    accumulate(model, batch, 4, LossSettings(), tally=Tally())
    assert not sketcher._sketches.any() and sketcher._is_dirty


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_ordinary_models_are_taken_apart_also_below_adapters(arch):
    import peft

    model = tiny_model(arch)
    assert head.plain_head(model) is not None
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=arch == "gpt2")
    )
    assert head.plain_head(wrapped) is not None


def test_fake_tensors_are_taken_apart_by_structure_alone():
    with fake_tensors():
        model = tiny_model()
        assert head.plain_head(model) is not None and model not in head._verified
        accumulate(model, batch_of(3, 5), 2, LossSettings(), tally=Tally())
        assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape


def test_a_hooked_head_is_left_to_the_model_and_said_so_once(caplog):
    model = tiny_model()
    for module in (model.lm_head, model):
        handle = module.register_forward_hook(lambda *_: None)
        with caplog.at_level(logging.WARNING, logger="logra.head"):
            assert head.plain_head(model) is None and head.plain_head(model) is None
        handle.remove()
    assert len(caplog.records) == 1 and "LlamaForCausalLM" in caplog.text
    assert head.plain_head(model) is not None
    model.lm_head.forward = lambda x: 2 * nn.Linear.forward(model.lm_head, x)  # as offloading replaces it
    assert head.plain_head(model) is None


def expected_logprobs(model, batch):
    """Of the completion tokens, from all of the model's logits; 0 in padding."""
    with torch.no_grad():
        logits = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
        ).logits
    log_p = torch.log_softmax(logits[:, batch.prompt_ids.shape[1] - 1 : -1].float(), -1)
    return torch.where(batch.completion_mask, log_p.gather(-1, batch.completion_ids[..., None]).squeeze(-1), 0.0)


@pytest.mark.parametrize("has_prompts", [False, True])
def test_an_adapted_head_and_learned_prompts_are_left_to_the_model(has_prompts):
    import peft

    torch.manual_seed(0)
    config = (
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        if has_prompts
        else peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    )
    model = peft.get_peft_model(tiny_model(spread=0.2), config).eval()
    assert head.plain_head(model) is None
    if not has_prompts:
        batch = batch_of(3, 5)
        mine = logprobs_of(model, batch, 2, LossSettings())
        torch.testing.assert_close(mine, expected_logprobs(model, batch), rtol=1e-4, atol=1e-5)


def test_soft_capped_logits_are_noticed_and_made_whole(caplog):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, final_logit_softcapping=0.5, pad_token_id=0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    batch = batch_of(3, 5)
    with caplog.at_level(logging.WARNING, logger="logra.head"):
        mine = logprobs_of(model, batch, 2, LossSettings())
        logprobs_of(model, batch, 2, LossSettings())
    assert len(caplog.records) == 1 and "Gemma2ForCausalLM" in caplog.text
    torch.testing.assert_close(mine, expected_logprobs(model, batch), rtol=1e-4, atol=1e-5)
