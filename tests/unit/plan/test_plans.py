"""Plans: sharding, what does not fit, what would fit, formulas, and the refusal before training."""

from dataclasses import replace

import pytest
import torch
from test_agreement import LOGRA, llama, make_config

from logra.build import plan as module
from logra.build.plan import (
    METHODS,
    Plan,
    Question,
    as_method,
    check_memory,
    generous_estimate,
    largest,
    plan_memory,
    search,
)
from logra.build.rehearsal import Shape
from logra.errors import ConfigError
from logra.memory.fake import Phase
from logra.memory.gauge import GRADIENT, ROLLOUT, UPDATE
from logra.memory.plan import Ledger, PhasePlan, at_layers, first_fault, shard_of

SHAPE = Shape(16, 48, 2, 4)


def ask(config, **options) -> Question:
    return Question(config, options.pop("model", llama()), options.pop("shape", SHAPE), **options)


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_shards_of_rows_are_rounded_up():
    assert shard_of([(8, 4)], 4) == 0.25 and shard_of([(9, 4)], 4) == 3 / 9
    assert shard_of([(8, 4), (1,)], 4) == (2 * 4 + 1) / 33


def test_layers_are_followed_place_by_place():
    def phases(layers):
        tops = {("a",): {"weights": 10 * layers, "x": 100}, ("b",): {"weights": 10 * layers, "x": 30 * layers}}
        return {"p": Phase("p", tops, {"weights": 10.0 * layers * layers}, float(layers))}

    for counts in ((2, 3), (2, 3, 4)):
        found = at_layers({n: phases(n) for n in counts}, 20)["p"]
        assert (
            found.peak == {"weights": 200, "x": 600} and found.weight == 20
        )  # the other place is the peak of few layers
        assert found.mean["weights"] == pytest.approx(200)


def test_the_peak_is_looked_for_again_after_sharding():
    phase = Phase("gradient", {("a",): {"weights": 100, "activations": 20}, ("b",): {"weights": 0, "activations": 90}})
    assert Ledger().plan(phase).peak == {"weights": 100, "activations": 20}
    ledger = Ledger({"weights": 0.25}, {"runtime": 5}, {"gathered": 7})
    assert ledger.plan(phase).peak == {"activations": 90, "runtime": 5, "gathered": 7}
    assert "gathered" not in ledger.plan(Phase("update", phase.tops)).peak


def test_the_first_fault_names_phase_and_kind():
    phases = {
        "rollout": PhasePlan({"weights": 10}, {}, 1.0), "gradient": PhasePlan({"weights": 10, "activations": 5}, {}, 1.0)
    }  # fmt: skip
    assert first_fault(phases, None) is None and first_fault(phases, 15) is None
    fault = first_fault(phases, 12)
    assert fault is not None and (fault.phase, fault.kind, fault.missing) == ("gradient", "activations", 3)
    fault = first_fault(phases, 9)
    assert fault is not None and (fault.phase, fault.kind) == ("rollout", "weights")


@pytest.mark.parametrize(
    ("peak", "start", "limit", "least", "most", "best"),
    [
        (lambda n: 100 + 7 * n, 1, 800, 1, 4096, 100),
        (lambda n: 100 + n * n, 60, 10_100, 1, 4096, 100),
        (lambda n: 100 + 7 * n, 50, 135, 1, 4096, 5),
        (lambda n: 100 + 7 * n, 4, 90, 1, 4096, None),
        (lambda n: 100, 4, 200, 1, 64, 64),
    ],
)
def test_search(peak, start, limit, least, most, best):
    calls = []

    def counted(value):
        calls.append(value)
        return peak(value)

    found = search(counted, start, peak(start), limit, least, most)
    assert len(calls) <= 4
    assert found is None if best is None else best * 0.9 <= found <= best and peak(found) <= limit


# -- plans -----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_plan_are_what_the_model_has():
    config = make_config(method=LOGRA["random"])
    plan = plan_memory(ask(config, accelerator=False))
    model_bytes = 4 * plan.num_parameters
    rows = plan.phases[GRADIENT].peak
    assert abs(rows["weights"] - model_bytes) < 200 and "runtime" not in rows and plan.host == {}
    outs = sum(p for p, _ in module.sizes_of(config, llama()).targets)
    assert rows["sketch"] == 4 * 8 * outs and rows["optimizer"] == 4 * outs
    assert plan.phases[UPDATE].peak["sync"] >= 4 * 8 * outs  # U, at least
    assert plan.peak == max(phase.peak_bytes for phase in plan.phases.values()) >= plan.mean > model_bytes
    assert plan.fits and plan.fault is None


