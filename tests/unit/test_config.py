"""Configuration: YAML, flags, faults with their fixes, and what is written back."""

import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from logra import config as cfg
from logra.config.yaml_text import _Loader
from logra.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("**/*.yaml"))
TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
MINIMAL = {
    "model": {"name_or_path": "builtin:tiny-llama"},
    "data": {"name": "reasoning_gym:products"},
    "reward": {"functions": [{"function": "format"}]},
}

fixed = settings(deadline=None, derandomize=True, max_examples=50)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
traps = st.sampled_from([
    "1e-6", "1e5", "-1E+3", "1.5e3", "010", "0x1f", "0b1", "1_000", "1:30", "on", "yes", "No", "true", "null", "~",
    "2026-01-02", ".inf", "-.INF", ".nan", ".5", "5.", "=", "<<", "'", "&a", "*a", "", "- a", "a: b", "# a", "a #b",
    " x", "x\n", "\r", "a\x85b", "\u2028", "\ufeff",
])  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | traps
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | traps, inner, max_size=3)
)
keys = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)


def make(**changes):
    return cfg.make_config(cfg.apply_overrides(MINIMAL, {k.replace("__", "."): v for k, v in changes.items()}))


def fault(**changes):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    return str(caught.value)


def load(tmp_path, text, *flags):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return cfg.load_config(path, flags)


def as_yaml(**changes):
    return yaml.safe_dump(cfg.apply_overrides(MINIMAL, changes))


# -- recipes -------------------------------------------------------------------------------------------------


def test_there_are_recipes():
    assert len(RECIPES) >= 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_reads_back_equal(path, tmp_path):
    config = cfg.load_config(path)
    assert load(tmp_path, cfg.to_yaml(config)) == config


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "1.e-6", "+1e-06", "0.000001", ".1e-5"])
def test_scientific_notation_is_a_number_in_yaml_and_in_flags(text, tmp_path):
    recipe = as_yaml()
    assert load(tmp_path, f"{recipe}\nmethod: {{lr: {text}}}\n").method.lr == 1e-6
    assert load(tmp_path, recipe, "--method.lr", text).method.lr == 1e-6
    assert load(tmp_path, recipe, f"--method.lr={text}").method.lr == 1e-6
    assert cfg.parse_value(text) == float(text) and isinstance(cfg.parse_value(text), float)


@pytest.mark.parametrize("text", ["010", "1:30", "on", "2026-01-02", "2026-13-01", "0x_", "=", "*a", "1e5x", "1__0"])
def test_what_only_yaml_1_1_reads_as_something_else_stays_text(text, tmp_path):
    assert cfg.parse_value(text) == text
    recipe = f"{as_yaml()}\nlog: {{project: '{text}'}}\n"
    assert load(tmp_path, recipe).log.project == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n", " Answer:", "Question: ", "# hint", "a # b", "- a", "x\n", "| a", "{", "a\tb"]
)
def test_text_flags_keep_spaces_colons_and_hashes(text, tmp_path):
    assert load(tmp_path, as_yaml(), "--data.prompt_suffix", text).data.prompt_suffix == text


def test_quotes_make_text_of_anything(tmp_path):
    assert load(tmp_path, as_yaml(), "--log.project", "'123'").log.project == "123"
    assert load(tmp_path, as_yaml(), "--log.project", '"a\\nb"').log.project == "a\nb"
    assert "log.project" in fault(log__project=123)


@pytest.mark.parametrize(("text", "value"), [("null", None), ("~", None), ("true", True), ("-3", -3), ("1_000", 1000)])
def test_other_scalars(text, value):
    assert cfg.parse_value(text) == value and type(cfg.parse_value(text)) is type(value)


def test_infinite_and_nan_numbers_are_refused():
    for value in (math.inf, math.nan, cfg.parse_value("1e999")):
        assert "method.lr" in fault(method__lr=value)


