"""Exported folders load with `from_pretrained` and compute what the live model computed."""

import errno
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from logra.errors import CheckpointError, ModelError
from logra.rl import export
from logra.rl.export import export_model, model_card
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.sketch.split import split

ARCHS = ["llama", "gpt2"]
IDS = torch.tensor([[5, 9, 23, 7], [30, 31, 4, 6]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def load(folder, **more):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **more)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def is_tied(model):
    return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def snapshot(model):
    return {
        "config": model.config.to_json_string(use_diff=False),
        "generation": model.generation_config.to_json_string(use_diff=False),
        "flags": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "pointers": {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "training": model.training,
    }


def assert_same(before, after):
    values = before.pop("values"), after.pop("values")
    assert before == after
    assert_equal_values(*values)


def assert_equal_values(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("claimed", [True, False], ids=["claims_tied", "claims_untied"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", ARCHS)
def test_tied_or_not_is_decided_by_storage(tmp_path, arch, tied, claimed):
    model = tiny_model(arch, tied=tied)
    assert is_tied(model) == tied
    model.config.tie_word_embeddings = claimed
    before = snapshot(model)
    export_model(model, None, tmp_path / "final", card={})
    assert_same(before, snapshot(model))
    assert json.loads((tmp_path / "final" / "config.json").read_text())["tie_word_embeddings"] == tied
    loaded = load(tmp_path / "final")
    assert is_tied(loaded) == tied
    assert torch.equal(logits(loaded), logits(model))


def test_untied_with_equal_values_stays_untied(tmp_path):
    model = tiny_model("llama", tied=False)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.config.tie_word_embeddings = True
    assert not is_tied(load(export_model(model, None, tmp_path / "final", card={})))


def test_a_live_model_in_training_is_left_alone(tmp_path):
    model = tiny_model("llama").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" not in name)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    before = snapshot(model)
    export_model(model, char_tokenizer(), tmp_path / "final", card={})
    assert_same(before, snapshot(model))
    logits(model)
    assert calls == [1]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_preserved_or_as_asked(tmp_path, arch, live):
    model = tiny_model(arch, tied=True).to(live)
    same = load(export_model(model, None, tmp_path / "same", card={}))
    assert same.dtype == live
    assert_equal_values(same.state_dict(), model.state_dict())
    other = load(export_model(model, None, tmp_path / "bf16", card={}, dtype=torch.bfloat16))
    assert other.dtype == torch.bfloat16 and is_tied(other)
    expected = {k: split(v)[0] if live == torch.float32 else v for k, v in model.state_dict().items()}
    assert_equal_values(other.state_dict(), {k: v.to(torch.bfloat16) for k, v in expected.items()})
    assert model.dtype == live


def test_float32_weights_in_a_bfloat16_model_are_not_rounded(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    loaded = load(export_model(model, None, tmp_path / "final", card={}))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, weight)


@pytest.mark.parametrize("given", ["model.embed_tokens.weight", "lm_head.weight"])
def test_given_values_replace_the_models_and_keep_ties(tmp_path, given):
    model = tiny_model("llama", tied=True).to(torch.bfloat16)
    masters = {
        given: torch.randn(51, 64, generator=torch.Generator().manual_seed(1)),
        "model.layers.1.self_attn.q_proj.weight": torch.full((64, 64), 1 + 2**-20),
    }
    loaded = load(export_model(model, None, tmp_path / "final", card={}, state_dict=masters))
    assert is_tied(loaded) and torch.equal(loaded.lm_head.weight, masters[given])
    assert (loaded.model.layers[1].self_attn.q_proj.weight == 1 + 2**-20).all()
    with pytest.raises(ModelError, match="has not"):
        export_model(model, None, tmp_path / "other", card={}, state_dict={"nonsense": torch.ones(1)})
    assert not (tmp_path / "other").exists()


def test_tokenizer_template_and_generation_config_come_along(tmp_path):
    model, tokenizer = tiny_model("llama"), char_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[1, 3], pad_token_id=0, bos_token_id=2)
    folder = export_model(model, tokenizer, tmp_path / "final", card={})
    loaded = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "1+2=?"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    assert loaded("12*3").input_ids == tokenizer("12*3").input_ids
    assert (loaded.pad_token, loaded.eos_token) == ("<pad>", "<eos>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 3]


def test_a_generation_config_that_may_not_be_saved_is_mended_in_the_copy(tmp_path):
    model = tiny_model("llama")
    model.generation_config.temperature = 0.6  # without do_sample, as some base models ship it
    folder = export_model(model, None, tmp_path / "final", card={})
    saved = GenerationConfig.from_pretrained(folder)
    assert (saved.do_sample, saved.temperature) == (True, 0.6)
    assert not model.generation_config.do_sample


def test_an_export_replaces_an_older_one_whole(tmp_path):
    folder = tmp_path / "runs" / "final"
    export_model(tiny_model("llama", seed=1), char_tokenizer(), folder, card={})
    second = tiny_model("gpt2", seed=2)
    export_model(second, None, folder, card={})
    assert torch.equal(logits(load(folder)), logits(second))
    assert not (folder / "tokenizer.json").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["final"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


@pytest.mark.parametrize("step", ["copy_mode", "fsync_tree", "set_dtype", "replace_folder"])
def test_a_full_disk_leaves_the_older_export(tmp_path, monkeypatch, step):
    folder = tmp_path / "final"
    first, second = tiny_model("llama", seed=1), tiny_model("llama", seed=2, tied=True)
    export_model(first, None, folder, card={})
    second.config.tie_word_embeddings = False
    before = snapshot(second)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, step, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*needs about"):
        export_model(second, None, folder, card={})
    assert_same(before, snapshot(second))
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert torch.equal(logits(load(folder)), logits(first))


def test_other_modules_are_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot export a Linear"):
        export_model(torch.nn.Linear(2, 2), None, tmp_path / "final", card={})


# peft


def randomised(model):
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("arch", ARCHS)
def test_adapters_are_merged_in_a_copy(tmp_path, arch, dora):
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "down_proj"] if arch == "llama" else ["c_attn", "c_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, use_dora=dora, fan_in_fan_out=arch == "gpt2")
    model = randomised(peft.get_peft_model(tiny_model(arch, tied=True), config))
    expected, values = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    loaded = load(export_model(model, char_tokenizer(), tmp_path / "final", card={}))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-5)
    assert (logits(loaded) - logits(tiny_model(arch, tied=True))).abs().max() > 0.01
    assert torch.equal(logits(model), expected)
    after = model.state_dict()
    assert_equal_values(after, values)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_on_a_tied_head_unties_it(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    model = randomised(peft.get_peft_model(tiny_model("llama", tied=True), config))
    loaded = load(export_model(model, None, tmp_path / "final", card={}))
    assert not is_tied(loaded)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_adapters_with_whole_modules_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(tiny_model("llama"), config)
    with pytest.raises(ModelError, match="merge_and_unload"):
        export_model(model, None, tmp_path / "final", card={})


# Model card


def front_matter(text):
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_tells_where_the_model_comes_from():
    text = model_card(
        {
            "base_model": "org/base",
            "dataset": "org/data",
            "method": "LoGRA (aligned)",
            "steps": 30,
            "license": "mit",
            "settings": {"rank": 16, "lr": 1e-5, "prompt": "a|b"},
            "tags": ["math"],
            "eval_before": {"pass@1": 0.21},
            "eval_after": {"pass@1": 0.987654, "mean_length": 12},
        }
    )
    assert front_matter(text) == {
        "base_model": "org/base",
        "datasets": ["org/data"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["logra", "reinforcement-learning", "math"],
    }
    for part in (
        "LoGRA (aligned)",
        "30 steps",
        "| rank | 16 |",
        "| lr | 1e-05 |",
        "a\\|b",
        "| pass@1 | 0.21 | 0.9877 |",
        "| mean_length |  | 12 |",
        f"| torch | {torch.__version__} |",
        "2610.06647",
    ):
        assert part in text


def test_the_card_names_no_local_folder_and_survives_odd_text():
    text = model_card(
        {
            "base_model": "/home/someone/models/Base-1B",
            "dataset": "./data/x: y #1.jsonl",
            "settings": {"path": "~/secret/z"},
        }
    )
    front = front_matter(text)
    assert front["base_model"] == "Base-1B" and front["datasets"] == ["x: y #1.jsonl"]
    assert "someone" not in text and "secret" not in text


def test_an_empty_card_and_unknown_keys():
    assert front_matter(model_card({}))["library_name"] == "transformers"
    with pytest.raises(ModelError, match="unknown model card keys \\['stpes'\\]"):
        model_card({"stpes": 3})


def test_the_card_is_the_readme(tmp_path):
    folder = export_model(tiny_model("llama"), None, tmp_path / "final", card={"steps": 7})
    assert (folder / "README.md").read_text() == model_card({"steps": 7})
