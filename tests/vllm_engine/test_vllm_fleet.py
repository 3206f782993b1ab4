"""Two real servers behind one engine: one is killed while it samples and started again; no step and no rollout is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_trainer import Trainer, peaked_model, save

from logra.rl.engines.fleet import FleetEngine
from logra.rl.engines.vllm_serve import SERVE_ENVIRONMENT, serve_options
from logra.rl.engines.vllm_server import VLLMServerEngine
from logra.rl.tiny import char_tokenizer
from logra.rl.types import Prompt, Sampling
from logra.sync.memory import MemoryLog
from logra.sync.publisher import Publisher

SAMPLING = Sampling(40, temperature=0.7)


class Server:
    """A vLLM server on a port of its own, in a process group of its own."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder)]
        command += [*serve_options(), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--max-model-len", "200", "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-seqs", "16"]
        environment = (
            os.environ | SERVE_ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        )
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(peaked_model("llama"), tmp_path / "model")


@pytest.fixture
def servers(folder: Path, tmp_path: Path) -> Iterator[list[Server]]:
    servers = [Server(folder, tmp_path / f"server{number}.log") for number in range(2)]
    yield servers
    for server in servers:
        server.kill()


def assert_samples_the_policy(engine: FleetEngine, trainer: Trainer) -> None:
    texts = ["1+1=", "abc", "what is 12*3? ", "x"]
    prompts = [Prompt(i, text, tuple(char_tokenizer()(text).input_ids)) for i, text in enumerate(texts)]
    rollouts = engine.generate(prompts, 8, SAMPLING)
    assert [(r.prompt.id, r.index) for r in rollouts] == [(i, j) for i in range(4) for j in range(8)]
    for rollout in rollouts:
        assert rollout.version == trainer.version == engine.version
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits_TV = trainer.model(input_ids=ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double() / 0.7
        logps = logits_TV.log_softmax(-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert rollout.logprobs == pytest.approx(logps.tolist(), abs=2e-5)


def test_one_server_is_killed_and_comes_back(servers: list[Server], folder: Path) -> None:
    trainer = Trainer(peaked_model("llama"), ("model.norm.weight",), basis="aligned")
    table = [[name, *block.shape] for name, block in trainer.blocks().items()]
    log = MemoryLog(run=trainer.run, base=trainer.base, targets=table)
    publisher = Publisher(log)

    def member(url: str) -> VLLMServerEngine:
        return VLLMServerEngine(
            url,
            folder,
            char_tokenizer(),
            connect=False,
            concurrency=8,
            base=trainer.base,
            head=lambda: log.head,
            **trainer.engine_arguments(),
        )

    engine = FleetEngine([server.url for server in servers], member, log=log, patience_s=200, retry_s=0.5)
    try:
        engine.publish(0, None)
        while engine.metrics()["rollout/servers"] < 2:  # one was there first
            time.sleep(1)
            assert_samples_the_policy(engine, trainer)

        def step() -> None:
            packet = publisher.publish(trainer.step(), trainer.version)
            engine.publish(trainer.version, packet)

        step()
        assert_samples_the_policy(engine, trainer)
        killer = threading.Timer(0.3, servers[0].kill)
        killer.start()
        while not engine.metrics()["rollout/dropped"]:
            assert_samples_the_policy(engine, trainer)
        killer.join()
        step()
        assert_samples_the_policy(engine, trainer)
        servers[0].start()
        while engine.metrics()["rollout/servers"] < 2:
            step()
            assert_samples_the_policy(engine, trainer)
            time.sleep(0.5)
        step()
        assert_samples_the_policy(engine, trainer)
        assert engine.metrics()["rollout/rejoined"] == 1
        assert engine.digest() == trainer.digest()

        engine.live = "placing"  # now by the log alone, and with the other one gone: the step waits for it
        servers[0].kill()
        servers[1].kill()
        threading.Timer(1.0, servers[0].start).start()
        assert_samples_the_policy(engine, trainer)
        step()
        assert_samples_the_policy(engine, trainer)
        assert engine.digest() == trainer.digest()
    finally:
        engine.close()
