"""`logra train` with a real vLLM: it learns, follows the trainer at every step, and a resumed run catches up by an anchor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_trainer import save
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from logra import config as cfg
from logra.build import build_run
from logra.errors import MismatchError, UpdateError
from logra.rl.engines.vllm_link import Link
from logra.sketch.block import digest

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe's model with heads of 32, which vLLM's CPU backend takes."""
    torch.manual_seed(7)
    settings = LlamaConfig(
        vocab_size=51, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return save(LlamaForCausalLM(settings), tmp_path_factory.mktemp("model"))


def build(model: Path, folder: Path, **flags):
    base = {
        "output_dir": str(folder), "model.name_or_path": str(model), "rollout.engine": "vllm", "train.steps": 5,
        "eval.num_prompts": 8, "checkpoint.every": 2, "rollout.vllm.max_model_len": 128, "rollout.vllm.enforce_eager": True,
        "rollout.vllm.options": {"block_size": 32}, "method.dense_params": ["norms"], "journal.digest_every": 1,
        "method.basis": "aligned", "method.refresh_every": 2,
    }  # fmt: skip
    return build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), base | flags)))


def fit(model: Path, folder: Path, stop: int | None = None, **flags):
    run = build(model, folder, **flags)
    try:
        if stop is not None:
            object.__setattr__(run.trainer.plan, "steps", stop)
            object.__setattr__(run.trainer.plan, "eval_after", False)
        run.fit()
        assert run.trainer.engine.digest() == run.trainer.method.digest()
        return run.trainer.method.digest(), list(run.trainer.method.blocks())
    finally:
        run.close()


def test_training_with_vllm_learns_and_resumes(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(model_folder, folder, stop=3)
    final, names = fit(model_folder, folder, resume="auto")
    assert digest(AutoModelForCausalLM.from_pretrained(folder / "final"), names) == final
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in lines if "reward" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
    assert max(r["sampling/sampling_logp_difference/mean"] for r in steps) < 1e-4
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    evaluations = [r for r in lines if "eval/pass@1" in r]
    assert [r["eval/version"] for r in evaluations] == [0, steps[-1]["num_updates"]]


def test_a_lost_update_stops_the_run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build(model_folder, tmp_path / "run", eval=None)
    send = Link._transfer

    def lossy(link: Link, info, version: int) -> None:
        if version == 2:
            monkeypatch.setattr(Link, "_settle", lambda self, v, head: setattr(self, "version", v))
            monkeypatch.setattr(Link, "_compare", lambda *_: None)
            return
        send(link, info, version)

    monkeypatch.setattr(Link, "_transfer", lossy)
    try:
        with pytest.raises((UpdateError, MismatchError), match="missed an Update"):
            run.fit()
        assert run.trainer.step == 2
    finally:
        run.close()
