"""Reading an answer out of a reply. An extractor returns the answer's text, or None if there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

Extractor = Callable[[str], str | None]

# A minus sign counts only where it cannot be a subtraction ("10-3" ends in 3, "= -3" in -3). Exponents stop
# at three digits so that a reply cannot ask for a number of a million digits.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}.])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w]))?"
)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_LATEX = str.maketrans({"\u2212": "-", "\u2013": "-"})


def parse_number(text: str) -> Decimal | None:
    r"""The number that `text` is, exactly: "1,234", "-3", "3.0", "$5", "50%", "\boxed{7}". Else None."""
    inner = boxed(text)
    bare = _plain(text if inner is None else inner).strip(" \t\r\n$%")
    match = _NUMBER.fullmatch(bare)
    return _decimal(match.group()) if match else None


def last_number(text: str) -> str | None:
    r"""The last number of the reply, without thousands separators.

    A complete \boxed{...} that holds one goes first. No arithmetic: "3/4" reads as 3 and 4. "1,234" is one
    number, also inside a list.
    """
    numbers = _numbers(text)
    return _digits(numbers[-1]) if numbers else None


def last_integer(text: str) -> str | None:
    r"""The last number of the reply that is whole ("3.0" is 3, "3.5" is passed over), in plain digits.

    A complete \boxed{...} that holds one goes first.
    """
    inner = boxed(text)
    if inner is not None and (found := _last_whole(inner)) is not None:
        return found
    return _last_whole(text)


def boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, braces balanced. Linear in the text."""
    stack: list[int | None] = []
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            stack.append(None)
        elif token == "}":
            start = stack.pop() if stack else None
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
        elif len(token) > 2:
            stack.append(match.end())
    return None if best is None else text[best[0] : best[1]].strip()


def answer_tag(text: str) -> str | None:
    """The content of the last complete <answer>...</answer>, stripped."""
    start: int | None = None
    found: str | None = None
    for match in _TAG.finditer(text):
        if not match.group(1):
            start = match.end()
        elif start is not None:
            found, start = text[start : match.start()].strip(), None
    return found


def whole(text: str) -> str | None:
    """The whole reply, stripped; None if nothing is left."""
    return text.strip() or None


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


EXTRACTORS: dict[str, Extractor] = {
    "last_integer": last_integer,
    "last_number": last_number,
    "answer_tag": answer_tag,
    "boxed": boxed,
    "all": whole,
    "last_line": last_line,
}


def _plain(text: str) -> str:
    return text.translate(_LATEX).replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\$", "$")


def _decimal(token: str) -> Decimal:
    return Decimal(token.replace(",", ""))


def _digits(value: Decimal) -> str:
    return "0" if value == 0 else format(value, "f")


def _numbers(text: str) -> list[Decimal]:
    inner = boxed(text)
    found = [_decimal(m.group()) for m in _NUMBER.finditer(_plain(inner))] if inner is not None else []
    return found or [_decimal(m.group()) for m in _NUMBER.finditer(_plain(text))]


def _last_whole(text: str) -> str | None:
    for match in reversed(list(_NUMBER.finditer(_plain(text)))):
        value = _decimal(match.group())
        if value == value.to_integral_value():
            return _digits(value.to_integral_value())
    return None
