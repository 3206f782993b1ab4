"""Updates in place: views of fused parameters, bfloat16 with residuals, over two tensor-parallel ranks.

On CPU vLLM repacks linear weights, so that they cannot be updated in place there. Without oneDNN it keeps them as it does on an
accelerator, so without it the workers run the code that an accelerator would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_trainer import Trainer, peaked_model, save

from logra.rl.engines.vllm_local import VLLMEngine
from logra.rl.tiny import char_tokenizer
from logra.rl.types import Prompt, Sampling
from logra.sketch.block import blocks_of
from logra.sketch.split import split

PLUG_IN = """
def register():
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False
"""
DENSE = ("model.norm.weight", "model.embed_tokens.weight")


@pytest.fixture
def plain_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM plug-in that takes oneDNN away in every worker, which is a process with modules of its own."""
    folder = tmp_path / "site"
    info = folder / "plain_layout-0.dist-info"
    info.mkdir(parents=True)
    (folder / "plain_layout.py").write_text(PLUG_IN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-layout\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplain_layout = plain_layout:register\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def start(folder: Path, trainer: Trainer, ranks: int, **arguments) -> VLLMEngine:
    return VLLMEngine(
        folder,
        char_tokenizer(),
        dtype="bfloat16",
        max_model_len=250,
        max_num_seqs=16,
        enforce_eager=True,
        tensor_parallel_size=ranks,
        **trainer.engine_arguments(),
        **arguments,
    )


def scores(engine: VLLMEngine) -> list[tuple]:
    prompts = [Prompt(i, text, tuple(char_tokenizer()(text).input_ids)) for i, text in enumerate(["1+1=", "abc"])]
    return [
        (r.token_ids, r.prompt.token_ids, r.logprobs)
        for r in engine.generate(prompts, 2, Sampling(8, temperature=1.0, seed=3))
    ]


@pytest.mark.usefixtures("plain_layout")
def test_bfloat16_shards_follow_the_float32_masters(tmp_path: Path) -> None:
    model = peaked_model("llama")
    trainer = Trainer(model, (*DENSE, "lm_head.weight"), basis="aligned")
    other = peaked_model("llama")
    with torch.no_grad():
        for block in blocks_of(other, trainer.names).values():
            block.value.mul_(1.25)
    # vLLM begins with other weights: version 0 is acknowledged only once an anchor has made them the trainer's
    engine = start(save(other, tmp_path / "base"), trainer, ranks=2, loading="in_place", residual="cpu")
    try:
        assert [a.version for a in engine.acknowledgements()] == [0, 0]
        assert {s["loading"] for s in engine.link.control.call("logra_status")} == {"in_place"}
        assert engine.digest() == trainer.base
        before = scores(engine)
        for step in range(9):
            update = trainer.step()
            engine.publish(trainer.version, update if step != 4 else None)  # once by an anchor, which holds the bases
            assert engine.digest() == trainer.digest()
        warm = scores(engine)
        assert [w[0] for w in warm] != [b[0] for b in before]
    finally:
        engine.close()
    # the digest is that of value and residual together, and a float32 splits in one way only, so the values are the masters
    # rounded; that vLLM computes with them:
    with torch.no_grad():
        for block in trainer.blocks().values():
            block.value.copy_(split(block.value)[0].float())
    for token_ids, prompt_ids, logprobs in warm:
        ids = torch.tensor([[*prompt_ids, *token_ids]])
        with torch.no_grad():
            logits_TV = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
        expected = logits_TV.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
        assert logprobs == pytest.approx(expected, abs=0.2), "more than bfloat16's own error"


def test_a_tied_head_follows_its_embedding_where_weights_are_reloaded(tmp_path: Path) -> None:
    model = peaked_model("llama", tied=True)
    trainer = Trainer(model, DENSE)
    engine = start(save(model, tmp_path), trainer, ranks=1)
    try:
        before = scores(engine)
        engine.publish(1, trainer.step())
        assert engine.digest() == trainer.digest()
        warm = scores(engine)
        assert len({w[0] for w in warm}) > 2 and [w[0] for w in warm] != [b[0] for b in before]
    finally:
        engine.close()
    with torch.no_grad():
        for block in trainer.blocks().values():
            block.value.copy_(split(block.value)[0].float())
    cold_engine = start(save(model, tmp_path / "rounded"), Trainer(model, DENSE, run="ab"), ranks=1)
    try:
        assert scores(cold_engine) == warm
    finally:
        cold_engine.close()
