import io
import json
import math

import pytest
import torch
from torch import nn

from logra.errors import CheckpointError, ConfigError, NonFiniteError
from logra.memory import formulas
from logra.optim import blockllm, param_groups, selection
from logra.optim.blockllm import BlockLLM
from logra.optim.selection import Choice, choose, fill, fill_as_code, is_due, ranked, ranked_as_code

SHAPES = {"wide": (6, 10), "tall": (13, 5), "square": (7, 7), "wide_2": (4, 12), "small": (2, 8)}
EVERY = {"update_freq": 3, "param_update_interval": 1, "num_bottom_to_sample": 9, "trigger": "interval"}


def weights(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def gradient(name, shape, step):
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    scale = 1.0 + 3.0 * torch.rand((), generator=generator)
    return torch.randn(shape, generator=generator) * scale


def give(parameters, step, optimizer=None):
    """Gradients as autograd would make them: for what requires one."""
    for n, p in parameters.items():
        p.grad = gradient(n, p.shape, step) if p.requires_grad else None


def run(optimizer, parameters, steps, start=0, loss=None):
    history = []
    for step in range(start, start + steps):
        give(parameters, step)
        optimizer.step(loss=None if loss is None else loss(step))
        history.append(optimizer.selected)
    return history


def values(parameters):
    return {n: p.detach().clone() for n, p in parameters.items()}


def same(one, other):
    for n in one:
        assert torch.equal(one[n], other[n]), n


def through_disk(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def wavy(step):
    return 2.0 + math.sin(1.7 * step)


# -- the whole method -----------------------------------------------------------------------------------------------------


class Twin:
    """float64, written from the paper: every gradient is at hand, and the choice is by |N| / (1 + times chosen)."""

    def __init__(self, start, chosen, lr, decay, sparsity, every, keeps):
        self.w = {n: p.detach().double() for n, p in start.items()}
        self.lr, self.decay, self.every, self.keeps = lr, decay, every, keeps
        self.budget = (1 - sparsity) * sum(w.numel() for w in self.w.values()) + 1e-6
        self.visits = dict.fromkeys(self.w, 0)
        self.moments, self.t = {}, 0
        self.choose(chosen)

    def choose(self, chosen):
        self.chosen = set(chosen)
        for n in chosen:
            self.visits[n] += 1
        self.moments = {n: m for n, m in self.moments.items() if n in self.chosen and self.keeps}

    def step(self, gradients):
        self.t += 1
        norms = {n: (g.double() / (g.double().abs() + 1e-8)).norm() for n, g in gradients.items()}
        for n in self.chosen:
            g = gradients[n].double()
            m, v, t = self.moments.get(n, (torch.zeros_like(g), torch.zeros_like(g), 0))
            m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, t + 1
            self.moments[n] = (m, v, t)
            processed = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            self.w[n] = self.w[n] * (1 - self.lr * self.decay) - self.lr * processed
            norms[n] = processed.norm()
        if self.t % self.every == 0:
            order = sorted(norms, key=lambda n: -norms[n] / (1 + self.visits[n]))
            taken, total = [], 0
            for n in order:
                if not taken or total + self.w[n].numel() <= self.budget:
                    taken.append(n)
                    total += self.w[n].numel()
            self.choose(taken)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("sparsity", [0.4, 0.9])
def test_it_is_the_paper_in_float64(sparsity, keeps):
    parameters = weights()
    own = {"on_reselect": "keep" if keeps else "reset", "sparsity": sparsity, "weight_decay": 0.1}
    optimizer = BlockLLM(list(parameters.items()), 0.02, **own, **EVERY)
    twin = Twin(parameters, optimizer.selected, 0.02, 0.1, sparsity, 3, keeps)
    seen = set()
    for p in parameters.values():
        p.requires_grad_(True)  # at the first step there was no probe yet, and the twin knows all gradients
    optimizer._now.probed = sorted(set(SHAPES) - set(optimizer.selected))
    for step in range(14):
        give(parameters, step)
        twin.step({n: gradient(n, p.shape, step) for n, p in parameters.items()})
        optimizer.step()
        assert set(optimizer.selected) == twin.chosen, step
        seen.add(tuple(optimizer.selected))
        for n, p in parameters.items():
            torch.testing.assert_close(p.double(), twin.w[n], rtol=1e-5, atol=1e-6)
    assert len(seen) >= 2


def test_with_all_blocks_it_is_adamw():
    parameters, others = weights(), weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, sparsity=0.0, weight_decay=0.1, eps=1e-3, trigger="interval")
    assert set(optimizer.selected) == set(SHAPES)
    other = torch.optim.AdamW(others.values(), lr=0.02, weight_decay=0.1, eps=1e-3)
    for step in range(5):
        give(parameters, step)
        give(others, step)
        optimizer.step()
        other.step()
    for n, p in parameters.items():
        torch.testing.assert_close(p, others[n], rtol=1e-5, atol=1e-6)


def test_a_scheduler_reaches_the_blocks():
    """In the published code the inner Adam keeps the first learning rate."""
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, sparsity=0.5, **EVERY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 0))
    before = values(parameters)
    run(optimizer, parameters, 1)
    same(values(parameters), before)
    schedule.step()
    run(optimizer, parameters, 1, start=1)
    assert all(not torch.equal(parameters[n], before[n]) for n in optimizer.selected)


