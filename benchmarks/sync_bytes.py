"""Bytes that one policy sync moves: LoGRA's Update against a full bf16 broadcast and a lossless delta of changed elements.

    python benchmarks/sync_bytes.py [--recipe recipes/demo.yaml] [--steps 7] [--ranks 64 256] [--shapes-only] ...

Sizes of Updates are those of real messages with Qwen2.5's shapes. The delta is measured on a real model: the recipe's rollouts
and rewards, its loss, a float32 master moved by AdamW (or by LoGRA), rounded to bf16 before and after the last step. Every
target's delta is sent in the smallest of several encodings, and bytes a parameter are scaled by kind of matrix to Qwen2.5.
Three masters are moved by the same steps: `settled` starts anywhere between two bf16 values, as after many steps; `fresh` exactly
at a bf16 checkpoint, where most steps do not reach the next value yet; `settled_small` as `settled`, with every matrix scaled to
an rms of 0.02, since the share that changes depends on the size of the weights, and larger models have smaller ones.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from delta import CODECS, Bits, delta_bound, entropy, pack, to_bits
from record import begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from logra import apply_update
from logra import config as cfg
from logra.build import build_run
from logra.rl.batch import TrainBatch
from logra.rl.step import Tally, accumulate
from logra.rl.trainer import Trainer
from logra.sketch.quantize import BITS, largest
from logra.sketch.sketcher import attach
from logra.sketch.split import merge
from logra.sketch.targets import Target
from logra.sketch.update import Factor, Update

GIB = 1 << 30
STARTS = ("settled", "fresh", "settled_small")
SMALL_RMS = 0.02
LIMITS = {"Qwen2.5-1.5B": 0.17, "Qwen2.5-7B": 0.35}  # GiB at rank 256, 8 bits
LIMIT_RANK, LIMIT_BITS = 256, 8
BETAS = (0.9, 0.999)
REAL_LIMIT = 400 << 20  # larger messages are not built: building one takes about three times its size
Shapes = Mapping[str, tuple[int, int]]


# -- shapes and message sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """A Qwen2-style decoder: q, k, v with bias, gated MLP, two norms a layer."""

    hidden: int
    intermediate: int
    layers: int
    kv: int
    vocab: int
    tied: bool

    def targets(self, layers: int | None = None) -> dict[str, tuple[int, int]]:
        """name -> (out, in) of the seven projections of the first `layers` layers (default: all)."""
        h, m, kv = self.hidden, self.intermediate, self.kv
        shapes = {
            "self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h), "mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m),
        }  # fmt: skip
        count = self.layers if layers is None else layers
        return {f"model.layers.{i}.{name}.weight": shape for i in range(count) for name, shape in shapes.items()}

    @property
    def num_targets(self) -> int:
        """Parameters of the target matrices."""
        return sum(out * width for out, width in self.targets().values())

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied output head counts once."""
        small = (self.hidden + 2 * self.kv) + 2 * self.hidden
        vocabulary = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.num_targets + self.layers * small + self.hidden + vocabulary


QWEN = {
    "Qwen2.5-1.5B": Decoder(1536, 8960, 28, 256, 151936, True),
    "Qwen2.5-7B": Decoder(3584, 18944, 28, 512, 152064, False),
}


def random_update(
    shapes: Shapes, rank: int, bits: int, seed: int = 0, dense: Mapping[str, Tensor] | None = None
) -> Update:
    """An Update of these shapes with random integers: its size is that of any other with the same header."""
    generator, top = torch.Generator().manual_seed(seed), largest(bits)
    factors = {}
    for name, (out, width) in shapes.items():
        q = torch.randint(-top, top + 1, (out, rank), generator=generator, dtype=BITS[bits])
        factors[name] = Factor(name, out, width, q, torch.full((out,), -20, dtype=torch.int8))
    return Update(
        index=100,
        basis="random",
        basis_index=100,
        seed=42,
        rank=rank,
        bits=bits,
        factors=factors,
        dense=dict(dense or {}),
    )