# -- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["seed: 1\nseed: 2\n", "method: {lr: 1e-5, lr: 1e-6}\n", "reward: {functions: [{weight: 1, weight: 2}]}"]
)
def test_a_key_given_twice_is_refused_with_its_line(text, tmp_path):
    with pytest.raises(ConfigError, match=r"given twice[\s\S]*line 1"):
        load(tmp_path, text)


def test_merge_keys_may_repeat_a_key(tmp_path):
    text = as_yaml() + "\nmethod: &m {lr: 1e-6, rank: 8}\n"
    assert load(tmp_path, text.replace("model:", "trust: {<<: {start: 1e-3}, start: 2e-3}\nmodel:")).trust.start == 2e-3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- a\n", "mapping"),
        (b"", "mapping"),
        (b"a: [1\n", "line"),
        (b"\xff\xfe\x00", "read"),
        (b"a: !!python/object:os.x {}", "read"),
    ],
)
def test_an_unreadable_recipe_is_a_config_error(content, words, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        cfg.load_config(path)


def test_a_missing_recipe_and_a_folder_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="no recipe at"):
        cfg.load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        cfg.load_config(tmp_path)


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("method__rnak", "method.rnak: unknown key; did you mean 'rank'?"),
        ("lr", "did you mean method.lr?"),
        ("train__lr", "train.lr: unknown key; did you mean method.lr?"),
        ("method__max_new_tokens", "did you mean rollout.max_new_tokens or eval.max_new_tokens?"),
        ("train__threads", "did you mean threads?"),
        ("metod", "metod: unknown key; did you mean 'method'?"),
        ("trust__zzzzzz", "valid keys: budget, enabled"),
        ("reward__functions", None),
    ],
)
def test_an_unknown_key_names_the_nearest(key, hint):
    if hint is None:
        text = fault(reward__functions=[{"function": "format", "wieght": 2}])
        assert "reward.functions.0.wieght: unknown key; did you mean 'weight'?" in text
    else:
        assert hint in fault(**{key: 1})


def test_an_unknown_key_of_eval_data_names_the_nearest():
    assert "eval.data: splitt: unknown key; did you mean 'split'?" in fault(eval__data={"splitt": "test"})


def test_all_faults_are_listed_at_once():
    text = fault(method__rank=0, train__steps="many", sead=1)
    assert all(part in text for part in ("method.rank", "train.steps", "sead", "'many'"))


def test_required_sections_are_named():
    with pytest.raises(ConfigError) as caught:
        cfg.make_config({"data": {}})
    text = str(caught.value)
    assert all(f"{key}: required and not given" in text for key in ("model", "data.name", "reward"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__top_p": 0.9}, "eval.top_p"),
        ({"rollout__top_k": 5}, "top_k"),
        ({"rollout__prompts_per_step": 9, "algorithm__updates_per_step": 2}, "not divisible"),
        ({"rollout__rollouts_per_prompt": 1}, "rollouts_per_prompt >= 2"),
        ({"eval__ks": [1, 4]}, "pass@4"),
        ({"eval__ks": [0]}, "pass@0"),
        ({"eval__ks": []}, "eval.ks"),
        ({"eval__rollouts_per_prompt": 4}, "greedy"),
        ({"model__dtype": "float16"}, "model.dtype"),
        ({"reward__functions": []}, "reward.functions"),
        ({"rollout__temperature": 0}, "rollout.temperature"),
        ({"method": "logra"}, "method"),
    ],
)
def test_impossible_combinations_are_refused(changes, words):
    assert words in fault(**changes)


def test_a_microbatch_is_no_larger_than_an_update():
    config = make(
        rollout__prompts_per_step=4,
        rollout__rollouts_per_prompt=2,
        algorithm__updates_per_step=2,
        train__microbatch_size=99,
    )
    assert config.train.microbatch_size == 4


