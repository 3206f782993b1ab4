"""FSDP2: optimizers of `logra.optim` give row-sharded weights the same update as whole ones, on any number of ranks."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from logra.optim.registry import OPTIMIZERS

OPTIONS = {"rank": 3, "update_proj_gap": 3}
COMMON = """
import sys
import torch
from torch import nn
from logra.optim import param_groups
from logra.optim.registry import OPTIMIZERS, takes_rank
torch.set_num_threads(1)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.up = nn.Linear(10, 7), nn.Linear(7, 13, bias=False)
    def forward(self, x):
        return self.up(torch.tanh(self.q_proj(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 10)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        for i, (n, p) in enumerate(self.named_parameters()):
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    def forward(self, x):
        x = self.embed(x)
        return sum(layer(x).square().mean() for layer in self.layers)

OPTIONS = {"galore": {"update_proj_gap": 3}, "galore_8bit": {"update_proj_gap": 3}, "fira": {"update_proj_gap": 3},
           "apollo": {"update_proj_gap": 3}, "apollo_mini": {"update_proj_gap": 3},
           "blockllm": {"trigger": "interval", "update_freq": 2, "sparsity": 0.5}}

def optimizer(name, net):
    return OPTIMIZERS[name](param_groups(net, rank=3 if takes_rank(name) else 1), 0.02, **OPTIONS.get(name, {}))

def steps(net, opt, first, count, rank=0, ranks=1):
    for step in range(first, first + count):
        x = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        if step == 2:  # a step without signal, on every rank
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
        else:
            net(x).backward()
        opt.step()
"""
RANK = (
    COMMON
    + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, ranks, folder, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,))
result = {}
for name in names:
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = optimizer(name, net)
    steps(net, opt, 0, 5)
    saved = opt.full_state_dict()
    at = {n: p.full_tensor().detach().clone() for n, p in net.named_parameters()}
    held = sum(v.nbytes for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    steps(net, opt, 5, 4)
    end = {n: p.full_tensor().detach().clone() for n, p in net.named_parameters()}
    opt.load_full_state_dict(saved)  # and back, sharded
    for n, p in net.named_parameters():
        mine = at[n].chunk(ranks)[rank] if rank < len(at[n].chunk(ranks)) else at[n][:0]
        with torch.no_grad():
            p.to_local().copy_(mine)
    steps(net, opt, 5, 4)
    again = all(torch.equal(p.full_tensor(), end[n]) for n, p in net.named_parameters())
    result[name] = {"saved": saved, "at": at, "end": end, "held": held, "again": again}
torch.save(result, f"{folder}/rank{rank}.pt")
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(r), str(request.param), str(folder), ",".join(OPTIMIZERS)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(request.param)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(error[-2000:] for error in errors)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(request.param)]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_shards_move_as_the_whole(ranks, name):
    space: dict = {}
    exec(COMMON, space)
    net = space["Net"]()
    opt = space["optimizer"](name, net)
    space["steps"](net, opt, 0, 5)
    held = sum(v.nbytes for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    first = {n: p.detach().clone() for n, p in net.named_parameters()}
    space["steps"](net, opt, 5, 4)
    for n, p in net.named_parameters():
        for rank in ranks:
            torch.testing.assert_close(rank[name]["at"][n], first[n], rtol=2e-5, atol=2e-6)
            torch.testing.assert_close(rank[name]["end"][n], p.detach(), rtol=2e-5, atol=2e-6)
            assert torch.equal(rank[name]["end"][n], ranks[0][name]["end"][n])
            assert rank[name]["again"]
    assert sum(rank[name]["held"] for rank in ranks) == held  # every state exists once
    # what two or three ranks saved, one continues
    for n, p in net.named_parameters():
        with torch.no_grad():
            p.copy_(ranks[0][name]["at"][n])
    opt.load_full_state_dict(ranks[0][name]["saved"])
    space["steps"](net, opt, 5, 4)
    for n, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), ranks[0][name]["end"][n], rtol=2e-5, atol=2e-6)


def test_flattened_parameters_are_refused():
    flat = type("FlatParameter", (nn.Parameter,), {})(torch.zeros(12))
    for make in OPTIMIZERS.values():
        with pytest.raises(ValueError, match="FSDP1"):
            make([("flat", flat)], 0.1)
