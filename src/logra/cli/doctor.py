"""`logra doctor`: versions, devices, and quick checks of what everything else rests on.

torch is imported inside the checks: a broken one is a finding. Environment variables are shown only where they
are plain numbers or switches, so that no token is ever printed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from logra.cli.console import Console

PACKAGES = ("logra", "torch", "transformers", "datasets", "safetensors", "numpy", "pyarrow", "pydantic")
EXTRAS = {
    "reasoning-gym": "tasks", "math-verify": "tasks", "peft": "peft",
    "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio",
}  # fmt: skip
VARIABLES = {
    "HF_HUB_OFFLINE": "models and data sets come from the local cache only",
    "TRANSFORMERS_OFFLINE": "models come from the local cache only",
    "HF_DATASETS_OFFLINE": "data sets come from the local cache only",
    "HF_HOME": "where models and data sets are cached",
    "HF_TOKEN": "used for gated models",
    "OMP_NUM_THREADS": "CPU threads of torch (or `threads` in the recipe)",
    "MKL_NUM_THREADS": "CPU threads of torch",
    "CUDA_VISIBLE_DEVICES": "which GPUs torch sees",
    "NVIDIA_TF32_OVERRIDE": "1 makes every float32 product less precise",
    "PYTORCH_CUDA_ALLOC_CONF": "torch's GPU allocator",
    "PYTHONHASHSEED": "some reasoning-gym tasks need it fixed",
}
_PLAIN = re.compile(r"[0-9][0-9,.-]{0,31}|true|false|yes|no|on|off|random", re.IGNORECASE)
# Random123's known answers for Philox4x32-10: counter, key, output.
PHILOX = (
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """One check. detail: what was seen, or why it failed; fix: what to do then, else empty."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


class Failed(Exception):
    """A check's own finding."""


def doctor(*, as_json: bool) -> int:
    """Print the state of this installation and machine. Returns 0, or 1 if a check failed."""
    facts = {
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}},
        "extras": {name: installed(name) for name in EXTRAS},
        "environment": environment(os.environ),
        "machine": machine(),
    }
    outcomes = [run_check(*check) for check in CHECKS]
    ok = all(outcome.ok for outcome in outcomes)
    if as_json:
        print(json.dumps({**facts, "checks": [asdict(outcome) for outcome in outcomes], "ok": ok}))
    else:
        show(facts, outcomes)
    return 0 if ok else 1


def run_check(name: str, fix: str, check: Callable[[], str]) -> Outcome:
    """Whatever a broken installation raises is a finding, so everything is caught."""
    try:
        return Outcome(name, True, check())
    except Exception as error:
        reason = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        return Outcome(name, False, reason.strip().splitlines()[0][:300], fix)


