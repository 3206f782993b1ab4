"""Server mode: a vLLM server of its own follows the trainer over HTTP, with packets inline or fetched from the trainer's log."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_trainer import Trainer, peaked_model, save

from logra.errors import UpdateError, UpdateOrderError
from logra.rl.engines.vllm_serve import KEY_VARIABLE, SERVE_ENVIRONMENT, serve_options
from logra.rl.engines.vllm_server import VLLMServerEngine
from logra.rl.tiny import char_tokenizer
from logra.rl.types import Prompt, Sampling
from logra.sync.http import serve
from logra.sync.memory import MemoryLog
from logra.sync.publisher import Publisher

TOKEN = "a-token-for-tests-only"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(peaked_model("llama"), tmp_path)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(peaked_model("llama"), ("model.norm.weight", "lm_head.weight"))


@pytest.fixture
def log(trainer: Trainer) -> Iterator[tuple[MemoryLog, str]]:
    table = [[name, *block.shape] for name, block in trainer.blocks().items()]
    log = MemoryLog(run=trainer.run, base=trainer.base, targets=table)
    with serve(log, token=TOKEN) as server:
        yield log, server.url


@pytest.fixture
def url(folder: Path, port: int, log: tuple[MemoryLog, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    environment = os.environ | SERVE_ENVIRONMENT | {"LOGRA_SYNC_URL": log[1], "LOGRA_SYNC_TOKEN": TOKEN}
    monkeypatch.setenv(KEY_VARIABLE, "a-key-for-tests")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *serve_options()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "200"]
    command += [
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--max-num-seqs",
        "64",
        "--api-key",
        "a-key-for-tests",
    ]
    with (folder / "server.log").open("w") as output:
        process = subprocess.Popen(
            command, env=environment | {"TORCHDYNAMO_DISABLE": "1"}, stdout=output, stderr=output
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def assert_samples_the_policy(engine: VLLMServerEngine, trainer: Trainer) -> None:
    prompts = [Prompt(i, text, tuple(char_tokenizer()(text).input_ids)) for i, text in enumerate(["1+1=", "abc"])]
    for rollout in engine.generate(prompts, 3, Sampling(8, temperature=0.7)):
        assert rollout.version == trainer.version == engine.version
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits_TV = trainer.model(input_ids=ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double() / 0.7
        logps = logits_TV.log_softmax(-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert rollout.logprobs == pytest.approx(logps.tolist(), abs=2e-5)


def test_a_server_follows_the_trainer(url: str, folder: Path, trainer: Trainer, log: tuple[MemoryLog, str]) -> None:
    publisher = Publisher(log[0])
    arguments = {"patience_s": 200, "head": lambda: log[0].head, **trainer.engine_arguments()}
    engine = VLLMServerEngine(url, folder, char_tokenizer(), **arguments)
    try:
        assert engine.digest() == trainer.base
        assert_samples_the_policy(engine, trainer)

        for _ in range(3):  # inline
            engine.publish(trainer.version + 1, publisher.publish(trainer.step(), trainer.version))
            assert_samples_the_policy(engine, trainer)
        engine.link.by_index = True  # fetched by the worker
        engine.publish(trainer.version + 1, publisher.publish(trainer.step(), trainer.version))
        assert_samples_the_policy(engine, trainer)

        publisher.publish(trainer.step(), trainer.version)
        with pytest.raises(UpdateError, match="gap"):
            engine.publish(trainer.version + 1, publisher.publish(trainer.step(), trainer.version))
        with pytest.raises(UpdateOrderError, match="anchor"):
            assert_samples_the_policy(engine, trainer)
        engine.publish(trainer.version, None)
        assert engine.digest() == trainer.digest()
        assert_samples_the_policy(engine, trainer)
        engine.publish(trainer.version + 1, publisher.publish(trainer.step(), trainer.version))
        assert_samples_the_policy(engine, trainer)
    finally:
        engine.close()
        engine.close()
