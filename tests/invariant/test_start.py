"""What can fail fails before the first step; what may change on resuming may."""

import json

import pytest
import torch

from logra import config as cfg
from logra.build import build_run
from logra.cli.main import main
from logra.errors import ConfigError, ModelError
from logra.rl.models import load_model
from logra.rl.tiny import char_tokenizer, tiny_model


@pytest.fixture
def recipe(tmp_path):
    rows = [{"prompt": f"{i}+{i}="} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "output_dir": str(tmp_path / "run"),
        "threads": 1,
        "model": {"name_or_path": "builtin:tiny-llama"},
        "data": {"name": str(tmp_path / "data.jsonl")},
        "reward": {
            "functions": [{"function": "format", "params": {"pattern": "[0-9]", "mode": "search"}}],
            "workers": 1,
        },
        "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 4, "max_new_tokens": 4},
        "method": {"rank": 8},
        "train": {"steps": 2},
        "checkpoint": {"every": 1, "keep": 5},
    }


def fit(recipe, **flags):
    run = build_run(cfg.make_config(cfg.apply_overrides(recipe, flags)))
    try:
        run.fit()
    finally:
        run.close()
    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"rollout.max_new_tokens": 254}, "data.max_prompt_tokens to 2"),
        ({"rollout.max_new_tokens": 100000}, "lower rollout.max_new_tokens"),
    ],
)
def test_prompts_that_cannot_fit_are_refused_at_start(recipe, flags, words, tmp_path):
    with pytest.raises(ModelError, match=words) as caught:
        build_run(cfg.make_config(cfg.apply_overrides(recipe, flags)))
    assert "-" not in str(caught.value).split("lower")[1]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_unknown_advantage_options_are_refused_at_start(recipe, tmp_path):
    with pytest.raises(ConfigError, match="no option 'scales'"):
        fit(recipe, **{"algorithm.advantage_params": {"scales": "batch"}})
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(("journal", "step"), [(False, 1), (True, 2)])
def test_a_flipped_bit_in_the_newest_checkpoint_is_passed_over(recipe, tmp_path, journal, step):
    """The journal leads on from the checkpoint before it to the last step."""
    recipe["journal"] = {"enabled": journal}
    fit(recipe)
    file = tmp_path / "run" / "checkpoints" / "step_2" / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run = build_run(cfg.make_config(recipe | {"resume": "auto"}))
    assert run.trainer.step == step and "sha256" in run.folder.skipped[0]
    run.close()


def test_what_does_not_decide_the_result_may_change_on_resuming(recipe):
    fit(recipe)
    flags = {"resume": "auto", "train.steps": 3, "reward.workers": 2, "reward.timeout_s": 60.0, "rollout.batch_size": 3}
    assert fit(recipe, **flags).trainer.step == 3
    with pytest.raises(ConfigError, match=r"more than train\.steps=2"):
        fit(recipe, resume="auto")


@pytest.mark.parametrize("value", ["1e308", "10**400", "float('inf')"])
def test_absurd_rewards_are_counted_as_errors(recipe, value, tmp_path, capsys):
    (tmp_path / "absurd.py").write_text(f"def f(completions, **kwargs):\n    return [{value}] * len(completions)\n")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    functions = json.dumps([{"function": f"{tmp_path / 'absurd.py'}:f"}])
    assert main(["train", str(tmp_path / "recipe.yaml"), "--reward.functions", functions]) == 2
    assert "a reward must be finite and at most" in capsys.readouterr().err


def test_damaged_models_are_named(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(str(tmp_path / "nan"))
    char_tokenizer().save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_model(str(tmp_path / "nan"))
    file = tmp_path / "nan" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load the model"):
        load_model(str(tmp_path / "nan"))