# -- the choice -------------------------------------------------------------------------------------------------------------


def test_the_best_is_taken_and_what_fits_after_it():
    sizes = {"a": 50, "b": 30, "c": 60, "d": 20}
    assert fill(["a", "b", "c", "d"], sizes, 100) == ["a", "b", "d"]
    assert fill(["c", "d"], sizes, 10) == ["c"]  # larger than the budget: its turn comes all the same
    assert fill([], sizes, 10) == []


def test_the_published_fill_stops_at_what_does_not_fit():
    sizes = {"a": 50, "b": 30, "c": 60, "d": 20}
    assert fill_as_code(["a", "b", "c", "d"], [], sizes, 100) == ["a", "b"]
    assert fill_as_code(["c", "d"], ["a"], sizes, 10) == ["c"]  # there: an empty choice, and Adam refuses it
    assert fill_as_code(["d"], ["b", "c", "a"], sizes, 60) == ["d", "b", "c"]  # by chance, past the budget


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.6, 0.9])
def test_the_budget_is_in_numbers_and_the_codes_first_one_in_tensors(sparsity):
    sizes = {f"block{i}": 10 * (i + 1) for i in range(20)}
    group = {"seed": 1, "selection": "paper", "sparsity": sparsity}
    chosen = choose(Choice(visits=dict.fromkeys(sizes, 0)), sizes, group)
    total, budget = sum(sizes[n] for n in chosen), (1 - sparsity) * sum(sizes.values())
    assert total <= budget + 1e-6
    assert all(total + sizes[n] > budget for n in sizes if n not in chosen)
    code = choose(Choice(visits=dict.fromkeys(sizes, 0)), sizes, {**group, "selection": "code"})
    assert len(code) == int((1 - sparsity) * 20 + 1e-9) or sparsity == 0.9  # 1 - 0.9 is below 0.1 there
    assert len(code) >= 1


def test_chance_depends_on_names_seed_and_step_only():
    names = [f"layer{i}" for i in range(30)]
    order = selection.shuffled(names, 3, "choose", 0)
    assert order == selection.shuffled(reversed(names), 3, "choose", 0) and set(order) == set(names)
    assert order != names
    assert (
        len({tuple(selection.shuffled(names, *key)) for key in ((4, "choose", 0), (3, "probe", 0), (3, "choose", 1))})
        == 3
    )


