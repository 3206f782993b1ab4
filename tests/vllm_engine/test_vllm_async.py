"""A vLLM server that samples while the trainer computes: what is aborted, what an Update comes into, and a whole run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from random_trainer import Trainer, peaked_model, save
from transformers import LlamaConfig, LlamaForCausalLM

from logra import config as cfg
from logra.build import build_run
from logra.rl.engines.base import Interrupted
from logra.rl.engines.vllm_serve import SERVE_ENVIRONMENT, serve_options
from logra.rl.engines.vllm_server import VLLMServerEngine
from logra.rl.tiny import char_tokenizer
from logra.rl.types import Prompt, Rollout, Sampling

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@contextmanager
def serving(folder: Path, max_model_len: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *serve_options()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", "32"]
    command += ["--max-model-len", str(max_model_len), "--enforce-eager", "--no-enable-chunked-prefill"]
    environment = os.environ | SERVE_ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1"}
    with (folder / "server.log").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def logps(trainer: Trainer, rollout: Rollout) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    with torch.no_grad():
        logits_TV = trainer.model(input_ids=ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double()
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def wait_for_tokens(url: str, count: int) -> None:
    """Return when the server has sampled `count` more ids."""

    def sampled() -> float:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    goal = sampled() + count
    for _ in range(2000):
        if sampled() >= goal:
            return
        time.sleep(0.01)
    raise AssertionError("nothing was sampled")


def test_requests_in_flight_are_aborted_or_go_on_with_the_new_weights(tmp_path: Path) -> None:
    """Kept ones: the ids up to some place have the old version's log-probs, all later ones the new version's, exactly."""
    folder, trainer = save(peaked_model("llama"), tmp_path), Trainer(peaked_model("llama"))
    with serving(folder, 250) as url:
        engine = VLLMServerEngine(
            url, folder, char_tokenizer(), eos_token_ids=(), patience_s=200, midway=True, **trainer.engine_arguments()
        )
        prompts = [Prompt(i, text, tuple(char_tokenizer()(text).input_ids)) for i, text in enumerate(["1+1=", "abc"])]
        sampling, found = Sampling(230), []

        def generate() -> None:
            try:
                found.append(engine.generate(prompts, 4, sampling))
            except Interrupted as error:
                found.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        wait_for_tokens(url, 100)
        engine.abort()
        thread.join(20)
        assert isinstance(found.pop(), Interrupted)
        assert len(engine.generate(prompts, 1, Sampling(4))) == 2  # the next call is not

        thread = threading.Thread(target=generate)
        thread.start()
        wait_for_tokens(url, 100)
        before = Trainer(peaked_model("llama"))
        engine.publish(trainer.version + 1, trainer.step())
        assert thread.is_alive()
        thread.join(60)
        (rollouts,) = found
        engine.close()
    assert [r.version for r in rollouts] == [0] * 8 and all(len(r.token_ids) == 230 for r in rollouts)
    for rollout in rollouts:
        sampled = torch.tensor(rollout.logprobs, dtype=torch.float64)
        is_old, is_new = ((sampled - logps(t, rollout)).abs() < 2e-5 for t in (before, trainer))
        place = int((~is_old).nonzero()[0])  # the first id of the new version
        assert 0 < place < 230 and bool(is_new[place:].all())
        assert int(is_old[place:].sum()) < 0.1 * len(is_old[place:]) + 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe's model with heads of 32, which vLLM's CPU backend takes."""
    torch.manual_seed(7)
    settings = LlamaConfig(
        vocab_size=51, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return save(LlamaForCausalLM(settings), tmp_path_factory.mktemp("model"))


def test_training_with_rollouts_ahead_learns_and_resumes(model_folder: Path, tmp_path: Path) -> None:
    """The schedule with a real server: versions, evaluation at the newest, a resume on the same server, equal weights."""

    def fit(url: str, stop: int | None = None, **flags) -> None:
        base = {
            "output_dir": str(tmp_path / "run"), "model.name_or_path": str(model_folder), "rollout.engine": "vllm",
            "rollout.vllm.url": url, "rollout.async": 1, "train.steps": 8, "eval.num_prompts": 8, "eval.every": 3,
            "checkpoint.every": 0, "method.basis": "aligned", "journal.digest_every": 1, "threads": 1,
            "rollout.vllm.patience_s": 200,
        }  # fmt: skip
        run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))
        try:
            if stop is not None:
                object.__setattr__(run.trainer.plan, "steps", stop)
            run.trainer.fit()
            assert run.trainer.engine.digest() == run.trainer.method.digest()
        finally:
            run.close()

    with serving(model_folder, 128) as url:
        fit(url, stop=5)
        fit(url, resume="auto")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in lines if "reward" in r]
    versions = [0] + [r["num_updates"] for r in steps]
    expected = [versions[t] - versions[max(0, t - 1)] for t in range(8)]
    expected[5] = 0  # the first batch after resuming
    assert [r["staleness/max"] for r in steps] == [r["staleness/mean"] for r in steps] == expected
    evaluations = [r for r in lines if "eval/version" in r]
    assert [(r["step"], r["eval/version"]) for r in evaluations] == [(s, versions[s]) for s in (0, 3, 5, 6, 8)]
    assert max(r["sampling/sampling_logp_difference/mean"] for r in (steps[0], steps[5])) < 1e-4
    assert steps[-1]["reward"] > steps[0]["reward"]
