"""What is asked of vLLM, and what is made of its answers."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from logra.errors import ConfigError, DataError, ModelError, NonFiniteError, UpdateOrderError
from logra.rl.engines.vllm_local import start_llm
from logra.rl.engines.vllm_requests import Answer, check_lengths, end_token_ids, make_requests, oldest, to_rollout
from logra.rl.engines.vllm_serve import serve_options
from logra.rl.engines.vllm_server import VLLMServerEngine
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.rl.types import Prompt, Rollout, Sampling

PROMPT = Prompt(3, "1+1=", (5, 6, 7))
ANSWER = Answer([20, 21, 1], [-0.5, -1.0, -0.25], "stop", ["ab:4"])


def rollout(answer: Answer, sampling: Sampling | None = None) -> Rollout:
    (request,) = make_requests([PROMPT], 1, sampling or Sampling(8), {1, 9})
    return to_rollout(request, answer, 4, "ab:4", {1, 9}, char_tokenizer())


def test_every_setting_is_given() -> None:
    (request,) = make_requests([PROMPT], 1, Sampling(8, temperature=0.7, top_p=0.9), {9, 1})
    params = request.params
    assert params | {"seed": 0} == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "max_tokens": 8,
        "min_tokens": 0,
        "logprobs": 0,
        "stop_token_ids": [1, 9],
        "ignore_eos": True,
        "detokenize": False,
    }
    assert make_requests([PROMPT], 1, Sampling(8, temperature=0.0, top_p=0.5), [])[0].params["top_p"] == 1.0


def test_seeds_belong_to_rollouts() -> None:
    twin = replace(PROMPT, id=4)
    requests = make_requests([PROMPT, twin, PROMPT], 2, Sampling(8, seed=1, step=2), [])
    seeds = [r.params["seed"] for r in requests]
    assert [(r.prompt.id, r.index) for r in requests] == [(3, 0), (3, 1), (4, 0), (4, 1), (3, 0), (3, 1)]
    assert len(set(seeds)) == 6 and all(0 <= s < 1 << 63 for s in seeds)
    assert [r.params["seed"] for r in make_requests([twin], 2, Sampling(3, 0.5, seed=1, step=2), [])] == seeds[2:4]
    assert make_requests([PROMPT], 1, Sampling(8, seed=1, step=3), [])[0].params["seed"] not in seeds


def test_an_answer_becomes_a_rollout() -> None:
    result = rollout(ANSWER)
    assert (result.token_ids, result.logprobs, result.stop, result.version) == (
        (20, 21, 1),
        (-0.5, -1.0, -0.25),
        "eos",
        4,
    )
    assert result.text == char_tokenizer().decode([20, 21])
    cut = rollout(replace(ANSWER, token_ids=[20, 21], logprobs=[-1, -1], finish_reason="length"))
    assert (cut.stop, cut.text) == ("length", result.text)
    assert rollout(Answer([9], [-1.0], "stop", ["ab:4"])).text == ""


@pytest.mark.parametrize("labels", [["ab:3"], ["ab:3", "ab:4"], [], ["other:4"]])
def test_rollouts_of_another_version_are_refused(labels: list[str]) -> None:
    with pytest.raises(UpdateOrderError, match="rollout 0 was sampled by"):
        rollout(replace(ANSWER, labels=labels))


def test_an_answer_that_an_update_came_into_counts_as_of_its_oldest_version() -> None:
    request = make_requests([Prompt(4, "x", (5,))], 1, Sampling(4), {1})[0]
    versions = {"ab:9": 9, "ab:10": 10, "ab:11": 11}
    answer = Answer([5, 6, 7], [-1.0, -2.0, -3.0], "length", ["ab:10", "ab:11"])
    version, labelled = oldest(request, answer, versions)
    assert version == 10 and to_rollout(request, labelled, 10, "ab:10", {1}, char_tokenizer()).logprobs == (
        -1.0,
        -2.0,
        -3.0,
    )
    assert oldest(request, replace(answer, labels=["ab:9"]), versions)[0] == 9
    for labels in (["ab:8", "ab:9"], ["none"], ["ab:9", "none"], []):
        with pytest.raises(UpdateOrderError, match=r"prompt 4, rollout 0 .* something else changed"):
            oldest(request, replace(answer, labels=labels), versions)


def test_unusable_answers_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="prompt 3"):
        rollout(replace(ANSWER, logprobs=[-1.0, math.nan, -1.0]))
    with pytest.raises(ModelError, match="abort"):
        rollout(replace(ANSWER, finish_reason="abort"))
    narrowed = rollout(ANSWER, Sampling(8, top_p=0.5))
    assert all(math.isnan(logp) for logp in narrowed.logprobs)


def test_lengths() -> None:
    check_lengths([PROMPT], 7, 10)
    with pytest.raises(ModelError, match="max_model_len 10"):
        check_lengths([PROMPT], 8, 10)
    with pytest.raises(DataError, match="prompt 4 "):
        check_lengths([Prompt(4, "", ())], 1, 10)


def test_ends_come_from_the_folder_and_the_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [9, 11]
    model.save_pretrained(tmp_path)
    assert end_token_ids(str(tmp_path), char_tokenizer()) == {1, 9, 11}
    (tmp_path / "generation_config.json").unlink()
    assert end_token_ids(str(tmp_path), char_tokenizer()) == {1}


def test_vllm_is_not_imported_with_logra() -> None:
    code = "import logra.rl.engines.vllm_local, logra.rl.engines.vllm_server, sys; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_vllm_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.entrypoints.llm"):  # the second, where it is installed and was imported
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"logra\[vllm\]"):
        start_llm({}, {})


def test_a_server_that_is_not_there_is_reported() -> None:
    def start(url: str) -> VLLMServerEngine:
        return VLLMServerEngine(
            url, "", char_tokenizer(), run="a", masters=dict, digest=lambda: "ab", eos_token_ids=[1], patience_s=0
        )

    with pytest.raises(ConfigError, match="http://"):
        start("localhost:8000")
    with pytest.raises(ValueError, match="no vLLM server was ready"):
        start("http://127.0.0.1:9")
    assert "--logprobs-mode" in serve_options()