def wire_bytes(
    shapes: Shapes,
    rank: int,
    bits: int,
    *,
    dense: Shapes | None = None,
    envelope: str = "",
    index: int = 100,
    seed: int = 42,
) -> int:
    """Length of the message of such an Update, in closed form (wire format 2, ASCII names, no weight decay, drawn basis).

    dense: densely trained parameters; envelope: its JSON text, "" for none.
    """
    dense = dense or {}
    head = (
        f'{{"index":{index},"basis":"random","basis_index":{index},"seed":{seed},"rank":{rank},"bits":{bits},"decay":0.0,'
        f'"factors":[],"dense":[]' + (f',"envelope":{envelope}' if envelope else "") + "}"
    )
    entries = [f'{{"name":"{n}","out":{o},"in":{i},"explicit":false}}' for n, (o, i) in shapes.items()]
    entries += [f'{{"name":"{n}","out":{o},"in":{i}}}' for n, (o, i) in dense.items()]
    commas = max(0, len(shapes) - 1) + max(0, len(dense) - 1)
    header = len(head) + sum(map(len, entries)) + commas
    rows = sum(out for out, _ in shapes.values())
    values = sum(out * width for out, width in dense.values())
    return 18 + header + rows * (1 + rank * BITS[bits].itemsize) + 4 * values + 16


ENVELOPE = {"run": "0" * 32, "base": "0" * 32, "step": 100, "digest": "0" * 32}  # what a Packet adds, at its longest
ENVELOPE_TEXT = '{"run":"%s","base":"%s","step":100,"digest":"%s"}' % (("0" * 32,) * 3)


def message_sizes(ranks: Sequence[int]) -> dict[str, Any]:
    """Of each Qwen2.5 model: parameters, bf16 broadcasts and messages in bytes, real ones where they fit in memory.

    One layer is always built; `RuntimeError` if a real length is not the formula's.
    """
    sizes: dict[str, Any] = {}
    for model, decoder in QWEN.items():
        messages = []
        for rank in ranks:
            for bits in sorted(BITS):
                length = wire_bytes(decoder.targets(), rank, bits, envelope=ENVELOPE_TEXT)
                layer = _real_length(decoder.targets(1), rank, bits)
                is_real = length <= REAL_LIMIT
                if is_real:
                    _real_length(decoder.targets(), rank, bits)
                messages.append({"rank": rank, "bits": bits, "bytes": length, "layer_bytes": layer, "is_real": is_real})
        sizes[model] = {
            "parameters": decoder.num_parameters,
            "target_parameters": decoder.num_targets,
            "bf16_model_bytes": 2 * decoder.num_parameters,
            "bf16_target_bytes": 2 * decoder.num_targets,
            "messages": messages,
        }
    return sizes


def _real_length(shapes: Shapes, rank: int, bits: int) -> int:
    length = len(random_update(shapes, rank, bits).to_bytes(ENVELOPE))
    expected = wire_bytes(shapes, rank, bits, envelope=ENVELOPE_TEXT)
    if length != expected:
        raise RuntimeError(
            f"a message of {len(shapes)} targets has {length} bytes, the formula says {expected}: mend it"
        )
    return length


def misses(sizes: Mapping[str, Any]) -> list[str]:
    """The models whose rank-256, 8-bit message is above its limit."""
    return [
        f"{model}: {message['bytes'] / GIB:.4f} GiB > {LIMITS[model]}"
        for model, size in sizes.items()
        for message in size["messages"]
        if (message["rank"], message["bits"]) == (LIMIT_RANK, LIMIT_BITS) and message["bytes"] > LIMITS[model] * GIB
    ]


# -- the simulation -------------------------------------------------------------------------------------------------------


def start_master(weight: Tensor, start: str, name: str) -> Tensor:
    """The float32 master of `weight` at the beginning of a run; the residuals of the settled ones are uniform (int16)."""
    if start == "settled_small":
        weight = weight * (SMALL_RMS / weight.square().mean().sqrt())
    upper = weight.to(torch.bfloat16)
    if start == "fresh":
        return upper.float()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return merge(upper, torch.randint(-(1 << 15), 1 << 15, upper.shape, generator=generator, dtype=torch.int16))


