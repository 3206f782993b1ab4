"""The refusal before training: what is planned for it, what is not, and when it is made."""

import pytest
import torch
from test_agreement import LOGRA, gemma, llama, make_config
from test_plans import ask

from logra.build import plan as module
from logra.build import refusal
from logra.build.plan import plan_memory
from logra.build.refusal import check_memory, generous_estimate, generous_update
from logra.build.rehearsal import Shape
from logra.errors import ConfigError
from logra.memory.gauge import GRADIENT, ROLLOUT, UPDATE


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
        rollout={"max_new_tokens": 8, "prompts_per_step": 2, "rollouts_per_prompt": 2}, data={"max_prompt_tokens": 128},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def prompts_of_16_tokens(monkeypatch):
    monkeypatch.setattr(refusal, "longest_prompt", lambda config: 16)


def test_a_run_that_cannot_fit_is_found():
    found = check_memory(tiny(limit="1MiB"))
    assert found is not None and found.fault is not None and found.question.shape == Shape(16, 8, 4, 4)
    assert check_memory(tiny(limit="1MiB", check="off")) is None
    assert check_memory(tiny(limit="1GiB")) is None


def test_ranks_need_less_each():
    alone, two = (check_memory(tiny(limit="100KiB"), ranks) for ranks in (1, 2))
    assert alone is not None and two is not None and two.question.gpus == 2
    assert two.phases[GRADIENT].peak["weights"] < alone.phases[GRADIENT].peak["weights"]


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(refusal, "free_memory", lambda device: 1 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    seen = []
    monkeypatch.setattr(refusal, "generous_estimate", lambda *_: 1 << 40)
    monkeypatch.setattr(refusal, "plan_if_too_large", lambda question: seen.append(question))
    check_memory(tiny(), ranks=16)
    assert [(question.gpus, question.device_limit) for question in seen] == [(16, 1 << 27)]


def test_small_runs_are_not_rehearsed(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("rehearsed")

    monkeypatch.setattr(refusal, "plan_memory", fail)
    assert check_memory(tiny(limit="1GiB")) is None


def test_what_is_free_is_the_limit(monkeypatch):
    monkeypatch.setattr(refusal, "free_memory", lambda device: 1 << 20 if device == torch.device("cpu") else None)
    assert check_memory(tiny()) is not None
    monkeypatch.setattr(refusal, "free_memory", lambda device: None)
    assert check_memory(tiny()) is None


def test_what_cannot_be_planned_is_let_through(monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("an odd operation")

    monkeypatch.setattr(module, "rehearse", fail)
    monkeypatch.setattr(module, "_rehearsed", {})
    assert check_memory(tiny(limit="1MiB")) is None and "an odd operation" in caplog.text
    absent = make_config(model={"name_or_path": "/no/such/model"}, memory={"limit": "1MiB"})
    assert check_memory(absent) is None


def test_prompts_are_as_long_as_those_of_the_data():
    model = module.model_config_of("builtin:tiny-llama")[0]
    short, longest = (
        plan_memory(ask(tiny(), model=model, shape=Shape(n, 8, 4, 4), accelerator=False)).peak for n in (16, 128)
    )
    assert short < longest and check_memory(tiny(limit=f"{(short + longest) // 2}B")) is None
    found = check_memory(tiny(limit=f"{short - 1}B"))
    assert found is not None and found.question.shape.prompt == 16


def test_the_data_is_read_only_if_the_longest_prompts_would_not_fit(monkeypatch):
    def fail(config):
        raise AssertionError("read")

    monkeypatch.setattr(refusal, "longest_prompt", fail)
    assert check_memory(tiny(limit="1GiB")) is None
    with pytest.raises(AssertionError, match="read"):
        check_memory(tiny(limit="1MiB"))


def test_the_longest_prompt_is_read_from_the_data(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "d.jsonl").write_text('{"prompt": "12345", "answer": "1"}\n{"prompt": "1234567", "answer": "1"}\n')
    data = {"name": str(tmp_path / "d.jsonl"), "chat": False, "prompt_column": "prompt", "answer_column": "answer"}
    assert refusal.longest_prompt(make_config(model={"name_or_path": "builtin:tiny-llama"}, data=data)) == 7


def phases_planned(monkeypatch):
    asked = []

    def noted(question, phases, **options):
        asked.append(set(phases))
        return plan_memory(question, phases, **options)

    monkeypatch.setattr(
        refusal, "plan_memory", lambda q, phases=(ROLLOUT, GRADIENT, UPDATE), **o: noted(q, phases, **o)
    )
    return asked


def test_what_settles_nothing_is_not_rehearsed(monkeypatch):
    """The update where a bound of it fits, and all that fitted when only the prompts get shorter."""
    asked = phases_planned(monkeypatch)
    config = tiny()
    model = module.model_config_of("builtin:tiny-llama")[0]
    long = plan_memory(ask(config, model=model, shape=Shape(128, 8, 4, 4), accelerator=False))
    gradient, rest = long.phases[GRADIENT].peak_bytes, max(long.phases[n].peak_bytes for n in (ROLLOUT, UPDATE))
    assert rest < gradient
    assert check_memory(tiny(limit=f"{gradient - 1}B")) is None
    assert asked[0] == {ROLLOUT, GRADIENT} and ROLLOUT not in set().union(*asked[1:])


def test_an_update_that_does_not_fit_is_found(monkeypatch):
    config = make_config(method=LOGRA["random"], trust={"enabled": True, "probe_rollouts": 8})
    shape = Shape(2, 30, 1, 1)
    question = ask(config, shape=shape, accelerator=False)
    plan = plan_memory(question)
    assert plan.worst == UPDATE
    tight = refusal.replace(question, device_limit=plan.peak - 1)
    found = refusal.plan_if_too_large(tight)
    assert found is not None and found.worst == UPDATE
    assert refusal.plan_if_too_large(refusal.replace(question, device_limit=plan.peak)) is None


@pytest.mark.parametrize("shape", [Shape(2, 2, 1, 1), Shape(100, 200, 2, 8), Shape(24, 1000, 1, 1)])
@pytest.mark.parametrize(
    ("sections", "model"),
    [
        ({"method": {"name": "dense"}}, llama()),
        ({"method": {"name": "lora"}}, llama()),
        ({"method": LOGRA["random"]}, llama()),
        ({"method": LOGRA["aligned adam"], "trust": {"enabled": True, "probe_rollouts": 4}}, llama()),
        ({"method": {**LOGRA["aligned adam"], "weights": "split"}, "model": {"dtype": "bfloat16"}}, llama()),
        ({"trust": {"enabled": True, "mode": "finite_difference", "verify": True}}, llama()),
        ({"trust": {"enabled": True}, "model": {"attn_implementation": "eager"}}, llama()),
        ({"trust": {"enabled": True, "probe_rollouts": 3}}, gemma(2)),
        ({"method": LOGRA["beside"], "trust": {"enabled": True}}, llama()),
    ],
)
def test_the_bound_of_the_update_is_above_it(sections, model, shape):
    plan = plan_memory(ask(make_config(**sections), model=model, shape=shape, accelerator=False))
    assert plan.phases[UPDATE].peak_bytes < generous_update(plan.question, plan)


def test_a_limit_that_is_no_size():
    with pytest.raises(ConfigError, match="no size of memory"):
        tiny(limit="lots")
