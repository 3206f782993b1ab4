"""What every rollout engine promises (`Engine`), checked against slow unpadded forward passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra.errors import ConfigError, DataError
from logra.rl.engines.base import Engine
from logra.rl.engines.hf import HFEngine
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.rl.types import Prompt, Rollout, Sampling

ENGINES: dict[str, Callable[[PreTrainedModel, PreTrainedTokenizerBase], Engine]] = {
    "hf": HFEngine,
    "hf-batch-1": partial(HFEngine, batch_size=1),
    "hf-batch-3": partial(HFEngine, batch_size=3),
}
TEXTS = ("1+1=", "what is 12*3? ", "a", "sort: 9,4,7,1,8\nanswer: ")
PAD, EOS, SECOND_EOS = 0, 1, 9


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A peaked policy with two end ids, so that padding, stops and row dropping all matter."""
    model = tiny_model(request.param)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(15)
    model.generation_config.eos_token_id = [EOS, SECOND_EOS]
    return model


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, model: PreTrainedModel) -> Engine:
    return ENGINES[request.param](model, char_tokenizer())


def make_prompts() -> list[Prompt]:
    tokenizer = char_tokenizer()
    return [Prompt(10 + i, text, tuple(tokenizer(text).input_ids)) for i, text in enumerate(TEXTS)]


def score(model: PreTrainedModel, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Log-probabilities of a rollout's ids from one unpadded forward pass without a cache, in float64."""
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    with torch.no_grad():
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
    logp_TV = (logits_TV.double() / temperature).log_softmax(-1)
    return logp_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def test_is_an_engine(engine: Engine) -> None:
    assert isinstance(engine, Engine)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_sampling_temperature(
    engine: Engine, model: PreTrainedModel, temperature: float
) -> None:
    for rollout in engine.generate(make_prompts(), 3, Sampling(12, temperature)):
        expected = score(model, rollout, temperature)
        torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), expected, rtol=0, atol=1e-5)


def test_order_is_prompt_major_and_ids_are_carried(engine: Engine) -> None:
    prompts = make_prompts()
    rollouts = engine.generate(prompts, 2, Sampling(5))
    assert [(r.prompt.id, r.index) for r in rollouts] == [(p.id, i) for p in prompts for i in range(2)]
    assert all(r.prompt is prompts[i // 2] for i, r in enumerate(rollouts))


def test_stop_reason_and_length(engine: Engine) -> None:
    rollouts = engine.generate(make_prompts(), 12, Sampling(10))
    for rollout in rollouts:
        ends = [i for i, token in enumerate(rollout.token_ids) if token in (EOS, SECOND_EOS)]
        if rollout.stop == "eos":
            assert ends == [len(rollout.token_ids) - 1]
        else:
            assert ends == [] and len(rollout.token_ids) == 10
        assert len(rollout.logprobs) == len(rollout.token_ids) >= 1
    assert {r.token_ids[-1] for r in rollouts if r.stop == "eos"} == {EOS, SECOND_EOS}
    assert any(r.stop == "length" for r in rollouts)


def test_end_at_the_last_allowed_token_counts_as_eos(engine: Engine) -> None:
    for rollout in engine.generate(make_prompts(), 40, Sampling(1)):
        assert (rollout.stop == "eos") == (rollout.token_ids[0] in (EOS, SECOND_EOS))
        if rollout.stop == "eos":
            assert rollout.text == ""


def test_samples_do_not_depend_on_order_or_company(engine: Engine) -> None:
    prompts, sampling = make_prompts(), Sampling(12, temperature=0.8, seed=3, step=2)
    together = {(r.prompt.id, r.index): r for r in engine.generate(prompts, 3, sampling)}
    backwards = engine.generate(prompts[::-1], 3, sampling)
    alone = [r for p in prompts for r in engine.generate([p], 2, sampling)]
    for rollout in (*backwards, *alone):
        same = together[rollout.prompt.id, rollout.index]
        assert rollout.token_ids == same.token_ids and rollout.stop == same.stop
        assert rollout.logprobs == pytest.approx(same.logprobs, abs=1e-5)


def test_seed_step_prompt_and_index_each_give_new_randomness(engine: Engine) -> None:
    prompt = make_prompts()[0]
    twin = Prompt(99, prompt.content, prompt.token_ids)
    base = engine.generate([prompt, twin], 2, Sampling(12, seed=1, step=1))
    moved = [
        *engine.generate([prompt], 1, Sampling(12, seed=2, step=1)),
        *engine.generate([prompt], 1, Sampling(12, seed=1, step=2)),
    ]
    assert len({r.token_ids for r in (*base, *moved)}) == 6
    assert engine.generate([prompt, twin], 2, Sampling(12, seed=1, step=1)) == base


def test_a_repeated_prompt_is_sampled_afresh(engine: Engine) -> None:
    prompt = make_prompts()[1]
    rollouts = engine.generate([prompt, prompt], 2, Sampling(12))
    assert len({r.token_ids for r in rollouts}) == 4
    assert [r.index for r in rollouts] == [0, 1, 0, 1]


def test_version_is_stamped(engine: Engine) -> None:
    prompts = make_prompts()[:1]
    assert engine.version == 0 and engine.generate(prompts, 1, Sampling(2))[0].version == 0
    engine.publish(7, None)
    assert engine.version == 7 and engine.generate(prompts, 1, Sampling(2))[0].version == 7


def test_published_weights_are_the_ones_sampled(engine: Engine, model: PreTrainedModel) -> None:
    prompts, sampling = make_prompts(), Sampling(6)
    engine.generate(prompts, 1, sampling)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.publish(1, None)
    for rollout in engine.generate(prompts, 1, sampling):
        assert rollout.logprobs == pytest.approx(score(model, rollout, 1.0).tolist(), abs=1e-5)


def test_greedy_equals_an_argmax_loop(engine: Engine, model: PreTrainedModel) -> None:
    for rollout in engine.generate(make_prompts(), 1, Sampling(8, temperature=0.0)):
        ids = list(rollout.prompt.token_ids)
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in (EOS, SECOND_EOS):
                break
        assert list(rollout.token_ids) == ids[len(rollout.prompt.token_ids) :]
        assert rollout.logprobs == pytest.approx(score(model, rollout, 1.0).tolist(), abs=1e-5)


def test_no_prompts_give_no_rollouts(engine: Engine) -> None:
    assert engine.generate([], 4, Sampling(3)) == []


@pytest.mark.parametrize(
    ("num_rollouts", "sampling", "word"),
    [
        (0, Sampling(4), "num_rollouts"),
        (1, Sampling(0), "max_new_tokens"),
        (1, Sampling(4, temperature=-1.0), "temperature"),
        (1, Sampling(4, temperature=float("nan")), "temperature"),
        (1, Sampling(4, top_p=0.0), "top_p"),
        (1, Sampling(4, top_p=1.5), "top_p"),
    ],
)
def test_impossible_settings_are_refused(engine: Engine, num_rollouts: int, sampling: Sampling, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        engine.generate(make_prompts(), num_rollouts, sampling)


def test_empty_prompt_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(DataError, match="prompt 4 "):
        engine.generate([Prompt(4, "", ())], 1, Sampling(3))


def test_close_may_be_called_twice(engine: Engine) -> None:
    engine.close()
    engine.close()
