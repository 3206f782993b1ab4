"""How much of the true gradient a sketch basis sees, on real rollouts: random, aligned and the best possible.

    python benchmarks/fidelity.py [--recipe recipes/demo.yaml] [--ranks 8 16 64] [--past 4] [--record PATH | --no-record]
    python benchmarks/fidelity.py --ablations        # the published ones: rank, refresh or fixed, Rademacher or Gaussian

A few batches are sampled by the recipe on two-digit sums. The first `--past` of them go through `AlignedBases` as training
would (every target in the first two, then each in its turn), and through an exact decomposition of the same data. Then the
true gradient G of a later batch, which no basis has seen, is compared with its reconstruction: cos(G, G A^T A), over all
targets, by projection and rank. `best` is the truncated SVD of that very G, `exact` the principal directions of the past.
`*_felt` is the same cosine as the layer's outputs feel it, in the metric of its inputs, <U, V> = tr(U X^T X V^T): what a
step of G A^T A changes on real inputs, against what a step of G would change.
The policy moves between batches by AdamW on the targets (--lr), as it would in training.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from logra import config as cfg
from logra.build import build_run
from logra.errors import UserError
from logra.rl.step import Tally, accumulate
from logra.sketch import basis as drawn
from logra.sketch.aligned import AlignedBases
from logra.sketch.targets import Target

TASK = {
    "name": "reasoning_gym:basic_arithmetic",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
}
ABLATION_RANKS = (4, 16, 64, 256)
ATTEMPTS = 20
Rows = list[dict[str, Any]]


class Gradients:
    """Hooks on every target: the true G of a batch, and layer inputs with output gradients for whoever wants them."""

    def __init__(self, targets: Sequence[Target]):
        self.targets = targets
        self.true: dict[str, Tensor] = {}
        self.listeners: list[Callable[[str, Tensor, Tensor], None]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [t.module.register_forward_hook(self._hook(t.name)) for t in self.targets]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def forward(_module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            if output.requires_grad:
                output.register_hook(lambda h: self._take(name, x, h.reshape(-1, h.shape[-1])))

        return forward

    def _take(self, name: str, x_Nk: Tensor, h_Nd: Tensor) -> None:
        for listener in self.listeners:
            listener(name, x_Nk, h_Nd)


class Batches:
    """Rollout batches of a recipe; `backward` gives the gradients of one, `move` takes a step of AdamW on the targets."""

    def __init__(self, run: Any, lr: float):
        self.trainer = run.trainer
        self.model = self.trainer.method.model
        self.targets = self.trainer.method.targets
        self.gradients = Gradients(self.targets)
        self.optimizer = torch.optim.AdamW([t.weight for t in self.targets], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def backward(self) -> dict[str, float]:
        """Sample until a batch has signal, then forward and backward; the weights' gradients are G."""
        trainer = self.trainer
        for _ in range(ATTEMPTS):
            rollouts = trainer.rollout([trainer.prompts[i] for i in trainer.sampler.next_batch()])
            scores = trainer.rewards.score_rollouts(rollouts)
            batch = trainer.batch(rollouts, trainer.advantages(rollouts, scores))
            if batch.has_signal:
                break
        else:
            raise UserError(
                f"{ATTEMPTS} batches in a row have no rewards that differ within a prompt: use another task"
            )
        self.optimizer.zero_grad(set_to_none=True)
        with self.gradients.hooked():
            accumulate(self.model, batch, trainer.plan.microbatch_size, trainer.plan.loss, tally=Tally())
        return {"tokens": int(batch.attention_mask.sum()), "rollouts": len(batch)}

    def move(self) -> None:
        self.optimizer.step()

    def true(self, target: Target) -> Tensor:
        """G (d, k) of the last batch."""
        assert target.weight.grad is not None
        return target.weight.grad.t() if target.transposed else target.weight.grad


def open_run(options: argparse.Namespace, folder: str) -> Any:
    flags = {
        "output_dir": folder, "eval": None, "log.completions": False, "method": {"name": "dense"}, "checkpoint.every": 0,
        "rollout.prompts_per_step": options.prompts, "rollout.rollouts_per_prompt": options.rollouts,
        "rollout.max_new_tokens": options.tokens, "threads": options.threads, "train.microbatch_size": options.microbatch,
    }  # fmt: skip
    values = cfg.apply_overrides(cfg.read_yaml(options.recipe), flags)
    values["data"] = {**values["data"], **TASK}
    if options.model:
        values["model"] = {**values.get("model", {}), "name_or_path": options.model}
    return build_run(cfg.make_config(values))