def test_the_clip_range_defaults_to_the_losses_published_values():
    assert (make().algorithm.clip_low, make().algorithm.clip_high) == (0.2, 0.28)
    gspo = make(algorithm__loss="gspo").algorithm
    assert (gspo.clip_low, gspo.clip_high, gspo.aggregation) == (3e-4, 4e-4, "sequence")
    assert make(algorithm__loss="gspo", algorithm__clip_high=0.1).algorithm.clip_high == 0.1


# -- flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["method.lr", "1"], ["--"], ["-x", "1"], ["--method.lr"], ["--a", "1", "b"]])
def test_flags_that_are_no_pairs_are_refused(arguments):
    with pytest.raises(ConfigError, match=r"expected --section.key|needs a value"):
        cfg.parse_overrides(arguments)


def test_flags_take_dashes_equals_signs_and_negative_values():
    assert cfg.parse_overrides(["--output-dir", "a-b", "--data.prompt_prefix=x=y", "--eval.seed", "-1"]) == {
        "output_dir": "a-b",
        "data.prompt_prefix": "x=y",
        "eval.seed": -1,
    }


def test_overrides_reach_into_lists_and_absent_sections():
    data = cfg.apply_overrides(
        MINIMAL, {"reward.functions.0.weight": 2, "eval.num_prompts": 3, "eval.data.split": "test"}
    )
    assert data["reward"]["functions"] == [{"function": "format", "weight": 2}]
    assert data["eval"] == {"num_prompts": 3, "data": {"split": "test"}}
    assert MINIMAL["reward"]["functions"] == [{"function": "format"}]


@pytest.mark.parametrize("key", ["seed.x", "reward.functions.7.weight", "reward.functions.x", "data.name.x.y"])
def test_overrides_through_what_is_no_section_are_refused(key):
    with pytest.raises(ConfigError, match=f"--{key}"):
        cfg.apply_overrides({**MINIMAL, "seed": 1}, {key: 1})


@fixed
@given(
    st.dictionaries(keys, st.dictionaries(keys, values, max_size=3), max_size=3),
    st.lists(keys, min_size=1, max_size=3),
    values,
)
def test_an_override_sets_its_key_and_nothing_else(data, path, value):
    before = yaml.safe_dump(data, allow_unicode=True)
    dotted = ".".join(path)
    try:
        result = cfg.apply_overrides(data, {dotted: value})
    except ConfigError:
        node = data
        for part in path[:-1]:
            node = node[part] if isinstance(node, dict) else None
        assert not isinstance(node, dict)
        return
    node = result
    for part in path:
        node = node[part]
    assert node == value
    assert yaml.safe_dump(data, allow_unicode=True) == before
    assert {k: v for k, v in result.items() if k != path[0]} == {k: v for k, v in data.items() if k != path[0]}


@fixed
@given(texts | traps | st.text("0123456789-+.eExX_:#'\"[]{}&*!|>%@`, \n", max_size=8))
def test_any_flag_value_is_read_without_a_crash_and_text_is_kept(text):
    value = cfg.parse_value(text)
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"'):
        assert value == text


@fixed
@given(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none())
def test_flags_read_python_and_json_literals(value):
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    if value in (math.inf, -math.inf):
        text = {"inf": ".inf", "-inf": "-.inf"}[text]
    assert cfg.parse_value(text) == value and type(cfg.parse_value(text)) is type(value)


# -- writing -------------------------------------------------------------------------------------------------


@fixed
@given(st.dictionaries(texts | traps, values, max_size=3), texts | traps, st.floats(1e-12, 1e12), st.integers(), keys)
def test_what_is_written_reads_back_equal(params, text, lr, seed, name):
    config = make(
        data__params=params, data__prompt_prefix=text, data__system_prompt=text, method__lr=lr, seed=seed, log__project=name,
        eval__data={"params": params}, reward__functions=[{"function": "format", "params": params}],
    )  # fmt: skip
    loaded = yaml.load(cfg.to_yaml(config), Loader=_Loader)
    assert cfg.make_config(loaded) == config
    assert cfg.to_yaml(cfg.make_config(loaded)) == cfg.to_yaml(config)