class Watch:
    """Follows the bf16 image of the targets over a run, for all starts, and sizes the delta of the last step."""

    def __init__(self, targets: Sequence[Target], origin: Mapping[str, Tensor]):
        self.targets, self.origin = targets, origin
        self.before = {start: {t.name: self._bits(t, start) for t in targets} for start in STARTS}
        self.shares: dict[str, list[float]] = {start: [] for start in STARTS}
        self.moved: list[float] = []

    def _bits(self, target: Target, start: str) -> Bits:
        first = self.origin[target.name]
        return to_bits(start_master(first, start, target.name) + (target.weight.detach() - first))

    def step(self, is_last: bool) -> dict[str, Any] | None:
        """Note the share of elements whose bf16 bits changed since the last call; sizes by kind if it is the last."""
        sizes: dict[str, Any] = {start: {} for start in STARTS}
        for start in STARTS:
            changed = total = 0
            for target in self.targets:
                old, new = self.before[start][target.name], self._bits(target, start)
                changed, total = changed + int(np.count_nonzero(old != new)), total + len(old)
                if is_last:
                    kind = target.name.removesuffix(".weight").rpartition(".")[2]
                    _add_sizes(sizes[start].setdefault(kind, {}), old, new)
                else:
                    self.before[start][target.name] = new
            self.shares[start].append(changed / total)
        return sizes if is_last else None


def _add_sizes(into: dict[str, Any], old: Bits, new: Bits) -> None:
    """Adds one tensor: elements, changed ones, bytes and seconds by codec, bytes of the smallest and of the bound."""
    entry: dict[str, float] = {"elements": len(old), "changed": int(np.count_nonzero(old != new))}
    for name, (encode, decode) in CODECS.items():
        message, entry[f"{name}_encode_s"] = timed(lambda encode=encode: encode(old, new))
        back, entry[f"{name}_decode_s"] = timed(lambda decode=decode, message=message: decode(old, message))
        if not np.array_equal(back, new):
            raise RuntimeError(f"the codec {name} is not lossless: mend it")
        entry[name] = len(message)
    entry |= {"best": min(entry[name] for name in CODECS), "bound": delta_bound(old, new)}
    for key, value in entry.items():
        into[key] = into.get(key, 0) + value


