"""Published shapes of well-known models, for plans where no hub can be reached: `--model shape:qwen2.5-7b`.

Only what decides memory; `qwen-27b` is no published model, but a dense shape of 27.0 billion parameters.
"""

from __future__ import annotations

from typing import Any

PREFIX = "shape:"

_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
_MATH = {"max_position_embeddings": 4096}

_QWEN2_05B = _QWEN2 | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN2_15B = _QWEN2 | {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN2_7B = _QWEN2 | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN2_32B = _QWEN2 | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN2_05B,
    "qwen2.5-1.5b": _QWEN2_15B,
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2.5-32b": _QWEN2_32B,
    "qwen2.5-math-1.5b": _QWEN2_15B | _MATH,
    "qwen2.5-math-7b": _QWEN2_7B | _MATH,
    "qwen-27b": {
        "model_type": "qwen3", "max_position_embeddings": 40960, "hidden_size": 5120, "intermediate_size": 19712,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "max_position_embeddings": 131072, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama", "max_position_embeddings": 8192, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

_ALIASES = {
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "qwen2.5-coder-1.5b": "qwen2.5-1.5b",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen2.5-coder-32b": "qwen2.5-32b",
    "llama-3-8b": "llama-3.1-8b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
}


def find_shape(name: str) -> str | None:
    """The shape that a model's name stands for: Qwen/Qwen2.5-7B-Instruct is of shape qwen2.5-7b. None if it is not known."""
    short = name.removeprefix(PREFIX).rpartition("/")[2].lower().removesuffix("-instruct")
    short = _ALIASES.get(short, short)
    return short if short in SHAPES else None


def shape_of(name: str) -> dict[str, Any] | None:
    """The configuration's values of a known shape, `model_type` among them; None if the name is not known."""
    found = find_shape(name)
    return None if found is None else dict(SHAPES[found])
