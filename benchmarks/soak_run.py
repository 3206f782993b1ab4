"""One run of the soak: trainer, engine and proxy, and who looks after them while faults come. See `soak.py`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from record import ROOT
from soak_checks import flatness, starts, verify
from soak_faults import Fault, Proxy

from logra import config as cfg
from logra.rl.run_dir import read_metrics
from logra.rl.tiny import char_tokenizer, tiny_model

END_S = 60.0  # torchrun must end within, once a rank was killed
STALL_S = 180.0  # without a finished step
MOST_STOPS = 25
SAMPLE_EVERY = 10
WHO = ("engine", "rank0", "rank1")


def settings(options: argparse.Namespace, model: Path, run: Path, url: str) -> dict[str, Any]:
    """The tiny recipe, smaller still. Anchors bring back an engine that is one Update ahead of a resumed trainer."""
    changes = {
        "output_dir": str(run), "model.name_or_path": str(model), "rollout.engine": "vllm", "rollout.vllm.url": url,
        "rollout.vllm.patience_s": options.patience, "rollout.async": options.ahead, "rollout.prompts_per_step": 4,
        "rollout.rollouts_per_prompt": 4, "rollout.max_new_tokens": 4, "rollout.vllm.max_num_seqs": 4,
        "train.steps": options.steps, "train.microbatch_size": 8, "trust.probe_rollouts": 4, "trust.start": 1e-3,
        "trust.final": 1e-4, "trust.steps": options.steps, "method.lr": 1e-3, "method.rank": 8,
        "checkpoint.every": options.checkpoint_every, "journal.digest_every": 10,
        "journal.anchor_every": options.anchor_every, "log.completions": False, "reward.workers": 1,
    }  # fmt: skip
    recipe = cfg.read_yaml(ROOT / "recipes" / "tiny.yaml") | {"eval": None}
    recipe["reward"] = {"functions": [{"function": f"{ROOT / 'benchmarks' / 'soak_reward.py'}:coin"}]}
    return cfg.apply_overrides(recipe, {k: v for k, v in changes.items() if v is not None})


def write_model(folder: Path) -> Path:
    """What trainer and engine both load."""
    tiny_model("llama", seed=7, spread=0.1).to(torch.bfloat16).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def resident(pid: int) -> int | None:
    """Bytes of a process in memory; None if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None


