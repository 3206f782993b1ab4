"""Small weights and gradients, the same for every optimizer whose steps are looked at one by one."""

import torch
from torch import nn

SHAPES = {"tall": (12, 5), "wide": (6, 10), "square": (7, 7)}


def weights(shapes=SHAPES):
    draw = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=draw)) for n, s in shapes.items()}


def set_gradients(parameters, step, size=1.0):
    for n, p in parameters.items():
        draw = torch.Generator().manual_seed(1000 * step + sum(map(ord, n)))
        p.grad = size * torch.randn(p.shape, generator=draw)


def step_with(optimizer, parameters, step, size=1.0):
    """How far each weight moves."""
    before = {n: p.detach().clone() for n, p in parameters.items()}
    set_gradients(parameters, step, size)
    optimizer.step()
    return {n: p.detach() - before[n] for n, p in parameters.items()}