def test_blocks_that_were_chosen_often_yield_and_in_the_code_they_do_not():
    choice = Choice(visits={"a": 9, "b": 0, "c": 1}, norms={"a": 5.0, "b": 1.0, "c": 4.0}, updates=1000)
    assert ranked(choice, ["a", "b", "c"], dict.fromkeys("abc", 25)) == ["c", "b", "a"]
    assert ranked_as_code(choice, ["c", "b", "a"]) == (["a", "c", "b"], [])


def test_what_was_never_measured_counts_by_size_and_in_the_code_comes_last():
    sizes = {"a": 64, "b": 64, "c": 64, "d": 100, "e": 9}
    choice = Choice(visits=dict.fromkeys(sizes, 0), norms={"a": 5.0, "b": 1.0, "c": 4.0})
    assert ranked(choice, ["e", "b", "c", "d", "a"], sizes) == ["d", "a", "c", "e", "b"]
    assert ranked_as_code(choice, ["e", "b", "c", "d", "a"]) == (["a", "c", "b"], ["e", "d"])
    equal = Choice(visits=dict.fromkeys(sizes, 0))
    assert ranked(equal, ["c", "a", "b"], sizes) == ["c", "a", "b"]  # by chance


def test_the_papers_norm_of_a_block_that_is_not_trained_is_its_size():
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, **{**EVERY, "update_freq": 99})
    run(optimizer, parameters, 3)
    norms = optimizer.state_dict()["extra"]["norms"]
    assert len(norms) == 4
    for n, norm in norms.items():
        assert norm == pytest.approx(parameters[n].numel() ** 0.5, rel=1e-4)


def test_every_block_has_its_turn():
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, sparsity=0.9, **{**EVERY, "update_freq": 2})
    history = run(optimizer, parameters, 40)
    assert {n for chosen in history for n in chosen} == set(SHAPES)
    assert all(
        len(chosen) == 1
        or sum(parameters[n].numel() for n in chosen) <= 0.1 * sum(p.numel() for p in parameters.values())
        for chosen in history
    )


def test_probes_take_turns_and_last_one_step():
    parameters = weights()
    own = {"param_update_interval": 3, "num_bottom_to_sample": 1, "trigger": "interval", "update_freq": 10**6}
    own["selection"] = "code"
    optimizer = BlockLLM(list(parameters.items()), 0.02, sparsity=0.9, **own)
    (chosen,) = optimizer.selected
    probes = []
    for step in range(3 * 8):
        probed = [n for n, p in parameters.items() if p.requires_grad and n != chosen]
        assert len(probed) == (1 if step % 3 == 2 else 0)
        probes += probed
        before = values(parameters)
        run(optimizer, parameters, 1, start=step)
        assert [n for n in SHAPES if not torch.equal(parameters[n], before[n])] == [chosen]
        for n in probed:
            expected = gradient(n, SHAPES[n], step).norm().item()
            assert optimizer.state_dict()["extra"]["norms"][n] == pytest.approx(expected, rel=1e-6)
    assert set(probes[:4]) == set(probes[4:]) == set(SHAPES) - {chosen}


# -- when it chooses anew -----------------------------------------------------------------------------------------------------


def due_steps(trigger, losses, update_freq, patience):
    """The steps at which a choice ends, and what the definitions say, from the whole history."""
    group = {"trigger": trigger, "update_freq": update_freq, "patience": patience}
    choice, start = Choice(), 0
    found, expected = [], []
    for t, loss in enumerate(losses, 1):
        choice.updates, choice.since = t, choice.since + 1
        choice.note_loss(loss, patience)
        own = losses[start:t]
        last, mean = own[-patience:], sum(own[-patience:]) / len(own[-patience:])
        if trigger == "plateau":
            earlier = own[-2 * patience : -patience]
            ends = len(own) >= 2 * patience and len(own) % update_freq == 0 and sum(earlier) <= sum(last)
        elif trigger == "paper":
            ends = len(own) >= patience and loss >= mean
        elif trigger == "code":
            ends = t % update_freq == 0 and len(own) > patience and sum(own) / len(own) < mean
        else:
            ends = len(own) == update_freq
        if ends:
            expected.append(t)
        if is_due(choice, group):
            found.append(t)
            choice.start([])
        if ends:
            start = t
    return found, expected


