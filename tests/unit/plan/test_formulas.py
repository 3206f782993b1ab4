"""Optimizer state by formula: the worked values of the published methods, by hand."""

import pytest

from logra.memory import formulas
from logra.memory.shapes import SHAPES

MIB, GIB = 1 << 20, 1 << 30
SQUARE, WIDE, DOWN = (4096, 4096), (11008, 4096), (1536, 8960)


def published_apollo(p, q, r):
    """Without the projector, which the paper draws again from its seed; ours is kept."""
    return formulas.apollo(p, q, r) - 4 * r * min(p, q)


@pytest.mark.parametrize(
    ("state", "shape", "rank", "mib"),
    [
        (formulas.adamw, SQUARE, 0, 128), (formulas.adamw, WIDE, 0, 344), (formulas.adamw, DOWN, 0, 105),
        (formulas.lora_pre, SQUARE, 64, 4), (formulas.lora_pre, SQUARE, 256, 16), (formulas.lora_pre, WIDE, 256, 29.5),
        (formulas.lora_pre, DOWN, 256, 20.5),
        (formulas.lora_pre_muon, SQUARE, 64, 2), (formulas.lora_pre_muon, WIDE, 256, 14.75),
        (formulas.galore, SQUARE, 64, 3), (formulas.galore, SQUARE, 256, 12), (formulas.galore, WIDE, 256, 25.5),
        (formulas.galore, DOWN, 256, 19),
        (formulas.galore_8bit, SQUARE, 64, 1581056 / 2**20), (formulas.galore_8bit, WIDE, 256, 9918464 / 2**20),
        (published_apollo, SQUARE, 64, 2), (published_apollo, WIDE, 256, 21.5), (published_apollo, DOWN, 256, 17.5),
        (formulas.apollo, SQUARE, 64, 3),
        (formulas.apollo_mini, SQUARE, 1, 0.047), (formulas.apollo_mini, WIDE, 1, 0.1),
        (formulas.muon, SQUARE, 0, 64), (formulas.muon, DOWN, 0, 52.5),
        (formulas.lora_all, SQUARE, 64, 8), (formulas.lora_all, WIDE, 256, 59), (formulas.lora_all, DOWN, 256, 41),
        (formulas.logra, SQUARE, 64, 2.016), (formulas.logra, WIDE, 256, 14.792),
    ],
)  # fmt: skip
def test_worked_values(state, shape, rank, mib):
    assert state(*shape, rank) / MIB == pytest.approx(mib, abs=0.01)


def projections(name):
    """The seven projections of every layer, from the shape alone."""
    c = SHAPES[name]
    h, i = c["hidden_size"], c["intermediate_size"]
    head = c.get("head_dim", h // c["num_attention_heads"])
    q, kv = head * c["num_attention_heads"], head * c["num_key_value_heads"]
    return [(q, h), (kv, h), (kv, h), (h, q), (i, h), (i, h), (h, i)] * c["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "adam", "logra", "lora_pre", "galore", "apollo", "lora"),
    [
        ("qwen2.5-0.5b", 2.67, (0.13, 0.52), (0.26, 1.05), (0.24, 0.90), (0.21, 0.79), (0.52, 2.10)),
        ("qwen2.5-1.5b", 9.76, (0.28, 1.10), (0.55, 2.20), (0.50, 1.98), (0.44, 1.76), (1.10, 4.40)),
        ("qwen2.5-7b", 48.62, (0.60, 2.41), (1.20, 4.81), (1.08, 4.31), (0.95, 3.80), (2.41, 9.62)),
    ],
)
def test_totals_of_whole_models(name, adam, logra, lora_pre, galore, apollo, lora):
    matrices = projections(name)
    assert formulas.total(formulas.adamw, matrices, 0) / GIB == pytest.approx(adam, abs=0.006)
    given = {
        formulas.logra: logra, formulas.galore: galore, published_apollo: apollo, formulas.lora_all: lora,
        lambda p, q, r: 8 * r * (p + q): lora_pre,  # the table has it without the fallback for narrow matrices
    }  # fmt: skip
    for state, sizes in given.items():
        for rank, size in zip((64, 256), sizes, strict=True):
            assert formulas.total(state, matrices, rank) / GIB == pytest.approx(size, abs=0.015)


def test_a_rank_beyond_the_matrix_keeps_no_more_than_the_matrix_allows():
    assert formulas.galore(8, 64, 1000) == formulas.galore(8, 64, 8)
    assert formulas.lora_pre(8, 64, 8) == formulas.adamw(8, 64) and formulas.lora_pre(9, 64, 8) == 8 * 8 * 73


def test_eight_bits_keep_scales_of_blocks():
    assert formulas.adamw_8bit(16, 16) == 512 + 8 and formulas.adamw_8bit(1, 257) == 514 + 16


def test_what_an_update_needs_is_that_of_the_largest_matrix():
    galore = formulas.STATE["galore"]
    assert galore.workspace_bytes([(8, 4), (16, 4)], 2) == 4 * 64 + 4 * 4 * 20
    assert formulas.STATE["adamw_8bit"].workspace_bytes([(8, 4)], 2) == 0
    assert formulas.STATE["blockllm"].state_bytes([(100, 10)], 2) == 800


def test_state_of_a_whole_model():
    assert formulas.STATE["fira"].state_bytes([(8, 4), (8, 4)], 2) == 2 * (4 * (2 * 2 * 8 + 2 * 4) + 4)
