"""What a run shows in the terminal: the arithmetic at the start, live progress, the curve at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from logra.build import Run
from logra.cli.console import Console
from logra.rl.evaluate import EvalResult

_BARS = " ▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], width: int = 60) -> str:
    """A one-line curve from 0 (or the least value) to 1 (or the greatest); neighbours are averaged beyond `width`."""
    if not values:
        return ""
    per = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[i : i + per] for i in range(0, len(values), per))]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in means)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


class Display:
    """A listener of the trainer. `plain`, or an output that is no terminal: one line a step."""

    def __init__(self, run: Run, *, plain: bool = False, console: Console | None = None):
        self.run = run
        self.console = console or Console()
        self.live = self.console.is_terminal and not plain
        self.rewards: list[float] = []
        self.started = time.perf_counter()
        self.first_step = run.trainer.step
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.live,
        )
        total = run.trainer.plan.steps
        self.task = self.progress.add_task("train", total=total, completed=run.trainer.step, note="")

    def __enter__(self) -> Display:
        self.introduce()
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def introduce(self) -> None:
        """The batch arithmetic and the targets."""
        config, plan, out = self.run.config, self.run.trainer.plan, self.console.print
        chosen, skipped = self.run.trainer.method.describe()
        if self.run.resumed_from is not None:
            out(f"resumed from {self.run.resumed_from} (step {self.run.trainer.step})", highlight=False)
        out(
            f"[bold]{config.model.name_or_path}[/] on {config.data.name}, method {config.method.name}",
            highlight=False,
        )
        rollouts = plan.prompts_per_step * plan.rollouts_per_prompt
        micro = -(-rollouts // plan.updates_per_step // plan.microbatch_size)
        out(
            f"one step: {plan.prompts_per_step} prompts x {plan.rollouts_per_prompt} rollouts = {rollouts} rollouts, "
            f"{plan.updates_per_step} update(s) of {rollouts // plan.updates_per_step} rollouts in {micro} microbatch(es) "
            f"of {plan.microbatch_size}; {plan.steps} steps over {len(self.run.prompts)} prompts",
            highlight=False,
        )
        prompts = self.run.prompts
        for count, why in (
            (prompts.num_too_long, "over-long"),
            (prompts.num_empty, "empty"),
            (prompts.num_excluded, "held-out"),
        ):
            if count:
                out(f"left out {count} {why} prompt(s)", highlight=False)
        out(_targets(chosen, skipped))

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.rewards.append(metrics["reward"])
        done = step - self.first_step
        rate = done / max(time.perf_counter() - self.started, 1e-9)
        note = (
            f"reward {metrics['reward']:.3f}  {rate * 60:.1f} steps/min  ETA {_duration((self._total - step) / rate)}"
        )
        if "trust/scale" in metrics:
            note += f"  KL {metrics['trust/predicted_kl']:.1e}  scale {metrics['trust/scale']:.2f}"
        if metrics["skipped_steps"]:
            note += f"  skipped {metrics['skipped_steps']}"
        self.progress.update(self.task, completed=step, note=note)
        if not self.live:
            self.console.print(f"step {step}/{self._total}  {note}", highlight=False, soft_wrap=True)

    @property
    def _total(self) -> int:
        return self.run.trainer.plan.steps

    def on_eval(self, step: int, result: EvalResult) -> None:
        rates = "  ".join(f"pass@{k} {value:.3f}" for k, value in result.pass_at.items())
        self.console.print(
            f"[bold]held-out {rates}[/]  at step {step} ({result.num_prompts} prompts, mean length "
            f"{result.mean_length:.1f})",
            highlight=False,
        )

    def summary(self, final: Path) -> None:
        out = self.console.print
        if self.rewards:
            out(
                f"reward  {curve(self.rewards)}  {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}",
                highlight=False,
            )
        evaluations = self.run.evaluations()
        if len(evaluations) > 1:
            first, last = evaluations[0], evaluations[-1]
            for name in (n for n in first if n.startswith("eval/pass@")):
                out(
                    f"[bold]held-out {name.removeprefix('eval/')}  before {first[name]:.3f} (step {first['step']})  "
                    f"after {last[name]:.3f} (step {last['step']})[/]",
                    highlight=False,
                )
        out(f"model: {final}", highlight=False, soft_wrap=True)


def _targets(chosen: Sequence[tuple[str, tuple[int, ...]]], skipped: Sequence[Any]) -> Table:
    """Targets and skipped tensors, grouped over layers by the last parts of their names, shape and reason."""
    groups: dict[tuple[str, str, str], int] = {}
    rows = [(name, shape, "trained") for name, shape in chosen] + [(s.name, s.shape, s.reason) for s in skipped]
    for name, shape, what in rows:
        short = ".".join("*" if part.isdigit() else part for part in name.removesuffix(".weight").split("."))
        key = (short, "x".join(map(str, shape)), what)
        groups[key] = groups.get(key, 0) + 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tensor", no_wrap=True)
    for header in ("shape", "count", ""):
        table.add_column(header)
    for (name, shape, what), count in groups.items():
        table.add_row(name, shape, str(count), what, style=None if what == "trained" else "dim")
    return table