def test_a_residual_on_the_host():
    split = {"weights": "split", **LOGRA["random"]}
    on_device, on_host = (
        plan_memory(
            ask(make_config(method={**split, "residual": place}, model={"dtype": "bfloat16", "device": "auto"}))
        )
        for place in ("device", "cpu")
    )
    trained = on_host.num_trained
    assert (
        on_device.phases[GRADIENT].peak["residual"] == 2 * trained and "residual" not in on_host.phases[GRADIENT].peak
    )
    assert on_host.host["residual"] == 2 * trained and on_host.link_bytes == 4 * trained and on_device.link_bytes == 0
    assert on_host.host["export"] == 4 * trained and on_host.host["loading"] == 2 * on_host.num_parameters
    assert on_host.phases[GRADIENT].peak["runtime"] == module.RUNTIME
    assert on_host.host_bytes == max(6 * trained, 2 * on_host.num_parameters)  # loading is over before the rest begins
    small = replace(on_host.question, host_limit=on_host.host_bytes - 1)
    assert on_host.fits and not replace(on_host, question=small).fits


def test_offloaded_checkpoints_go_to_the_host():
    model = {"gradient_checkpointing": True, "device": "auto"}
    near, far = (
        plan_memory(
            ask(make_config(method=LOGRA["random"], model={**model, "offload_activations": offload})), (GRADIENT,)
        )
        for offload in (False, True)
    )
    boundaries = 2 * 2 * 64 * 128 * 4  # layers, rows, tokens, hidden size, bytes
    assert far.host["offloaded"] == boundaries and far.link_bytes == 2 * boundaries
    assert near.peak > far.peak


def test_shards_of_logra():
    split = {"weights": "split", "rank": 8, **LOGRA["random"]}
    one, four = (
        plan_memory(ask(make_config(method=split, model={"dtype": "bfloat16"}), gpus=gpus, accelerator=False))
        for gpus in (1, 4)
    )
    for row in ("weights", "residual", "sketch", "optimizer"):
        assert four.phases[GRADIENT].peak[row] == pytest.approx(one.phases[GRADIENT].peak[row] / 4, rel=0.02), row
    sizes = module.sizes_of(one.question.config, llama())
    gathered = 2 * (2 * sizes.layer + sizes.outside)
    assert four.phases[UPDATE].peak["gathered"] == gathered
    assert gathered < four.phases[GRADIENT].peak["gathered"] < 2 * gathered
    assert four.phases[GRADIENT].peak["basis"] == one.phases[GRADIENT].peak["basis"]


def test_float32_masters_are_twice_split_weights_of_a_shard():
    wide = make_config(method=LOGRA["random"], model={"dtype": "bfloat16"})
    plan = plan_memory(ask(wide, gpus=2, accelerator=False))
    assert plan.phases[GRADIENT].peak["weights"] == pytest.approx(4 * plan.num_parameters / 2, rel=0.01)
    assert "residual" not in plan.phases[GRADIENT].peak


def test_shards_of_dense():
    config = make_config(method={"name": "dense"}, model={"dtype": "bfloat16"})
    plan = plan_memory(ask(config, gpus=2, accelerator=False))
    rows, trained = plan.phases[UPDATE].peak, plan.num_trained
    assert rows["weights"] == pytest.approx(2 * plan.num_parameters, rel=0.01)
    assert rows["optimizer"] == pytest.approx(4 * trained, rel=0.01) and rows["gradients"] == pytest.approx(
        2 * trained, rel=0.01
    )


def test_methods_by_formula_differ_from_dense_in_state_only():
    base = ask(make_config(method={"rank": 4}), accelerator=False)
    dense, galore, block = (plan_memory(as_method(base, label)) for label in ("dense", "galore", "blockllm"))
    assert galore.by_formula and not dense.by_formula
    a, b = dense.phases[GRADIENT].peak, galore.phases[GRADIENT].peak
    assert b["optimizer"] < a["optimizer"] and b["gradients"] == a["gradients"] and b["activations"] == a["activations"]
    assert block.phases[GRADIENT].peak["gradients"] < a["gradients"] / 2


def test_every_method_of_a_comparison_can_be_planned():
    base = ask(make_config(method={"rank": 4}), shape=Shape(4, 8, 1, 1), accelerator=False)
    plans = module.compare(base)
    assert set(plans) == set(METHODS) and all(isinstance(p, Plan) and p.peak > 0 for p in plans.values())
    assert plans["dora"].peak >= plans["lora"].peak
    with pytest.raises(ConfigError, match="no method 'muon'"):
        as_method(base, "muon")