@pytest.mark.parametrize("trigger", ["plateau", "paper", "code", "interval"])
@pytest.mark.parametrize(("update_freq", "patience"), [(1, 1), (4, 3), (10, 2), (3, 5)])
def test_triggers_are_their_definitions(trigger, update_freq, patience):
    generator = torch.Generator().manual_seed(update_freq)
    noise = torch.rand(120, generator=generator, dtype=torch.float64).tolist()
    found, expected = due_steps(trigger, noise, update_freq, patience)
    assert found == expected and len(found) >= 2


def test_a_run_that_comes_to_rest_is_noticed_and_by_the_code_it_is_not():
    flat = [3.0 - 0.02 * min(t, 100) for t in range(300)]
    assert due_steps("plateau", flat, 10, 5)[0][0] == 110
    assert due_steps("code", flat, 10, 5)[0] == []
    assert due_steps("plateau", [3.0 - 0.02 * t for t in range(300)], 10, 5)[0] == []
    assert due_steps("code", [3.0 + 0.02 * t for t in range(30)], 10, 5)[0] == [10, 20, 30]


def test_the_published_first_step_does_nothing():
    parameters = weights()
    before = values(parameters)
    faithful = BlockLLM(list(parameters.items()), 0.02, sparsity=0.5, **BlockLLM.FAITHFUL)
    run(faithful, parameters, 1, loss=wavy)
    same(before, values(parameters))
    run(faithful, parameters, 1, start=1, loss=wavy)
    assert all(not torch.equal(parameters[n], before[n]) for n in faithful.selected)
    others = weights()
    mended = BlockLLM(list(others.items()), 0.02, sparsity=0.5)
    run(mended, others, 1, loss=wavy)
    assert all(not torch.equal(others[n], before[n]) for n in mended.selected)


def test_the_published_code_from_its_description():
    """Adam rebuilt at each choice; reselection on worsening; by norm up to the first block that does not fit."""
    parameters = weights()
    own = {"update_freq": 4, "patience": 2, "param_update_interval": 1, "num_bottom_to_sample": 9}
    optimizer = BlockLLM(list(parameters.items()), 0.02, sparsity=0.4, **own, **BlockLLM.FAITHFUL)
    assert len(optimizer.selected) == int(0.6 * len(SHAPES))
    chosen, theirs = optimizer.selected, weights()
    adam = torch.optim.Adam([theirs[n] for n in chosen], lr=0.02)
    history, norms, changes, update_step = [], {}, 0, 0
    budget = int(0.6 * sum(p.numel() for p in parameters.values()))
    for step in range(33):
        loss = 1.0 + 0.1 * step
        visible = [n for n, p in parameters.items() if p.requires_grad]
        give(parameters, step)
        optimizer.step(loss=loss)
        update_step += 1
        if update_step == 1:
            continue
        for n in chosen:
            theirs[n].grad = gradient(n, SHAPES[n], step)
        adam.step()
        norms |= {n: gradient(n, SHAPES[n], step).norm().item() for n in visible}
        history.append(loss)
        if update_step % 4 == 0 and len(history) > 2 and sum(history) / len(history) < sum(history[-2:]) / 2:
            running, chosen = 0, []
            for n in sorted(norms, key=lambda n: -norms[n]):
                running += theirs[n].numel()
                if running >= budget:
                    break
                chosen.append(n)
            assert running >= budget  # or chance decides
            adam, history, changes = torch.optim.Adam([theirs[n] for n in chosen], lr=0.02), [], changes + 1
        assert optimizer.selected == sorted(chosen), step
    for n in SHAPES:
        torch.testing.assert_close(parameters[n], theirs[n], rtol=1e-5, atol=1e-6)
    assert changes >= 5


