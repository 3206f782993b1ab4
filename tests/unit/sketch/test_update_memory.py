"""The update itself needs U, the integers and small pieces beside the sketches; AdamW's moments are there from the start."""

import inspect

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import logra
from logra.build.rehearsal import Shape, rehearse
from logra.config import make_config
from logra.memory.gauge import UPDATE
from logra.memory.meter import Meter
from logra.rl.methods.base import Schedule
from logra.rl.methods.dense import AdamWMethod
from logra.rl.tiny import tiny_model
from logra.sketch import optimizers, quantize, sketcher, update

RANK, WIDTH, LAYERS = 64, 256, 16
KINDS = [("random", "row_adam"), ("random", "sgd"), ("aligned", "row_adam"), ("aligned", "adam")]


@pytest.fixture
def small_chunks(monkeypatch):
    """Pieces small beside the tensors of these tests, as they are beside those of real models."""
    monkeypatch.setattr(sketcher, "_CHUNK", 1 << 12)
    monkeypatch.setattr(quantize, "_CHUNK", 1 << 12)
    monkeypatch.setattr(update.apply_block, "__kwdefaults__", {"chunk": 1 << 12})
    monkeypatch.setattr("logra.sketch.block._CHUNK", 1 << 12)


def stack(width=WIDTH, layers=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def attached(basis, optimizer, weights="fp32", **options):
    model = stack()
    return model, logra.attach(
        model, rank=RANK, basis=basis, optimizer=optimizer, weights=weights, max_grad_norm=1.0, **options
    )


def backward(model, seed, split=False):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16, enabled=split):
        loss = model(x).float().square().sum()
    loss.backward()


def peaks(model, own):
    """Most bytes above the start, in propose and in apply."""
    own.basis_block(own.names[0])
    with Meter() as meter:
        meter.register("other", [*(p.data for p in model.parameters()), *(t for ts in own.held().values() for t in ts)])
        start = meter.total
        with meter.phase("propose"):
            proposal = own.propose(1e-3)
        with meter.phase("apply"):
            own.apply(proposal)
    return [meter.reading(phase).peak - start for phase in ("propose", "apply")]


@pytest.mark.parametrize("weights", ["fp32", "split"])
@pytest.mark.parametrize(("basis", "optimizer"), KINDS)
def test_the_update_needs_the_step_its_integers_and_pieces(small_chunks, basis, optimizer, weights):
    model, own = attached(basis, optimizer, weights)
    rows, numbers = LAYERS * WIDTH, LAYERS * WIDTH * RANK
    piece = 4 * (1 << 12)  # float32
    one_target = 4 * RANK * WIDTH
    for step in range(3):
        backward(model, step, weights == "split")
        due = sum(p.numel() for p in own._bases.pending.values()) if basis == "aligned" else 0
        overlaps = LAYERS * 4 * RANK**2 if optimizer == "adam" and due else 0
        proposing, applying = peaks(model, own)
        assert 4 * numbers <= proposing <= 4 * numbers + 8 * piece
        # U, q, the next bases; three int64 and two int8 a row; pieces of rounding; a target's bases, old, new and their QR
        bound = 5 * numbers + due + rows * 26 + 4 * piece + 4 * one_target + overlaps
        assert 5 * numbers <= applying <= bound
        assert bound < 9 * numbers  # one more float32 tensor of the sketches' size beside U and q would show


def test_pieces_make_no_difference(small_chunks, monkeypatch):
    digests = set()
    for chunk in (1 << 8, 1 << 12, 1 << 22):
        monkeypatch.setattr(sketcher, "_CHUNK", chunk)
        model, own = attached("aligned", "adam")
        for step in range(3):
            backward(model, step)
            own.apply(own.propose(1e-3))
        digests.add((own.digest(), *(float(m.double().sum()) for m in own._moments.values())))
    assert len(digests) == 1


def test_folding_in_the_quantiser_is_folding_before_it():
    generator = torch.Generator().manual_seed(3)
    factor = torch.randn(300, 32, generator=generator)
    table = 2.0 ** torch.randint(-6, 3, (3, 32), generator=generator).float()
    place, rows = torch.arange(3).repeat_interleave(100), torch.arange(300)
    folded = quantize.quantize(factor * table[place], 8, 5, place, rows, scale=0.3)
    inside = quantize.quantize(factor, 8, 5, place, rows, scale=0.3, fold=(table, place))
    assert all(torch.equal(a, b) for a, b in zip(folded, inside, strict=True))


