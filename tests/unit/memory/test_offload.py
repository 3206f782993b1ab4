"""Inputs of checkpointed layers in host memory: the same bits, and exactly the hidden states are moved."""

import pytest
import torch

import logra
from logra import config as cfg
from logra.errors import ConfigError
from logra.rl import models
from logra.rl.methods.base import Schedule
from logra.rl.methods.dense import DenseMethod, LoraMethod
from logra.rl.tiny import tiny_model


def gradients(method, arch, offload, ids):
    """(what the backward pass collected, the model)"""
    model = tiny_model(arch)
    models.prepare(model, True)
    if offload:
        models.offload_inputs(model)
    if method in ("random", "aligned"):
        sketcher = logra.attach(model, rank=4, basis=method)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [*(sketcher.sketch(name) for name in sketcher.names), *sketcher.accumulated()]
    trained = model
    if method != "all":
        options = {"rank": 4} if method == "lora" else {}
        trained = {"dense": DenseMethod, "lora": LoraMethod}[method](model, Schedule(1e-3), **options).model
    trained(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in trained.parameters() if p.grad is not None]


@pytest.fixture
def moved(monkeypatch):
    """The shapes of what is moved to the host."""
    shapes, pack = [], models._to_host

    def counting(tensor):
        device, kept = pack(tensor)
        if kept is not tensor:
            shapes.append(tuple(kept.shape))
        return device, kept

    monkeypatch.setattr(models, "_to_host", counting)
    return shapes


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["random", "aligned", "dense", "lora", "all"])
def test_the_same_bits_with_only_the_hidden_states_moved(method, arch, ids, moved):
    plain = gradients(method, arch, False, ids)
    assert not moved
    offloaded = gradients(method, arch, True, ids)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True)) and any(g.any() for g in plain)
    assert moved == [(*ids.shape, 64)] * 2  # one a layer, and nothing of the recomputation


def test_what_is_moved_comes_back_with_its_dtype_and_the_rest_stays():
    hidden = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    device, host = models._to_host(hidden)
    assert host is not hidden and torch.equal(models._from_host((device, host)), hidden) and host.dtype == hidden.dtype
    for other in (torch.arange(4), torch.randn(2, 2)):  # positions; masks and rotary tables
        assert models._to_host(other)[1] is other


def test_on_the_cpu_preparing_moves_nothing(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(models, "offload_inputs", lambda model: pytest.fail("there is nowhere to move to"))
    models.prepare(model, True, offload=True)


def test_preparing_on_an_accelerator_moves(monkeypatch):
    model, called = tiny_model(), []
    monkeypatch.setattr(models, "offload_inputs", called.append)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    models.prepare(model, True, offload=True)
    models.prepare(model, True, offload=False)
    models.prepare(model, False, offload=True)
    assert called == [model]


def test_offloading_without_checkpointing_is_an_error_with_the_fix():
    keys = {"output_dir": "x", "data": {"name": "x"}, "reward": {"functions": [{"function": "exact_match"}]}}
    with pytest.raises(ConfigError, match="gradient_checkpointing=true"):
        cfg.make_config({**keys, "model": {"name_or_path": "x", "offload_activations": True}})
    on = {"name_or_path": "x", "offload_activations": True, "gradient_checkpointing": True}
    assert cfg.make_config({**keys, "model": on}).model.offload_activations
