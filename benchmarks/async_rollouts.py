"""Rollouts ahead of the trainer (rollout.async) against taking turns: updates per hour and quality, side by side.

    python benchmarks/async_rollouts.py --vllm-python PYTHON [--ahead 0 1] [--seeds 3] [--steps 24] [--recipe recipes/demo.yaml]

One CPU core for the trainer and one for a vLLM server, the same for every arm: taking turns then leaves one of them idle at any
moment. Every run has a fresh server, a fresh trainer process and the recipe's task and model; arms take turns, and the order of
a round alternates, so that a drift of the machine cancels. Updates per hour are from the end of the last warm-up step to the
end of the last step, by the clock, with logging and journal. Rewards are those of training rollouts; pass@1 is of the recipe's
held-out prompts after the last step. PYTHON is an interpreter that has vLLM; the trainer runs with the one that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from record import ROOT, begin_record, finish_record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from logra import config as cfg
from logra.build import build_run
from logra.rl.engines.vllm_serve import SERVE_ENVIRONMENT, serve_options
from logra.rl.evaluate import EvalResult
from logra.rl.run_dir import read_metrics

TARGET = 1.3  # updates per hour, one ahead over none
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SERVER = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes started within have this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, **ONE_THREAD, **extra, "PYTHONPATH": path}


@contextmanager
def serving(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int]]:
    """A vLLM server of the recipe's model on its core; gives its address and process. The engine waits until it is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        options.vllm_python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        options.model,
        *serve_options(),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", "32"]
    command += ["--max-model-len", str(options.max_model_len), "--max-num-seqs", "64"]
    command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    with (folder / "server.log").open("w") as output, on_core(options.cores[1]):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(SERVER | SERVE_ENVIRONMENT), stdout=output, stderr=output
        )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(60)


def settings(options: argparse.Namespace, ahead: int, seed: int, url: str, folder: Path) -> dict[str, Any]:
    """The recipe, laid over with what the comparison needs."""
    changes: dict[str, Any] = {
        "output_dir": str(folder / "run"), "seed": seed, "threads": 1, "train.steps": options.steps,
        "trust.steps": options.steps, "rollout.engine": "vllm", "rollout.vllm.url": url, "rollout.async": ahead,
        "rollout.on_update": options.on_update if ahead else "finish", "log.memory": False, "log.completions": False,
        "checkpoint.every": 0, "eval.before": False,
    }  # fmt: skip
    if options.no_eval:
        changes = {k: v for k, v in changes.items() if not k.startswith("eval.")} | {"eval": None}
    return cfg.apply_overrides(cfg.read_yaml(options.recipe), changes)


# -- the trainer's process -----------------------------------------------------------------------------------------------------


def computed_s(root: int) -> float:
    """Seconds of CPU of a process and all that it started."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)], used[int(path.parent.name)] = (
                int(fields[1]),
                int(fields[11]) + int(fields[12]),
            )
    family, size = {root}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


class Clock:
    """When each step ended, in seconds of the clock, and of the computing of trainer and server until then."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.ends: list[float] = []
        self.trainer_cpu: list[float] = []
        self.server_cpu: list[float] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.ends.append(time.perf_counter())
        self.trainer_cpu.append(time.process_time())
        self.server_cpu.append(computed_s(self.server))

    def on_eval(self, step: int, result: EvalResult) -> None:
        pass


def train(config: Mapping[str, Any], server: int) -> dict[str, Any]:
    """One run: what it logged, and when its steps ended. server: its process."""
    run, clock = build_run(cfg.make_config(dict(config))), Clock(server)
    run.trainer.listeners.append(clock)
    try:
        run.trainer.fit()
    finally:
        run.close()
    times = {"ends": clock.ends, "trainer_cpu": clock.trainer_cpu, "server_cpu": clock.server_cpu}
    return {**times, "metrics": read_metrics(run.folder.metrics)}


def run_once(options: argparse.Namespace, ahead: int, seed: int) -> dict[str, Any]:
    """A server and a trainer of their own, each on its core."""
    with tempfile.TemporaryDirectory(prefix="async-") as name:
        folder = Path(name)
        with serving(options, folder) as (url, server):
            request = folder / "request.json"
            config = settings(options, ahead, seed, url, folder)
            request.write_text(json.dumps({"config": config, "server": server}))
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(request)]
            with on_core(options.cores[0]):
                done = subprocess.run(command, cwd=ROOT, env=environment({}), capture_output=True, text=True)
            if done.returncode:
                log = (folder / "server.log").read_text()[-2000:]
                raise ValueError(f"the run with {ahead} ahead failed:\n{done.stderr[-3000:]}\nserver: {log}")
        return summarise(json.loads((folder / "result.json").read_text()), options.warm_up)


