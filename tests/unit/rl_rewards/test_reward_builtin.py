"""The built-in reward functions, called in this process."""

import json
from typing import Any

import pytest

from logra.errors import RewardError
from logra.rl.rewards.builtin import Reply, make_builtin, soft_overlong
from logra.rl.rewards.spec import Score


def judge(name: str, text: str, row: dict[str, Any] | None = None, num_tokens: int = 1, **params: Any) -> Score:
    return make_builtin(name, params)(Reply("q", text, [0] * num_tokens, row or {}))


@pytest.mark.parametrize(
    ("text", "answer", "params", "value", "status"),
    [
        ("I get 72", "72", {}, 1.0, "scored"),
        ("I get 72.0", 72, {}, 1.0, "scored"),
        ("I get 72", 72.0, {}, 1.0, "scored"),
        ("I get 1,234", "1234", {}, 1.0, "scored"),
        ("I get 72", "12 * 6 = 72\n#### 72", {}, 1.0, "scored"),
        ("I get 71", "72", {}, 0.0, "wrong"),
        ("I do not know", "72", {}, 0.0, "unparseable"),
        ("", "72", {}, 0.0, "unparseable"),
        ("0.333", "0.3333", {}, 0.0, "wrong"),
        ("0.333", "0.3333", {"tolerance": 0.001}, 1.0, "scored"),
        ("0.1", "0.3", {"tolerance": 0.2}, 1.0, "scored"),  # in binary 0.3 - 0.1 < 0.2 and 0.1 + 0.2 > 0.3
        ("7 (or 3.5)", "7", {"extract": "last_integer"}, 1.0, "scored"),
        ("7 <answer>8</answer>", "8", {"extract": "answer_tag"}, 1.0, "scored"),
        ("<answer>eight</answer>", "8", {"extract": "answer_tag"}, 0.0, "unparseable"),
        ("-3", "3", {}, 0.0, "wrong"),
        ("anything", None, {}, None, "abstain"),
        ("1" * 40 + "1", "1" * 40 + "2", {}, 0.0, "wrong"),
    ],
)
def test_numeric_match(text: str, answer: Any, params: dict[str, Any], value: float | None, status: str) -> None:
    assert judge("numeric_match", text, {"answer": answer}, **params) == Score(value, status)  # type: ignore[arg-type]


def test_a_reference_without_a_number_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(RewardError, match="'blue' holds no number"):
        judge("numeric_match", "5", {"answer": "blue"})


def test_exact_match() -> None:
    assert judge("exact_match", " Paris \n", {"answer": "Paris"}) == Score(1.0)
    assert judge("exact_match", "paris", {"answer": "Paris"}) == Score(0.0, "wrong")
    assert judge("exact_match", "paris", {"answer": "Paris"}, ignore_case=True) == Score(1.0)
    assert judge("exact_match", "well:\nParis", {"answer": "Paris"}, extract="last_line") == Score(1.0)
    assert judge("exact_match", "  ", {"answer": "Paris"}).status == "unparseable"
    assert judge("exact_match", "Paris", {"answer": None}).status == "abstain"


def test_format_matches_the_whole_reply_or_a_part() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    good = "<think>a\nb</think>\n<answer>1</answer>"
    assert judge("format", good, pattern=pattern) == Score(1.0)
    assert judge("format", good + " more", pattern=pattern) == Score(0.0, "wrong")
    assert judge("format", good + " more", pattern=pattern, mode="search") == Score(1.0)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)],
)
def test_length_is_daposs_soft_overlong_punishment(num_tokens: int, penalty: float) -> None:
    assert judge("length", "", num_tokens=num_tokens, max_tokens=100, cache_tokens=20).value == pytest.approx(penalty)
    assert soft_overlong(num_tokens, 100, 20) == pytest.approx(penalty)


@pytest.mark.parametrize(("num_tokens", "penalty"), [(50, 0.0), (25, -0.5), (75, -0.5), (0, -1.0), (500, -1.0)])
def test_length_target(num_tokens: int, penalty: float) -> None:
    assert judge("length", "", num_tokens=num_tokens, target_tokens=50).value == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("numeric_match", {"extract": "last_int"}, "last_integer"),
        ("numeric_match", {"tolerence": 1}, "did you mean 'tolerance'"),
        ("numeric_match", {"tolerance": -1.0}, "not negative"),
        ("numeric_match", {"tolerance": float("nan")}, "finite"),
        ("format", {}, "needs the option 'pattern'"),
        ("format", {"pattern": "("}, "no regular expression"),
        ("format", {"pattern": "a", "mode": "match"}, "'full' or 'search'"),
        ("length", {}, "max_tokens and cache_tokens"),
        ("length", {"max_tokens": 10, "cache_tokens": 11}, "max_tokens and cache_tokens"),
        ("length", {"max_tokens": 10, "cache_tokens": 0}, "max_tokens and cache_tokens"),
        ("length", {"target_tokens": 5, "max_tokens": 10}, "alone"),
    ],
)
def test_wrong_options_are_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make_builtin(name, params)


@pytest.mark.parametrize(
    ("text", "answer", "status"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", "scored"),
        (r"so $x = \frac{2}{4}$", r"\frac{1}{2}", "scored"),
        (r"\boxed{(1, 2)}", "$(1,2)$", "scored"),
        (r"\boxed{3}", "4", "wrong"),
        ("I cannot tell", "4", "unparseable"),
        ("4", None, "abstain"),
    ],
)
def test_math_verify(text: str, answer: str | None, status: str) -> None:
    pytest.importorskip("math_verify")
    score = judge("math_verify", text, {"answer": answer})
    assert score.status == status
    assert score.value == {"scored": 1.0, "wrong": 0.0, "unparseable": 0.0, "abstain": None}[status]


def test_reasoning_gym_uses_the_tasks_own_scorer_by_name() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", seed=1, size=1)[0]
    row = {key: entry[key] for key in ("question", "answer", "metadata")}
    assert row["metadata"]["source_dataset"] == "chain_sum"
    right, wrong = f"<answer>{row['answer']}</answer>", "<answer>no idea</answer>"
    assert judge("reasoning_gym", right, row) == Score(1.0)
    assert judge("reasoning_gym", right, {**row, "metadata": json.dumps(row["metadata"])}) == Score(1.0)
    assert judge("reasoning_gym", f"it is {row['answer']}", row, extract="last_integer") == Score(1.0)
    assert judge("reasoning_gym", right, {"answer": row["answer"]}, task="chain_sum") == Score(1.0)
    assert judge(
        "reasoning_gym", right, {"answer": None, "metadata": {}, "task": "chain_sum", "entry": entry}
    ) == Score(1.0)
    assert judge("reasoning_gym", wrong, row).value == 0.0
    assert judge("reasoning_gym", "no tag", row).status == "unparseable"
    assert judge("reasoning_gym", right, {**row, "metadata": None}).status == "abstain"
    with pytest.raises(RewardError, match="chain_sum"):
        judge("reasoning_gym", right, row, task="chain_sums")


def test_reasoning_gym_keeps_a_verifier_that_accepts_many_answers() -> None:
    """Countdown accepts any expression that reaches the target, which no comparison with the answer does."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("countdown", seed=3, size=1)[0]
    row = {key: entry[key] for key in ("question", "answer", "metadata")}
    other = f"({row['answer']})"
    assert judge("exact_match", f"<answer>{other}</answer>", row, extract="answer_tag").status == "wrong"
    assert judge("reasoning_gym", f"<answer>{other}</answer>", row) == Score(1.0)
