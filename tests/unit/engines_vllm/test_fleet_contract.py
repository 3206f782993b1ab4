"""The engine contract (tests/contracts/test_engine.py) on two servers behind one engine, over HTTP."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeVLLM, Trainer
from transformers import PreTrainedModel

from logra.rl.engines.fleet import FleetEngine
from logra.rl.engines.vllm_server import VLLMServerEngine
from logra.rl.tiny import char_tokenizer, tiny_model

PATH = Path(__file__).parents[2] / "contracts" / "test_engine.py"


def _contract() -> dict[str, object]:
    spec = importlib.util.spec_from_file_location("engine_contract", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


globals().update(_contract())


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = tiny_model(request.param)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(15)
    return model


@pytest.fixture
def engine(model: PreTrainedModel, tmp_path: Path) -> Iterator[FleetEngine]:
    trainer = Trainer(model, everything=True)
    servers = [FakeVLLM(model, trainer.names) for _ in range(2)]
    engine = FleetEngine(
        [server.url for server in servers],
        lambda url: VLLMServerEngine(
            url, tmp_path, char_tokenizer(), eos_token_ids=[1, 9], concurrency=4, connect=False, **trainer.link()
        ),
    )
    yield engine
    engine.close()
    for server in servers:
        server.kill()