@pytest.mark.parametrize("what", ["microbatch", "length", "rank", "decoded"])
def test_what_would_fit_fits(what):
    base = ask(make_config(method=LOGRA["random"]), accelerator=False)
    plan = plan_memory(base)
    limited = replace(plan, question=replace(base, device_limit=int(plan.peak * 1.5)))
    found = largest(limited, what)
    assert found is not None and found >= module._value(base, what)
    assert plan_memory(module._changed(base, what, found)).peak <= plan.peak * 1.5 * 1.02
    nothing = replace(plan, question=replace(base, device_limit=1000))
    assert largest(nothing, what) is None


def test_a_model_with_layers_of_several_kinds_is_rehearsed_whole(monkeypatch):
    counts = []

    def rehearse(config, model_config, shape, **options):
        counts.append(model_config.num_hidden_layers)
        return {GRADIENT: Phase(GRADIENT, {(): {"weights": 1}}, {}, 1.0)}

    monkeypatch.setattr(module, "rehearse", rehearse)
    mixed = llama(8)
    mixed.layer_types = ["full_attention", "sliding_attention"] * 4
    plan_memory(ask(make_config(), model=mixed, accelerator=False), (GRADIENT,))
    plan_memory(ask(make_config(), model=llama(8), accelerator=False), (GRADIENT,))
    assert counts == [8, 2, 3, 4]


def test_vllm_beside_the_trainer():
    journal = {"rollout": {"engine": "vllm", "vllm": {"memory": 0.5}}, "method": LOGRA["random"]}
    config = make_config(**journal, model={"device": "auto"})
    plan = plan_memory(ask(config, device_limit=1 << 30))
    assert all(phase.peak["engine"] == 1 << 29 for phase in plan.phases.values())
    assert "kv_cache" not in plan.phases[ROLLOUT].peak
    asleep = make_config(
        rollout={"engine": "vllm", "vllm": {"memory": 0.5, "colocated": True}},
        method=LOGRA["random"],
        model={"device": "auto"},
    )
    plan = plan_memory(ask(asleep, device_limit=1 << 30))
    assert "engine" in plan.phases[ROLLOUT].peak and "engine" not in plan.phases[GRADIENT].peak


# -- before training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [
        {}, {"method": {"name": "dense"}}, {"method": {"name": "lora"}}, {"train": {"head_chunk": 0}},
        {"model": {"attn_implementation": "eager"}, "trust": {"enabled": True}}, {"algorithm": {"kl_coef": 0.1}},
    ],
)  # fmt: skip
def test_the_generous_estimate_is_above_the_plan(sections):
    config = make_config(**sections)
    for shape in (Shape(2, 2, 1, 1), Shape(100, 200, 2, 8)):
        estimate = generous_estimate(config, llama(), shape)
        assert plan_memory(ask(config, shape=shape, accelerator=False)).peak < estimate


def tiny(**memory):
    return make_config(
        model={"name_or_path": "builtin:tiny-llama"}, memory=memory,
        rollout={"max_new_tokens": 8, "prompts_per_step": 2, "rollouts_per_prompt": 2}, data={"max_prompt_tokens": 16},
    )  # fmt: skip


def test_a_run_that_cannot_fit_is_found():
    found = check_memory(tiny(limit="1MiB"))
    assert found is not None and found.fault is not None and found.question.shape == Shape(16, 8, 4, 4)
    assert check_memory(tiny(limit="1MiB", check="off")) is None
    assert check_memory(tiny(limit="1GiB")) is None


def test_small_runs_are_not_rehearsed(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("rehearsed")

    monkeypatch.setattr(module, "plan_memory", fail)
    assert check_memory(tiny(limit="1GiB")) is None


def test_what_is_free_is_the_limit(monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda device: 1 << 20 if device == torch.device("cpu") else None)
    assert check_memory(tiny()) is not None
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    assert check_memory(tiny()) is None


def test_what_cannot_be_planned_is_let_through(monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("an odd operation")

    monkeypatch.setattr(module, "rehearse", fail)
    monkeypatch.setattr(module, "_rehearsed", {})
    assert check_memory(tiny(limit="1MiB")) is None and "an odd operation" in caplog.text
    absent = make_config(model={"name_or_path": "/no/such/model"}, memory={"limit": "1MiB"})
    assert check_memory(absent) is None


def test_a_limit_that_is_no_size():
    with pytest.raises(ConfigError, match="no size of memory"):
        tiny(limit="lots")
