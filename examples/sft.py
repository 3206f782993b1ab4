"""Fine-tune with any optimizer of `logra.optim` in TRL's SFTTrainer (Hugging Face's Trainer takes the same two arguments).

    python examples/sft.py                                                # a tiny model on made-up sums: seconds on a CPU
    python examples/sft.py --optimizer lora_pre --rank 8 --lr 2e-5 --model MODEL --data FILE.jsonl
    python examples/sft.py --resume                                       # go on from the newest checkpoint, state included

Needs `pip install 'logra[trl]'`. FILE.jsonl: one object a line with a "text".
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from logra.optim import for_trainer
from logra.optim.registry import OPTIMIZERS
from logra.rl.tiny import char_tokenizer, tiny_model


def load(model: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if model is None:
        return tiny_model(spread=0.1), char_tokenizer()
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def texts(data: Path | None) -> list[str]:
    if data is not None:
        return [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
    draw = random.Random(0)
    pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(512)]
    return [f"{a}+{b}={a + b}" for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="galore")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", help="a folder or a name on the hub")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output-dir", default="runs/sft")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    model, tokenizer = load(options.model)
    chosen = for_trainer(model, options.optimizer, lr=options.lr, rank=options.rank)
    print(chosen[1]["params"])  # which matrices the method takes, and what AdamW steps, with the reason
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": texts(options.data)}),
        optimizer_cls_and_kwargs=chosen,
        args=SFTConfig(
            output_dir=options.output_dir, max_steps=options.steps, per_device_train_batch_size=8, logging_steps=10,
            save_steps=20, report_to="none", gradient_checkpointing=False, bf16=False,
        ),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{options.optimizer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
