"""What is particular to the in-process engine: it disturbs nothing, inherits nothing, wastes little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from logra.errors import ConfigError, ModelError, NonFiniteError
from logra.rl.engines.hf import HFEngine
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.rl.types import Prompt, Sampling

LONG = "12*3=? "


def make_prompts(*texts: str) -> list[Prompt]:
    tokenizer = char_tokenizer()
    return [Prompt(i, text, tuple(tokenizer(text).input_ids)) for i, text in enumerate(texts)]


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = tiny_model(request.param)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(15)
    return model


def test_batch_sizes_agree(model: PreTrainedModel) -> None:
    prompts, sampling = make_prompts("1", LONG, "abc", LONG + LONG), Sampling(16, temperature=0.8)
    eos = (1, 9, 20, 30)
    whole, one, three = (
        HFEngine(model, char_tokenizer(), batch_size=size, eos_token_ids=eos).generate(prompts, 4, sampling)
        for size in (None, 1, 3)
    )
    for other in (one, three):
        assert [r.token_ids for r in other] == [r.token_ids for r in whole]
        for a, b in zip(other, whole, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_left_padding_does_not_matter(model: PreTrainedModel) -> None:
    """GPT-2 has absolute positions, so it shows any padding that leaks."""
    short, long = make_prompts("7", LONG * 6)
    engine = HFEngine(model, char_tokenizer())
    padded = engine.generate([short, long], 2, Sampling(10))[:2]
    for a, b in zip(padded, engine.generate([short], 2, Sampling(10)), strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_generation_config_is_not_inherited(model: PreTrainedModel) -> None:
    prompts = make_prompts("1+1=", "abc")
    plain = HFEngine(model, char_tokenizer()).generate(prompts, 3, Sampling(12))
    model.generation_config.update(
        repetition_penalty=2.0, top_k=1, temperature=0.1, do_sample=True, min_new_tokens=12, max_length=3
    )
    assert HFEngine(model, char_tokenizer()).generate(prompts, 3, Sampling(12)) == plain


def test_pad_equal_to_eos_and_a_second_eos(model: PreTrainedModel) -> None:
    tokenizer = char_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model.generation_config.eos_token_id = [9]
    prompts, sampling = make_prompts("1", LONG), Sampling(12)
    rollouts = HFEngine(model, tokenizer).generate(prompts, 30, sampling)
    for rollout in rollouts:
        ends = [i for i, token in enumerate(rollout.token_ids) if token in (1, 9)]
        assert ends == ([len(rollout.token_ids) - 1] if rollout.stop == "eos" else [])
    assert {r.token_ids[-1] for r in rollouts if r.stop == "eos"} == {1, 9}
    assert HFEngine(model, char_tokenizer()).generate(prompts, 30, sampling) == rollouts


def test_text_is_the_response_without_its_end(model: PreTrainedModel) -> None:
    tokenizer = char_tokenizer()
    for rollout in HFEngine(model, tokenizer, eos_token_ids=(9, 12)).generate(make_prompts("1"), 20, Sampling(8)):
        body = rollout.token_ids[:-1] if rollout.stop == "eos" else rollout.token_ids
        assert rollout.text == "".join(tokenizer.convert_ids_to_tokens([i for i in body if i > 3]))


def test_no_end_ids_run_to_the_limit(model: PreTrainedModel) -> None:
    engine = HFEngine(model, char_tokenizer(), eos_token_ids=())
    rollouts = engine.generate(make_prompts("1"), 40, Sampling(10))
    assert all(r.stop == "length" and len(r.token_ids) == 10 for r in rollouts)
    assert any(1 in r.token_ids for r in rollouts)


def test_end_ids_come_from_model_and_tokenizer(model: PreTrainedModel) -> None:
    tokenizer = char_tokenizer()
    for named, expected in ((None, {1}), (9, {1, 9}), ([1, 9, 12], {1, 9, 12})):
        model.generation_config.eos_token_id = named
        assert HFEngine(model, tokenizer).eos_token_ids == expected
    assert HFEngine(model, tokenizer, eos_token_ids=[5]).eos_token_ids == {5}


def test_missing_end_id_is_refused_with_the_fix(model: PreTrainedModel) -> None:
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    with pytest.raises(ModelError, match="eos_token_ids"):
        HFEngine(model, tokenizer)


def test_missing_pad_token_needs_no_help(model: PreTrainedModel) -> None:
    prompts, sampling = make_prompts("1", LONG), Sampling(10)
    expected = HFEngine(model, char_tokenizer()).generate(prompts, 2, sampling)
    tokenizer = char_tokenizer()
    tokenizer.pad_token = None
    engine = HFEngine(model, tokenizer)
    assert engine.pad_token_id == 1
    assert engine.generate(prompts, 2, sampling) == expected
    assert HFEngine(model, tokenizer, pad_token_id=33).generate(prompts, 2, sampling) == expected


def test_too_long_for_the_positions_is_refused_with_numbers() -> None:
    engine = HFEngine(tiny_model("gpt2", positions=16), char_tokenizer(), eos_token_ids=())
    prompt = make_prompts("0123456789")[0]
    assert len(engine.generate([prompt], 1, Sampling(6))[0].token_ids) == 6
    with pytest.raises(ModelError, match=r"10 tokens.*max_new_tokens 7.*17.*16.*data.max_prompt_tokens to 9"):
        engine.generate([prompt], 1, Sampling(7))


def test_impossible_batch_size_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        HFEngine(model, char_tokenizer(), batch_size=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_name_the_prompt(model: PreTrainedModel, bad: float, temperature: float) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[char_tokenizer().convert_tokens_to_ids("z")] = bad
    model.train()
    with pytest.raises(NonFiniteError, match="prompt 1, rollout 0"):
        HFEngine(model, char_tokenizer()).generate(make_prompts("abc", "xyz"), 1, Sampling(4, temperature))
    assert model.training


def test_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    inner = next(module for name, module in model.named_modules() if name.endswith(".1"))
    inner.eval()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = torch.get_rng_state()
    HFEngine(model, char_tokenizer()).generate(make_prompts("1", LONG), 2, Sampling(6))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert not any(p.is_inference() or p.grad is not None for p in model.parameters())


def test_dropout_is_off_while_sampling() -> None:
    model, prompts = tiny_model("gpt2"), make_prompts("1+1=")
    expected = HFEngine(model, char_tokenizer()).generate(prompts, 2, Sampling(8))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    assert HFEngine(model, char_tokenizer()).generate(prompts, 2, Sampling(8)) == expected


def test_requires_grad_hook_and_checkpointing_change_nothing(model: PreTrainedModel) -> None:
    prompts, sampling = make_prompts("1", LONG), Sampling(10)
    expected = HFEngine(model, char_tokenizer()).generate(prompts, 3, sampling)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.config.use_cache = False
    model.train()
    widths, kept = record_widths(model), []
    model.get_input_embeddings().register_forward_hook(lambda _module, _args, output: kept.append(output))
    assert HFEngine(model, char_tokenizer()).generate(prompts, 3, sampling) == expected
    assert kept and not any(output.is_inference() for output in kept)
    assert widths[0] == (2, len(LONG)) and all(width == 1 for _, width in widths[1:])
    ids = torch.tensor([prompts[1].token_ids])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def record_widths(model: PreTrainedModel) -> list[tuple[int, int]]:
    """The (rows, columns) of every input the model is called with from now on."""
    widths: list[tuple[int, int]] = []

    def hook(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return widths


def test_each_distinct_prompt_is_prefilled_once(model: PreTrainedModel) -> None:
    prompts = make_prompts("1", LONG, "1")
    widths = record_widths(model)
    HFEngine(model, char_tokenizer(), eos_token_ids=()).generate(prompts, 8, Sampling(3))
    assert widths == [(2, len(LONG)), (24, 1), (24, 1)]


def test_finished_rows_leave_the_batch_and_decoding_stops_early(model: PreTrainedModel) -> None:
    widths = record_widths(model)
    eos = tuple(range(4, 30))
    rollouts = HFEngine(model, char_tokenizer(), eos_token_ids=eos).generate(make_prompts("1", LONG), 16, Sampling(200))
    rows = [rows for rows, _ in widths[1:]]
    lengths = [len(r.token_ids) for r in rollouts]
    assert rows == sorted(rows, reverse=True)
    for step, present in enumerate(rows, start=1):
        open_rows = sum(length > step for length in lengths)
        assert open_rows <= present and open_rows > 0.75 * present - 1e-9
    assert len(rows) == max(lengths) - 1
