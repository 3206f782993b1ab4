"""What every optimizer of `logra.optim` promises, without exception: run for all of the registry."""

import copy
import io
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from logra.errors import CheckpointError, ConfigError, NonFiniteError
from logra.memory import formulas
from logra.optim import param_groups
from logra.optim.registry import OPTIMIZERS, takes_rank

RANK = 3
GAP = 4  # steps between bases: every test of more than that sees a refresh
# rank-free methods take none; what must be small for refreshes and reselections to happen within a test
OPTIONS = {
    "galore": {"rank": RANK, "update_proj_gap": GAP}, "galore_8bit": {"rank": RANK, "update_proj_gap": GAP},
    "apollo": {"rank": RANK, "update_proj_gap": GAP}, "apollo_mini": {"update_proj_gap": GAP},
    "fira": {"rank": RANK, "update_proj_gap": GAP}, "lora_pre": {"rank": RANK}, "lora_pre_muon": {"rank": RANK}, "muon": {},
    "blockllm": {"sparsity": 0.4, "trigger": "interval", "update_freq": GAP, "param_update_interval": 2},
}  # fmt: skip
SHAPES = {"wide": (6, 10), "tall": (12, 5), "square": (7, 7), "wide_2": (6, 10), "bias": (9,), "norm": (4,)}

pytestmark = pytest.mark.parametrize("name", list(OPTIMIZERS))


def weights(seed=0, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}


def build(name, parameters, lr=0.02, **options):
    return OPTIMIZERS[name](list(parameters.items()), lr, **{**OPTIONS[name], **options})


def set_gradients(parameters, step, zero=()):
    for n, p in sorted(parameters.items()):
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, n)))
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = torch.zeros_like(gradient) if n in zero or zero == "all" else gradient