class Trackers:
    """Aligned bases of several ranks, and the exact second moments, fed by the same data."""

    def __init__(self, targets: Sequence[Target], options: argparse.Namespace):
        columns = {t.name: t.in_features for t in targets}
        if max(options.ranks) > min(columns.values()):
            raise UserError(f"a rank of {max(options.ranks)} exceeds the {min(columns.values())} inputs of some target")
        self.index = 0
        self.bases = {
            rank: AlignedBases(columns, rank=rank, seed=options.seed, every=options.every, explore=options.explore)
            for rank in options.ranks
        }
        self.covariances = {name: torch.zeros(k, k) for name, k in columns.items()}
        self.inputs = {name: torch.zeros(k, k) for name, k in columns.items()}  # X^T X of tokens with a gradient

    def take(self, name: str, x_Nk: Tensor, h_Nd: Tensor) -> None:
        weighted = x_Nk * torch.linalg.vector_norm(h_Nd, dim=1, keepdim=True)
        self.covariances[name].addmm_(weighted.t(), x_Nk)
        seen = x_Nk[h_Nd.any(1)]
        self.inputs[name].addmm_(seen.t(), seen)
        for bases in self.bases.values():
            observer = bases.observer(name, self.index)
            if observer is not None:
                observer(x_Nk, h_Nd, x_Nk @ bases.bases[name].matrix.t())

    def refresh(self) -> None:
        self.index += 1
        for bases in self.bases.values():
            bases.take(bases.following(self.index))


def cosine(gradient_dk: Tensor, basis_rk: Tensor) -> float:
    """cos(G, G A^T A), Frobenius."""
    sketch = gradient_dk @ basis_rk.t()
    image = sketch @ basis_rk
    return float(torch.sum(image * gradient_dk) / (image.norm() * gradient_dk.norm()))


def felt(gradient_dk: Tensor, basis_rk: Tensor, second_moment_kk: Tensor) -> float:
    """The cosine of G and G A^T A in the metric of the inputs: of the changes X G^T and X (G A^T A)^T of the outputs."""
    image = (gradient_dk @ basis_rk.t()) @ basis_rk
    moved, moved_image = gradient_dk @ second_moment_kk, image @ second_moment_kk
    norms = torch.sum(moved * gradient_dk) * torch.sum(moved_image * image)
    return float(torch.sum(moved * image) / norms.sqrt())


