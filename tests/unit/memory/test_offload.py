"""Inputs of checkpointed layers in host memory: the same bits, and exactly the hidden states are moved."""

import pytest
import torch

import logra
from logra.rl import models
from logra.rl.tiny import tiny_model


def gradients(method, offload, ids):
    model = tiny_model()
    models.prepare(model, True)
    if offload:
        models.offload_inputs(model)
    if method == "logra":
        sketcher = logra.attach(model, rank=4)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if method == "logra":
        return [sketcher.sketch(name) for name in sketcher.names]
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("method", ["logra", "dense"])
def test_the_same_bits_with_only_the_hidden_states_moved(method, ids, monkeypatch):
    moved = []
    pack = models._to_host

    def counting(tensor):
        device, kept = pack(tensor)
        if kept is not tensor:
            moved.append(tuple(kept.shape))
        return device, kept

    plain = gradients(method, False, ids)
    monkeypatch.setattr(models, "_to_host", counting)
    offloaded = gradients(method, True, ids)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True)) and any(g.any() for g in plain)
    assert moved == [(*ids.shape, 64)] * 2  # one a layer


def test_on_the_cpu_preparing_moves_nothing(ids, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(models, "offload_inputs", lambda model: pytest.fail("there is nowhere to move to"))
    models.prepare(model, True, offload=True)
