import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from logra.errors import CheckpointError, ConfigError, ModelError
from logra.optim.velora import compress, grouped, mean_direction, unit, velora, weight_gradient
from logra.rl.tiny import tiny_model


class Stack(nn.Module):
    """Two layers, of which the second's input is kept by nothing else."""

    def __init__(self, hidden=12, wide=20, bias=True, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.up = nn.Linear(hidden, wide, bias=bias)
            self.down = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def inputs(*shape, seed=1, mean=0.5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + mean


def gradients(model, x, target=1.0):
    model.zero_grad()
    x = x.detach().requires_grad_()
    output = model(x)
    (output - target).square().mean().backward()
    return output.detach(), x.grad, {n: p.grad.clone() for n, p in model.named_parameters()}


def reference(x_ND, g_NP, num_groups, scale, v=None):
    """dW in float64 from the paper: x rebuilt group by group."""
    x, g = x_ND.double(), g_NP.double()
    count, width = x.shape
    size = -(-width // num_groups)
    padded = torch.zeros(count, num_groups * size, dtype=torch.float64)
    padded[:, :width] = x
    if v is None:
        v = sum(padded[:, m * size : (m + 1) * size].sum(0) for m in range(num_groups))
        v = v / v.norm()
    rebuilt = torch.zeros_like(padded)
    for m in range(num_groups):
        part = slice(m * size, (m + 1) * size)
        rebuilt[:, part] = torch.outer(padded[:, part] @ v, v)
    return scale * g.t() @ rebuilt[:, :width]


# -- the mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "num_groups"), [(20, 4), (20, 5), (20, 3), (20, 20), (20, 1), (10, 6), (7, 4)])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_weight_gradient_is_the_papers(width, num_groups, scale):
    model = nn.Sequential(nn.Linear(width, 6))
    x = inputs(5, 3, width)
    y = model(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    handle = velora(model, num_groups, ["0"], scale)
    model(x).backward(g)
    handle.detach()
    expected = reference(x.flatten(0, 1), g.flatten(0, 1), num_groups, scale)
    torch.testing.assert_close(model[0].weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model[0].bias.grad, g.sum((0, 1)), rtol=1e-5, atol=1e-6)


def test_output_and_input_gradient_are_exact_and_the_bias_gradient_too():
    model, x = Stack(), inputs(2, 7, 12)
    output, dx, exact = gradients(model, x)
    handle = velora(model, 4, ["up", "down"])
    output_2, dx_2, approximate = gradients(model, x)
    assert torch.equal(output, output_2)
    torch.testing.assert_close(dx, dx_2, rtol=1e-6, atol=1e-8)
    for n in ("up.bias", "down.bias"):
        torch.testing.assert_close(exact[n], approximate[n], rtol=1e-6, atol=1e-8)
    for n in ("up.weight", "down.weight"):
        assert not torch.allclose(exact[n], approximate[n], rtol=0.05)
    handle.detach()
    assert torch.equal(gradients(model, x)[2]["down.weight"], exact["down.weight"])


@pytest.mark.parametrize("init", ["batch_average", "batch_average_once", "random"])
def test_one_feature_a_group_is_exact(init):
    model, x = Stack(), inputs(3, 5, 12)
    _, _, exact = gradients(model, x)
    velora(model, {"up": 12, "down": 20}, ["up", "down"], init=init)
    _, _, same = gradients(model, x)
    for n in exact:
        torch.testing.assert_close(exact[n], same[n], rtol=1e-5, atol=1e-7)


def test_the_gradient_is_a_projection_as_long_as_its_cosine():
    """x = 0.7 + noise in 8 groups of 8: of the square of x (8 + 8 mu^2) / 8 a feature, (1 + 8 mu^2) / 8 lies along v."""
    x, g = inputs(4096, 64, mean=0.7), inputs(4096, 256, seed=3, mean=0.0)
    v = unit(mean_direction(x, 8))
    rebuilt = weight_gradient(g, compress(x, v), v, 64, 1.0)
    exact = g.t() @ x
    cosine = functional.cosine_similarity(rebuilt.flatten(), exact.flatten(), dim=0)
    assert cosine == pytest.approx(((1 + 8 * 0.49) / (8 + 8 * 0.49)) ** 0.5, abs=0.05)  # 0.64
    assert cosine == pytest.approx(float(rebuilt.norm() / exact.norm()), abs=0.02)
    shorter = unit(mean_direction(x, 2))  # more groups, more of it
    more = weight_gradient(g, compress(x, shorter), shorter, 64, 1.0)
    assert functional.cosine_similarity(more.flatten(), exact.flatten(), dim=0) > cosine + 0.1


def test_free_functions():
    x = inputs(5, 10)
    assert grouped(x, 4).shape == (5, 3, 4) and torch.equal(grouped(x, 4).flatten(1)[:, :10], x)
    assert torch.equal(grouped(x, 4)[:, 2, 2:], torch.zeros(5, 2))
    torch.testing.assert_close(unit(torch.zeros(4)), torch.full((4,), 0.5))
    torch.testing.assert_close(unit(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8]))
    assert unit(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    torch.testing.assert_close(mean_direction(x, 5), grouped(x, 5).flatten(0, 1).mean(0))


# -- against peft -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "num_groups"), [(20, 4), (20, 3), (10, 6)])
def test_one_layer_is_pefts(width, num_groups):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft.tuners.lora.velora import VeloraFunction
    x = inputs(4, 3, width)
    model = nn.Sequential(nn.Linear(width, 6))
    g = inputs(4, 3, 6, seed=5, mean=0.0)
    v = unit(mean_direction(x.flatten(0, 1), -(-width // num_groups)))
    theirs_x, ours_x = (x.clone().requires_grad_() for _ in range(2))
    weight, bias = (p.detach().clone().requires_grad_() for p in (model[0].weight, model[0].bias))
    theirs = VeloraFunction.apply(theirs_x, weight, bias, v, num_groups, 0.7)
    theirs.backward(g)
    velora(model, num_groups, ["0"], 0.7)
    ours = model(ours_x)
    ours.backward(g)
    for one, other in (
        (ours, theirs), (ours_x.grad, theirs_x.grad), (model[0].weight.grad, weight.grad), (model[0].bias.grad, bias.grad),
    ):  # fmt: skip
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("init", ["batch_average", "batch_average_once"])
def test_training_adapters_is_pefts_step_by_step(init):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora.config import VeloraConfig
    common = {"r": 4, "target_modules": ["v_proj", "down_proj"], "lora_dropout": 0.0}
    own = VeloraConfig(num_groups=8, scale=0.5, init_type=init)
    torch.manual_seed(0)
    theirs = get_peft_model(tiny_model(hidden=32), LoraConfig(**common, velora_config=own)).train()
    torch.manual_seed(0)
    ours = get_peft_model(tiny_model(hidden=32), LoraConfig(**common)).train()
    handle = velora(ours, 8, ["lora_A.default"], 0.5, init)
    assert len(handle.names) == 4
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q)
    for step in range(5):
        ids = torch.randint(4, 40, (3, 9), generator=torch.Generator().manual_seed(step))
        for model in (theirs, ours):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        for (n, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-7, msg=lambda m, n=n: f"{n}: {m}")
                with torch.no_grad():
                    p -= 0.1 * p.grad
                    q -= 0.1 * q.grad
    if init == "batch_average_once":
        kept = handle.state_dict()
        for name, module in theirs.named_modules():
            if hasattr(module, "lora_velora_embed"):
                torch.testing.assert_close(kept[f"{name}.lora_A.default"], module.lora_velora_embed["default"])


# -- memory -------------------------------------------------------------------------------------------------------------------


def saved_bytes(model, run):
    """Bytes of distinct storages kept for backward, the parameters' own left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run().backward()
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_its_numbers_a_token_and_v(dtype):
    model = nn.Sequential(nn.Linear(64, 16)).to(dtype)
    x = inputs(3, 10, 64).to(dtype)
    assert saved_bytes(model, lambda: model(x.clone()).sum()) == 30 * 64 * dtype.itemsize
    velora(model, 8, ["0"])
    assert saved_bytes(model, lambda: model(x.clone()).sum()) == 30 * 8 * dtype.itemsize + 8 * 4


def test_what_a_decoder_saves():
    """down_proj's input is kept by itself alone; v_proj's by q_proj and k_proj as well, so all of them or none."""
    model = tiny_model()
    ids = torch.arange(20).view(2, 10) % 40 + 4

    def run():
        return model(ids, labels=ids).loss

    def spared(layers):
        before = saved_bytes(model, run)
        handle = velora(model, 8, layers)
        after = saved_bytes(model, run)
        handle.detach()
        return before - after

    token = 2 * 20 * 4  # a number of each token in each of two layers
    small = 2 * 4  # float32 numbers of both layers' v
    assert spared(["down_proj"]) == token * (128 - 8) - small * 16
    assert spared(["v_proj"]) == -token * 8 - small * 8  # worse than nothing
    assert spared(["q_proj", "k_proj", "v_proj"]) == token * (64 - 3 * 8) - 3 * small * 8


# -- precision --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_low_precision(way):
    model, x = Stack(), inputs(4, 9, 12)
    _, _, exact = gradients(model, x)
    handle = velora(model, 4, ["up", "down"])
    _, _, wanted = gradients(model, x)
    handle.detach()
    low = copy.deepcopy(model)
    if way == "bfloat16":
        low, x = low.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        output, dx, plain = gradients(low, x)
    velora(low, 4, ["up", "down"])
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        same_output, same_dx, found = gradients(low, x)
    assert output.dtype == torch.bfloat16 and torch.equal(output, same_output)
    assert dx.dtype == same_dx.dtype == x.dtype
    torch.testing.assert_close(dx, same_dx, rtol=0.02, atol=1e-5)
    for n in exact:
        assert found[n].dtype == plain[n].dtype == (torch.bfloat16 if way == "bfloat16" else torch.float32)
        torch.testing.assert_close(found[n].float(), wanted[n], rtol=0.05, atol=2e-3)


def test_the_mean_is_taken_in_float32():
    x = torch.full((5000, 8), 1.0, dtype=torch.bfloat16) + inputs(1, 8).bfloat16()
    torch.testing.assert_close(mean_direction(x, 4), x.double().view(-1, 4).mean(0).float(), rtol=1e-5, atol=1e-5)


# -- the three ways to v ------------------------------------------------------------------------------------------------------


def test_once_is_fixed_and_average_follows():
    first, second = inputs(6, 12), -3.0 * inputs(6, 12, seed=8).flip(1).abs() * torch.arange(12)
    found = {}
    for init in ("batch_average", "batch_average_once"):
        model = nn.Sequential(nn.Linear(12, 4))
        handle = velora(model, 3, ["0"], init=init)
        model(first).sum().backward()
        model.zero_grad()
        model(second).sum().backward()
        v = unit(mean_direction(second if init == "batch_average" else first, 4))
        expected = reference(second, torch.ones(6, 4), 3, 1.0, v.double())
        torch.testing.assert_close(model[0].weight.grad.double(), expected, rtol=1e-4, atol=1e-4)
        found[init] = handle.state_dict()
    assert found["batch_average"] == {} and list(found["batch_average_once"]) == ["0"]


def test_two_passes_before_their_backwards():
    """Each pass goes back with its own v, as with gradient accumulation over two losses."""
    model = nn.Sequential(nn.Linear(12, 4))
    velora(model, 3, ["0"])
    one, two = inputs(6, 12), inputs(5, 12, seed=8).flip(1) * torch.arange(12)
    (model(one).sum() + model(two).sum()).backward()
    expected = reference(one, torch.ones(6, 4), 3, 1.0) + reference(two, torch.ones(5, 4), 3, 1.0)
    torch.testing.assert_close(model[0].weight.grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_useless_first_batch_is_not_kept(bad):
    model = nn.Sequential(nn.Linear(12, 4))
    handle = velora(model, 3, ["0"], init="batch_average_once")
    model(torch.full((6, 12), bad)).sum().backward()
    assert handle.state_dict() == {}
    if bad == 0.0:
        assert torch.equal(model[0].weight.grad, torch.zeros(4, 12))
    x = inputs(6, 12)
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(handle.state_dict()["0"], unit(mean_direction(x, 4)))
    assert torch.isfinite(model[0].weight.grad).all()


def test_random_depends_on_seed_and_name():
    models = [Stack(hidden=12, wide=12) for _ in range(3)]
    one, same, other = (
        velora(m, 3, ["up", "down"], init="random", seed=s).state_dict() for m, s in zip(models, (1, 1, 2), strict=True)
    )
    assert torch.equal(one["up"], same["up"]) and torch.equal(one["down"], same["down"])
    assert not torch.equal(one["up"], one["down"]) and not torch.equal(one["up"], other["up"])
    torch.testing.assert_close(one["up"].norm(), torch.tensor(1.0))


def test_state_continues_bitwise():
    def train(model, steps, start=0):
        for step in range(start, start + steps):
            _, _, found = gradients(model, inputs(4, 12, seed=step))
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p -= 0.1 * found[n]

    model = Stack()
    handle = velora(model, 3, ["up", "down"], init="batch_average_once")
    train(model, 2)
    buffer = io.BytesIO()
    torch.save((model.state_dict(), handle.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    train(model, 3, start=2)
    again = Stack(seed=9)
    other = velora(again, 3, ["up", "down"], init="batch_average_once")
    again.load_state_dict(weights)  # the model's own keys, and no more
    other.load_state_dict(state)
    train(again, 3, start=2)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_of_something_else_is_refused_whole():
    handle = velora(Stack(), 3, ["up", "down"], init="random")
    good = handle.state_dict()
    for bad in (
        {}, {"up": good["up"]}, {**good, "elsewhere": good["up"]}, {**good, "down": torch.zeros(2)},
        {**good, "up": good["up"].double()},
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            handle.load_state_dict(bad)
        for name, v in handle.state_dict().items():
            assert torch.equal(v, good[name])
    with pytest.raises(CheckpointError, match="another init"):
        velora(Stack(), 3, ["up", "down"]).load_state_dict(good)


# -- where it works ---------------------------------------------------------------------------------------------------------


def test_conv1d_is_stored_the_other_way_round():
    model = tiny_model("gpt2")
    ids = torch.arange(12).view(2, 6) + 4
    exact = {}
    for groups in (None, 64, 8):
        handle = velora(model, groups, ["attn.c_attn", "c_fc"]) if groups else None
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters()}
        if handle is None:
            exact, value = found, loss.detach()
            continue
        handle.detach()
        assert torch.equal(loss.detach(), value)
        for n, grad in found.items():
            compressed = n.endswith(("attn.c_attn.weight", "c_fc.weight"))
            if groups == 64 or not compressed:
                torch.testing.assert_close(grad, exact[n], rtol=1e-4, atol=1e-6)
            else:
                assert grad.shape == exact[n].shape and not torch.allclose(grad, exact[n], rtol=0.05)


def test_defaults_on_a_decoder_and_in_eval_mode():
    model = tiny_model()
    assert not model.training
    handle = velora(model)
    assert len(handle.names) == 4 and all(n.endswith(("v_proj", "down_proj")) for n in handle.names)
    ids = torch.arange(12).view(2, 6) + 4
    keys = set(model.state_dict())
    assert saved_bytes(model, lambda: model(ids, labels=ids).loss) > 0
    assert set(model.state_dict()) == keys  # exports are as ever
    with torch.no_grad():
        model(ids)


def test_frozen_weights_compute_as_ever_for_as_long_as_they_are():
    model, x = Stack(), inputs(4, 12)
    velora(model, 3, ["up", "down"])
    model.down.weight.requires_grad_(False)
    kept = saved_bytes(model, lambda: model(x).sum())
    assert kept == 4 * (20 + 3) * 4 + 4 * 4  # tanh's output, z and v of `up`; nothing for `down`
    assert model.down.weight.grad is None and model.down.bias.grad is not None
    model.down.weight.requires_grad_(True)
    model(x).sum().backward()
    assert model.down.weight.grad is not None


def test_a_deep_copy_is_plain_and_its_own():
    model, x = Stack(), inputs(4, 12)
    velora(model, 3, ["up", "down"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2.0)
    plain = Stack()
    plain.load_state_dict(twin.state_dict())
    output, _, exact = gradients(plain, x)
    output_2, _, found = gradients(twin, x)
    assert torch.equal(output, output_2)
    for n in exact:
        torch.testing.assert_close(exact[n], found[n], rtol=1e-5, atol=1e-6)
    velora(twin, 3, ["up", "down"]).detach()
    assert torch.equal(gradients(twin, x)[0], output)


def test_detaching_is_idempotent_and_safe():
    model, x = Stack(), inputs(4, 12)
    handle = velora(model, 3, ["up"])
    with pytest.raises(ConfigError, match="already replaced"):
        velora(model, 3, ["up"])
    loss = model(x).sum()
    handle.detach()
    handle.detach()
    loss.backward()  # the pass before keeps what it needs
    assert "forward" not in model.up.__dict__
    again = velora(model, 3, ["up"])
    original, model.up.forward = model.up.forward, lambda input: input
    with pytest.raises(ConfigError, match="since"):
        again.detach()
    model.up.forward = original
    again.detach()


def test_activation_checkpointing_is_refused():
    model = tiny_model()
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="save nothing"):
        velora(model)
    model.gradient_checkpointing_disable()
    velora(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_groups": 0}, "num_groups"), ({"num_groups": 2.5}, "num_groups"), ({"num_groups": 13}, "exceeds the 12"),
        ({"scale": 0.0}, "scale"), ({"scale": float("nan")}, "scale"), ({"init": "svd"}, "init"),
        ({"num_groups": {"up": 3, "other": 2}}, "must name the suffixes"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        velora(Stack(), **{"num_groups": 3, "layers": ["up", "down"], **options})


def test_layers_that_are_not_there_or_not_trained():
    with pytest.raises(ModelError, match="v_proj"):
        velora(Stack(), 3)
    model = Stack().requires_grad_(False)
    with pytest.raises(ConfigError, match="requires a gradient"):
        velora(model, 3, ["up"])


def test_checkpointing_that_is_switched_on_later_is_refused_too():
    model = tiny_model()
    handle = velora(model, 16)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        one.gradient_checkpointing_enable()
        one.train()
    ids = torch.arange(6)[None]
    copied(input_ids=ids)
    with pytest.raises(ConfigError, match="checkpoints activations"):
        model(input_ids=ids)
    handle.detach()
    model(input_ids=ids)