# -- the loss ---------------------------------------------------------------------------------------------------------------


def test_without_a_loss_it_says_so_at_once():
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02)
    give(parameters, 0)
    before = values(parameters)
    with pytest.raises(ConfigError, match=r"step\(loss=loss\)"):
        optimizer.step()
    same(before, values(parameters))
    assert optimizer.state_dict()["extra"]["updates"] == 0
    optimizer.set_loss(1.0)
    optimizer.step()
    give(parameters, 1)
    with pytest.raises(ConfigError, match="trigger='interval'"):
        optimizer.step()  # the loss before was that step's


@pytest.mark.parametrize("way", ["argument", "set", "closure", "tensor"])
def test_ways_to_give_the_loss(way):
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, update_freq=1, patience=1)
    loss = torch.tensor(1.5, requires_grad=True)
    give(parameters, 0)
    if way == "argument":
        assert optimizer.step(loss=1.5) is None
    elif way == "tensor":
        assert optimizer.step(loss=loss) is None
    elif way == "set":
        optimizer.set_loss(loss * 1.0)
        assert optimizer.step() is None
    else:
        assert optimizer.step(lambda: loss) is loss
    assert optimizer.state_dict()["extra"]["losses"] == [1.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_step(bad):
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02)
    before, state = values(parameters), json.dumps(optimizer.state_dict()["extra"])
    give(parameters, 0)
    with pytest.raises(NonFiniteError, match="loss"):
        optimizer.step(loss=bad)
    same(before, values(parameters))
    assert json.dumps(optimizer.state_dict()["extra"]) == state


def test_a_step_without_signal_counts_for_nothing():
    parameters, others = weights(), weights()
    optimizer, other = (BlockLLM(list(p.items()), 0.02, update_freq=3, patience=1) for p in (parameters, others))
    run(optimizer, parameters, 2, loss=wavy)
    run(other, others, 2, loss=wavy)
    for p in others.values():
        p.grad = torch.zeros_like(p)
    other.step(loss=9.0)
    assert run(optimizer, parameters, 9, start=2, loss=wavy) == run(other, others, 9, start=2, loss=wavy)
    same(values(parameters), values(others))


# -- gradients and state ------------------------------------------------------------------------------------------------------


def chain(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10)))


def train(model, optimizer, steps):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        optimizer.step(loss=wavy(step))


def test_what_is_not_chosen_has_no_gradient_and_no_state():
    model = chain()
    own = {"update_freq": 4, "patience": 1, "param_update_interval": 3, "trigger": "interval"}
    optimizer = BlockLLM(list(model.named_parameters()), 0.01, sparsity=0.8, **own)
    histories = set()
    for _ in range(5):
        train(model, optimizer, 3)
        histories.add(tuple(optimizer.selected))
        assert len(optimizer.selected) == 2
        for slot in optimizer.slots():
            chosen = slot.name in optimizer.selected
            if slot.is_matrix:
                held = sum(v.nbytes for v in slot.state.values() if isinstance(v, torch.Tensor))
                assert held in ((0, formulas.adamw(8, 8)) if chosen else (0,))
                assert slot.parameter.requires_grad == (chosen or slot.name in optimizer._now.probed)
                assert chosen or slot.parameter.grad is None
            else:
                assert slot.parameter.requires_grad and len(slot.state) == 3
    assert len(histories) > 1
    optimizer.release()
    assert all(p.requires_grad for p in model.parameters())


def test_state_is_a_tenth_of_adamws():
    shapes = {f"layer{i}": (16, 24) for i in range(20)}
    parameters = weights(shapes=shapes)
    optimizer = BlockLLM(list(parameters.items()), 0.01, **EVERY)
    run(optimizer, parameters, 8)
    give(parameters, 8)
    held = sum(v.nbytes for s in optimizer.slots() for v in s.state.values() if isinstance(v, torch.Tensor))
    assert held == formulas.STATE["blockllm"].state_bytes(shapes.values(), 0)


