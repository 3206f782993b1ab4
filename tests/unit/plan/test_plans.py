"""Plans: sharding, what does not fit, what would fit, formulas, and the refusal before training."""

import math
from dataclasses import replace

import pytest
from test_agreement import LOGRA, gemma, llama, make_config

from logra.build import fitting
from logra.build import plan as module
from logra.build.fitting import largest, search
from logra.build.plan import METHODS, PAPER, Plan, Question, as_method, period_of, plan_memory
from logra.build.rehearsal import Shape, rehearse
from logra.cli.main import main
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
        spent = {("head",): 5.0, ("layer",): 2.0 * layers}
        times = {("head",): {"weights": 5.0 * 10 * layers}, ("layer",): {"weights": 2.0 * layers * 10 * layers}}
        return {"p": Phase("p", tops, spent, times)}

    for counts in ((2, 3), (2, 4)):
        found = at_layers({n: phases(n) for n in counts}, 20)["p"]
        assert found.peak == {"weights": 200, "x": 600}  # the other place is the peak of few layers
        assert found.weight == 45.0 and found.mean["weights"] == pytest.approx(200)


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


@pytest.mark.parametrize("first", [0.5, 1.0, 2.0, 4.0])
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
def test_search(peak, start, limit, least, most, best, first):
    calls = []

    def counted(value):
        calls.append(value)
        return peak(value)

    found = search(counted, start, peak(start), limit, least, most, round(first * start))
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


def test_replicas_each_hold_all_shards():
    plans = {
        (gpus, replicas): plan_memory(
            ask(make_config(model={"dtype": "bfloat16"}, distributed={"replicas": replicas}), gpus=gpus)
        ).phases[GRADIENT].peak["weights"]
        for gpus, replicas in ((4, 1), (4, 2), (2, 1))
    }  # fmt: skip
    assert plans[4, 2] == plans[2, 1] == pytest.approx(2 * plans[4, 1], rel=0.05)


@pytest.mark.parametrize("name", ["galore", "fira", "muon"])
def test_low_rank_methods_work_on_whole_matrices_over_devices_too(name):
    """State is shared out; a step needs the whole gradient of a matrix on the device that owns it."""
    config = make_config(method={"name": name, "rank": 4, "basis": None}, model={"dtype": "bfloat16"})
    one, four = (plan_memory(ask(config, gpus=gpus, accelerator=False)).phases[UPDATE].peak for gpus in (1, 4))
    assert four["optimizer"] == pytest.approx(one["optimizer"] / 4, rel=0.05)
    assert four.get("workspace", 0) == pytest.approx(one.get("workspace", 0), rel=0.01)
    assert four["gathered"] >= 8 * 256 * 128


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
    with pytest.raises(ConfigError, match="no method 'adafactor'"):
        as_method(base, "adafactor")


def test_an_optimizer_of_a_configuration_is_planned_by_its_formula():
    own = make_config(model={"name_or_path": "builtin:tiny-llama"}, method={"name": "galore", "rank": 4})
    base = make_config(model={"name_or_path": "builtin:tiny-llama"}, method={"name": "dense", "rank": 4})
    model = module.model_config_of("builtin:tiny-llama")[0]
    plans = [plan_memory(ask(c, model=model, shape=Shape(16, 8, 4, 4))) for c in (own, base)]
    assert plans[0].by_formula and plans[0].question.label == "galore" and not plans[1].by_formula
    assert plans[0].peak < plans[1].peak


@pytest.mark.parametrize("share", [1.05, 1.5])
@pytest.mark.parametrize("what", ["microbatch", "length", "rank", "decoded"])
def test_what_would_fit_fits_and_no_much_larger_does(what, share):
    base = ask(make_config(method=LOGRA["random"]), accelerator=False)
    plan = plan_memory(base)
    limit = int(plan.peak * share)
    limited = replace(plan, question=replace(base, device_limit=limit))
    found = largest(limited, what)
    assert found is not None and found >= fitting._value(base, what)
    assert plan_memory(fitting._changed(base, what, found)).peak <= limit * 1.02
    more = math.ceil(found * 1.1) + 1
    assert more > fitting._most(base, what) or plan_memory(fitting._changed(base, what, more)).peak > limit * 0.98
    nothing = replace(plan, question=replace(base, device_limit=1000))
    assert largest(nothing, what) is None


