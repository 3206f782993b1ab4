"""What would fit a device: the largest microbatch, length, rank and number of responses decoded at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from logra.build.plan import Plan, Question, plan_memory, positions_of, with_method
from logra.memory.gauge import GRADIENT, ROLLOUT, UPDATE
from logra.memory.plan import PhasePlan
from logra.sketch import aligned, quantize

WHAT = ("microbatch", "length", "rank", "decoded")
# what -> phases to rehearse again. The update of logra is scaled instead: rehearsing its KL probe takes longest.
_AGAIN = {"microbatch": (GRADIENT,), "length": (ROLLOUT, GRADIENT), "rank": (GRADIENT,), "decoded": (ROLLOUT,)}
_GROWS = {
    "microbatch": ("activations",), "length": ("activations", "kv_cache"), "decoded": ("kv_cache",),
    "rank": ("sketch", "basis", "optimizer", "sync"),
}  # fmt: skip


def largest(plan: Plan, what: str) -> int | None:
    """About the largest microbatch, length, rank or number of responses decoded at once that fits the device; None: not even
    the least. Peaks of a phase grow with each nearly along a straight line, so a few rehearsals tell."""
    question = plan.question
    assert question.device_limit is not None
    least, most = 8 if what == "length" else 1, _most(question, what)
    for name, phase in plan.phases.items():  # one after the other: together their peaks have kinks
        peak = _peak_of(plan, what, name)
        found: int | None = most
        if peak is not None:
            guess = _guess(phase, question, what)
            found = search(peak, _value(question, what), phase.peak_bytes, question.device_limit, least, most, guess)
        elif phase.peak_bytes > question.device_limit:
            found = None
        if found is None:
            return None
        most = found
    return most


def _peak_of(plan: Plan, what: str, name: str) -> Callable[[int], int] | None:
    """The peak of one phase as a function of the value; None if it does not depend on it."""
    question, phase = plan.question, plan.phases[name]
    again = _AGAIN[what]
    if what == "rank" and question.config.method.name == "lora":
        again = (GRADIENT, UPDATE)
    if name in again:
        return lambda value: plan_memory(_changed(question, what, value), (name,)).phases[name].peak_bytes
    if what == "rank" or (what == "length" and question.config.trust.enabled):
        return lambda value: _scaled(phase, question, what, value)
    return None


def _guess(phase: PhasePlan, question: Question, what: str) -> int:
    """Where the line through nothing and what grows with the value meets the limit."""
    limit, value = question.device_limit or 0, _value(question, what)
    grows = sum(phase.peak.get(row, 0) for row in _GROWS[what])
    return value * (limit - phase.peak_bytes + grows) // grows if grows else 2 * value


def _scaled(phase: PhasePlan, question: Question, what: str, value: int) -> int:
    """The peak of a phase that is not rehearsed again."""
    ratio = value / _value(question, what)
    if what == "rank":
        return round(sum(size * (ratio if row in _GROWS[what] else 1.0) for row, size in phase.peak.items()))
    if what == "length" and question.config.trust.enabled:
        most = question.config.trust.probe_max_tokens  # of the KL probe, whose workspace is linear in its tokens
        ratio = max(1.0, min(value, most) / min(question.length, most))
        return round(sum(size * (ratio if row == "workspace" else 1.0) for row, size in phase.peak.items()))
    return phase.peak_bytes


def _value(question: Question, what: str) -> int:
    values = {"microbatch": question.shape.rows, "length": question.length, "decoded": question.shape.decoded}
    return (question.config.method.rank or 64) if what == "rank" else values[what]


def _most(question: Question, what: str) -> int:
    if what == "rank":
        method, hidden = question.config.method, int(getattr(question.model, "hidden_size", 1 << 12))
        if method.name != "logra":
            return hidden
        of_basis = aligned.LARGEST if method.basis == "aligned" else 1
        return min(hidden, (quantize.EXACT_LIMIT - 1) // (quantize.largest(method.bits) * of_basis))
    if what == "length":
        return positions_of(question.model) or 1 << 20
    return 1 << 12


def _changed(question: Question, what: str, value: int) -> Question:
    shape = question.shape
    if what == "rank":
        return replace(question, config=with_method(question.config, rank=value))
    if what == "length":
        prompt = max(1, round(value * shape.prompt / question.length))
        return replace(question, shape=replace(shape, prompt=prompt, response=max(1, value - prompt)))
    return replace(question, shape=replace(shape, **{"rows" if what == "microbatch" else "decoded": value}))


def search(
    peak: Callable[[int], int], start: int, known: int, limit: int, least: int, most: int, guess: int
) -> int | None:
    """The largest value from `least` to `most` with peak(value) <= limit, up to 3 % below it; peak(start) is `known`.

    From the first guess on, secants: the value whose peak the line through two others puts at the limit, until it fits and the
    next would hardly be larger.
    """
    points = {start: known}
    best = start if known <= limit and start <= most else None
    guess = min(most, max(least, guess))
    if guess == start:  # the guess says that it is it: look beside it
        guess = min(most, start + max(1, start // 32)) if known <= limit else max(least, start - max(1, start // 32))
    for _ in range(4):
        if guess in points:
            break
        points[guess] = peak(guess)
        if points[guess] <= limit:
            best = max(best or 0, guess)
        if best == most:
            break
        low, high = _around(points, limit)
        slope = max(1e-9, (points[high] - points[low]) / (high - low))
        guess = min(most, max(least, math.floor(low + (limit - points[low]) / slope)))
        if best is not None and best <= guess <= best * 1.03:
            break
    return best


def _around(points: Mapping[int, int], limit: int) -> tuple[int, int]:
    """Two values, one on each side of the limit if there are such, the nearest ones."""
    below = sorted(value for value, size in points.items() if size <= limit)
    above = sorted(value for value, size in points.items() if size > limit)
    if below and above and below[-1] < above[0]:
        return below[-1], above[0]
    low, high = sorted(points)[-2:] if below else sorted(points)[:2]
    return low, high