def test_integer_keys_of_parameters_survive_writing():
    config = make(data__params={"weights": {1: 0.5, 2: 0.5}})
    assert yaml.load(cfg.to_yaml(config), Loader=_Loader)["data"]["params"] == {"weights": {1: 0.5, 2: 0.5}}


# -- identity ------------------------------------------------------------------------------------------------


def test_identity_covers_what_a_run_computes_and_differences_name_it():
    first = make()
    assert (
        cfg.differences(cfg.identity(first), cfg.identity(make(output_dir="x", checkpoint__every=1, train__steps=7)))
        == []
    )
    changed = cfg.differences(cfg.identity(first), cfg.identity(make(method__lr=0.5, seed=3)))
    assert changed == ["method.lr was 8e-05, is 0.5", "seed was 42, is 3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"method.name": "dense", "method.weights": "split"}, "belongs to method logra"),
        ({"method.name": "lora", "method.dense_params": ["norms"]}, "dense_params belongs to method logra"),
        ({"method.residual": "cpu"}, "needs weights=split"),
        ({"method.weights": "split"}, "set model.dtype to bfloat16"),
        ({"sync.serve": True, "method.name": "dense"}, "needs method logra"),
        ({"sync.serve": True, "journal.enabled": False}, "journal.enabled"),
        ({"sync.serve": True, "method.basis": "gaussian"}, "gaussian"),
        ({"sync.serve": True, "sync.host": "0.0.0.0"}, "sync.token_file"),
        ({"sync.subscribers": 1}, "set sync.serve to true"),
        ({"journal.keep_anchors": 1}, "needs journal.anchor_every"),
        ({"rollout.engine": "vllm", "method.name": "lora"}, "needs method logra"),
        ({"rollout.vllm.fetch": True}, "needs rollout.vllm.url and sync.serve"),
        ({"rollout.vllm.url": []}, "give one server's address, or a list of different ones"),
        ({"rollout.vllm.url": ["http://a:1", "http://a:1/"]}, "a list of different ones"),
        ({"rollout.vllm.url": ["http://a:1", "b:2"]}, "begins with http:// or https://, not 'b:2'"),
        ({"rollout.vllm.patience_s": 0}, "greater than 0"),
        ({"rollout.mismatch_limit": 0}, "greater than 0"),
    ],
)
def test_combinations_that_cannot_be(flags, words):
    data = cfg.apply_overrides(cfg.read_yaml(TINY), flags)
    with pytest.raises(ConfigError, match=re.escape(words)):
        cfg.make_config(data)