def test_toggling_changes_nothing_but_memory():
    model, other = chain(), chain()
    own = {"update_freq": 2, "patience": 1, "param_update_interval": 3, "sparsity": 0.8}
    optimizer = BlockLLM(list(model.named_parameters()), 0.01, **own)
    untoggled = BlockLLM(list(other.named_parameters()), 0.01, toggle=False, **own)
    train(model, optimizer, 25)
    train(other, untoggled, 25)
    assert all(p.requires_grad for p in other.parameters())
    assert sum(p.grad is not None for n, p in other.named_parameters() if n.endswith("weight")) <= 3
    same(values(dict(model.named_parameters())), values(dict(other.named_parameters())))
    assert optimizer.state_dict()["extra"] == untoggled.state_dict()["extra"]
    assert sum(optimizer.state_dict()["extra"]["visits"].values()) > 4  # it did choose anew


def test_a_gradient_that_is_dropped_must_be_finite_too():
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, toggle=False, trigger="interval")
    name = next(n for n in SHAPES if n not in optimizer.selected)
    give(parameters, 0)
    parameters[name].grad[0, 0] = math.nan
    before = values(parameters)
    with pytest.raises(NonFiniteError, match=name):
        optimizer.step()
    same(before, values(parameters))


OWN = {"update_freq": 3, "patience": 2, "param_update_interval": 2, "sparsity": 0.6}


@pytest.mark.parametrize("own", [{}, {"trigger": "paper"}, BlockLLM.FAITHFUL, {"trigger": "interval"}])
@pytest.mark.parametrize("stop", [1, 4, 7, 10])
def test_it_continues_bitwise(own, stop):
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, **{**OWN, **own})
    run(optimizer, parameters, stop, loss=wavy)
    saved, at = through_disk(optimizer.state_dict()), values(parameters)
    saved["extra"] = json.loads(json.dumps(saved["extra"]))
    history = run(optimizer, parameters, 17, start=stop, loss=wavy)
    again = {n: nn.Parameter(at[n].clone()) for n in reversed(SHAPES)}
    other = BlockLLM(list(again.items()), 0.5, **{**OWN, **own})
    run(other, again, 2, loss=wavy)  # a past of its own, to be forgotten
    for n, p in again.items():
        p.data.copy_(at[n])
    other.load_state_dict(saved)
    assert run(other, again, 17, start=stop, loss=wavy) == history
    same(values(parameters), values(again))
    assert optimizer.state_dict()["extra"] == other.state_dict()["extra"]
    assert len({tuple(chosen) for chosen in history}) > 1


def test_damaged_choices_are_refused_whole():
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02, **EVERY)
    run(optimizer, parameters, 4)
    good = json.dumps(optimizer.state_dict()["extra"])
    other = next(n for n in SHAPES if n not in optimizer.selected)
    for key, value in (
        ("selected", []),
        ("selected", ["elsewhere"]),
        ("visits", {}),
        ("norms", {"x": 1.0}),
        (None, None),
    ):
        state = optimizer.state_dict()
        extra = {} if key is None else {**json.loads(good), key: value}
        with pytest.raises(CheckpointError):
            optimizer.load_state_dict({**state, "extra": extra})
        assert json.dumps(optimizer.state_dict()["extra"]) == good
    assert other not in optimizer.selected


def test_without_names_places_are_names():
    parameters, named = weights(), weights()
    optimizer = BlockLLM(list(parameters.values()), 0.02, **EVERY)
    run(optimizer, parameters, 5)
    assert all(name.startswith("group0.") for name in optimizer.selected)
    other = BlockLLM(list(named.values()), 0.02, **EVERY)
    other.load_state_dict(through_disk(optimizer.state_dict()))
    assert other.selected == optimizer.selected


