r"""The built-in reward functions. Each is a factory: options in, a function of one rollout out.

Correctness functions give 1 for right and 0 for wrong or unparseable, and say which of the two it was.
A rollout whose prompt has no reference answer is left to other functions (abstain); a reference that cannot
be read is a fault of the data and counts as an error.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

from logra.errors import RewardError, UserError
from logra.rl.rewards.extract import EXTRACTORS, Extractor, last_number, parse_number
from logra.rl.rewards.spec import Score


@dataclass(frozen=True)
class Reply:
    """One rollout as a built-in sees it. text: what the assistant wrote. row: the prompt's columns."""

    prompt: Any
    text: str
    token_ids: list[int]
    row: dict[str, Any]


Scorer = Callable[[Reply], Score]


@dataclass(frozen=True)
class Builtin:
    make: Callable[..., Scorer]
    needs: tuple[str, ...]


BUILTINS: dict[str, Builtin] = {}
ABSTAIN = Score(None, "abstain")
UNPARSEABLE = Score(0.0, "unparseable")


def builtin(name: str, *needs: str) -> Callable[[Callable[..., Scorer]], Callable[..., Scorer]]:
    """Register a factory under `name`; `needs` are the columns that it reads."""

    def register(make: Callable[..., Scorer]) -> Callable[..., Scorer]:
        BUILTINS[name] = Builtin(make, needs)
        return make

    return register


def make_builtin(name: str, params: dict[str, Any]) -> Scorer:
    """The scorer of the built-in `name`. RewardError for an option it does not have or lacks."""
    make = BUILTINS[name].make
    options = inspect.signature(make).parameters
    for key in params:
        if key not in options:
            raise RewardError(f"reward {name!r} has no option {key!r}; {nearest(key, options)}")
    lacking = [k for k, o in options.items() if o.default is inspect.Parameter.empty and k not in params]
    if lacking:
        raise RewardError(f"reward {name!r} needs the option {lacking[0]!r}: set it under params")
    return make(**params)


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean ...?' for close names, else the list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "there are: " + ", ".join(names[:20]) if names else "there are none"


def verdict(value: float) -> Score:
    """A judged answer: wrong if it is worth nothing."""
    return Score(value, "scored" if value > 0 else "wrong")


@builtin("numeric_match", "answer")
def numeric_match(extract: str = "last_number", tolerance: float = 0.0) -> Scorer:
    """1 if the extracted number is within `tolerance` (absolute) of the reference; decimal, so 0 is exact.

    The reference may be a number or a text that ends in one (GSM8K's "... #### 72").
    """
    read, allowed = _extractor("numeric_match", extract), _tolerance(tolerance)

    def score(reply: Reply) -> Score:
        if (answer := reply.row.get("answer")) is None:
            return ABSTAIN
        gold = _number(str(answer))
        if gold is None:
            raise RewardError(f"numeric_match: the reference answer {str(answer)[:80]!r} holds no number")
        value = parse_number(read(reply.text) or "")
        if value is None:
            return UNPARSEABLE
        return verdict(float(value == gold or abs(value - gold) <= allowed))

    return score


@builtin("exact_match", "answer")
def exact_match(extract: str = "all", ignore_case: bool = False) -> Scorer:
    """1 if the extracted text equals the reference, both stripped."""
    read = _extractor("exact_match", extract)

    def score(reply: Reply) -> Score:
        if (answer := reply.row.get("answer")) is None:
            return ABSTAIN
        if (found := read(reply.text)) is None:
            return UNPARSEABLE
        gold = str(answer).strip()
        return verdict(float(found.casefold() == gold.casefold() if ignore_case else found == gold))

    return score


@builtin("format")
def format_match(pattern: str, mode: str = "full") -> Scorer:
    """1 if the regular expression matches the whole reply ("full") or a part ("search"); DOTALL is on."""
    if mode not in ("full", "search"):
        raise RewardError(f"reward 'format': mode must be 'full' or 'search', got {mode!r}")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"reward 'format': {pattern!r} is no regular expression: {error}") from error
    match = compiled.fullmatch if mode == "full" else compiled.search
    return lambda reply: verdict(float(match(reply.text) is not None))


