"""Time of one training step, side by side: dense AdamW, LoRA (peft) and LoGRA on the same seven projections, in float32.

    python benchmarks/step_time.py [--model models/SmolLM2-135M-Instruct] [--batch 8] [--length 256] [--rank 64] ...
    python benchmarks/step_time.py --methods logra aligned    # what tracking a basis adds to drawing one

A step is forward, backward and update on one fixed batch of random tokens; LoGRA's includes drawing the next basis (in the
forward pass), propose and apply, without a trust region. All methods live in one process, each with its own copy of the
model, and take turns in every round; the order changes each round so that drift cancels. Ratios are taken within a round.
Wall and CPU time are both kept, every round is in the record, and nothing is dropped but the warm-up rounds (two: the
aligned basis refreshes all targets in its first two updates, and an eighth of them, in turn, in every later one).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from logra.cli.allocator import keep_freed_memory
from logra.rl.models import load_model, prepare
from logra.sketch.sketcher import attach
from logra.sketch.targets import select_targets

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
METHODS = ("dense", "lora", "logra", "full", "logra15", "aligned")
PHASES = ("forward", "backward", "update", "total")
CLOCKS = ("wall_s", "cpu_s")
SPREAD = ("median", "q1", "q3", "min")
TARGETS = {"logra/dense": 0.78, "logra/lora": 0.92, "aligned/logra": 1.04}
OURS = ("logra", "logra15", "aligned")
LR = 1e-6  # the time does not depend on it; the weights stay sane
Round = Mapping[str, Mapping[str, Mapping[str, float]]]  # method -> phase -> clock -> seconds


@dataclass(frozen=True)
class Contender:
    """One method on its own copy of the model. held: trainable state after backward by kind; optimizer_state: after update."""

    model: nn.Module
    update: Callable[[], None]
    held: Callable[[], dict[str, list[Tensor]]]
    optimizer_state: Callable[[], list[Tensor]]

    def loss(self, ids: Tensor) -> Tensor:
        return self.model(ids, labels=ids, use_cache=False).loss


def build(method: str, model: nn.Module, options: argparse.Namespace) -> Contender:
    """A contender of METHODS that owns `model`."""
    if method == "dense":
        chosen = {id(t.weight) for t in select_targets(model, PROJECTIONS)[0]}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        return _with_adamw(model, options, lambda: {})
    if method == "full":
        model.requires_grad_(True)
        return _with_adamw(model, options, lambda: {})
    if method == "lora":
        return _lora(model, options)
    if method == "aligned":
        return _logra(model, options, bits=8, basis="aligned")
    return _logra(model, options, bits=15 if method == "logra15" else 8)


def _with_adamw(
    model: nn.Module, options: argparse.Namespace, extra: Callable[[], dict[str, list[Tensor]]]
) -> Contender:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True if options.fused_adamw else None)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def state() -> list[Tensor]:
        return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]

    return Contender(model, update, lambda: {"gradients": _gradients(model), **extra()}, state)


def _lora(model: nn.Module, options: argparse.Namespace) -> Contender:
    from peft import LoraConfig, get_peft_model

    names = [t.name.removesuffix(".weight") for t in select_targets(model, PROJECTIONS)[0]]
    config = LoraConfig(r=options.rank, lora_alpha=options.rank, lora_dropout=0.0, target_modules=names)
    adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    trained = [p for p in adapted.parameters() if p.requires_grad]
    return _with_adamw(adapted, options, lambda: {"adapters": trained})  # type: ignore[dict-item]


def _logra(model: nn.Module, options: argparse.Namespace, bits: int, basis: str = "random") -> Contender:
    sketcher = attach(
        model, rank=options.rank, basis=basis, seed=options.seed, optimizer="row_adam", variant="simplified",
        targets=PROJECTIONS, bits=bits,
    )  # fmt: skip

    def held() -> dict[str, list[Tensor]]:
        return {
            "gradients": _gradients(model),
            "sketch": [sketcher.sketch(name) for name in sketcher.names],
            "basis": [sketcher.basis_block(name) for name in sketcher.names],  # as drawn by the forward pass
            "next_basis": sketcher.accumulated()[1:],  # of the targets that are due
        }

    def update() -> None:
        if sketcher.apply(sketcher.propose(LR)) is None:
            raise RuntimeError("the sketches are zero: there was no step to time")

    def moments() -> list[Tensor]:
        state = sketcher.state_dict()
        return [state[key] for key in ("first_moment", "moment") if key in state]

    return Contender(model, update, held, moments)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, float]]:
    """The action's result, and the seconds of wall time and of this process' CPU time (all threads) that it took."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    wait()
    return result, {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def run_step(
    contender: Contender, ids: Tensor, inspect: Callable[[], None] = lambda: None
) -> tuple[float, dict[str, dict[str, float]]]:
    """One step: (loss, phase -> clock -> seconds). `inspect` is called between backward and update, untimed."""
    gc.collect()
    loss, forward = timed(lambda: contender.loss(ids), ids.device)
    _, backward = timed(loss.backward, ids.device)
    inspect()
    _, update = timed(contender.update, ids.device)
    phases = {"forward": forward, "backward": backward, "update": update}
    total = {clock: sum(phase[clock] for phase in phases.values()) for clock in CLOCKS}
    return float(loss.detach()), {**phases, "total": total}


def warm_up(contenders: Mapping[str, Contender], ids: Tensor) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """The warm-up rounds: each method's first loss and its trainable state in bytes by kind, counted from the tensors.

    All start from the same weights, so `RuntimeError` if their losses differ: they would not be doing the same work.
    """
    losses, sizes = {}, {}
    for method, contender in contenders.items():
        held: dict[str, int] = {}
        losses[method], _ = run_step(contender, ids, lambda c=contender, h=held: h.update(_bytes(c.held())))
        sizes[method] = held | _bytes({"optimizer_state": contender.optimizer_state()})
        run_step(contender, ids)
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= 1e-4 * abs(low):
        raise RuntimeError(f"the methods do not start from the same loss: {losses}")
    return losses, sizes


def _bytes(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    return {kind: sum(t.numel() * t.element_size() for t in some) for kind, some in tensors.items()}


def order_of(methods: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: every rotation, each forwards and then backwards."""
    shift = index // 2 % len(methods)
    rotated = [*methods[shift:], *methods[:shift]]
    return rotated[::-1] if index % 2 else rotated


@contextlib.contextmanager
def quiet_gc() -> Iterator[None]:
    """No garbage collection but the explicit ones, and those look at new objects only."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(contenders: Mapping[str, Contender], ids: Tensor, repeats: int) -> dict[str, Any]:
    """Warm up, run the rounds, and return everything that the record keeps but the summaries."""
    load_before = list(os.getloadavg())
    with quiet_gc():
        first_losses, state_bytes = warm_up(contenders, ids)
        orders, losses, rounds = [], [], []
        for index in range(repeats):
            orders.append(order_of(list(contenders), index))
            steps = {method: run_step(contenders[method], ids) for method in orders[-1]}
            losses.append({method: steps[method][0] for method in contenders})
            rounds.append({method: steps[method][1] for method in contenders})
    return {
        "load_average": {"before": load_before, "after": list(os.getloadavg())},
        "first_loss": first_losses,
        "state_bytes": state_bytes,
        "orders": orders,
        "losses": losses,
        "rounds": rounds,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, quartiles (linear interpolation) and median."""
    return {what: float(v) for what, v in zip(SPREAD, np.percentile(values, (50, 25, 75, 0)), strict=True)}


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """method -> phase -> clock -> `spread` over the rounds."""
    return {
        method: {p: {c: spread([r[method][p][c] for r in rounds]) for c in CLOCKS} for p in PHASES}
        for method in rounds[0]
    }


def paired_ratios(rounds: Sequence[Round]) -> dict[str, Any]:
    """Of each LoGRA method over each other, and of aligned over random bases: clock -> `spread` of the ratio of totals within
    a round, and the target."""
    ratios: dict[str, Any] = {}
    for ours in (m for m in rounds[0] if m in OURS):
        for other in (m for m in rounds[0] if m not in OURS or (ours, m) == ("aligned", "logra")):
            pair = f"{ours}/{other}"
            ratios[pair] = {c: spread([r[ours]["total"][c] / r[other]["total"][c] for r in rounds]) for c in CLOCKS}
            ratios[pair]["target"] = TARGETS.get(pair)
    return ratios


def misses(ratios: Mapping[str, Any]) -> list[str]:
    """The pairs whose median wall ratio is above its target."""
    return [p for p, r in ratios.items() if r["target"] is not None and r["wall_s"]["median"] > r["target"]]


def show(results: Mapping[str, Any], console: Console) -> None:
    """Three tables: seconds, ratios, bytes; and the load of the machine."""
    heads = ("wall", *SPREAD[1:], "CPU", *SPREAD[1:])
    seconds = _table("seconds a step: median, quartiles, minimum", "method", "phase", *heads)
    for method, phases in results["summary"].items():
        for phase in PHASES:
            cells = [f"{phases[phase][clock][what]:.3f}" for clock in CLOCKS for what in SPREAD]
            seconds.add_row(method, phase, *cells, end_section=phase == PHASES[-1])
    ratios = _table("ratio of totals within a round: median (quartiles)", "pair", "wall", "CPU", "target")
    for pair, ratio in results["ratios"].items():
        ratios.add_row(pair, *(_cell(ratio[clock]) for clock in CLOCKS), str(ratio["target"] or ""))
    kinds = sorted({kind for sizes in results["state_bytes"].values() for kind in sizes})
    sizes = _table("trainable state, MB (10^6 bytes)", "method", *kinds, "sum")
    for method, held in results["state_bytes"].items():
        sizes.add_row(method, *(f"{held.get(k, 0) / 1e6:.2f}" for k in kinds), f"{sum(held.values()) / 1e6:.2f}")
    for table in (seconds, ratios, sizes):
        console.print(table)
    before, after = (" ".join(f"{v:.2f}" for v in results["load_average"][k]) for k in ("before", "after"))
    console.print(f"load average (1, 5, 15 min): before {before}, after {after}")


def _table(title: str, *heads: str) -> Table:
    return Table(*heads, title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)


def _cell(values: Mapping[str, float]) -> str:
    return f"{values['median']:.3f} ({values['q1']:.3f}-{values['q3']:.3f})"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time of dense AdamW, LoRA and LoGRA, side by side in one process."
    )
    parser.add_argument(
        "--model", default="models/SmolLM2-135M-Instruct", help="a folder, a hub name or builtin:tiny-llama"
    )
    for name, default, text in (
        ("batch", 8, "sequences a step"), ("length", 256, "tokens a sequence"), ("rank", 64, "rank of LoGRA and LoRA"),
        ("repeats", 9, "timed rounds"), ("threads", 2, "torch threads"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} (default {default})")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens and of LoGRA's bases")
    parser.add_argument("--return-freed-memory", action="store_true", help="glibc's own behaviour, for comparison")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS[:4]), help="logra15: 15-bit Updates"
    )
    parser.add_argument(
        "--fused-adamw", action="store_true", help="torch's fused AdamW for dense and LoRA, not its default"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a median wall ratio is above its target")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--record", type=Path, metavar="PATH", help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    where.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    options.methods = list(dict.fromkeys(options.methods))
    if options.check and not {"dense", "lora", "logra"} <= {*options.methods}:
        parser.error("--check needs the methods dense, lora and logra")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"need a whole number of at least 1, got {text!r}")
    return int(text)


def prepare_contenders(options: argparse.Namespace) -> tuple[dict[str, Contender], Tensor, dict[str, int]]:
    """The contenders, the token batch, and the counts of parameters. Every method gets a copy; the last takes the original."""
    model, _ = load_model(options.model, device=options.device, seed=options.seed)
    prepare(model, gradient_checkpointing=False)
    trained = sum(t.weight.numel() for t in select_targets(model, PROJECTIONS)[0])
    counts = {"model_parameters": sum(p.numel() for p in model.parameters()), "target_parameters": trained}
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(model.config.vocab_size, (options.batch, options.length), generator=generator).to(
        options.device
    )
    last = options.methods[-1]
    copies = {method: model if method == last else copy.deepcopy(model) for method in options.methods}
    return {method: build(method, copies[method], options) for method in options.methods}, ids, counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record. Exit code 2 for what the user can mend, 1 if --check finds a miss, else 0."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    # as `logra train` does on CPUs; the same for all methods
    keeps = not options.return_freed_memory and keep_freed_memory()
    fixed = {"dtype": "float32", "lr": LR, "weight_decay": 0.0, "gradient_checkpointing": False, "targets": PROJECTIONS}
    fixed |= {"keeps_freed_memory": keeps}
    config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "check", "seed")} | fixed
    try:
        begun = None if options.no_record else begin_record(name="step_time", config=config, seed=options.seed)
        contenders, ids, counts = prepare_contenders(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {**counts, **measure(contenders, ids, options.repeats)}
    results |= {"summary": summarise(results["rounds"]), "ratios": paired_ratios(results["rounds"])}
    show(results, Console())
    if begun is not None:
        finish_record(options.record, begun, results)
    missed = misses(results["ratios"])
    if options.check and missed:
        print(f"above the target: {', '.join(missed)}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