@pytest.mark.parametrize(
    ("text", "urls"),
    [("null", []), ("http://a:1", ["http://a:1"]), ('[http://a:1, "https://b:2"]', ["http://a:1", "https://b:2"])],
)
def test_one_server_or_several(text, urls):
    assert cfg.load_config(TINY, ["--rollout.vllm.url", text]).rollout.vllm.urls == urls


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("aligned", "adam", 16, 8e-5)),
        ({"method__basis": "aligned", "method__optimizer": "row_adam"}, ("aligned", "row_adam", 16, 8e-5)),
        ({"method__basis": "random"}, ("random", "row_adam", 64, 1e-5)),
        ({"method__refresh": False}, ("random", "row_adam", 64, 1e-5)),
        ({"method__bits": 15}, ("random", "row_adam", 64, 1e-5)),
        ({"method__name": "lora", "method__basis": "aligned"}, ("aligned", "row_adam", 64, 1e-5)),
        ({"method__name": "dense"}, ("random", "row_adam", 64, 1e-5)),
        ({"method__variant": "paper", "method__rank": 256}, ("random", "row_adam", 256, 1.0)),
    ],
)
def test_rank_and_lr_follow_the_basis(flags, expected):
    method = make(**flags).method
    assert (method.basis, method.optimizer, method.rank, method.lr) == expected


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"method__basis": "random", "method__optimizer": "adam"}, "drawn anew"),
        ({"method__basis": "random", "method__momentum": 0.9}, "drawn anew"),
        ({"method__basis": "aligned", "method__refresh": False}, "basis=random"),
        ({"method__basis": "aligned", "method__explore": 16}, "below rank"),
        ({"method__basis": "random", "method__explore": 2}, "aligned"),
        ({"method__basis": "aligned", "method__rank": 16, "method__bits": 15}, "is above 8"),
        ({"method__basis": "aligned", "method__rank": 2000}, "is above 1040"),
        ({"method__basis": "random", "method__rank": 1025, "method__bits": 15}, "is above 1024"),
        ({"method__basis": "aligned", "method__variant": "paper", "method__optimizer": "adam"}, "paper"),
    ],
)
def test_bases_and_optimizers_that_do_not_go_together(flags, match):
    with pytest.raises(ConfigError, match=match):
        make(**flags)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        ({"name": "galore", "options": {"rank": 3}}, "options.rank is method.rank"),
        ({"name": "galore_8bit", "options": {"state_bits": 32}}, "galore_8bit"),
        ({"name": "blockllm", "options": {"trigger": "plateau"}}, "trigger"),
        ({"name": "logra", "options": {"scale": 1.0}}, "options are those"),
    ],
)
def test_options_of_an_optimizer_do_not_shadow_the_methods(method, match):
    with pytest.raises(ConfigError, match=match):
        cfg.make_config({"model": {"name_or_path": "m"}, "data": {"name": "d"}, "method": method})


SERVER = {"rollout__engine": "vllm", "rollout__vllm__url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"rollout__async": 1}, r"engine=hf is the trained model itself: use a vLLM server .*rollout\.vllm\.url"),
        ({"rollout__async": 1, "rollout__engine": "vllm"}, "vLLM in the trainer's process: use a vLLM server"),
        (SERVER | {"rollout__async": 2, "algorithm__importance_cap": None}, r"algorithm\.importance_cap"),
        (SERVER | {"rollout__async": -1}, r"rollout\.async: .* greater than or equal to 0"),
        (SERVER | {"rollout__on_update": "restart"}, r"needs rollout\.async >= 1"),
        (SERVER | {"rollout__async": 1, "rollout__on_update": "drop"}, r"rollout\.on_update"),
        (
            SERVER
            | {"rollout__vllm__url": ["http://a", "http://b"], "rollout__async": 1, "rollout__on_update": "keep"},
            "one server only",
        ),
        ({"rollout__ahead": 1}, r"rollout\.ahead: unknown key; .*async"),
        ({"rollout__asynch": 1}, "did you mean 'async'"),
        ({"async": 1}, r"did you mean rollout\.async"),
    ],
)
def test_rollouts_ahead_need_an_engine_beside_the_trainer(flags, match):
    with pytest.raises(ConfigError, match=match):
        make(**flags)


def test_the_key_of_rollouts_ahead_is_async_everywhere(tmp_path):
    flags = cfg.parse_overrides(["--rollout.async", "2", "--rollout.on-update", "restart"])
    made = make(**SERVER, **{key.replace(".", "__"): value for key, value in flags.items()})
    assert (made.rollout.ahead, made.rollout.on_update) == (2, "restart")
    assert made.model_dump()["rollout"]["async"] == 2 and "ahead" not in made.model_dump(mode="json")["rollout"]
    path = tmp_path / "config.yaml"
    path.write_text(cfg.to_yaml(made))
    assert "  async: 2\n" in path.read_text() and cfg.load_config(path) == made


def test_how_far_ahead_is_no_part_of_what_a_resumed_run_must_keep():
    ahead = make(**SERVER, rollout__async=2, rollout__on_update="keep")
    assert cfg.identity(ahead) == cfg.identity(make(**SERVER))