@builtin("length")
def length(max_tokens: int | None = None, cache_tokens: int | None = None, target_tokens: int | None = None) -> Scorer:
    """A penalty on the number n of sampled tokens (the end of sequence included), in [-1, 0].

    With max_tokens L and cache_tokens C: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13),
        0 for n <= L - C;  (L - C - n) / C for L - C < n <= L;  -1 for n > L.
    With target_tokens instead: -min(1, |n - target| / target), the length term of L1 (arXiv 2503.04697,
    eq. 1), scaled and bounded.
    """
    if target_tokens is not None:
        if max_tokens is not None or cache_tokens is not None or target_tokens < 1:
            raise RewardError("reward 'length': give target_tokens >= 1 alone, or max_tokens with cache_tokens")
        return lambda reply: Score(-min(1.0, abs(len(reply.token_ids) - target_tokens) / target_tokens))
    if max_tokens is None or cache_tokens is None or not 0 < cache_tokens <= max_tokens:
        raise RewardError("reward 'length': needs max_tokens and cache_tokens with 0 < cache_tokens <= max_tokens")
    return lambda reply: Score(soft_overlong(len(reply.token_ids), max_tokens, cache_tokens))


def soft_overlong(num_tokens: int, max_tokens: int, cache_tokens: int) -> float:
    """DAPO eq. 13; see `length`."""
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - cache_tokens)) / cache_tokens))


@builtin("math_verify", "answer")
def math_verify() -> Scorer:
    """1 if Math-Verify finds the reply's expression equal to the reference. Both may be LaTeX.

    Its own alarm is off: it needs a main thread, and code in C ignores it. The pool's limit stands in.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError("reward 'math_verify' needs Math-Verify: pip install 'logra[tasks]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that the alarm is off

    def score(reply: Reply) -> Score:
        if (answer := reply.row.get("answer")) is None:
            return ABSTAIN
        text = str(answer)
        gold = parse(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}", parsing_timeout=None)
        if not gold:
            raise RewardError(f"math_verify: the reference answer {text[:80]!r} cannot be parsed")
        found = parse(reply.text, parsing_timeout=None)
        return verdict(float(verify(gold, found, timeout_seconds=None))) if found else UNPARSEABLE

    return score


@builtin("reasoning_gym", "metadata", "answer")
def reasoning_gym(extract: str = "answer_tag", task: str | None = None) -> Scorer:
    """The task's own scorer, rebuilt by name: `task`, else metadata["source_dataset"]. Partial credit stays.

    Reads the columns answer, metadata (a mapping, or one as JSON) and question (if absent, the prompt), or
    the whole entry from the column "entry" if there is one.
    """
    read = _extractor("reasoning_gym", extract)
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ImportError as error:
        raise UserError("reward 'reasoning_gym' needs reasoning-gym: pip install 'logra[tasks]'") from error
    scorer_of = cache(get_score_answer_fn)

    def score(reply: Reply) -> Score:
        metadata = reply.row.get("metadata")
        if metadata is None and task is None:
            return ABSTAIN
        metadata = json.loads(metadata) if isinstance(metadata, str) else dict(metadata or {})
        name = task or metadata.get("source_dataset") or reply.row.get("task")
        if name not in DATASETS:
            raise RewardError(f"reasoning_gym has no task {name!r}; {nearest(str(name), DATASETS)}")
        entry = reply.row.get("entry") or {
            "question": reply.row.get("question") or message_text(reply.prompt),
            "answer": reply.row.get("answer"),
            "metadata": metadata,
        }
        found = read(reply.text)
        return UNPARSEABLE if found is None else verdict(float(scorer_of(name)(found, entry)))

    return score


def message_text(content: str | list[dict[str, str]]) -> str:
    """A plain string, or the text of the last chat message."""
    return content if isinstance(content, str) else content[-1]["content"] if content else ""


def _extractor(reward: str, name: str) -> Extractor:
    if name not in EXTRACTORS:
        raise RewardError(f"reward {reward!r}: no extractor {name!r}; {nearest(name, EXTRACTORS)}")
    return EXTRACTORS[name]


def _tolerance(tolerance: float) -> Decimal:
    if not 0 <= tolerance < float("inf"):
        raise RewardError(f"reward 'numeric_match': tolerance must be finite and not negative, got {tolerance}")
    return Decimal(str(tolerance))


def _number(text: str) -> Decimal | None:
    exact = parse_number(text)
    return exact if exact is not None else parse_number(last_number(text) or "")
