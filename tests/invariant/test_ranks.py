"""Data-parallel ranks: what they sum, they step and refresh alike, bit for bit."""

import json
import subprocess
import sys

import pytest

from logra.rl.tiny import tiny_model
from logra.sketch.sketcher import attach

RANK = """
import json, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from logra.rl.tiny import tiny_model
from logra.sketch.sketcher import attach

rank, ranks, folder, basis = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
model = tiny_model(spread=0.1)
sketcher = attach(model, rank=8, basis=basis, refresh_every=3)
digests = []
for step in range(7):
    ids = torch.randint(4, 51, (8, 12), generator=torch.Generator().manual_seed(step))
    for part in ids[rank::ranks].split(2) if not (rank == 1 and step == 4) else ():  # a rank without rollouts
        (model(input_ids=part).logits.square().mean(dim=(1, 2)).sum() / 8).backward()
    for tensor in sketcher.accumulated():
        dist.all_reduce(tensor)
    sketcher.apply(sketcher.propose(1e-3))
    digests.append(sketcher.digest())
bases = [int(sketcher.basis_block(n).long().abs().sum()) for n in sketcher.names]
print(json.dumps({"digests": digests, "bases": bases}))
dist.destroy_process_group()
"""


def run(folder, ranks, basis):
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(ranks), str(folder), basis], stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_two_ranks_hold_the_same_weights_and_bases_at_every_step(basis, tmp_path):
    first, second = run(tmp_path / "run", 2, basis)
    assert first == second
    assert len(set(first["digests"])) == 7


def test_what_is_accumulated_is_the_sum_over_ranks(ids):
    def accumulated(parts):
        sketcher = attach(tiny_model(spread=0.1), rank=8, basis="aligned")
        for part in parts:
            sketcher.model(input_ids=part).logits.square().mean(dim=(1, 2)).sum().backward()
        return sketcher.accumulated()

    whole, halves = accumulated([ids]), [accumulated([half]) for half in ids.split(4)]
    idle = accumulated([])
    assert [t.shape for t in idle] == [t.shape for t in whole] and not any(bool(t.any()) for t in idle)
    for together, *apart in zip(whole, *halves, strict=True):
        assert (together - sum(apart)).norm() < 2e-6 * together.norm()