# -- facts ---------------------------------------------------------------------------------------------------


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter and are set: numbers and switches as they are, anything else only as set."""
    given = {name: variables[name] for name in VARIABLES if variables.get(name)}
    shown = {name for name, value in given.items() if _PLAIN.fullmatch(value)} - {"HF_TOKEN"}
    return {name: value if name in shown else "(set, not shown)" for name, value in given.items()}


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
    }
    try:
        import torch

        facts["threads"] = torch.get_num_threads()
        facts["devices"] = [_gpu(index) for index in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError):
        facts |= {"threads": None, "devices": []}  # the packages check says why
    return facts


def _gpu(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return {"name": name, "memory_bytes": total, "free_bytes": free, "capability": f"{major}.{minor}"}


# -- checks --------------------------------------------------------------------------------------------------


def check_packages() -> str:
    """Every package logra requires is there, new enough, and torch, transformers and datasets import."""
    from packaging.requirements import Requirement

    wrong = []
    for line in importlib.metadata.requires("logra") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name}{requirement.specifier} (found {found or 'none'})")
    if wrong:
        raise Failed("needs " + ", ".join(wrong))
    for name in ("torch", "transformers", "datasets"):
        importlib.import_module(name)
    return "all required packages are here and import"


def check_philox() -> str:
    import torch

    from logra.hashing import philox

    for device in dict.fromkeys(("cpu", _device())):
        for counter, key, expected in PHILOX:
            words = philox(tuple(torch.tensor(c, device=device) for c in counter), key)  # type: ignore[arg-type]
            found = tuple(int(word) for word in words)
            if found != expected:
                raise Failed(f"on {device}: {' '.join(f'{w:08x}' for w in found)}")
    return f"known answers on {' and '.join(dict.fromkeys(('cpu', _device())))}"


def check_update() -> str:
    """The default device makes an Update, a copy on the CPU applies what was sent: the same bits."""
    from logra.rl.tiny import tiny_model
    from logra.sketch.block import apply_update, digest
    from logra.sketch.update import Update

    sizes = []
    for basis in ("random", "aligned"):
        model, other = tiny_model().to(_device()), tiny_model()  # type: ignore[arg-type]
        before = digest(other)
        sketcher, proposal, batch = _proposal(model, basis)
        sent = b""
        for _ in range(2):  # the second has a basis that was tracked
            update = sketcher.apply(proposal)
            assert update is not None
            sent = update.to_bytes()
            apply_update(other, Update.from_bytes(sent))
            model(**batch, labels=batch["input_ids"]).loss.backward()
            proposal = sketcher.propose(1e-2)
        sizes.append(f"{len(sent):,} bytes {basis}")
        if digest(model) == before:
            raise Failed("the update changed nothing")
        if digest(model) != digest(other):
            raise Failed(f"the weights on {_device()} and on the cpu differ after the same update, basis {basis}")
    return f"a model on {_device()} and its copy on cpu hold the same bits (updates of {', '.join(sizes)})"


def check_blocks() -> str:
    import torch

    from logra import hashing
    from logra.sketch.update import apply_block

    generator = torch.Generator().manual_seed(0)
    d, r, k = 96, 32, 160
    weight = torch.randn(d, k, generator=generator).to(_device())
    q = torch.randint(-127, 128, (d, r), dtype=torch.int8, generator=generator).to(_device())
    exponent = torch.randint(-20, -8, (d,), dtype=torch.int8, generator=generator).to(_device())
    basis = hashing.signs(1, range(r), range(k), _device())
    whole, rows, columns = (weight.clone() for _ in range(3))
    apply_block(whole, q, exponent, basis)
    for part in (slice(0, 7), slice(7, d)):
        apply_block(rows[part], q[part], exponent[part], basis)
    for part in (slice(0, 33), slice(33, k)):
        apply_block(columns[:, part], q, exponent, basis[:, part])
    if torch.equal(whole, weight) or not (torch.equal(whole, rows) and torch.equal(whole, columns)):
        raise Failed(f"on {_device()} a matrix updated in blocks differs from one updated whole")
    return f"whole, by rows and by columns equal on {_device()}"


def check_kl() -> str:
    """Predicted KL by forward mode against the KL measured, at a step small enough for the quadratic."""
    from logra.rl.tiny import tiny_model
    from logra.trust.kl import measure_kl, predict_kl

    model = tiny_model().to(_device())  # type: ignore[arg-type]
    sketcher, proposal, batch = _proposal(model)
    at_one = predict_kl(model, sketcher, proposal, batch, mode="forward")
    scale = (1e-4 / at_one) ** 0.5
    measured = measure_kl(model, sketcher, proposal, batch, scale)
    if not abs(measured / 1e-4 - 1.0) < 0.05:
        raise Failed(f"predicted 1.00e-04, measured {measured:.2e} nats a token")
    return f"predicted 1.00e-04, measured {measured:.2e} nats a token on {_device()}"


def check_rewards() -> str:
    from logra.rl.rewards.pool import RewardPool
    from logra.rl.rewards.spec import RewardSpec

    with RewardPool([RewardSpec("format", params={"pattern": "^[0-9]"})], workers=1, start_timeout_s=30.0) as pool:
        totals = pool.score(["1+1=", "1+1="], ["2", "two"], [[1], [2]]).total
    if totals != [1.0, 0.0]:
        raise Failed(f"a right and a wrong reply got {totals}")
    return "a worker process started and scored"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _proposal(model: Any, basis: str = "random") -> tuple[Any, Any, dict[str, Any]]:
    """(sketcher, its proposal, the batch) after one backward pass of a fixed batch."""
    import torch

    from logra.sketch.sketcher import attach

    ids = torch.arange(2 * 12, device=next(model.parameters()).device).reshape(2, 12) % 40 + 4
    sketcher = attach(model, rank=8, basis=basis)
    model(input_ids=ids, labels=ids).loss.backward()
    return sketcher, sketcher.propose(1e-2), {"input_ids": ids}


CHECKS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("packages", f"{Path(sys.executable).name} -m pip install -U logra", check_packages),
    ("philox", "reinstall torch: its integer arithmetic is wrong on this device", check_philox),
    ("exact update", "report it: replicas would drift apart; until then use model.device=cpu", check_update),
    ("blocks", "report it: shards would drift apart; until then use model.device=cpu", check_blocks),
    (
        "forward-mode KL",
        "set trust.mode: finite_difference in the recipe, or use another torch version",
        check_kl,
    ),
    ("reward workers", "make sure that processes may be started here (limits, containers)", check_rewards),
)


# -- what is shown -------------------------------------------------------------------------------------------


def show(facts: Mapping[str, Any], outcomes: list[Outcome]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, version in facts["versions"].items():
        console.print(f"{name:16} {version or 'missing'}")
    for name, version in facts["extras"].items():
        console.print(f"{name:16} {version or f'not installed (optional): pip install {_quoted(EXTRAS[name])}'}")
    _show_machine(console, facts["machine"])
    for name, value in facts["environment"].items():
        console.print(f"{name}={value}  {VARIABLES[name]}")
    console.print()
    for outcome in outcomes:
        style = "green" if outcome.ok else "bold red"
        console.print("ok     " if outcome.ok else "FAILED ", style=style, end="")
        console.print(f"{outcome.name:16} {outcome.detail}" + (f". Fix: {outcome.fix}" if outcome.fix else ""))


def _quoted(extra: str) -> str:
    return f"'logra[{extra}]'"


def _show_machine(console: Console, facts: Mapping[str, Any]) -> None:
    console.print(f"{'machine':16} {facts['platform']}, {facts['cpus']} CPUs, {_gib(facts['memory_bytes'])} memory")
    console.print(f"{'threads':16} {facts['threads'] or 'unknown'}")
    for gpu in facts["devices"]:
        memory = f"{_gib(gpu['free_bytes'])} of {_gib(gpu['memory_bytes'])} free"
        console.print(f"{'GPU':16} {gpu['name']}, {memory}, capability {gpu['capability']}")
    if not facts["devices"]:
        console.print(f"{'GPU':16} none seen by torch: the CPU is used")
    console.print(f"{'free disk here':16} {_gib(facts['disk_free_bytes'])}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