def compare(batches: Batches, options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """One row a target and rank: cosines of random, aligned, exact and best."""
    trackers = Trackers(batches.targets, options)
    batches.gradients.listeners = [trackers.take]
    sizes = []
    for _ in range(options.past):
        sizes.append(batches.backward())
        trackers.refresh()
        batches.move()
    batches.gradients.listeners = []
    rows: Rows = []
    for number in range(options.later):
        sizes.append(batches.backward())
        for target in batches.targets:
            rows += _rows_of(target, batches.true(target), trackers, options.seed, number)
        batches.move()
    return rows, {"batches": sizes}


def _rows_of(target: Target, gradient: Tensor, trackers: Trackers, seed: int, number: int) -> Rows:
    _, directions = torch.linalg.eigh(trackers.covariances[target.name].double())
    squares = torch.linalg.eigvalsh(_smaller_gram(gradient)).clamp(min=0.0).flip(0)
    inputs = trackers.inputs[target.name]
    rows = []
    for rank, bases in trackers.bases.items():
        signs = drawn.draw("random", seed, target.name, number, range(rank), range(target.in_features)).float()
        random, aligned = signs * drawn.scale(rank), bases.bases[target.name].matrix
        rows.append(
            {
                "target": target.name,
                "projection": target.name.removesuffix(".weight").rpartition(".")[2],
                "rank": rank,
                "random": cosine(gradient, random),
                "aligned": cosine(gradient, aligned),
                "exact": cosine(gradient, directions[:, -rank:].t().float()),
                "best": float((squares[:rank].sum() / squares.sum()).sqrt()),
                "random_felt": felt(gradient, random, inputs),
                "aligned_felt": felt(gradient, aligned, inputs),
            }
        )
    return rows


def _smaller_gram(gradient_dk: Tensor) -> Tensor:
    wide = gradient_dk.double() if gradient_dk.shape[0] <= gradient_dk.shape[1] else gradient_dk.t().double()
    return wide @ wide.t()


def ablate(batches: Batches, options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """The published ablations on true gradients: cosine by rank, Rademacher or Gaussian, refreshed or fixed bases.

    Each cell is the mean over the targets and `--later` batches; sqrt(r / (k + r)) is what the shapes alone predict.
    """
    rows: Rows = []
    sizes = []
    for number in range(options.later):
        sizes.append(batches.backward())
        for target in batches.targets:
            gradient, columns = batches.true(target), range(target.in_features)
            for rank in ABLATION_RANKS:
                if rank > target.in_features:
                    continue
                row: dict[str, Any] = {"target": target.name, "rank": rank}
                for kind in ("random", "gaussian"):
                    for label, index in (("refreshed", number), ("fixed", 0)):
                        block = drawn.draw(kind, options.seed, target.name, index, range(rank), columns).float()
                        row[f"{kind}_{label}"] = cosine(gradient, block * drawn.scale(rank))
                row["predicted"] = (rank / (target.in_features + rank)) ** 0.5
                rows.append(row)
        batches.move()
    return rows, {"batches": sizes}


def means(rows: Rows, keys: Sequence[str]) -> Rows:
    """Rows averaged over everything but `keys`, in order of first appearance; the number averaged as `count`."""
    groups: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
    return [
        dict(zip(keys, group, strict=True))
        | {name: sum(row[name] for row in some) / len(some) for name in numbers}
        | {"count": len(some)}
        for group, some in groups.items()
    ]


def show(rows: Rows, console: Console) -> None:
    table = Table(*rows[0], box=SIMPLE)
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def parse_common(parser: argparse.ArgumentParser, ranks: list[int]) -> argparse.ArgumentParser:
    """The arguments that say which data is looked at; ranks: the default."""
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("--model", help="instead of the recipe's")
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    for name, default, text in (
        ("past", 4, "batches the bases see"), ("later", 2, "batches they are judged on"), ("prompts", 8, "a batch"),
        ("rollouts", 8, "a prompt"), ("tokens", 20, "new tokens at most"), ("every", 8, "updates between refreshes"),
        ("explore", 0, "random rows"), ("microbatch", 16, "rollouts a backward pass"), ("threads", 2, "torch threads"),
        ("seed", 0, "of the bases"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--lr", type=float, default=1e-5, help="of AdamW between batches (default 1e-5)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--record", type=Path)
    where.add_argument("--no-record", action="store_true")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablations", action="store_true", help="the published ablations instead")
    return check(parse_common(parser, ranks=[8, 16, 64]).parse_args(arguments))


def check(options: argparse.Namespace) -> argparse.Namespace:
    """Raises `UserError` for numbers that mean nothing."""
    positive = (
        *options.ranks,
        options.past,
        options.later,
        options.prompts,
        options.rollouts,
        options.tokens,
        options.every,
    )
    if min(positive) < 1 or not 0 <= options.explore < min(options.ranks):
        raise UserError(
            "ranks, past, later, prompts, rollouts, tokens and every begin at 1; explore is below every rank"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    name = "fidelity_ablations" if options.ablations else "fidelity"
    config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "seed")} | {"task": TASK}
    begun = None if options.no_record else begin_record(name=name, config=config, seed=options.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(options, f"{folder}/run")
        try:
            rows, sizes = (ablate if options.ablations else compare)(Batches(run, options.lr), options)
        finally:
            run.close()
    keys = ["rank"] if options.ablations else ["projection", "rank"]
    summary = {"by_rank": means(rows, ["rank"]), "by_" + "_and_".join(keys): means(rows, keys)}
    for table in summary.values():
        show(table, Console(width=160))
    if begun is not None:
        finish_record(options.record, begun, {**sizes, **summary})
    return 0


if __name__ == "__main__":
    sys.exit(main())
