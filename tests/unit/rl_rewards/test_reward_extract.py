"""Answers read from replies."""

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra.rl.rewards.extract import (
    EXTRACTORS,
    answer_tag,
    boxed,
    last_integer,
    last_line,
    last_number,
    parse_number,
    whole,
)


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("the answer is 42", "42"),
        ("so 3 apples and 4 pears make 7.", "7"),
        ("it costs $1,234", "1234"),
        ("1,234,567 people", "1234567"),
        ("1{,}234", "1234"),
        ("-3", "-3"),
        ("= -3", "-3"),
        ("x=-3", "-3"),
        ("10-3", "3"),
        ("a-3", "3"),
        ("\u22123", "-3"),
        ("+5", "5"),
        ("3.0", "3"),
        ("7, or about 3.5 each", "7"),
        ("-0", "0"),
        ("007", "7"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        (r"thus \boxed{42}. Check: 6 * 7", "42"),
        (r"$\boxed{-1,000}$", "-1000"),
        (r"\boxed{no number} 5", "5"),
        (r"\boxed{5", "5"),
        ("2e3", "2000"),
        ("9" * 5000, "9" * 5000),
        ("answer5", "5"),
        ("3.5", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_integer(text: str, integer: str | None) -> None:
    assert last_integer(text) == integer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("pi is 3.14", "3.14"),
        ("about .5", "0.5"),
        ("1,234.50 dollars", "1234.50"),
        ("-2.5e-3", "-0.0025"),
        ("3/4", "4"),
        (r"\boxed{2.5} and 9", "2.5"),
        ("v1.2.3", "3"),
        ("ends with 12.", "12"),
        ("no", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("-3", -3),
        ("3.0", 3),
        ("$5", 5),
        ("50%", 50),
        (r"\boxed{7}", 7),
        (r"The answer is \boxed{1{,}000}", 1000),
        ("\u22122", -2),
        ("1e3", 1000),
        ("1e9999", None),
        ("12 apples", None),
        ("1,23", None),
        ("nan", None),
        ("", None),
    ],
)
def test_parse_number(text: str, value: int | None) -> None:
    assert parse_number(text) == value


@given(st.integers(-(10**40), 10**40))
def test_any_integer_is_read_back_exactly(value: int) -> None:
    for text in (f"it is {value}", f"it is {value:,}", rf"\boxed{{{value}}} of 9", f"{value}.0"):
        assert last_integer(text) == str(value)
    assert parse_number(f"{value:,}") == Decimal(value)


@given(st.text(alphabet="0123456789.,-+eE\\boxed{}<>/answr \n", max_size=60))
def test_extractors_take_any_text_and_their_numbers_parse(text: str) -> None:
    for extract in EXTRACTORS.values():
        found = extract(text)
        assert found is None or isinstance(found, str)
    for extract in (last_integer, last_number):
        found = extract(text)
        assert found is None or parse_number(found) is not None


def test_boxed_takes_the_last_complete_box_with_balanced_braces() -> None:
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}} then \boxed{3") == r"\frac{1}{2}"
    assert boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert boxed(r"\boxed{\boxed{5}}") == "5"
    assert boxed(r"\fbox{ 4 }") == "4"
    assert boxed("} 3 {") is None


def test_answer_tag_takes_the_last_complete_pair() -> None:
    assert answer_tag("<answer>1</answer> no <ANSWER>\n 2 </ANSWER> <answer>3") == "2"
    assert answer_tag("<answer>draft <answer>5</answer>") == "5"
    assert answer_tag("5</answer>") is None


def test_whole_and_last_line() -> None:
    assert whole("  a\nb \n") == "a\nb"
    assert last_line("  a\n b \n\n") == "b"
    assert whole(" \n ") is None
    assert last_line(" \n ") is None


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "<answer>", "1,", "123,", "-", "1.", "1e", "9"])
def test_a_degenerate_reply_takes_linear_time(piece: str) -> None:
    """A quadratic extractor needs minutes for 200,000 repetitions."""
    start = time.monotonic()
    for extract in EXTRACTORS.values():
        extract(piece * 200_000)
    assert time.monotonic() - start < 20