def test_the_largest_rank_is_one_that_can_be_exact():
    base = ask(make_config(method=LOGRA["aligned"]), accelerator=False, model=llama(hidden=2048, layers=1))
    plan = plan_memory(base)
    assert largest(replace(plan, question=replace(base, device_limit=1 << 40)), "rank") == 1040


def test_layers_that_take_turns():
    def kinds(text):
        model = llama(len(text))
        model.layer_types = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in text]
        return period_of(model)

    assert [kinds(text) for text in ("ffff", "sfsfs", "sssfsssfss", "sffff", "f")] == [1, 2, 4, 5, 1]
    assert period_of(llama(7)) == 1


def test_few_layers_are_rehearsed(monkeypatch):
    counts = []

    def rehearse(config, model_config, shape, **options):
        counts.append(model_config.num_hidden_layers)
        return {GRADIENT: Phase(GRADIENT, {(): {"weights": model_config.num_hidden_layers}}, {(): 1.0}, {(): {}})}

    monkeypatch.setattr(module, "rehearse", rehearse)
    monkeypatch.setattr(module, "_rehearsed", {})
    two, odd = llama(21), llama(8)
    two.layer_types = ["full_attention", "sliding_attention"] * 10 + ["full_attention"]
    odd.layer_types = ["full_attention"] * 7 + ["sliding_attention"]
    for model, expected in ((two, [5, 7]), (odd, [8]), (llama(8), [2, 3]), (llama(5), [5])):
        counts.clear()
        plan = plan_memory(ask(make_config(), model=model, accelerator=False), (GRADIENT,))
        assert counts == expected and plan.peak == model.num_hidden_layers


def test_the_layers_of_gemma_are_followed_by_their_turns():
    config, model, phases = make_config(method={"name": "dense"}), gemma(8), (ROLLOUT, GRADIENT)
    planned = plan_memory(ask(config, model=model, accelerator=False), phases)
    for name, phase in rehearse(config, model, SHAPE, phases=phases).items():
        assert planned.phases[name].peak_bytes == pytest.approx(sum(phase.peak.values()), rel=0.002), name
        assert planned.phases[name].mean_bytes == pytest.approx(sum(phase.mean.values()), rel=0.02), name


def test_lo_gra_as_published():
    """S and A whole in float32 on every device, and logits that are not made in chunks."""
    base = ask(make_config(model={"dtype": "bfloat16"}), gpus=4, accelerator=False)
    ours, paper = (plan_memory(as_method(base, label)).phases[GRADIENT].peak for label in ("logra-random", PAPER))
    outs, ins = (sum(side) for side in zip(*module.sizes_of(base.config, llama()).targets, strict=True))
    assert paper["sketch"] == 4 * 8 * outs and paper["basis"] == 4 * 8 * ins
    assert ours["sketch"] == pytest.approx(paper["sketch"] / 4, rel=0.05) and ours["basis"] == paper["basis"] / 4
    of_logits = 4 * SHAPE.rows * SHAPE.response * 3000
    assert paper["activations"] > ours["activations"] + ours["logits"] + 2 * of_logits


def test_the_optimizer_on_an_accelerator_needs_no_workspace():
    """torch's fused AdamW; on the CPU it works on one parameter after the other."""
    config = make_config(method={"name": "dense"})
    here, there = (
        plan_memory(ask(config, shape=Shape(2, 2, 1, 1), accelerator=accelerator)).phases[UPDATE].peak
        for accelerator in (False, True)
    )
    largest_matrix = max(p * q for p, q in module.sizes_of(config, llama()).targets)
    assert here["workspace"] > 4 * largest_matrix > 100 * there.get("workspace", 0)
    assert here["optimizer"] == there["optimizer"]


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


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_plan_says_that_logits_are_made_whole(tmp_path, capsys):
    for name, model in (("capped", gemma(2)), ("plain", llama())):
        model.save_pretrained(tmp_path / name)
        arguments = ["--model", str(tmp_path / name), "--length", "16", "--decoded", "1", "--model.device", "cpu"]
        assert main(["plan", *arguments, "--method", "dense"]) == 0
        assert ("they are made whole" in capsys.readouterr().out) == (name == "capped")


def test_the_published_method_by_name(capsys):
    arguments = ["--model", "builtin:tiny-llama", "--length", "16", "--gpus", "2", "--rank", "4"]
    assert main(["plan", *arguments, "--method", "logra-paper"]) == 0
    text = capsys.readouterr().out
    assert "LoGRA as published, rank 4" in text and "method.weights=split" not in text
