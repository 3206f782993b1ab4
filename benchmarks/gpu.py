"""One accelerator, under ten minutes: real peaks and step times of full-parameter RL steps at 1.5B, 7B and 27B.

    python benchmarks/gpu.py                       # on a GPU; writes benchmarks/records/gpu_DATE_COMMIT.json
    python benchmarks/gpu.py --cap 24GiB --shapes qwen2.5-7b      # under a cap: out of memory there is out of memory here
    python benchmarks/gpu.py --cpu                 # a dry run on tiny models, which the tests make

Random weights in the published shapes: `hi` in bfloat16 on the device, the int16 residual in host memory, activation
checkpointing, the chunked head, 4,096 tokens. A step samples a few responses in process, makes the backward pass of one
microbatch, proposes, asks the trust region and applies. Beside the measured bytes of each phase stands the plan
(logra.build.plan) of the same step; a shape that does not fit is recorded as such, and the next one begins.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from batches import random_batch
from record import begin_record, finish_record
from transformers import AutoModelForCausalLM, PretrainedConfig

from logra import config as cfg
from logra.build.model import build_method
from logra.build.plan import Question, model_config_of, plan_memory
from logra.build.rehearsal import Shape
from logra.build.run import training_plan
from logra.config.sizes import parse_size
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE, StepGauge
from logra.rl.engines.hf import HFEngine
from logra.rl.models import prepare
from logra.rl.step import Tally, accumulate
from logra.rl.types import Prompt, Sampling

BUDGET_S = 540  # no new shape begins after it
ARMS = {"random-16": {"basis": "random", "rank": 16}, "aligned-16": {"basis": "aligned", "rank": 16}}


class _Tokenizer:
    """All that the engine asks of one: random weights have nothing to say."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def config_of(arm: str, options: argparse.Namespace) -> cfg.Config:
    return cfg.make_config({
        "output_dir": "unused", "data": {"name": "unused"}, "reward": {"functions": [{"function": "exact_match"}]},
        "model": {
            "name_or_path": "unused", "dtype": "bfloat16", "gradient_checkpointing": True, "device": options.device,
        },
        "method": {"name": "logra", "weights": "split", "residual": "cpu", **ARMS[arm]},
        "train": {"microbatch_size": options.rows},
    })  # fmt: skip


def random_model(model_config: PretrainedConfig, device: torch.device) -> torch.nn.Module:
    """In bfloat16 on the device, never in float32 anywhere."""
    with device:
        return AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16, attn_implementation="sdpa")


def run(shape: str, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of one shape and arm: seconds and bytes of each phase, and the plan."""
    config, device = config_of(arm, options), torch.device(options.device)
    model_config, _ = model_config_of(shape)
    plan = training_plan(config)
    begun = time.perf_counter()
    model = random_model(model_config, device)
    prepare(model, True)  # type: ignore[arg-type]
    method = build_method(config, model)  # type: ignore[arg-type]
    loaded_s = time.perf_counter() - begun
    gauge = StepGauge(device, method.held, model.parameters)
    engine = HFEngine(model, _Tokenizer(), eos_token_ids=[], autocast=True)  # type: ignore[arg-type]
    batch = random_batch(
        2 * options.rows,
        options.length,
        options.length // 8,
        model_config.vocab_size,
        options.seed,
        device=options.device,
    )
    prompts = [Prompt(0, "", tuple(batch.prompt_ids[0].tolist()), {})]
    contexts = {"input_ids": batch.input_ids[:2], "attention_mask": batch.attention_mask[:2]}
    steps = []
    for number in range(1, options.steps + 1):
        gauge.begin(number)
        seconds = {}
        with _timed(seconds, ROLLOUT, device), gauge.phase(ROLLOUT):
            engine.generate(prompts, options.decoded, Sampling(options.new_tokens, 1.0, seed=number))
        with gauge.watch():
            with _timed(seconds, GRADIENT, device), gauge.phase(GRADIENT):
                method.zero()
                accumulate(method.model, batch, options.rows, plan.loss, tally=Tally())
            with _timed(seconds, UPDATE, device), gauge.phase(UPDATE):
                method.step(lambda: contexts, 1.0)
        steps.append({"seconds": seconds, **gauge.metrics()})
    given = batch.prompt_ids.shape[1]
    lengths = Shape(given, options.length - given, options.rows, options.decoded)
    planned = plan_memory(Question(config, model_config, lengths, accelerator=options.device == "cuda"))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "loaded_s": loaded_s,
        "steps": steps,
        "median_s": {name: statistics.median(step["seconds"][name] for step in steps) for name in PHASES},
        "planned": {name: phase.peak_bytes for name, phase in planned.phases.items()},
        "planned_by_kind": {name: phase.peak for name, phase in planned.phases.items()},
    }


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[name] = time.perf_counter() - start


def attempt(shape: str, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """`run`, or that it did not fit; nothing of it stays on the device."""
    try:
        return run(shape, arm, options)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error)[:300].split("Process")[0]}
    finally:
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-1.5b", "qwen2.5-7b", "qwen-27b"])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    for name, default in (("length", 4096), ("rows", 1), ("decoded", 8), ("new-tokens", 32), ("steps", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cap", help="fraction of the device's memory that may be used, as bytes: 24GiB")
    parser.add_argument("--cpu", action="store_true", help="a dry run on the tiny model")
    parser.add_argument("--record", type=Path, help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    options.device = "cpu" if options.cpu else "cuda"
    names = ["builtin:tiny-llama"] if options.cpu else [f"shape:{name}" for name in options.shapes]
    if options.cpu:
        options.length, options.new_tokens, options.decoded = 64, 4, 2
    elif not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: run it where there is one, or with --cpu")
    if options.cap and not options.cpu:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_size(options.cap) / total))
    keys = ("arms", "length", "rows", "decoded", "new_tokens", "steps", "cap", "device")
    config = {key: getattr(options, key) for key in keys} | {"shapes": names}
    begun, started, results = begin_record(name="gpu", config=config, seed=options.seed), time.perf_counter(), {}
    for name in names:
        for arm in options.arms:
            if time.perf_counter() - started > BUDGET_S:
                results[f"{name} {arm}"] = {"left_out": f"begun after {BUDGET_S} s"}
                continue
            found = results[f"{name} {arm}"] = attempt(name, arm, options)
            print(name, arm, found.get("out_of_memory") or found["median_s"], flush=True)
    if not options.no_record:
        finish_record(options.record, begun, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
