"""`logra launch` with a real vLLM server, which is killed in the middle: it is started again, and no training step is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from random_trainer import save
from transformers import LlamaConfig, LlamaForCausalLM

from logra.sketch.block import blocks_of
from logra.sync.journal import Journal
from logra.sync.replay import bring_to
from logra.sync.replica import Replica

ROOT = Path(__file__).parents[2]
STEPS = 6


def model_folder(folder: Path) -> Path:
    """The tiny recipe's model with heads of 32, which vLLM's CPU backend takes."""
    torch.manual_seed(7)
    settings = LlamaConfig(
        vocab_size=51, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return save(LlamaForCausalLM(settings), folder)


def process_on(port: str) -> int:
    """The server's number, by its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"--weight-transfer-config" in words and port.encode() in words:
            return int(path.parent.name)
    raise AssertionError(f"no server on port {port}")


def replayed(model: Path, run: Path) -> None:
    """Follow the journal from the base model; every packet's digest (digest_every=1) is compared on the way."""
    follower = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with Journal.open(run / "journal") as journal:
        info = journal.info()
        replica = Replica(blocks_of(follower, [name for name, _, _ in info.targets]), run=info.run, base=info.base)
        assert bring_to(journal, replica) == info.next == STEPS


@pytest.mark.parametrize(
    "extra", [[], ["--train-gpus", "2", "--rollout.async", "1"]], ids=["one rank", "two ranks ahead"]
)
def test_a_server_that_is_killed_costs_no_step(tmp_path: Path, extra: list[str]) -> None:
    model, run, log = model_folder(tmp_path / "model"), tmp_path / "run", tmp_path / "launch.log"
    flags = {
        "output_dir": run, "model.name_or_path": model, "train.steps": STEPS, "eval": "null", "checkpoint.every": 0,
        "rollout.vllm.max_model_len": 128, "rollout.vllm.enforce_eager": "true", "rollout.vllm.max_num_seqs": 16,
        "rollout.vllm.options": "{block_size: 32}", "rollout.max_new_tokens": 24, "journal.digest_every": 1,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "logra", "launch", str(ROOT / "recipes" / "tiny.yaml"), "--cpu", *extra, *words]
    with log.open("w") as output:
        launch = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"TORCHDYNAMO_DISABLE": "1"})
    try:
        deadline = time.monotonic() + 400
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text().count("reward_std"):
            assert launch.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        port = re.findall(r"--port (\d+)", log.read_text())[0]
        os.killpg(process_on(port), signal.SIGKILL)
        assert launch.wait(250) == 0, log.read_text()
    finally:
        launch.terminate()
        launch.wait(60)
    lines = log.read_text().splitlines()
    assert any("started again (1 of 3)" in line for line in lines) and any(
        "is back, at version" in line for line in lines
    )
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    fresh = [record for record in steps if not record["staleness/max"]]
    assert max(record["sampling/sampling_logp_difference/mean"] for record in fresh) < 1e-4
    staleness = [record["staleness/max"] for record in steps]
    assert staleness == ([0, *[1] * (STEPS - 1)] if extra else [0] * STEPS)
    replayed(model, run)
    trained = shlex.split(next(line for line in lines if "-m logra train" in line))
    assert f'["http://127.0.0.1:{port}"]' in trained and "VLLM_API_KEY=" not in log.read_text()
