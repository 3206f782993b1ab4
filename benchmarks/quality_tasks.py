"""The arms, the tasks and the rewards of benchmarks/quality.py: plain data first, then what they need.

No heavy import: the reward's worker processes load this file.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]

# name -> the keys of `method`; everything else is the same for all arms
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"name": "dense"},
    "lora-16": {"name": "lora", "rank": 16},
    "random-16": {"name": "logra", "basis": "random", "optimizer": "row_adam", "rank": 16},
    "random-64": {"name": "logra", "basis": "random", "optimizer": "row_adam", "rank": 64},
    "random-256": {"name": "logra", "basis": "random", "optimizer": "row_adam", "rank": 256},
    "aligned-8": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 8},
    "aligned-16": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 16},
    "aligned-64": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 64},
    "aligned-16-adam": {"name": "logra", "basis": "aligned", "optimizer": "adam", "rank": 16},
    # what explains the others; only with --arms
    "dense-no-momentum": {"name": "dense", "betas": [0.0, 0.95]},
    "random-4": {"name": "logra", "basis": "random", "optimizer": "row_adam", "rank": 4},
    "aligned-4": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 4},
    "random-1": {"name": "logra", "basis": "random", "optimizer": "row_adam", "rank": 1},
    "aligned-1": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 1},
    "aligned-8-15-bits": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 8, "bits": 15},
    "aligned-16-explore": {"name": "logra", "basis": "aligned", "optimizer": "row_adam", "rank": 16, "explore": 4},
}
BY_DEFAULT = tuple(ARMS)[: tuple(ARMS).index("dense-no-momentum")]
TUNING_SEED = 0  # of the trials, which use no other; the seeds that are reported start at 1

# updates: of one run. trials: lrs tried per arm, first `lr`, its half and its double. The rest shapes the run.
TASKS: dict[str, dict[str, Any]] = {
    # A random two-layer model (hidden 256) learns to answer two characters with the code of the second: a table of 32
    # entries, rewarded by the share of equal bits, so that every sample tells something and no constant reply does well.
    "tiny": {
        "updates": 40,
        "trials": 4,
        "rows": "code",
        "held_out": 256,
        "model": {"hidden": 256, "spread": 0.07, "seed": 0},
        "reward": {"function": "quality_tasks.py:equal_bits", "name": "equal_bits"},
        "config": {
            "rollout": {"prompts_per_step": 96, "rollouts_per_prompt": 8, "max_new_tokens": 1},
            "algorithm": {"advantage": "dr_grpo"},
            "train": {"microbatch_size": 384},
        },
        "lr": {
            "dense": 1e-3, "lora-16": 4e-3, "random-16": 2e-3, "random-64": 1.5e-3, "random-256": 1e-3,
            "aligned-8": 4e-3, "aligned-16": 3e-3, "aligned-64": 2e-3, "aligned-16-adam": 6e-3,
            "dense-no-momentum": 1e-3, "random-4": 4e-3, "aligned-4": 8e-3, "random-1": 8e-3, "aligned-1": 3.2e-2,
            "aligned-8-15-bits": 4e-3, "aligned-16-explore": 3e-3,
        },
    },
    # A real model learns to answer sums of two-digit numbers and products with a one-digit one: some it answers at once, many
    # it has to learn, and none of the methods is through with it after 30 updates.
    "smol": {
        "updates": 30,
        "trials": 3,
        "rows": "arithmetic",
        "held_out": 128,
        "model": "models/SmolLM2-135M-Instruct",
        "reward": {"function": "numeric_match", "params": {"extract": "last_integer"}},
        "config": {
            "rollout": {"prompts_per_step": 8, "rollouts_per_prompt": 8, "max_new_tokens": 4},
            "algorithm": {"advantage": "dr_grpo"},
            "train": {"microbatch_size": 64},
        },
        "lr": {
            "dense": 1e-5, "lora-16": 2e-4, "random-16": 1e-5, "random-64": 1e-5, "random-256": 1e-5,
            "aligned-8": 4e-5, "aligned-16": 4e-5, "aligned-64": 2e-5, "aligned-16-adam": 4e-5,
            "dense-no-momentum": 1e-5, "random-4": 1e-5, "aligned-4": 4e-5, "random-1": 1e-5, "aligned-1": 4e-5,
            "aligned-8-15-bits": 4e-5, "aligned-16-explore": 4e-5,
        },
    },
}  # fmt: skip

CODE_ALPHABET = "0123456789abcdefghijklmnopqrstuv"  # 32 characters of the tiny tokenizer: 5 bits each


def code_rows() -> list[Row]:
    """All 1024 pairs of characters; the answer to a pair is the code of its second: a fixed permutation."""
    shuffled = random.Random(99).sample(CODE_ALPHABET, len(CODE_ALPHABET))
    code = dict(zip(CODE_ALPHABET, shuffled, strict=True))
    return [{"prompt": a + b, "answer": code[b]} for a, b in itertools.product(CODE_ALPHABET, repeat=2)]


def arithmetic_rows() -> list[Row]:
    """All 720 products of a one-digit and a two-digit number, and as many of the sums of two two-digit numbers."""
    products = [
        {"prompt": f"Calculate: {a} * {b} =", "answer": str(a * b)} for a in range(2, 10) for b in range(10, 100)
    ]
    pairs = list(itertools.product(range(10, 100), repeat=2))
    sums = [{"prompt": f"Calculate: {a} + {b} =", "answer": str(a + b)} for a, b in pairs]
    return products + random.Random(7).sample(sums, len(products))


ROWS = {"code": code_rows, "arithmetic": arithmetic_rows}


def split_rows(kind: str, held_out: int) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): disjoint, shuffled, the same for every run."""
    rows = ROWS[kind]()
    random.Random(5).shuffle(rows)
    return rows[held_out:], rows[:held_out]


def equal_bits(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of equal bits between the places of the reply's first character and of the answer in the alphabet, in [0, 1].

    1 only for the answer itself; 0 for a character outside the alphabet; 1/2 on average for any constant reply.
    """
    return [_bits(text[:1], right) for text, right in zip(completions, answer, strict=True)]


def _bits(given: str, right: str) -> float:
    if not given or given not in CODE_ALPHABET:
        return 0.0
    different = CODE_ALPHABET.index(given) ^ CODE_ALPHABET.index(right)
    return 1.0 - different.bit_count() / 5


def materialise(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The sections of a configuration that name files: data, eval data, reward and model, written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, rows in zip(("train", "held_out"), split_rows(task["rows"], task["held_out"]), strict=True):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(_lines(rows)))
    reward = dict(task["reward"])
    if ".py:" in reward["function"]:
        reward["function"] = str(Path(__file__).resolve().parent / reward["function"])
    return {
        "model": {"name_or_path": _model(task["model"], folder / "model"), "device": "cpu"},
        "data": {"name": str(files["train"]), "chat": False, "answer_column": "answer"},
        "reward": {"functions": [reward], "workers": 1},
        "eval": {"num_prompts": task["held_out"], "data": {"name": str(files["held_out"])}},
    }


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    return (json.dumps(row) + "\n" for row in rows)


def _model(model: str | dict[str, Any], folder: Path) -> str:
    """The path of a model; one that is given by its shape is made: the same random weights for every run."""
    if isinstance(model, str):
        return str(Path(__file__).resolve().parents[1] / model)
    import transformers

    from logra.rl.tiny import char_tokenizer, tiny_model

    transformers.utils.logging.disable_progress_bar()
    tiny_model(**model).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)
