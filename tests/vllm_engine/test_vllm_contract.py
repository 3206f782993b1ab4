"""The engine contract (tests/contracts/test_engine.py), on vLLM. One engine a model, brought back to version 0 for each test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_trainer import Trainer, peaked_model, save
from transformers import PreTrainedModel

from logra.rl.engines.vllm_local import VLLMEngine
from logra.rl.tiny import char_tokenizer

PATH = Path(__file__).parents[1] / "contracts" / "test_engine.py"
# closing is tested in test_vllm_engine: the engine is shared here
LEFT_OUT = {"test_close_may_be_called_twice"}


def _contract() -> dict[str, object]:
    spec = importlib.util.spec_from_file_location("engine_contract", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if name.startswith("test_") and name not in LEFT_OUT}


globals().update(_contract())


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    model = peaked_model(request.param, seed=1)  # a seed whose samples meet both end ids
    folder = save(model, tmp_path_factory.mktemp(request.param))
    everything = [name for name, _ in model.named_parameters()]
    trainer = Trainer(model)
    trainer.dense = tuple(name for name in everything if name not in trainer.target_names)
    trainer.names = everything
    engine = VLLMEngine(
        folder,
        char_tokenizer(),
        dtype="float32",
        max_model_len=250,
        max_num_seqs=64,
        enforce_eager=True,
        **trainer.engine_arguments(),
    )
    yield engine, model
    engine.close()


@pytest.fixture
def model(started: tuple) -> Iterator[PreTrainedModel]:
    model = started[1]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    yield model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])


@pytest.fixture
def engine(started: tuple, model: PreTrainedModel) -> VLLMEngine:
    started[0].publish(0, None)
    return started[0]