def test_layers_with_one_input_keep_it_once():
    kept, model = [], tiny_model()
    logra.attach(model, rank=4, basis="aligned")

    def pack(tensor):
        if tensor.ndim == 2 and tensor.shape == (3 * 7, 64) and not tensor.requires_grad:
            kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.ones(3, 7, dtype=torch.int64), use_cache=False)
    # of two layers, without down_proj: q, k and v share one, o has its own, gate and up share
    assert len(kept) == 2 * 6 and len(set(kept)) == 2 * 3


# -- what a plan says of it --------------------------------------------------------------------------------------------


def lines(function):
    """(file, its line numbers) of a function."""
    source, first = inspect.getsourcelines(function)
    return inspect.getsourcefile(function), range(first, first + len(source))


def within(phase, function):
    """Bytes by kind at the peaks of the lines of a function."""
    file, numbers = lines(function)
    return [kinds for place, kinds in phase.tops.items() if file in place and place[-2] in numbers]


@pytest.mark.parametrize("optimizer", ["row_adam", "adam"])
def test_a_plan_names_the_step_and_its_integers_from_their_making_on(small_chunks, optimizer):
    config = make_config(
        {"model": {"name_or_path": "x", "dtype": "bfloat16"}, "data": {"name": "x"}, "trust": {"enabled": False},
         "reward": {"functions": [{"function": "x"}]},
         "method": {"rank": 64, "basis": "aligned", "optimizer": optimizer, "weights": "split"}}
    )  # fmt: skip
    shape = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    phase = rehearse(config, shape, Shape(4, 4, 1, 1), phases=(UPDATE,))[UPDATE]
    numbers = 64 * 2 * (2 * 128 + 2 * 64 + 2 * 1024 + 128)
    stepping, rounding = within(phase, optimizers.row_adam_direction), within(phase, quantize.quantize)
    assert max(kinds["proposal"] for kinds in stepping) >= 4 * numbers
    assert max(kinds["sync"] for kinds in rounding) >= numbers
    for kinds in (*stepping, *rounding):  # what several devices share; what each has whole is `workspace`
        assert kinds.get("workspace", 0) < numbers / 10, kinds


# -- AdamW's moments ----------------------------------------------------------------------------------------------------


def adamw(**options):
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    return AdamWMethod(model, dict(model.named_parameters()), Schedule(1e-2, **options))


def test_adamw_has_its_moments_from_the_start_and_saves_those_that_stepped():
    method = adamw()
    assert sum(t.numel() for t in method.held_state()["optimizer"]) == 2 * (30 + 5) + 2
    tensors, values = method.state()
    assert not tensors and values["steps"] == {}
    method.parameters["weight"].grad = torch.ones(5, 6)  # the bias never steps
    method.step(lambda: {}, 1.0)
    tensors, values = method.state()
    assert values["steps"] == {"weight": 1} and set(tensors) == {"exp_avg.weight", "exp_avg_sq.weight"}


def test_adamw_goes_on_as_torch_does_and_from_its_checkpoint():
    method, resumed = adamw(), adamw()
    twin = nn.Linear(6, 5)
    twin.load_state_dict(method.model.state_dict())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for mine, other in zip(method.parameters.values(), twin.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            other.grad = mine.grad.clone()
        if step == 2:
            for parameter in resumed.parameters.values():  # what it did before is forgotten
                parameter.grad = torch.ones_like(parameter)
            resumed.step(lambda: {}, 1.0)
            tensors, values = method.state()
            resumed.load_state({k: t.clone() for k, t in tensors.items()}, values)
            resumed.model.load_state_dict(method.model.state_dict())
            for mine, other in zip(method.parameters.values(), resumed.parameters.values(), strict=True):
                other.grad = mine.grad.clone()
            resumed.step(lambda: {}, 1.0)
        method.step(lambda: {}, 1.0)
        optimizer.step()
    for a, b, c in zip(method.parameters.values(), twin.parameters(), resumed.parameters.values(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_loading_a_start_forgets_what_was_there():
    method, start = adamw(), adamw().state()
    for parameter in method.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    method.step(lambda: {}, 1.0)
    method.load_state(*start)
    assert method.num_updates == 0 and not any(bool(t.any()) for t in method.held_state()["optimizer"])


def test_a_fused_step_takes_the_same_state(monkeypatch):
    plain, other = adamw(), adamw().state()
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)  # the CPU has a fused step too, not asked for there
    fused = adamw()
    monkeypatch.undo()
    assert fused.optimizer.param_groups[0]["fused"] and not plain.optimizer.param_groups[0]["fused"]
    fused.load_state(*other)
    for step in range(3):
        for method in (plain, fused):
            for parameter in method.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            method.step(lambda: {}, 1.0)
    assert plain.state()[1] == fused.state()[1] and plain.state()[1]["steps"] == {"weight": 3, "bias": 3}
    for a, b in zip(plain.parameters.values(), fused.parameters.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
