"""Pre-training a small Llama with every optimizer: same text, schedule and tokens, lr from the same grid; perplexity and bytes.

    python benchmarks/pretrain.py [--model 20m] [--arms adamw galore-16 galore-128 lora_pre-16 ...] [--jobs 2]
    python benchmarks/pretrain.py --summary             # the table, and the record once nothing is missing
    python benchmarks/pretrain.py --text allenai/c4:en  # a text data set by name, where there is a network

The default text is what every Python installation carries: the source of its standard library (about 10 MB), by file into
training and held-out parts. A byte-level BPE is trained on the training part. Models have the published shapes
(GaLore's and LoRA-Pre's llama_9m to llama_60m) with a vocabulary of `--vocabulary`. An arm is METHOD or METHOD-RANK: the
method takes the attention and MLP matrices, AdamW the rest, at the same fixed lr in every arm: with one lr for both, a method
that makes smaller steps of the matrices would seem better. The grid is of the matrices' lr. A finished run is one file in
the store, named by a hash of all that shapes it; call again, or from several processes, to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import quality_runs
import torch
from quality import spawn
from record import RECORDS, begin_record, finish_record, provenance
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from logra import hashing
from logra.cli.allocator import keep_freed_memory
from logra.memory.meter import Meter
from logra.optim import BlockLLM, param_groups
from logra.optim.registry import OPTIMIZERS, takes_rank
from logra.region import region

STORE = RECORDS / "pretrain_runs"
STDLIB = "python-stdlib"
# hidden, intermediate, heads, layers
MODELS = {
    "9m": (128, 352, 4, 4), "20m": (256, 688, 4, 4), "35m": (384, 1024, 8, 6), "60m": (512, 1376, 8, 8),
}  # fmt: skip
ARMS = ("adamw", "galore-16", "galore-128", "lora_pre-16", "lora_pre-128")
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
BETAS = (0.9, 0.95)  # LoRA-Pre's; the same for all
OTHERS_LR = 1e-2  # of embeddings, head and norms, which AdamW steps in every arm: only the matrices' lr is searched
SHOWN_EVERY = 20


@dataclass(frozen=True)
class Run:
    """One training run; `key` names all that shapes it."""

    arm: str
    lr: float
    model: str
    text: str
    vocabulary: int
    steps: int
    rows: int
    length: int
    seed: int

    @property
    def key(self) -> str:
        whole = {**asdict(self), "data": digest(self.text, self.vocabulary), "betas": BETAS, "others_lr": OTHERS_LR}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    def path(self, store: Path) -> Path:
        return store / f"{self.model}_{self.arm}_lr{self.lr:g}_seed{self.seed}_{self.key}.json"


# -- text ----------------------------------------------------------------------------------------------------------------------


def documents(text: str) -> list[str]:
    """All texts, in an order of their own."""
    if text != STDLIB:
        from datasets import load_dataset

        name, _, subset = text.partition(":")
        rows = load_dataset(name, subset or None, split="train", streaming=True)
        return [row["text"] for row in rows.take(20_000)]
    folder = Path(sysconfig.get_paths()["stdlib"])
    outside = ("site-packages", "test", "tests", "idlelib", "lib2to3")
    paths = [p for p in folder.rglob("*.py") if not any(part in outside for part in p.relative_to(folder).parts)]
    return [p.read_text(encoding="utf-8", errors="replace") for p in sorted(paths)]


@cache
def tokens(text: str, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(training, held-out) token ids, int64; every twentieth text is held out."""
    texts = documents(text)
    kept = [t for i, t in enumerate(texts) if i % 20]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(kept, vocab_size=vocabulary, show_progress=False)
    parts = (kept, [t for i, t in enumerate(texts) if i % 20 == 0])
    train, held_out = ([i for e in tokenizer.encode_batch(part) for i in e.ids] for part in parts)
    return torch.tensor(train), torch.tensor(held_out)


@cache
def digest(text: str, vocabulary: int) -> str:
    """Hex digest of both parts: runs on other text are other runs."""
    found = hashlib.sha256()
    for part in tokens(text, vocabulary):
        found.update(part.numpy().tobytes())
    return found.hexdigest()[:16]


def rows_of(ids: Tensor, run: Run, step: int) -> Tensor:
    """(rows, length) of the training text at places keyed by seed and step."""
    key = hashing.derive_key(run.seed, "rows", step) >> 1
    places = torch.randint(len(ids) - run.length, (run.rows,), generator=torch.Generator().manual_seed(key))
    return torch.stack([ids[p : p + run.length] for p in places.tolist()])


# -- one run --------------------------------------------------------------------------------------------------------------------