# -- groups and ranks -------------------------------------------------------------------------------------------------------


def test_groups_of_a_model_and_frozen_parts():
    from logra.rl.tiny import tiny_model

    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    groups = param_groups(model, rank=1, others={"lr": 1e-3})
    optimizer = BlockLLM(groups, 0.01, trigger="interval")
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert "model.embed_tokens.weight" in frozen and "lm_head.weight" not in frozen
    assert len(frozen) == 1 + 14 - len(optimizer.selected)
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    before = values(dict(model.named_parameters()))
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before) - set(frozen)


def test_blocks_of_all_groups_are_one_pool():
    parameters = weights()
    pairs = list(parameters.items())
    groups = [{"params": pairs[:2]}, {"params": pairs[2:4], "weight_decay": 0.1}, {"params": pairs[4:], "rank": None}]
    optimizer = BlockLLM(groups, 0.02, sparsity=0.5, **EVERY)
    assert set(optimizer._now.visits) == {n for n, _ in pairs[:4]}
    history = run(optimizer, parameters, 12)
    assert {n for chosen in history for n in chosen} == {n for n, _ in pairs[:4]}
    late = nn.Parameter(torch.randn(3, 3))
    optimizer.add_param_group({"params": [("late", late)]})
    assert not late.requires_grad and "late" in optimizer._now.visits
    with pytest.raises(ConfigError, match="sparsity"):
        optimizer.add_param_group({"params": [("later", nn.Parameter(torch.randn(3, 3)))], "sparsity": 0.1})


def test_only_vectors():
    parameters = weights(shapes={"bias": (9,)})
    optimizer = BlockLLM(list(parameters.items()), 0.02)
    before = values(parameters)
    run(optimizer, parameters, 2)
    assert optimizer.selected == [] and not torch.equal(parameters["bias"], before["bias"])


def test_frozen_and_double_blocks_are_named():
    parameters = weights()
    optimizer = BlockLLM(list(parameters.items()), 0.02)
    with pytest.raises(ConfigError, match="frozen"):
        BlockLLM(list(parameters.items()), 0.02)
    optimizer.release()
    BlockLLM(list(parameters.items()), 0.02).release()
    groups = [{"params": [("w", p)]} for p in (parameters["wide"], parameters["tall"])]
    with pytest.raises(ConfigError, match="same name"):
        BlockLLM(groups, 0.02)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sparsity", 1.0), ("sparsity", -0.1), ("update_freq", 0), ("patience", 0), ("param_update_interval", 0),
        ("num_bottom_to_sample", -1), ("selection", "best"), ("trigger", "never"), ("on_reselect", "drop"),
        ("first_step", "no"), ("rank", 0.5),
    ],
)  # fmt: skip
def test_bad_options_are_named(option, value):
    with pytest.raises(ConfigError, match=option):
        BlockLLM(list(weights().items()), 0.02, **{option: value})


def test_ranks_agree_on_when_to_choose(monkeypatch):
    parameters = weights()
    with monkeypatch.context() as patch:
        patch.setattr(blockllm, "_num_ranks", lambda: 2)
        with pytest.raises(ConfigError, match="toggle=False"):
            BlockLLM(list(parameters.items()), 0.02)
        optimizer = BlockLLM(list(parameters.items()), 0.02, toggle=False, update_freq=2, patience=1)
        asked = []

        def another_rank_says_yes(flag, op):
            asked.append(float(flag))
            assert op == torch.distributed.ReduceOp.MAX
            flag.fill_(1.0)

        patch.setattr(blockllm.dist, "all_reduce", another_rank_says_yes)
        first = optimizer.selected
        history = run(optimizer, parameters, 6, loss=lambda step: -float(step))
    assert asked == [0.0] * 6 and any(chosen != first for chosen in history)