def run(optimizer, parameters, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(parameters, step)
        optimizer.step()


def values(parameters):
    return {n: p.detach().clone() for n, p in parameters.items()}


def state_of(optimizer):
    return {slot.name: dict(slot.state) for slot in optimizer.slots()}


def same_state(one, other):
    assert one.keys() == other.keys()
    for n in one:
        assert one[n].keys() == other[n].keys(), n
        for key, value in one[n].items():
            torch.testing.assert_close(other[n][key], value, rtol=0, atol=0, equal_nan=False)


def same(one, other):
    for n in one:
        assert torch.equal(one[n], other[n]), n


def through_disk(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_it_is_an_optimizer_that_moves_every_parameter(name):
    parameters = weights()
    before = values(parameters)
    optimizer = build(name, parameters)
    assert isinstance(optimizer, torch.optim.Optimizer)
    run(optimizer, parameters, 12)
    for n, p in parameters.items():
        assert torch.isfinite(p).all() and not torch.equal(p, before[n]), n


def test_it_learns(name):
    """Least squares with a rank-2 solution: the loss falls to a quarter."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 10, generator=generator)
    y = x @ (torch.randn(10, 2, generator=generator) @ torch.randn(2, 6, generator=generator))
    layer = nn.Linear(10, 6)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    optimizer = build(name, dict(layer.named_parameters()), lr=0.05)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < 0.25 * losses[0]


def test_state_is_what_the_layout_says_and_the_planner_plans(name):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 2)
    for slot in optimizer.slots():
        found = {k: (tuple(v.shape), v.dtype) for k, v in slot.state.items() if isinstance(v, torch.Tensor)}
        if found:
            assert found == {k: (tuple(shape), dtype) for k, (shape, dtype) in optimizer.layout(slot).items()}
        if slot.is_matrix and found:
            held = sum(v.nbytes for v in slot.state.values() if isinstance(v, torch.Tensor))
            formula = formulas.adamw if name == "blockllm" else getattr(formulas, name)
            assert held == formula(*slot.shape, RANK)


def test_state_is_tensors_and_numbers_and_continues_bitwise(name):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 6)
    saved, at = through_disk(optimizer.state_dict()), values(parameters)
    run(optimizer, parameters, 7, start=6)
    again = {n: nn.Parameter(v.clone()) for n, v in at.items()}
    other = build(name, again, lr=0.5)
    other.load_state_dict(other.state_dict())  # as accelerate does at once
    other.load_state_dict(saved)
    other.load_state_dict(other.state_dict())
    assert other.param_groups[0]["lr"] == 0.02
    run(other, again, 7, start=6)
    same(values(parameters), values(again))
    same_state(state_of(optimizer), state_of(other))


def test_order_of_parameters_does_not_matter(name):
    parameters = weights()
    optimizer = build(name, parameters)
    shuffled = {n: weights()[n] for n in reversed(SHAPES)}
    other = build(name, shuffled)
    run(optimizer, parameters, 6)
    run(other, shuffled, 6)
    same(values(parameters), values(shuffled))
    saved = through_disk(optimizer.state_dict())  # and a saved state finds its parameters by name
    third_weights = {n: nn.Parameter(parameters[n].detach().clone()) for n in reversed(SHAPES)}
    third = build(name, third_weights)
    third.load_state_dict(saved)
    run(optimizer, parameters, 3, start=6)
    run(third, third_weights, 3, start=6)
    same(values(parameters), values(third_weights))


def test_a_zero_gradient_changes_nothing(name):
    parameters, others = weights(), weights()
    optimizer, other = build(name, parameters), build(name, others)
    run(optimizer, parameters, 5)
    run(other, others, 5)
    set_gradients(others, 99, zero="all")
    other.step()
    same(values(parameters), values(others))
    same_state(state_of(optimizer), state_of(other))
    run(optimizer, parameters, 5, start=5)
    run(other, others, 5, start=5)
    same(values(parameters), values(others))


def test_a_zero_gradient_at_the_first_step_changes_nothing(name):
    parameters, others = weights(), weights()
    optimizer, other = build(name, parameters), build(name, others)
    set_gradients(others, 0, zero="all")
    other.step()
    same(weights(), values(others))
    run(optimizer, parameters, 5)
    run(other, others, 5)
    same(values(parameters), values(others))


def test_zero_gradients_that_are_stepped_stay_finite(name):
    parameters = weights()
    optimizer = build(name, parameters, zero_gradient="step")
    for step in range(9):
        set_gradients(parameters, step, zero="all" if step != 3 else ())
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in parameters.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_raises_by_name(name, bad):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 3)
    before, state = values(parameters), copy.deepcopy(state_of(optimizer))
    set_gradients(parameters, 3)
    parameters["square"].grad[2, 3] = bad
    with pytest.raises(NonFiniteError, match="square"):
        optimizer.step()
    same(before, values(parameters))
    same_state(state, state_of(optimizer))


def test_bfloat16_parameters_have_float32_state_that_stays_so(name):
    parameters = weights(dtype=torch.bfloat16)
    optimizer = build(name, parameters)
    run(optimizer, parameters, 5)
    other = build(name, weights(dtype=torch.bfloat16))
    other.load_state_dict(through_disk(optimizer.state_dict()))
    same_state(state_of(optimizer), state_of(other))
    for state in state_of(other).values():
        assert torch.bfloat16 not in {v.dtype for v in state.values() if isinstance(v, torch.Tensor)}
    exact = weights(dtype=torch.bfloat16)  # one rounding a step: close to the float32 run from the same start
    full = {n: nn.Parameter(p.detach().float()) for n, p in exact.items()}
    reference = build(name, full)
    one = build(name, exact)
    set_gradients(exact, 0)
    for n, p in full.items():
        p.grad = exact[n].grad.float()
    one.step()
    reference.step()
    for n, p in full.items():
        assert torch.equal(exact[n], p.detach().bfloat16()), n


def test_parameters_without_gradient_are_left_alone(name):
    parameters = weights()
    optimizer = build(name, parameters)
    before = values(parameters)
    for step in range(5):
        set_gradients(parameters, step)
        parameters["tall"].grad = None
        optimizer.step()
    assert torch.equal(parameters["tall"], before["tall"])
    optimizer.zero_grad()
    optimizer.step()  # none at all
    saved = through_disk(optimizer.state_dict())
    build(name, weights()).load_state_dict(saved)


def test_closures_schedulers_and_clipping(name):
    parameters = weights()
    optimizer = build(name, parameters)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    before = values(parameters)

    def closure():
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in parameters.values()), torch.zeros(()))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss is not None and loss.requires_grad
    same(before, values(parameters))  # the first lr was zero
    schedule.step()
    closure()
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step()
    assert any(not torch.equal(p, before[n]) for n, p in parameters.items())


def test_accumulated_gradients_are_one_step(name):
    layer = nn.Linear(10, 6)
    twin = copy.deepcopy(layer)
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(3))
    for model, parts in ((layer, 1), (twin, 4)):
        optimizer = build(name, dict(model.named_parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            for part in x.split(len(x) // parts):
                model(part).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(layer.weight, twin.weight, rtol=1e-4, atol=1e-5)


def test_weight_decay_is_decoupled_and_applies_to_all(name):
    plain, decayed = weights(), weights()
    one, other = build(name, plain), build(name, decayed, weight_decay=0.5)
    before = values(plain)
    set_gradients(plain, 0)
    set_gradients(decayed, 0)
    one.step()
    other.step()
    for n in SHAPES:
        if torch.equal(plain[n], before[n]):  # not stepped (BlockLLM's other blocks)
            assert torch.equal(decayed[n], before[n])
            continue
        shrunk = 0.02 * 0.5 * (before[n] if other.DECAYS_FIRST else plain[n])
        torch.testing.assert_close(decayed[n], plain[n] - shrunk, rtol=1e-5, atol=1e-6)


def test_what_is_no_matrix_is_stepped_by_adamw(name):
    parameters = weights(shapes={"bias": (9,), "norm": (4,)})
    twin = weights(shapes={"bias": (9,), "norm": (4,)})
    ours = build(name, parameters, eps=1e-12, betas=(0.9, 0.98))
    theirs = torch.optim.AdamW(twin.values(), lr=0.02, betas=(0.9, 0.98), eps=1e-12, weight_decay=0.0)
    for group in ours.param_groups:
        group["weight_decay"] = 0.0
    run(ours, parameters, 5)
    run(theirs, twin, 5)
    for n in parameters:
        torch.testing.assert_close(parameters[n], twin[n], rtol=1e-5, atol=1e-6)


def test_groups_of_a_model(name):
    from logra.rl.tiny import tiny_model

    model = tiny_model()
    groups = param_groups(model, **{"rank": RANK if takes_rank(name) else 1, **OPTIONS[name]}, others={"lr": 1e-3})
    optimizer = OPTIMIZERS[name](groups, 0.01)
    listed = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in listed} == {id(p) for p in model.parameters()} and len(listed) == len(
        {id(p) for p in listed}
    )
    matrices = {slot.name for slot in optimizer.slots() if slot.is_matrix}
    assert matrices == {n for n, _ in groups.chosen}
    assert not any("embed" in n or "lm_head" in n or "norm" in n for n in matrices)
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    optimizer.step()
    assert "AdamW (embedding)" in str(groups)


def test_a_rank_above_a_side_is_said_and_works(name, caplog):
    if "rank" not in OPTIONS[name]:
        with pytest.raises(ConfigError, match="rank"):
            build(name, weights(), rank=4000.5)
        return
    with caplog.at_level(logging.WARNING):
        parameters = weights()
        optimizer = build(name, parameters, rank=8)
    assert "rank 8 exceeds" in caplog.text
    run(optimizer, parameters, 6)
    assert all(torch.isfinite(p).all() for p in parameters.values())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr"), ({"lr": math.nan}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": -1.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"), ({"zero_gradient": "drop"}, "zero_gradient"),
    ],
)  # fmt: skip
def test_bad_options_are_named(name, options, match):
    with pytest.raises(ConfigError, match=match):
        build(name, weights(), **options)


def test_an_unknown_option_of_a_group_is_named(name):
    with pytest.raises(ConfigError, match="weight_decay"):
        OPTIMIZERS[name]([{"params": list(weights().items()), "weight_decai": 0.1}], 0.01)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_decay": "0.1"}, "weight_decay"), ({"eps": None}, "eps"), ({"betas": 0.9}, "betas"), ({"lr": True}, "lr"),
        ({"betas": ("a", "b")}, "betas"), ({"seed": "x"}, "seed"),
    ],
)  # fmt: skip
def test_a_group_that_is_refused_leaves_nothing_behind(name, options, match):
    optimizer = build(name, weights())
    with pytest.raises(ConfigError, match=match):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(6, 5)))], **options})
    with pytest.raises(ConfigError, match="same name"):
        optimizer.add_param_group({"params": [("wide", nn.Parameter(torch.ones(6, 5)))], **OPTIONS[name]})
    with pytest.raises(ConfigError, match="floating-point"):
        optimizer.add_param_group(
            {"params": [("z", nn.Parameter(torch.ones(6, 5, dtype=torch.complex64)))], **OPTIONS[name]}
        )
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(6, 5)))], **OPTIONS[name]})


def test_numbers_of_numpy_are_saved_as_plain_ones(name):
    parameters = weights()
    optimizer = build(name, parameters, lr=np.float64(0.01), eps=np.float32(1e-8), seed=np.int64(3))
    run(optimizer, parameters, 1)
    through_disk(optimizer.state_dict())


def test_an_ordinary_state_of_torch_is_refused_whole(name):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 2)
    other = torch.optim.AdamW(list(weights().items()))
    before, groups = copy.deepcopy(state_of(optimizer)), copy.deepcopy(optimizer.state_dict()["param_groups"])
    for bad in (other.state_dict(), {}, None, {**optimizer.state_dict(), "extra": {"x": 1}}):
        with pytest.raises(CheckpointError):
            optimizer.load_state_dict(bad)
        same_state(before, state_of(optimizer))
        assert optimizer.state_dict()["param_groups"] == groups


def test_a_state_without_a_step_must_fit_too(name):
    if "rank" not in OPTIONS[name]:
        return
    with pytest.raises(CheckpointError, match="rank"):
        build(name, weights(), rank=2).load_state_dict(build(name, weights(), rank=4).state_dict())


def test_gradients_near_the_largest_number_leave_weights_finite(name):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 2)
    for n, p in parameters.items():
        p.grad = torch.full_like(p, 1e25) * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)))
    optimizer.step()
    run(optimizer, parameters, 3, start=2)
    assert all(torch.isfinite(p).all() for p in parameters.values())


def test_state_of_something_else_is_refused_whole(name):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 3)
    good, before = optimizer.state_dict(), copy.deepcopy(state_of(optimizer))
    first = next(i for i, s in good["state"].items() if len(s) > 1)
    key = next(k for k, v in good["state"][first].items() if isinstance(v, torch.Tensor) and v.ndim)
    damaged = []
    for change in ("shape", "dtype", "absent", "writer", "groups", "name"):
        bad = copy.deepcopy(good)
        if change == "shape":
            bad["state"][first][key] = torch.zeros(1, 1, 1)
        elif change == "dtype":
            bad["state"][first][key] = bad["state"][first][key].double()
        elif change == "absent":
            del bad["state"][first][key]
        elif change == "writer":
            bad["optimizer"] = "Adafactor"
        elif change == "groups":
            bad["param_groups"] = bad["param_groups"] * 2
        else:
            bad["param_groups"][0]["param_names"][0] = "elsewhere"
        damaged.append(bad)
    for bad in damaged:
        with pytest.raises(CheckpointError):
            optimizer.load_state_dict(bad)
        same_state(before, state_of(optimizer))


def test_transposed_parameters_and_gradients(name):
    plain = weights(shapes={"w": (6, 10)})
    turned = {"w": nn.Parameter(plain["w"].detach().t().contiguous().t())}
    one, other = build(name, plain), build(name, turned)
    for step in range(6):
        set_gradients(plain, step)
        turned["w"].grad = plain["w"].grad.t().contiguous().t()
        one.step()
        other.step()
    torch.testing.assert_close(plain["w"], turned["w"], rtol=1e-4, atol=1e-5)


def test_a_copy_goes_its_own_way(name):
    parameters = weights()
    optimizer = build(name, parameters)
    run(optimizer, parameters, 3)
    both = copy.deepcopy((optimizer, parameters))
    run(optimizer, parameters, 3, start=3)
    run(*both, 3, start=3)
    same(values(parameters), values(both[1]))
