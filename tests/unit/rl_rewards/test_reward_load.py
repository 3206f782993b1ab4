"""Finding user functions and checking what they return, in this process."""

from pathlib import Path
from typing import Any

import pytest

from logra.errors import RewardError
from logra.rl.rewards.load import Batch, ContractError, as_score, as_scores, find, load
from logra.rl.rewards.spec import RewardSpec, Score, path_of

FILE = str(Path(__file__).with_name("reward_functions.py"))


def run(spec: RewardSpec, completions: list[Any], **columns: list[Any]) -> list[Score]:
    count = len(completions)
    batch = Batch(["q"] * count, completions, [[1, 2]] * count, columns)
    return [score for part in load(spec).score(batch) for score in part]


def values(name: str, completions: list[Any], **columns: list[Any]) -> list[float | None]:
    return [score.value for score in run(RewardSpec(f"{FILE}:{name}"), completions, **columns)]


def test_a_trl_function_gets_lists_and_every_column() -> None:
    assert values("lengths", ["a", "bcd"], answer=[1, 2]) == [1.0, 3.0]
    assert values("sees", ["a"], answer=["1"], level=[2]) == [1 + 10 + 100 + 2000 + 20000]
    assert values("chat_content", [[{"role": "assistant", "content": "3"}]]) == [3.0]


def test_a_function_without_kwargs_gets_only_what_it_names() -> None:
    spec = RewardSpec(f"{FILE}:named_only")
    assert load(spec).needs == ("answer",)
    assert [s.value for s in run(spec, ["a", "b"], answer=["a", "x"], level=[1, 2])] == [1.0, 0.0]
    assert load(RewardSpec(f"{FILE}:lengths")).needs == ()


def test_params_are_further_arguments() -> None:
    spec = RewardSpec(f"{FILE}:scaled", params={"factor": 3.0})
    assert [s.value for s in run(spec, ["ab"])] == [6.0]
    with pytest.raises(RewardError, match=r"no parameter 'facter'.*did you mean 'factor'"):
        load(RewardSpec(f"{FILE}:scaled", params={"facter": 3.0}))


def test_async_none_bool_and_nested_functions() -> None:
    assert values("slow_async", ["a", "b"]) == [1.0, 1.0]
    assert values("only_numbers", ["12", "x"]) == [1.0, None]
    assert values("bools", ["yes", "no"]) == [1.0, 0.0]
    assert values("Judge.fair", ["a"]) == [0.5]


def test_exceptions_are_counted_with_their_traceback() -> None:
    for name, text in (("raises", "the judge lost its key"), ("exits", "SystemExit")):
        scores = run(RewardSpec(f"{FILE}:{name}"), ["a", "b"])
        assert [(s.value, s.status) for s in scores] == [(None, "error")] * 2
        assert text in scores[0].message


