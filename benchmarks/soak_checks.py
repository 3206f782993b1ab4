"""What must hold after a soak: steps, journal, final model and engine agree, and memory has not grown."""

from __future__ import annotations

import http.client
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import logra
from logra.rl.engines.vllm_link import combine_parts
from logra.rl.run_dir import read_metrics
from logra.sketch.block import blocks_of
from logra.sync.journal import Journal
from logra.sync.packet import Packet
from logra.sync.replica import Replica

SETTLED = 100  # steps of a process before its memory counts as settled


def verify(model: Path, run: Path, steps: int, engine_port: int) -> dict[str, Any]:
    """The figures of a finished run; `failures` says in words what does not hold."""
    metrics = [record for record in read_metrics(run / "metrics.jsonl") if "reward" in record]
    replayed = replay(model, run)
    engine = ask_engine(engine_port)
    digests = {"journal": replayed.pop("digest"), "final": final_digest(run), "engine": engine["digest"]}
    failures = []
    if [record["step"] for record in metrics] != list(range(1, steps + 1)):
        failures.append(f"metrics.jsonl does not hold each of {steps} steps once")
    if len({*digests.values()}) != 1:
        failures.append(f"digests differ: {digests}")
    updates = metrics[-1]["num_updates"]
    if not updates == replayed["updates"] == engine["version"]:
        failures.append(
            f"versions differ: trainer {updates}, journal {replayed['updates']}, engine {engine['version']}"
        )
    leftovers = left_over(run)
    if leftovers:
        failures.append(f"left behind: {', '.join(leftovers[:5])}")
    return {
        "steps": len(metrics), "updates": updates, "skipped": metrics[-1]["skipped_steps"],
        "median_step_s": statistics.median(record["step_time"] for record in metrics),
        "dropped": climbs(metrics, "rollout/dropped"), "rejoined": climbs(metrics, "rollout/rejoined"),
        "largest_gap": max(record.get("sampling/sampling_logp_difference/mean", 0.0) for record in metrics),
        "staleness_max": max(record["staleness/max"] for record in metrics),
        "digests": digests, **replayed, "left_over": leftovers, "failures": failures,
    }  # fmt: skip


def replay(model: Path, run: Path) -> dict[str, Any]:
    """Follow the journal from the base model by every single Update, no anchor, and compare every digest that it holds."""
    follower = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with Journal.open(run / "journal") as journal:
        info = journal.info()
        replica = Replica(
            blocks_of(follower, [name for name, _, _ in info.targets]), version=0, run=info.run, base=info.base
        )
        compared = 0
        for index in range(info.first, info.next):
            packet = Packet.from_bytes(journal.read(index))
            replica.apply(packet)  # raises where order, run, parent or digest do not fit
            compared += packet.digest is not None
        size = sum(path.stat().st_size for path in (run / "journal").glob("segment_*"))
    return {
        "digest": replica.digest(),
        "updates": replica.version,
        "digests_compared": compared,
        "journal_bytes": size,
        "packet_bytes": info.packet_bytes,
    }


def final_digest(run: Path) -> str:
    """Of what moves, in the exported model."""
    with Journal.open(run / "journal") as journal:
        names = [name for name, _, _ in journal.info().targets]
    return logra.digest(AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32), names)


def ask_engine(port: int) -> dict[str, Any]:
    """Version and digest of the engine's weights, by the routes that the trainer asks."""

    def call(method: str) -> list[Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/collective_rpc", json.dumps({"method": method}))
            return json.loads(connection.getresponse().read())["results"]
        finally:
            connection.close()

    digest = combine_parts([part for parts in call("logra_sums") for part in parts])
    (status,) = call("logra_status")
    return {"version": status["version"], "digest": digest}


def left_over(run: Path) -> list[str]:
    """Files that only live while something is under way."""
    found = [path for path in (run / "transfer").rglob("*") if path.is_file()]
    found += [path for path in run.rglob("*") if ".tmp-" in path.name or path.name.startswith(".model")]
    return sorted({path.relative_to(run).as_posix() for path in found})


def climbs(metrics: Sequence[Mapping[str, Any]], key: str) -> int:
    """How far a counter climbed in all, which begins at 0 with every start of the trainer."""
    total, before = 0.0, 0.0
    for record in metrics:
        now = record.get(key, 0.0)
        total += now - before if now >= before else now
        before = now
    return round(total)


# -- memory --------------------------------------------------------------------------------------------------------------------


def flatness(samples: Sequence[Mapping[str, int]], who: str) -> dict[str, Any] | None:
    """Resident memory of a process in its longest life without a restart. None: too little was seen of it.

    samples: {"step", who: bytes, who + "_life": number of its start}. first: median of steps 100 to 300 of that life (of its
    middle third if it is shorter than that); last: of its last 200 steps (its last third). slope: bytes per 1,000 steps, the
    median over all pairs of samples (Theil and Sen), of what follows the first 100 steps (the first third).
    """
    lives: dict[int, list[tuple[int, int]]] = {}
    for sample in samples:
        if who in sample:
            lives.setdefault(sample[who + "_life"], []).append((sample["step"], sample[who]))
    life = max(lives.values(), key=lambda points: points[-1][0] - points[0][0], default=[])
    if len(life) < 10:
        return None
    begin, end = life[0][0], life[-1][0]
    third = (end - begin) / 3
    start = begin + min(SETTLED, third)
    first = [size for step, size in life if start <= step <= start + min(200, third)]
    last = [size for step, size in life if step >= end - min(200, third)]
    pairs = combinations([point for point in life if point[0] >= start], 2)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0]]
    return {
        "from_step": begin, "to_step": end, "lives": len(lives), "first_bytes": round(statistics.median(first)),
        "last_bytes": round(statistics.median(last)), "largest_bytes": max(size for _, size in life),
        "bytes_per_1000_steps": round(1000 * statistics.median(slopes)) if slopes else 0,
    }  # fmt: skip


def starts(samples: Sequence[Mapping[str, int]], who: str, after: int = SETTLED) -> list[list[int]]:
    """[step, bytes] of every life, `after` steps from its first sample: do later lives need more than earlier ones?"""
    found, begun = {}, {}
    for sample in samples:
        if who in sample:
            life = sample[who + "_life"]
            begun.setdefault(life, sample["step"])
            if sample["step"] - begun[life] >= after:
                found.setdefault(life, [sample["step"], sample[who]])
    return list(found.values())
