"""Where one checkpoint matrix lives inside vLLM's fused, tensor-parallel parameters. Torch only: no vLLM is imported.

vLLM joins q, k and v into one `qkv_proj`, gate and up into one `gate_up_proj`, and gives each tensor-parallel rank some rows
(column-parallel layers, embeddings, heads) or some columns (row-parallel layers). `locate` turns the unfused name of an Update
into a `Place`: rows and columns of a parameter of this rank, and of the whole matrix. Layers are known by the names of their
classes and by their attributes, as vLLM 0.32 has them. Whatever is not understood gives None, and `fits` compares a place with
the checkpoint before anything is written, so a wrong guess is found at the start and never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra.sketch.block import Block

Shape = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """`count` rows (or columns), from `local` on in this rank's parameter and from `whole` on in the matrix."""

    local: int
    whole: int
    count: int


@dataclass(frozen=True)
class Place:
    """One matrix of logical shape (out, in), vectors (n, 1), in `parameter`, which is stored out x in."""

    parameter: str
    shape: Shape
    rows: Span
    columns: Span

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The (rows, columns) view of this rank's part."""
        data = parameters[self.parameter].detach()
        matrix = data if data.ndim == 2 else data.view(-1, 1)
        rows, columns = self.rows, self.columns
        return matrix[rows.local : rows.local + rows.count, columns.local : columns.local + columns.count]

    def part(self, matrix: Tensor) -> Tensor:
        """The part of a whole (out, in) matrix that this rank holds."""
        rows, columns = self.rows, self.columns
        return matrix[rows.whole : rows.whole + rows.count, columns.whole : columns.whole + columns.count]

    def block(self, name: str, parameters: Mapping[str, Tensor], residual: str) -> Block:
        """The part as a `Block` of zero residual. residual: "device" keeps it beside the weights, "cpu" in host memory."""
        value = self.view(parameters)
        low = None
        if value.dtype == torch.bfloat16:
            device = value.device if residual == "device" else torch.device("cpu")
            low = torch.zeros(value.shape, dtype=torch.int16, device=device)
            if residual == "cpu" and value.device.type == "cuda":
                low = low.pin_memory()
        return Block(name, value, low, self.shape, self.rows.whole, self.columns.whole)


def locate(model: nn.Module, name: str, shape: Shape, fused: Mapping[str, list[str]]) -> Place | None:
    """The place of `name` (as in the checkpoint, unfused) on this rank, or None where it cannot be told.

    fused: the model class' `packed_modules_mapping`, {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}.
    """
    module_name, _, leaf = name.rpartition(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    index: int | None = None
    if module_name not in modules:
        parent, _, child = module_name.rpartition(".")
        for joined, parts in fused.items():
            if child in parts and (candidate := f"{parent}.{joined}" if parent else joined) in modules:
                module_name, index = candidate, parts.index(child)
    module = modules.get(module_name)
    parameter = None if module is None else module._parameters.get(leaf)
    if module is None or parameter is None or parameter.ndim not in (1, 2):
        return None
    local = (parameter.shape[0], parameter.shape[1] if parameter.ndim == 2 else 1)
    spans = _spans(module, index, shape, is_vector=parameter.ndim == 1)
    if spans is None or not _fits_inside(spans, local, shape):
        return None
    return Place(f"{module_name}.{leaf}", shape, *spans)


def fits(place: Place, parameters: Mapping[str, Tensor], matrix: Tensor) -> bool:
    """Does the parameter hold what the checkpoint has there, cast as vLLM casts? matrix: the whole (out, in) values."""
    view = place.view(parameters)
    part = place.part(matrix).to(view.device).to(view.dtype)
    return view.dtype in (torch.float32, torch.bfloat16) and torch.equal(view, part)


def _fits_inside(spans: tuple[Span, Span], local: Shape, whole: Shape) -> bool:
    return all(s.local + s.count <= n and s.whole + s.count <= m for s, n, m in zip(spans, local, whole, strict=True))


def _spans(module: nn.Module, index: int | None, shape: Shape, *, is_vector: bool) -> tuple[Span, Span] | None:
    """Rows and columns of a layer's weight (or, a vector, of its bias)."""
    kinds = {c.__name__ for c in type(module).__mro__}
    columns = Span(0, 0, shape[1])
    if "QKVParallelLinear" in kinds:
        rows = _qkv_rows(module, index)
    elif "MergedColumnParallelLinear" in kinds:
        rows = _merged_rows(module, index)
    elif index is not None:
        return None
    elif "ColumnParallelLinear" in kinds:
        count = shape[0] // module.tp_size
        rows = Span(0, module.tp_rank * count, count)
    elif "RowParallelLinear" in kinds:
        rows = Span(0, 0, shape[0])
        if not is_vector:
            count = shape[1] // module.tp_size
            columns = Span(0, module.tp_rank * count, count)
    elif "VocabParallelEmbedding" in kinds:
        indices = module.shard_indices
        start, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
        rows = Span(0, start, stop - start)
    else:
        rows = Span(0, 0, shape[0])  # norms and replicated layers: `_fits_inside` and `fits` check it
    return None if rows is None else (rows, columns)


def _qkv_rows(layer: nn.Module, index: int | None) -> Span | None:
    """q, k or v (0, 1, 2) in this rank's rows: heads are dealt out, and key-value heads are repeated if there are too few."""
    sizes = [
        layer.num_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
        layer.num_kv_heads * layer.v_head_size,
    ]
    if index is None:  # joined in the checkpoint too: one range only where nothing is sharded
        return Span(0, 0, sum(sizes)) if layer.tp_size == 1 else None
    rank = layer.tp_rank if index == 0 else layer.tp_rank // layer.num_kv_head_replicas
    return Span(sum(sizes[:index]), rank * sizes[index], sizes[index])


def _merged_rows(layer: nn.Module, index: int | None) -> Span | None:
    sizes = [size // layer.tp_size for size in layer.output_sizes]
    if index is None:
        return Span(0, 0, sum(sizes)) if layer.tp_size == 1 else None
    return Span(sum(sizes[:index]), layer.tp_rank * sizes[index], sizes[index])