def summarise(result: Mapping[str, Any], warm_up: int) -> dict[str, Any]:
    """Rates, times and quality of one run. warm_up: steps that are not timed."""
    steps = [m for m in result["metrics"] if "reward" in m]
    evaluations = [m for m in result["metrics"] if "eval/pass@1" in m]
    timed, ends = steps[warm_up:], result["ends"]
    hours = (ends[-1] - ends[warm_up - 1]) / 3600
    last = [m["reward"] for m in steps[-max(1, len(steps) // 3) :]]
    mean = {key: statistics.fmean(m[key] for m in timed) for key in ("step_time", "time/rollout", "time/rollout_wait")}
    return {
        "updates_per_hour": (timed[-1]["num_updates"] - steps[warm_up - 1]["num_updates"]) / hours,
        "steps_per_hour": len(timed) / hours,
        "step_s": mean["step_time"],
        "trainer_cpu_s": (result["trainer_cpu"][-1] - result["trainer_cpu"][warm_up - 1]) / len(timed),
        "server_cpu_s": (result["server_cpu"][-1] - result["server_cpu"][warm_up - 1]) / len(timed),
        "rollout_s": mean["time/rollout"],
        "wait_s": mean["time/rollout_wait"],
        "staleness_mean": statistics.fmean(m["staleness/mean"] for m in timed),
        "staleness_max": max(m["staleness/max"] for m in steps),
        "gap_mean": statistics.fmean(m.get("sampling/sampling_logp_difference/mean", 0.0) for m in timed),
        "reward_last_third": statistics.fmean(last),
        "pass@1": evaluations[-1]["eval/pass@1"] if evaluations else None,
        "rewards": [m["reward"] for m in steps],
        "step_times": [m["step_time"] for m in steps],
        "skipped": steps[-1]["skipped_steps"],
    }


# -- all of them ---------------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every arm with every seed; the order of the arms turns from seed to seed."""
    runs: list[dict[str, Any]] = []
    load = os.getloadavg()
    for number in range(options.seeds):
        arms = options.ahead if number % 2 == 0 else options.ahead[::-1]
        for ahead in arms:
            started, seed = time.perf_counter(), options.seed + number
            found = {"ahead": ahead, "seed": seed, **run_once(options, ahead, seed)}
            runs.append(found | {"wall_s": time.perf_counter() - started})
            console.print(
                f"seed {seed}, {ahead} ahead: {found['updates_per_hour']:.1f} updates an hour, {found['step_s']:.2f} s a step "
                f"({found['rollout_s']:.2f} s sampling, {found['wait_s']:.2f} s waiting; CPU {found['trainer_cpu_s']:.2f} s "
                f"trainer, {found['server_cpu_s']:.2f} s server), reward {found['reward_last_third']:.3f}"
            )
    base = {run["seed"]: run["updates_per_hour"] for run in runs if run["ahead"] == options.ahead[0]}
    arms = {}
    for ahead in options.ahead:
        own = [run for run in runs if run["ahead"] == ahead]
        ratios = [run["updates_per_hour"] / base[run["seed"]] for run in own if base[run["seed"]]]
        scored = [run["pass@1"] for run in own if run["pass@1"] is not None]
        arms[str(ahead)] = {
            "updates_per_hour": statistics.median(run["updates_per_hour"] for run in own),
            "ratio": statistics.median(ratios) if ratios else None,
            "ratios": ratios,
            "reward_last_third": [run["reward_last_third"] for run in own],
            "pass@1": scored,
            "staleness_mean": statistics.fmean(run["staleness_mean"] for run in own),
        }
    return {"arms": arms, "runs": runs, "load_before": list(load), "load_after": list(os.getloadavg())}


def show(results: Mapping[str, Any], console: Console) -> None:
    table = Table(box=SIMPLE)
    for column in ("ahead", "updates an hour", "ratio", "reward, last third", "pass@1", "staleness"):
        table.add_column(column, justify="right")
    for ahead, arm in results["arms"].items():
        ratio = "-" if arm["ratio"] is None else f"{arm['ratio']:.2f}"
        table.add_row(
            ahead, f"{arm['updates_per_hour']:.1f}", ratio, spread(arm["reward_last_third"]), spread(arm["pass@1"]),
            f"{arm['staleness_mean']:.2f}",
        )  # fmt: skip
    console.print(table)


def spread(values: Sequence[float]) -> str:
    """Mean and range over the seeds."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--vllm-python", default=sys.executable, help="an interpreter that has vLLM (default: this one)"
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument(
        "--ahead", type=int, nargs="+", default=[0, 1], help="arms; the first is what others are compared with"
    )
    parser.add_argument("--on-update", choices=("finish", "keep", "restart"), default="finish")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed, at least 1")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42, help="the first of them")
    parser.add_argument("--cores", type=int, nargs=2, metavar=("TRAINER", "SERVER"), help="default: the first two")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--no-eval", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit code 1 if the last arm's ratio is below {TARGET}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 1 <= options.warm_up < options.steps:
        parser.error("--warm-up must be at least 1 and below --steps")
    return options


def prepare(options: argparse.Namespace) -> None:
    """Fill in cores and model. Raises `ValueError` for what a run would only find later."""
    available = sorted(os.sched_getaffinity(0))
    options.cores = options.cores or available[:2]
    if len(set(options.cores)) < 2 or not {*options.cores} <= {*available}:
        raise ValueError(f"two different cores are needed, of {available}: see --cores")
    options.model = cfg.read_yaml(options.recipe)["model"]["name_or_path"]
    if not (ROOT / options.model).is_dir():
        raise ValueError(f"the recipe's model {options.model} must be a folder here: make model, or another --recipe")
    found = subprocess.run(
        [options.vllm_python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True
    )
    if found.returncode:
        raise ValueError(f"{Path(options.vllm_python).name} has no vLLM: give --vllm-python")
    options.vllm = found.stdout.split()[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record. Exit code 2 for what the user can mend, 1 if --check finds a miss, else 0."""
    options = parse(arguments)
    if options.worker is not None:
        result = train(**json.loads(options.worker.read_text()))
        options.worker.with_name("result.json").write_text(json.dumps(result))
        return 0
    console = Console()
    try:
        prepare(options)
        config = {k: v for k, v in vars(options).items() if k not in ("record", "no_record", "check", "seed", "worker")}
        begun = None if options.no_record else begin_record(name="async_rollouts", config=config, seed=options.seed)
        results = measure(options, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(results, console)
    if begun is not None:
        finish_record(options.record, begun, results)
    ratio = results["arms"][str(options.ahead[-1])]["ratio"]
    missed = ratio is None or ratio < TARGET
    if missed:
        print(f"below the target of {TARGET}: {ratio}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