def ranks_below(pid: int) -> dict[int, int]:
    """Process id of each rank that a torchrun has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                words = (path / "environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(path.name) for word in words if word.startswith(b"RANK=")}
    return found


class Progress:
    """The last finished step, by metrics.jsonl, which a resumed run replaces by a shorter one."""

    def __init__(self, path: Path) -> None:
        self.path, self._place, self._offset, self._last = path, None, 0, 0

    def last(self) -> int:
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if self._place != stat.st_ino or stat.st_size < self._offset:
                    self._place, self._offset, self._last = stat.st_ino, 0, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return 0
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._last = json.loads(line)["step"]
        return self._last


@dataclass
class Active:
    """A fault that is not over. fired, ended: monotonic seconds. step: a later one shows that the run goes on."""

    fault: Fault
    armed: float
    fired: float | None = None
    step: int = 0
    ended: float | None = None  # of the trainer, whose rank was killed
    restarted: bool = False


class Soak:
    """One run under faults; `run` returns what happened."""

    def __init__(self, options: argparse.Namespace, model: Path, folder: Path, faults: Sequence[Fault]) -> None:
        self.options, self.model, self.folder, self.faults = options, model, folder, list(faults)
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.recipe = folder / "run", folder / "recipe.yaml"
        self.proxy = Proxy()
        self.engine: subprocess.Popen[str] | None = None
        self.trainer: subprocess.Popen[bytes] | None = None
        self.progress = Progress(self.path / "metrics.jsonl")
        self.lives = {"engine": 0, "trainer": 0}
        self.active: Active | None = None
        self.happened: list[dict[str, Any]] = []
        self.stops: list[dict[str, Any]] = []
        self.samples: list[dict[str, int]] = []
        self.ranks: dict[int, int] = {}
        self._log_from = 0

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        data = settings(self.options, self.model, self.path, self.proxy.url)
        self.recipe.write_text(cfg.to_yaml(cfg.make_config(data)))
        try:
            self.start_engine()
            self.start_trainer()
            self._follow()
            port = self.proxy.upstream
            assert port is not None
            found = verify(self.model, self.path, self.options.steps, port)
        finally:
            self.close()
        add_lost(self.happened, read_metrics(self.path / "metrics.jsonl"))
        for who in WHO:
            found.setdefault("memory", {})[who] = flatness(self.samples, who)
            found.setdefault("memory_of_lives", {})[who] = starts(self.samples, who)
        return {
            **found, "wall_s": round(time.monotonic() - started, 1), "unexpected_stops": self.stops,
            "faults": self.happened, "starts": self.lives,
        }  # fmt: skip

    def close(self) -> None:
        """End what was started here."""
        self.end_trainer()
        self.kill_engine()
        self.proxy.close()

    # -- processes ----------------------------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "soak_engine.py"), str(self.model)]
        with (self.folder / "engine.log").open("a") as log:
            engine = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment(),
                start_new_session=True,
            )  # fmt: skip
        self.engine = engine
        assert engine.stdout is not None
        port = engine.stdout.readline().strip()
        if not port.isdigit():
            raise ValueError(f"the engine did not start: see {self.folder / 'engine.log'}")
        self.lives["engine"] += 1
        self.proxy.upstream = int(port)

    def start_trainer(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0", "-m", "logra", "train", str(self.recipe), "--plain"]
        with (self.folder / "trainer.log").open("ab") as log:
            self._log_from = log.tell()
            self.trainer = subprocess.Popen(
                [*command, "--resume", "auto"], stdout=log, stderr=log, cwd=ROOT, env=environment(), start_new_session=True,
            )  # fmt: skip
        self.lives["trainer"] += 1
        self.ranks = {}

    def end_trainer(self) -> None:
        """torchrun and its ranks, which are in process groups of their own."""
        if self.trainer is None or self.trainer.poll() is not None:
            return
        for pid in (self.trainer.pid, *ranks_below(self.trainer.pid).values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.trainer.wait()

    def kill_engine(self) -> None:
        engine = self.engine
        if engine is not None:
            self.proxy.upstream = None
            engine.kill()
            engine.wait()
            for pipe in (engine.stdin, engine.stdout):
                if pipe is not None:
                    pipe.close()

    def kill_rank(self, rank: int) -> None:
        assert self.trainer is not None
        pid = ranks_below(self.trainer.pid).get(rank)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        seen, seen_at = 0, time.monotonic()
        while True:
            assert self.trainer is not None
            code = self.trainer.poll()
            step = self.progress.last()
            if code == 0:
                break
            if code is not None:
                self._ended(code, step)
                seen_at = time.monotonic()
            if step != seen:
                seen, seen_at = step, time.monotonic()
                self._sample(step)
            self._advance(step)
            if self.active is None and self.faults and step >= self.faults[0].step:
                self._begin(self.faults.pop(0), step)
            if time.monotonic() - seen_at > STALL_S:
                self._stop(f"no step was finished for {STALL_S:g} s", step)
                self.end_trainer()
                self.start_trainer()
                seen_at = time.monotonic()
            time.sleep(0.02)
        if self.active is not None:
            self._note(self.active, None)

    def _begin(self, fault: Fault, step: int) -> None:
        self.active = Active(fault, time.monotonic(), step=step)
        if fault.kind == "kill_rank":
            self.proxy.arm(fault, lambda: self.kill_rank(fault.rank))
        elif fault.kind == "kill_engine":
            self.proxy.arm(fault, self.kill_engine)
        else:
            self.proxy.arm(fault)

    def _advance(self, step: int) -> None:
        """Look after the fault that is not over."""
        active = self.active
        if active is None:
            return
        now, fault = time.monotonic(), active.fault
        if active.fired is None:
            if fault.route is None and now >= active.armed + fault.seconds:
                active.fired = now
                self.kill_rank(fault.rank) if fault.kind == "kill_rank" else self.kill_engine()
            elif fault.route is not None:
                active.fired = self.proxy.fired_at
            if active.fired is None:
                return
            active.step = step
            if fault.kind == "kill_engine":
                threading.Thread(target=self._bring_back, args=(fault.away_s,), daemon=True).start()
        if fault.kind == "kill_rank" and not active.restarted:
            if now - active.fired > END_S:
                self._stop(f"torchrun did not end within {END_S:g} s after a rank was killed", step)
                self.end_trainer()  # `_ended` goes on
                active.fired = now
            return
        if step > active.step:
            self._note(active, now)
            self.active = None

    def _bring_back(self, away_s: float) -> None:
        time.sleep(away_s)
        self.start_engine()

    def _ended(self, code: int, step: int) -> None:
        """The trainer has ended before its last step: as it should after a killed rank, else on its own."""
        active = self.active
        if active is not None and active.fault.kind == "kill_rank" and active.fired is None:
            active.fired = self.proxy.fired_at  # the loop has not looked yet
        if active is not None and active.fault.kind == "kill_rank" and active.fired and not active.restarted:
            active.ended, active.step, active.restarted = time.monotonic(), step, True
        else:
            self._stop(f"torchrun ended with code {code}", step)
        if len(self.stops) > MOST_STOPS:
            raise ValueError(f"the run has stopped {len(self.stops)} times: see {self.folder / 'trainer.log'}")
        self.start_trainer()

    def _stop(self, what: str, step: int) -> None:
        with (self.folder / "trainer.log").open("rb") as log:
            log.seek(self._log_from)
            lines = log.read().decode(errors="replace").splitlines()
        words = [line for line in lines if re.search(r"logra:|Error|left out|no use|is no", line)][-6:]
        cause = self.active.fault if self.active is not None else None
        self.stops.append(
            {"step": step, "what": what, "fault": cause and asdict(cause), "words": [without_paths(w) for w in words]}
        )
        print(f"  unexpected stop after step {step}: {what}\n    " + "\n    ".join(words), flush=True)

    def _note(self, active: Active, now: float | None) -> None:
        fault, fired = active.fault, active.fired
        recovery = None if now is None or fired is None else round(now - fired, 2)
        ended = None if active.ended is None or fired is None else round(active.ended - fired, 2)
        self.happened.append({**asdict(fault), "hit_after_step": active.step, "ended_s": ended, "recovery_s": recovery})
        what = " ".join(str(w) for w in (fault.kind, fault.route or "", fault.how) if w)
        print(
            f"  step {active.step}: {what}, next step after {recovery} s" + f" (ended {ended} s)" * bool(ended),
            flush=True,
        )

    def _sample(self, step: int) -> None:
        """Memory of all processes, every few steps."""
        if step % SAMPLE_EVERY or self.trainer is None or self.engine is None:
            return
        if len(self.ranks) < 2:
            self.ranks = ranks_below(self.trainer.pid)
        pids = {"engine": self.engine.pid} | {f"rank{rank}": pid for rank, pid in self.ranks.items()}
        sample = {"step": step}
        for who, pid in pids.items():
            if (size := resident(pid)) is not None:
                sample |= {who: size, who + "_life": self.lives["engine" if who == "engine" else "trainer"]}
        self.samples.append(sample)


def without_paths(text: str) -> str:
    """A line of a log as a record may hold it."""
    return re.sub(r"\S*/\S*", "...", text)[-600:]


def add_lost(faults: Sequence[dict[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Set `lost_s`: how much longer than two median steps the step that was hit took together with the one after it. A fault
    after the rollouts of a step, such as an engine killed in a transfer, only holds up the next one. After a killed rank it is
    the time until the next step, less a median one."""
    times = {record["step"]: record["step_time"] for record in metrics if "step_time" in record}
    usual = statistics.median(times.values())
    for fault in faults:
        own = [times[step] for step in range(fault["hit_after_step"] + 1, fault["hit_after_step"] + 3) if step in times]
        lost = sum(own) - len(own) * usual
        if fault.get("ended_s") is not None and fault["recovery_s"] is not None:
            lost = fault["recovery_s"] - usual
        fault["lost_s"] = round(lost, 2)