def test_nan_and_infinity_are_errors_of_that_rollout() -> None:
    scores = run(RewardSpec(f"{FILE}:some_nan"), ["nan", "x", "inf"])
    assert [(s.value, s.status) for s in scores] == [(None, "error"), (1.0, "scored"), (None, "error")]
    assert scores[0].message == "returned nan: a reward must be finite and at most 1e+18 in size"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_short", "'too_short' returned 1 values for 2 completions"),
        ("strings", r"'strings' returned a str as a reward.*float\(x\)"),
        ("array", r"'array' returned a ndarray.*tolist"),
        ("tensors", r"'tensors' returned a Tensor as a reward.*item"),
        ("single_number", "'single_number' returned a float"),
    ],
)
def test_a_broken_contract_names_the_function_and_the_fix(name: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        run(RewardSpec(f"{FILE}:{name}"), ["a", "b"])


def test_numbers_of_any_kind_are_accepted() -> None:
    import numpy

    given = [1, True, numpy.float32(0.5), numpy.int64(2), Score(0.0, "unparseable"), None]
    assert [s.value for s in as_scores(given, 6, "f")] == [1.0, 1.0, 0.5, 2.0, 0.0, None]
    assert as_score(Score(0.0, "unparseable"), "f").status == "unparseable"
    assert as_score(Score(float("nan"), "wrong"), "f").status == "error"
    with pytest.raises(ContractError, match="did you mean 'wrong'"):
        as_score(Score(0.0, "wrongg"), "f")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{FILE}:lenghts", "no 'lenghts' in .*did you mean 'lengths'"),
        (f"{FILE}:Judge.fare", "did you mean 'fair'"),
        (f"{FILE}:NOT_CALLABLE", "is a int, not a function"),
        (FILE.replace("functions", "function") + ":lengths", "did you mean reward_functions.py"),
        ("no_such_package.rewards.f", "no module 'no_such_package'"),
        ("math.sqr", "no 'sqr' in math; did you mean 'sqrt'"),
        ("logra.rl.rewards.extrac.whole", "no 'extrac' in logra.rl.rewards"),
        (__file__ + "x:f", "no reward file"),
    ],
)
def test_a_wrong_path_names_the_nearest(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        find(path)


def test_a_dotted_path_is_found() -> None:
    assert find("math.sqrt")(4.0) == 2.0
    assert find("logra.rl.rewards.extract.whole")(" a ") == "a"


def test_positional_only_parameters_are_refused() -> None:
    with pytest.raises(RewardError, match="positional-only"):
        load(RewardSpec(f"{FILE}:positional"))


def test_a_module_that_fails_to_import_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "broken_rewards.py"
    bad.write_text("import no_such_dependency\n")
    with pytest.raises(RewardError, match="no_such_dependency"):
        find(f"{bad}:f")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardError, match="no_such_dependency"):
        find("broken_rewards.f")


def test_a_reward_file_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 4.0\n")
    (tmp_path / "with_neighbour.py").write_text(
        "from neighbour_of_reward import VALUE\ndef f(completions): return [VALUE] * len(completions)\n"
    )
    assert [s.value for s in run(RewardSpec(f"{tmp_path}/with_neighbour.py:f"), ["a"])] == [4.0]


def test_verl_functions_get_their_four_arguments() -> None:
    spec = RewardSpec(f"{FILE}:compute_score", kind="verl", params={"bonus": 0.5})
    assert [s.value for s in run(spec, ["4", "5"], ground_truth=["4", "4"])] == [1.5, 0.5]
    assert [s.value for s in run(spec, ["4"], answer=["4"])] == [1.5]
    assert [s.value for s in run(spec, ["4"], reward_model=[{"ground_truth": "4"}])] == [1.5]
    assert [s.value for s in run(spec, ["4"], answer=["4"], data_source=["dict"])] == [1.5]
    chat = [[{"role": "assistant", "content": "4"}]]
    assert [s.value for s in run(spec, chat, answer=["4"])] == [1.5]
    mixed = run(spec, ["raise", "4"], answer=["4", "4"])
    assert [s.status for s in mixed] == ["error", "scored"]


def test_path_of_a_function() -> None:
    assert path_of(as_score) == "logra.rl.rewards.load.as_score"
    with pytest.raises(RewardError, match="lambda"):
        path_of(lambda completions: [1.0])

    def nested(completions):
        return [1.0]

    with pytest.raises(RewardError, match="top level"):
        RewardSpec(nested)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": float("nan")}, "weight must be finite"),
        ({"kind": "trll"}, "'trl' or 'verl'"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s must be positive"),
    ],
)
def test_a_wrong_spec_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardSpec("numeric_match", **options)


def test_names_default_to_the_functions_own() -> None:
    assert RewardSpec("numeric_match").name == "numeric_match"
    assert RewardSpec("a.b.judge").name == "judge"
    assert RewardSpec("dir/file.py:judge").name == "judge"
    assert RewardSpec("a.b.judge", name="mine").name == "mine"
