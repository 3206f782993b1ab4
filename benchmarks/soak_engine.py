"""The engine of the soak, a process of its own: vLLM's routes over the tiny model, moved by a replica.

    python benchmarks/soak_engine.py MODEL      # prints its port, ends when its standard input does

It is the tests' FakeVLLM, and keeps to what a real vLLM is strict about: one transfer at a time, nothing sampled while paused,
and no use of weights whose transfer was not finished.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "engines_vllm"))

from fake_vllm import FakeVLLM

from logra.errors import UpdateError


class Engine(FakeVLLM):
    """See the module."""

    def __init__(self, base: PreTrainedModel) -> None:
        self.is_open = self.is_pending = False  # a transfer was begun; it has moved weights
        self.awake = threading.Event()
        self.awake.set()
        super().__init__(base, [])

    def answer(self, path: str, body: Any) -> Any:
        self.calls.clear()  # for tests; here it would only grow
        if path == "/inference/v1/generate":
            self.awake.wait()
        elif path == "/pause":
            self.awake.clear()
            while self.num_running:
                time.sleep(0.002)
        elif path == "/resume":
            self.awake.set()
        with self._mutex:
            self._check(path)
            if path == "/update_weights":
                self.is_pending = True  # until it is finished, whatever becomes of it
        answer = super().answer(path, body)
        if path == "/start_weight_update":
            self.is_open = True
        elif path == "/finish_weight_update":
            self.is_open = self.is_pending = False
        return answer

    def _check(self, path: str) -> None:
        """Raise `UpdateError` for what vLLM's worker refuses."""
        if path in ("/start_weight_update", "/update_weights", "/finish_weight_update") and self.replica is None:
            raise UpdateError("no run was begun on this vLLM: call init_weight_transfer_engine first")
        if path == "/start_weight_update" and self.is_open:
            raise UpdateError("start_weight_update called while a weight update is already active")
        if path in ("/update_weights", "/finish_weight_update") and not self.is_open:
            raise UpdateError(f"{path[1:]} called before start_weight_update")

    def _init(self, info: dict[str, Any]) -> None:
        self.names = [name for name, _, _ in info["targets"]]
        super()._init(info)

    def _status(self) -> dict[str, Any]:
        status = super()._status()
        if self.is_pending and status["problem"] is None:
            status["problem"] = "a transfer was begun and not finished"
        return status


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    engine = Engine(model)
    print(engine.url.rpartition(":")[2], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
