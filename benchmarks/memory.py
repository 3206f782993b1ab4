"""Peak bytes of one training update by kind, side by side: dense AdamW, LoRA and LoGRA, and TRL's GRPOTrainer beside them.

    python benchmarks/memory.py [--model models/SmolLM2-135M-Instruct] [--rows 8] [--tokens 512] [--arms dense lora ...]

Every arm is a fresh process with the same model in float32, the same batch of random tokens, the same loss, activation
checkpointing on and one microbatch; rollouts are given, not sampled. Each makes two updates and the second is reported, so all
that is allocated late (AdamW's moments) is there. Bytes are those of tensor storages (logra.memory.meter): no allocator, no
interpreter. TRL (its own defaults otherwise) trains all parameters in `trl-dense`; the others train the seven projections.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from batches import random_batch, random_ids
from quality_tasks import ARMS as METHODS
from record import begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from logra import config as cfg
from logra.memory.meter import KINDS, Meter, Reading
from logra.region import region

# arm -> keys of `method` (ours), or what TRL trains
ARMS: dict[str, dict[str, Any]] = {
    "dense": METHODS["dense"],
    "lora": METHODS["lora-16"],
    "random": METHODS["random-64"],
    "aligned": METHODS["aligned-16"],
    "aligned-adam": METHODS["aligned-16-adam"],
    "aligned-trust": METHODS["aligned-16"] | {"trust": True},
    "trl-dense": {"trl": "dense"},
    "trl-lora": {"trl": "lora", "rank": 16},
}
LR = 1e-6
GIVEN = 64  # prompt tokens of a row; the rest of it is the response


def ours(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """The second of two updates of one of our methods."""
    from logra.build.model import build_method, build_model
    from logra.build.run import training_plan
    from logra.rl.models import prepare
    from logra.rl.step import Tally, accumulate

    method_keys = dict(ARMS[arm])
    config = cfg.make_config({
        "output_dir": "unused", "seed": options.seed, "data": {"name": "unused"},
        "model": {"name_or_path": options.model, "gradient_checkpointing": options.checkpointing, "device": "cpu"},
        "trust": {"enabled": method_keys.pop("trust", False)}, "method": {"lr": LR, **method_keys},
        "reward": {"functions": [{"function": "exact_match"}]}, "train": {"microbatch_size": options.rows},
    })  # fmt: skip
    model, tokenizer = build_model(config)
    prepare(model, options.checkpointing)
    method, plan = build_method(config, model), training_plan(config)
    given, pad = min(GIVEN, options.tokens // 2), int(tokenizer.pad_token_id or 0)
    batch = random_batch(options.rows, options.tokens, given, len(tokenizer), options.seed, pad=pad)
    probe = batch.probe(2, 4096)
    contexts = {"input_ids": probe.input_ids, "attention_mask": probe.attention_mask}
    for _ in range(2):
        with Meter() as meter:
            for kind, tensors in method.held().items():
                meter.register(kind, tensors)
            meter.watch_gradients(method.model.parameters())
            with meter.phase("gradient"), region("activations"):
                method.zero()
                accumulate(method.model, batch, options.rows, plan.loss, tally=Tally())
            with meter.phase("update"), region("workspace"):
                method.step(lambda: contexts, 1.0)
            state = {kind: _bytes(tensors) for kind, tensors in method.held().items() if kind != "weights"}
            readings = {"": meter.reading(), **meter.phases()}
    return {"phases": {name or "all": _shown(reading) for name, reading in readings.items()}, "held": state}


def trl(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both updates of TRL's GRPOTrainer with given completions; the peak is the second's, moments being there."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    given = min(GIVEN, options.tokens // 2)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    ids = random_ids(options.rows, options.tokens, model.config.vocab_size, options.seed)

    def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [row[:given] for row in ids], "completion_ids": [row[given:] for row in ids],
            "logprobs": [[-5.0] * (options.tokens - given)] * len(ids),
        }  # fmt: skip

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(index) for index in range(len(completions))]

    adapter = None
    if ARMS[arm]["trl"] == "lora":
        from peft import LoraConfig

        adapter = LoraConfig(
            r=ARMS[arm]["rank"], lora_alpha=ARMS[arm]["rank"], task_type="CAUSAL_LM",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=options.rows,
            num_generations=options.rows, max_completion_length=options.tokens - given, max_steps=2, learning_rate=LR,
            gradient_checkpointing=options.checkpointing, report_to=[], save_strategy="no", logging_steps=10,
            gradient_accumulation_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, peft_config=adapter, rollout_func=rollout,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * options.rows}),
        )  # fmt: skip
        with Meter() as meter:
            meter.register("weights", [*trainer.model.parameters(), *trainer.model.buffers()])
            meter.watch_gradients(trainer.model.parameters())
            trainer.train()
            slots = [t for s in trainer.optimizer.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
            reading = meter.reading()
    return {"phases": {"all": _shown(reading)}, "held": {"optimizer": _bytes(slots)}}


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _shown(reading: Reading) -> dict[str, Any]:
    return {"peak": reading.peak, "mean": reading.mean, "by_kind": reading.by_kind}


# -- side by side --------------------------------------------------------------------------------------------------------------


def run_arm(arm: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--one", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(found: Mapping[str, Any]) -> Table:
    kinds = [k for k in KINDS if any(k in arm["phases"]["all"]["by_kind"] for arm in found.values())]
    shown = Table("MiB at the peak", *found, box=SIMPLE, pad_edge=False)
    for kind in kinds:
        cells = [arm["phases"]["all"]["by_kind"].get(kind, 0) for arm in found.values()]
        shown.add_row(kind, *(f"{cell / 2**20:,.1f}" for cell in cells))
    peaks = [arm["phases"]["all"]["peak"] for arm in found.values()]
    shown.add_row("peak", *(f"{peak / 2**20:,.1f}" for peak in peaks), style="bold")
    if "dense" in found:
        dense = found["dense"]["phases"]["all"]["peak"]
        shown.add_row("of dense", *(f"{peak / dense:.3f}" for peak in peaks))
    return shown


def state_ratio(found: Mapping[str, Any]) -> dict[str, float]:
    """Bytes kept for gradients and the optimizer (sketch, basis and moments) over dense AdamW's gradients and moments."""
    if "dense" not in found:
        return {}
    dense = found["dense"]["phases"]["all"]["by_kind"]
    whole = dense.get("gradients", 0) + found["dense"]["held"]["optimizer"]
    kinds = ("gradients", "optimizer", "sketch", "basis")
    return {arm: sum(held["held"].get(k, 0) for k in kinds) / whole for arm, held in found.items() if arm != "dense"}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", choices=tuple(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps((trl if "trl" in ARMS[options.one] else ours)(options.one, options)))
        return 0
    config = {k: getattr(options, k) for k in ("model", "rows", "tokens", "arms", "checkpointing")} | {"methods": ARMS}
    begun = begin_record(name="memory", config=config, seed=options.seed)
    found = {arm: run_arm(arm, arguments) for arm in options.arms}
    console = Console(width=140, highlight=False)
    console.print(table(found))
    ratios = state_ratio(found)
    console.print(
        "gradient + optimizer state of dense: " + ", ".join(f"{arm} {ratio:.4f}" for arm, ratio in ratios.items())
    )
    if not options.no_record:
        finish_record(options.record, begun, {"arms": found, "state_of_dense": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