def summed(kinds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The sizes of all kinds of matrices together."""
    return {key: sum(kind[key] for kind in kinds.values()) for key in next(iter(kinds.values()))}


def scaled(kinds: Mapping[str, Mapping[str, float]], decoder: Decoder, key: str = "best") -> float:
    """Bytes of the delta at another model's shapes: bytes a parameter of each kind of matrix times its parameters there."""
    total = 0.0
    for name, (out, width) in decoder.targets().items():
        kind = kinds[name.removesuffix(".weight").rpartition(".")[2]]
        total += out * width * kind[key] / kind["elements"]
    return total


def sample_batches(trainer: Trainer, count: int) -> list[TrainBatch]:
    """`count` batches of the starting policy's rollouts that carry a learning signal. `RuntimeError` if they are too rare."""
    batches: list[TrainBatch] = []
    for index in range(4 * count):
        trainer.step = index  # keys the random numbers
        rollouts = trainer.rollout([trainer.prompts[i] for i in trainer.sampler.next_batch()])
        batch = trainer.batch(rollouts, trainer.advantages(rollouts, trainer.rewards.score_rollouts(rollouts)))
        batches += [batch] if batch.has_signal else []
        if len(batches) == count:
            return batches
    raise RuntimeError(
        f"only {len(batches)} of {4 * count} batches had unequal rewards: use more prompts or another recipe"
    )


class Simulation:
    """Runs from the same weights and batches: the model of `trainer`, reset before each."""

    def __init__(self, trainer: Trainer, batches: Sequence[TrainBatch], seed: int):
        self.trainer, self.batches, self.seed = trainer, batches, seed
        self.model: nn.Module = trainer.method.model
        self.targets = trainer.method.sketcher.targets  # type: ignore[attr-defined]
        self.origin = {t.name: t.weight.detach().clone() for t in self.targets}

    def _follow(self, step: Callable[[TrainBatch], Any]) -> dict[str, Any]:
        """Every batch once, through `step`; shares of each step and sizes of the last."""
        with torch.no_grad():
            for target in self.targets:
                target.weight.copy_(self.origin[target.name])
        watch, sizes = Watch(self.targets, self.origin), None
        for index, batch in enumerate(self.batches):
            accumulate(self.model, batch, self.trainer.plan.microbatch_size, self.trainer.plan.loss, tally=Tally())
            step(batch)
            sizes = watch.step(index == len(self.batches) - 1)
        moved = sum(float((t.weight.detach() - self.origin[t.name]).double().square().sum()) for t in self.targets)
        count = sum(t.weight.numel() for t in self.targets)
        return {"shares": watch.shares, "sizes": sizes, "moved_rms": math.sqrt(moved / count)}

    def recipe(self) -> dict[str, Any]:
        """The recipe's own LoGRA method, trust region included. First, since it holds the model's sketcher."""
        trainer, scales = self.trainer, []

        def step(batch: TrainBatch) -> None:
            result = trainer.method.step(lambda: trainer.probe(batch), trainer.plan.loss.temperature)
            scales.append(result.metrics["learning_rate"] * result.metrics.get("trust/scale", 1.0))

        trainer.method.zero()
        run = self._follow(step)
        trainer.method.sketcher.detach()  # type: ignore[attr-defined]
        return run | {"method": "logra recipe", "lr": scales[-1]}

    def dense(self, lr: float) -> dict[str, Any]:
        """AdamW on the targets, in float32."""
        chosen = [t.weight for t in self.targets]
        self.model.requires_grad_(False)
        for weight in chosen:
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(chosen, lr=lr, betas=BETAS, weight_decay=0.0)

        def step(batch: TrainBatch) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        run = self._follow(step)
        self.model.requires_grad_(False)
        return run | {"method": "dense AdamW", "lr": lr}

    def logra(self, lr: float, rank: int) -> dict[str, Any]:
        """LoGRA at a plain learning rate, and how far the real integers of its last Update can be compressed."""
        sketcher = attach(
            self.model, rank=rank, seed=self.seed, targets=[t.name.removesuffix(".weight") for t in self.targets]
        )
        updates: list[Update] = []

        def step(batch: TrainBatch) -> None:
            updates[:] = [u for u in [sketcher.apply(sketcher.propose(lr))] if u is not None]

        run = self._follow(step)
        sketcher.detach()
        return run | {"method": f"logra r{rank}", "lr": lr, "compress": compressibility(updates[0])}


def compressibility(update: Update) -> dict[str, float]:
    """Compressed size over size of an Update's integers q: Shannon's bound (per target and per row scale) and zlib."""
    raw = b"".join(f.q.contiguous().numpy().tobytes() for f in update.factors.values())
    bits = 0.0
    for factor in update.factors.values():
        bits += factor.q.numel() * entropy(np.unique(factor.q.numpy(), return_counts=True)[1])
    ratios = {f"zlib{level}": len(zlib.compress(raw, level)) / len(raw) for level in (1, 6)}
    return {
        "rank": update.rank,
        "raw_bytes": len(raw),
        "entropy": bits / 8 / len(raw),
        "zstd3": len(pack(raw)) / len(raw),
    } | ratios


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """All runs from the recipe's model: its own method, dense AdamW and LoGRA at every learning rate."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flags = {
            "output_dir": f"{folder}/run", "rollout.prompts_per_step": options.prompts, "seed": options.seed, "eval": None,
            "rollout.rollouts_per_prompt": options.rollouts, "log.completions": False, "journal.enabled": False,
            "threads": options.threads,
        }  # fmt: skip
        run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(options.recipe), flags)))
        stack.callback(run.close)
        simulation = Simulation(run.trainer, sample_batches(run.trainer, options.steps), options.seed)
        runs = [_told(simulation.recipe())]
        runs += [_told(simulation.dense(lr)) for lr in options.lrs]
        runs += [_told(simulation.logra(lr, options.simulated_rank)) for lr in options.lrs]
        simulation.batches = simulation.batches[:1]
        compress = [simulation.logra(options.lrs[0], rank)["compress"] for rank in options.ranks]
        square = sum(float(w.double().square().sum()) for w in simulation.origin.values())
        rms = math.sqrt(square / sum(w.numel() for w in simulation.origin.values()))
        return {"runs": runs, "compress": compress, "weight_rms": rms, "rows_in_batch": len(simulation.batches[0])}


def _told(run: dict[str, Any]) -> dict[str, Any]:
    run.pop("compress", None)
    last = ", ".join(f"{start} {run['shares'][start][-1]:.3%}" for start in STARTS)
    print(f"{run['method']} at lr {run['lr']:.2g}: changed in the last step {last}", file=sys.stderr, flush=True)
    return run


# -- time -----------------------------------------------------------------------------------------------------------------


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The action's result and its wall time in seconds."""
    started = time.perf_counter()
    result = action()
    return result, time.perf_counter() - started


class Layer(nn.Module):
    """One decoder layer's target matrices, float32, under the names that an Update uses."""

    def __init__(self, shapes: Shapes):
        super().__init__()
        for name, (out, width) in shapes.items():
            *parents, leaf, _ = name.split(".")
            module: nn.Module = self
            for part in parents:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            linear = nn.Linear(width, out, bias=False)
            linear.weight.data.normal_(0.0, 0.02)
            module.add_module(leaf, linear)


def time_update(shapes: Shapes, ranks: Sequence[int], repeats: int) -> dict[str, Any]:
    """Seconds to copy one layer's weights in bf16 and to encode, decode and apply its Update, taking turns; median ratios."""
    layer = Layer(shapes)
    source = torch.cat([p.detach().flatten() for p in layer.parameters()]).to(torch.bfloat16)
    target = torch.empty_like(source)
    rounds: list[dict[str, float]] = []
    for index in range(repeats + 1):
        row = {"copy": timed(lambda: target.copy_(source))[1]}
        for rank in ranks:
            update = random_update(shapes, rank, LIMIT_BITS, seed=index)
            data, row[f"encode_r{rank}"] = timed(update.to_bytes)
            back, row[f"decode_r{rank}"] = timed(lambda data=data: Update.from_bytes(data))
            _, row[f"apply_r{rank}"] = timed(lambda back=back: apply_update(layer, back))
        rounds += [row] if index else []  # the first warms up
    ratios = {key: statistics.median(r[key] / r["copy"] for r in rounds) for key in rounds[0] if key != "copy"}
    copy_s = statistics.median(r["copy"] for r in rounds)
    return {
        "bf16_bytes": 2 * len(source),
        "copy_s_per_gib": copy_s * GIB / (2 * len(source)),
        "ratios": ratios,
        "rounds": rounds,
    }


def delta_time(kinds: Mapping[str, Mapping[str, float]], copy_s_per_gib: float) -> dict[str, float]:
    """Time of each codec as a ratio to a bf16 copy of the same number of weights."""
    total = summed(kinds)
    copy_s = copy_s_per_gib * 2 * total["elements"] / GIB
    return {key[:-2]: total[key] / copy_s for key in total if key.endswith("_s")}


# -- report ---------------------------------------------------------------------------------------------------------------


def show(results: Mapping[str, Any], console: Console) -> None:
    """The tables."""
    console.print(_bytes_table(results))
    console.print(_time_table(results))
    if "runs" in results:
        console.print(_runs_table(results))
        compress = _table(
            "size of the integers q after compression (real Updates, 8 bits)",
            "rank",
            "bound",
            "zstd 3",
            "zlib 1",
            "zlib 6",
        )
        for row in results["compress"]:
            compress.add_row(str(row["rank"]), *(f"{row[k]:.3f}" for k in ("entropy", "zstd3", "zlib1", "zlib6")))
        console.print(compress)


def _bytes_table(results: Mapping[str, Any]) -> Table:
    table = _table("GiB a sync, and the share of a full bf16 broadcast of the targets", "what", *QWEN)
    sizes = results["sizes"]

    def add(what: str, count: Callable[[str], float]) -> None:
        table.add_row(what, *(f"{count(m) / GIB:8.4f}  {count(m) / sizes[m]['bf16_target_bytes']:8.3%}" for m in QWEN))

    add("bf16, whole model", lambda m: sizes[m]["bf16_model_bytes"])
    add("bf16, targets", lambda m: sizes[m]["bf16_target_bytes"])
    for index, message in enumerate(sizes[next(iter(QWEN))]["messages"]):
        add(
            f"LoGRA Update, rank {message['rank']}, {message['bits']} bits",
            lambda m, i=index: sizes[m]["messages"][i]["bytes"],
        )
    for run in results.get("runs", []):
        for start in STARTS:
            what = f"delta, {run['method']}, lr {run['lr']:.1e}, {start}"
            add(what, lambda m, r=run, s=start: r["scaled_bytes"][s][m])
    return table


def _runs_table(results: Mapping[str, Any]) -> Table:
    heads = ("method", "lr", "start", "changed in step 1", "in the last", *CODECS, "best", "bound")
    table = _table("the delta of the last step on the real model: bits a target parameter", *heads)
    for run in results["runs"]:
        for start in STARTS:
            total, shares = summed(run["sizes"][start]), run["shares"][start]
            bits = (f"{8 * total[key] / total['elements']:.3f}" for key in (*CODECS, "best", "bound"))
            table.add_row(run["method"], f"{run['lr']:.1e}", start, f"{shares[0]:.3%}", f"{shares[-1]:.3%}", *bits)
    return table


def _time_table(results: Mapping[str, Any]) -> Table:
    table = _table("time, in copies of the same weights in bf16", "what", "copies")
    for key, ratio in results["update_time"]["ratios"].items():
        table.add_row(f"LoGRA {key}", f"{ratio:.2f}")
    for run in results.get("runs", []):
        if run["method"].startswith("dense"):
            for key in ("gaps_encode", "gaps_decode", "rice_encode", "rice_decode"):
                table.add_row(f"delta {key}, lr {run['lr']:.0e} (numpy)", f"{run['time'][key]:.2f}")
    return table


def _table(title: str, *heads: str) -> Table:
    return Table(*heads, title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Bytes that one policy sync moves: LoGRA, full broadcast, lossless delta."
    )
    parser.add_argument("--recipe", default="recipes/demo.yaml", help="model, data, rewards and loss of the real steps")
    for name, default, text in (
        ("steps", 7, "steps of a run; the last one's delta is sized"), ("prompts", 6, "prompts a step"),
        ("rollouts", 4, "rollouts a prompt"), ("repeats", 5, "timed rounds"), ("threads", 2, "torch threads"),
        ("simulated-rank", 64, "rank of the LoGRA runs on the real model"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} (default {default})")
    parser.add_argument("--ranks", nargs="+", type=_positive, default=[64, 256])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--shapes-only", action="store_true", help="no model: message sizes and times only")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a message is above its limit")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--record", type=Path, metavar="PATH", help="default: benchmarks/records/NAME_DATE_COMMIT.json")
    where.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    if not all(0.0 < lr < 1.0 for lr in options.lrs):
        parser.error("learning rates lie between 0 and 1")
    if options.check and LIMIT_RANK not in options.ranks:
        parser.error(f"--check needs rank {LIMIT_RANK}")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"need a whole number of at least 1, got {text!r}")
    return int(text)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the record keeps."""
    results: dict[str, Any] = {"sizes": message_sizes(options.ranks)}
    gc.collect()
    shapes = QWEN["Qwen2.5-1.5B"].targets(1)
    results["update_time"] = time_update(shapes, options.ranks, options.repeats)
    if not options.shapes_only:
        results |= simulate(options)
        for run in results["runs"]:
            run["scaled_bytes"] = {s: {m: scaled(run["sizes"][s], d) for m, d in QWEN.items()} for s in STARTS}
            run["scaled_bound"] = {s: {m: scaled(run["sizes"][s], d, "bound") for m, d in QWEN.items()} for s in STARTS}
            run["time"] = delta_time(run["sizes"]["settled"], results["update_time"]["copy_s_per_gib"])
            for kind in (kind for kinds in run["sizes"].values() for kind in kinds.values()):
                for key in [key for key in kind if key.endswith("_s")]:
                    del kind[key]  # summed up in run["time"]
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record. Exit code 2 for what the user can mend, 1 if --check finds a miss, else 0."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "check", "seed")}
    config |= {
        "betas": BETAS,
        "weight_decay": 0.0,
        "models": {m: vars(d) for m, d in QWEN.items()},
        "limits_gib": LIMITS,
    }
    try:
        begun = None if options.no_record else begin_record(name="sync_bytes", config=config, seed=options.seed)
        results = measure(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(results, Console())
    if begun is not None:
        finish_record(options.record, begun, results)
    missed = misses(results["sizes"])
    for miss in missed:
        print(f"above the limit: {miss}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