def build_model(run: Run) -> LlamaForCausalLM:
    hidden, intermediate, heads, layers = MODELS[run.model]
    torch.manual_seed(run.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=run.vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
            num_hidden_layers=layers, max_position_embeddings=run.length, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip


def build_optimizer(run: Run, model: LlamaForCausalLM) -> torch.optim.Optimizer:
    name, _, rank = run.arm.partition("-")
    groups = param_groups(model, int(rank) if rank else 1, others={"lr": OTHERS_LR})
    if name == "adamw":
        plain = [{"params": group["params"], "lr": group.get("lr", run.lr)} for group in groups]
        return torch.optim.AdamW(plain, betas=BETAS, weight_decay=0.0)
    options: dict[str, Any] = {"rank": int(rank)} if takes_rank(name) else {}
    if name == "blockllm":
        options |= {"update_freq": max(1, run.steps // 10), "patience": max(1, run.steps // 30)}
    return OPTIMIZERS[name](groups, run.lr, betas=BETAS, seed=run.seed, **options)


def schedule(step: int, steps: int) -> float:
    """Share of the lr: linear over the first tenth, then cosine to a tenth (the published one)."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def execute(run: Run, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    train, held_out = tokens(run.text, run.vocabulary)
    model = build_model(run)
    optimizer = build_optimizer(run, model)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, run.steps))
    curve: list[float] = []
    clocks: dict[str, list[float]] = {"step_s": [], "optimizer_s": []}
    began = time.perf_counter()
    for step in range(run.steps):
        loss = one_step(model, optimizer, rows_of(train, run, step), clocks)
        plan.step()
        if not math.isfinite(loss):
            return {**asdict(run), "failed": f"loss {loss} at step {step}", "wall_s": time.perf_counter() - began}
        curve.append(loss)
    shown = [
        sum(curve[i : i + SHOWN_EVERY]) / len(curve[i : i + SHOWN_EVERY]) for i in range(0, len(curve), SHOWN_EVERY)
    ]
    medians = {key: sorted(values)[len(values) // 2] for key, values in clocks.items()}
    result = {
        **asdict(run), "held_out_loss": evaluate(model, held_out, run), "curve": shown, **medians,
        "optimizer_max_s": max(clocks["optimizer_s"]), "wall_s": time.perf_counter() - began, "threads": threads,
        "bytes": measure(model, optimizer, rows_of(train, run, 0)), "git": provenance()["git"],
    }  # fmt: skip
    result["perplexity"] = math.exp(result["held_out_loss"])
    return result


def one_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: Tensor, clocks: Mapping[str, list[float]] | None
) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(optimizer, BlockLLM):
        optimizer.set_loss(loss)
    before = time.perf_counter()
    with region("workspace"):
        optimizer.step()
    if clocks is not None:
        clocks["step_s"].append(time.perf_counter() - start)
        clocks["optimizer_s"].append(time.perf_counter() - before)
    return float(loss.detach())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, ids: Tensor, run: Run) -> float:
    """Mean loss of a token of the held-out text (its first 64 x rows rows)."""
    count = min(len(ids) // run.length, 64 * run.rows)
    batches = ids[: count * run.length].view(count, run.length).split(run.rows)
    losses = [float(model(input_ids=b, labels=b).loss) * len(b) for b in batches]
    return sum(losses) / count


def measure(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, Any]:
    """Peak of one step, by kind, and what the optimizer keeps."""
    state = [v for slots in optimizer.state.values() for v in slots.values() if isinstance(v, Tensor)]
    with Meter() as meter:
        meter.register("weights", list(model.parameters()))
        meter.register("optimizer", state)
        meter.watch_gradients(model.parameters())
        one_step(model, optimizer, ids, None)
        reading = meter.reading()
    return {"peak": reading.peak, "by_kind": reading.by_kind, "state": sum(v.nbytes for v in state)}


# -- all runs -------------------------------------------------------------------------------------------------------------------


def runs_of(options: argparse.Namespace, arm: str) -> list[Run]:
    """The runs of an arm as far as they are known: the grid's middle first, then on beside the best while it is at an end."""
    own = {k: getattr(options, k) for k in ("model", "text", "vocabulary", "steps", "rows", "length", "seed")}
    grid = sorted(options.lrs)
    low, high = (len(grid) - 1) // 2, len(grid) // 2
    while True:
        runs = [Run(arm, lr, **own) for lr in grid[low : high + 1]]
        results = [load(run, options.store) for run in runs]
        if any(result is None for result in results):
            return runs
        best = min(range(len(runs)), key=lambda i: results[i].get("perplexity", math.inf))  # type: ignore[union-attr]
        if best == 0 and low > 0:
            low -= 1
        elif best == len(runs) - 1 and high < len(grid) - 1:
            high += 1
        else:
            return runs


def load(run: Run, store: Path) -> dict[str, Any] | None:
    path = run.path(store)
    return json.loads(path.read_text()) if path.exists() else None


def work(options: argparse.Namespace, console: Console) -> None:
    """Do what is missing until nothing is; wait where others do what the rest depends on."""
    while wanted := [r for arm in options.arms for r in runs_of(options, arm) if load(r, options.store) is None]:
        if not any(attempt(run, options, console) for run in wanted):
            time.sleep(2.0)


def attempt(run: Run, options: argparse.Namespace, console: Console) -> bool:
    """Do one run if nobody else does, and if it is still missing; True if this changed what is wanted."""

    def say(result: Mapping[str, Any]) -> None:
        end = result.get("perplexity") or result["failed"]
        console.print(f"{run.arm} lr {run.lr:g}: {end}, {result['wall_s']:.0f} s")

    return quality_runs.attempt(run, options.store, lambda: execute(run, options.threads), say)


def summarise(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """(arm -> its best run and all trials, what is missing)."""
    arms, missing = {}, []
    for arm in options.arms:
        there = {run: load(run, options.store) for run in runs_of(options, arm)}
        missing += [f"{run.arm} lr {run.lr:g}" for run, result in there.items() if result is None]
        results = [result for result in there.values() if result is not None]
        trials = {f"{r['lr']:g}": round(r["perplexity"], 3) if "perplexity" in r else r["failed"] for r in results}
        good = [r for r in results if "perplexity" in r]
        arms[arm] = {"trials": trials, "best": min(good, key=lambda r: r["perplexity"]) if good else None}
    return arms, missing


def show(arms: Mapping[str, Any], options: argparse.Namespace) -> Table:
    tokens_seen = options.steps * options.rows * options.length
    table = Table(title=f"llama {options.model}, {tokens_seen:,} tokens of {options.text}", box=SIMPLE)
    for head in (
        "arm",
        "lr",
        "perplexity",
        "state MiB",
        "peak MiB",
        "optimizer ms",
        "slowest ms",
        "trials (lr: perplexity)",
    ):
        table.add_column(head, justify="left" if head.startswith(("arm", "trials")) else "right")
    for arm, found in arms.items():
        best, trials = found["best"], ", ".join(f"{lr}: {value}" for lr, value in found["trials"].items())
        cells = ("-",) * 6
        if best:
            cells = (
                f"{best['lr']:g}", f"{best['perplexity']:.2f}", f"{best['bytes']['state'] / 2**20:.2f}",
                f"{best['bytes']['peak'] / 2**20:.1f}", f"{1e3 * best['optimizer_s']:.1f}",
                f"{1e3 * best['optimizer_max_s']:.1f}",
            )  # fmt: skip
        table.add_row(arm, *cells, trials)
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="20m")
    names = "adamw, or METHOD[-RANK]: " + " ".join(OPTIMIZERS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help=names)
    parser.add_argument("--lrs", nargs="+", type=float, default=list(GRID))
    parser.add_argument("--text", default=STDLIB, help=f"{STDLIB}, or a data set with a column `text`: NAME[:SUBSET]")
    for name, default in (
        ("vocabulary", 2048), ("steps", 300), ("rows", 8), ("length", 128), ("seed", 1), ("threads", 1), ("jobs", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store", type=Path, default=STORE, help="folder of finished runs")
    parser.add_argument("--summary", action="store_true", help="run nothing: table, and record if all is there")
    parser.add_argument("--record", type=Path, help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument(
        "--worker", action="store_true", help=argparse.SUPPRESS
    )  # of --jobs: the table is not its business
    options = parser.parse_args(arguments)
    for arm in options.arms:
        name, _, rank = arm.partition("-")
        if arm != "adamw" and (name not in OPTIMIZERS or takes_rank(name) != rank.isdigit()):
            parser.error(f"{arm!r} is no arm: {names}, with -RANK where the method has one")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: all there; 1: runs are missing; 2: something to mend."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options, console = parse(arguments), Console(highlight=False)
    keep_freed_memory()
    if not options.summary:
        if options.jobs > 1:
            code = spawn([*arguments, "--worker"], options.jobs, Path(__file__))
            if code:
                return code
        else:
            work(options, console)
    if options.worker:
        return 0
    arms, missing = summarise(options)
    console.print(show(arms, options))
    if missing:
        console.print(f"missing: {', '.join(missing)}")
        return 1
    if not options.no_record:
        config = {
            k: getattr(options, k) for k in ("model", "text", "vocabulary", "steps", "rows", "length", "lrs", "arms")
        }
        begun = begin_record(
            name=f"pretrain_{options.model}",
            config={**config, "betas": BETAS, "others_lr": OTHERS_LR},
            seed=options.seed,
        )
        finish_record(options.record, begun, {"arms": arms, "data": digest(options.text, options.vocabulary)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
