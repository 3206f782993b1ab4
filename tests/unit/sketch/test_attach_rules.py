"""One sketcher a layer, nothing after detach, and numbers that are numbers."""

import pytest
import torch

import logra
from logra.errors import ConfigError, ModelError, UpdateError, UserError
from logra.rl.tiny import tiny_model


def test_attaching_twice_is_refused_and_detaching_restores_everything(ids):
    model = tiny_model()
    sketcher = logra.attach(model, rank=8)
    with pytest.raises(ModelError, match="already has a sketcher"):
        logra.attach(model, rank=8)
    sketcher.detach()
    sketcher.detach()  # twice is harmless
    assert all(p.requires_grad for p in model.parameters())
    logra.attach(model, rank=8).detach()
    assert all(p.requires_grad for p in model.parameters())


def test_a_detached_sketcher_moves_nothing_and_says_so(ids):
    model = tiny_model()
    sketcher = logra.attach(model, rank=8)
    model(input_ids=ids).logits.square().mean().backward()
    proposal = sketcher.propose(1e-3)
    before = logra.digest(model)
    sketcher.detach()
    for call in (
        lambda: sketcher.propose(1e-3),
        lambda: sketcher.apply(proposal),
        lambda: sketcher.quantize(proposal),
        lambda: sketcher.as_optimizer(1e-3).step(),
    ):
        with pytest.raises(UpdateError, match="attach again"):
            call()
    assert logra.digest(model) == before and sketcher.state_dict()["update_index"] == 0


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": float("nan")}, {"rank": 4.5}, {"update_ratio": -1.0}, {"weight_decay": float("inf")}],
)
def test_options_must_be_sensible_numbers(options):
    model = tiny_model()
    with pytest.raises(ConfigError):
        logra.attach(model, **options)
    assert all(p.requires_grad for p in model.parameters())


def test_steps_must_be_sensible_numbers(ids):
    model = tiny_model()
    sketcher = logra.attach(model, rank=8)
    model(input_ids=ids).logits.square().mean().backward()
    with pytest.raises(ConfigError, match="learning rate"):
        sketcher.propose(float("nan"))
    for scale in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UpdateError, match="scale"):
            sketcher.quantize(sketcher.propose(1e-3), scale)
    with pytest.raises(UserError, match="input_ids"):
        logra.predict_kl(model, sketcher, sketcher.propose(1e-3), {"ids": ids})


def test_a_broken_expression_and_a_flat_net_name_the_fix():
    with pytest.raises(ModelError, match="not a regular expression"):
        logra.attach(tiny_model(), targets="[")
    with pytest.raises(ModelError, match=r"targets=\['q_proj'"):
        logra.attach(torch.nn.Sequential(torch.nn.Linear(4, 4)).get_submodule("0"), rank=2)
