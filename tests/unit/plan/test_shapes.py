"""Known shapes: their sizes, and which names stand for them."""

import pytest

from logra.build.plan import model_config_of, sizes_of
from logra.config import make_config
from logra.errors import ModelError
from logra.memory.shapes import SHAPES, shape_of


def config():
    return make_config(
        {"model": {"name_or_path": "x"}, "data": {"name": "x"}, "reward": {"functions": [{"function": "x"}]}}
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544), ("qwen2.5-math-1.5b", 1.544), ("qwen2.5-7b", 7.616),
        ("qwen2.5-math-7b", 7.616), ("qwen2.5-32b", 32.764), ("qwen-27b", 27.0), ("llama-3.1-8b", 8.030),
        ("smollm2-135m", 0.1345),
    ],
)  # fmt: skip
def test_numbers_of_parameters(name, billions):
    model_config, note = model_config_of(f"shape:{name}")
    sizes = sizes_of(config(), model_config)
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, rel=0.002) and note == ""
    assert len(sizes.targets) == 7 * SHAPES[name]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("Qwen/Qwen2.5-Math-7B", "qwen2.5-math-7b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("shape:qwen2.5-coder-7b", "qwen2.5-7b"),
    ],
)  # fmt: skip
def test_names_of_shapes(name, shape):
    assert shape_of(name) == SHAPES[shape]


def test_a_hub_name_that_cannot_be_read_is_planned_from_its_shape(monkeypatch):
    def offline(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr("logra.build.plan.AutoConfig.from_pretrained", offline)
    model_config, note = model_config_of("Qwen/Qwen2.5-Math-7B")
    assert model_config.max_position_embeddings == 4096 and "published shape" in note
    with pytest.raises(ModelError, match=r"config\.json"):
        model_config_of("someone/else")


def test_a_folder_with_a_configuration_will_do(tmp_path):
    model_config_of("shape:smollm2-135m")[0].save_pretrained(tmp_path)
    assert model_config_of(str(tmp_path))[0].hidden_size == 576


def test_an_unknown_shape():
    with pytest.raises(ModelError, match="no shape 'gpt9': use one of"):
        model_config_of("shape:gpt9")
    assert shape_of("gpt9") is None
