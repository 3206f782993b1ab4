"""Places of unfused matrices in fused, sharded parameters: layers with vLLM's names and attributes, no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from logra.integrations.vllm_weights import Place, fits, locate
from logra.rl.engines.vllm_link import combine_parts
from logra.sketch.block import Block, apply_blocks, digest_blocks
from logra.sketch.split import split
from logra.sketch.update import Factor, Update

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 24, 4, 2, 6, 10, 13
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Layer(nn.Module):
    def __init__(self, weight: Tensor, **attributes) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


class ColumnParallelLinear(Layer):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(Layer):
    pass


class VocabParallelEmbedding(Layer):
    pass


class RMSNorm(Layer):
    pass


def checkpoint() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (VOCAB, HIDDEN),
        "layer.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "layer.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "layer.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "layer.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "layer.gate_proj.weight": (INNER * 4, HIDDEN),
        "layer.up_proj.weight": (INNER * 4, HIDDEN),
        "layer.fc.weight": (INNER * 4, HIDDEN),
        "layer.norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def sharded(values: dict[str, Tensor], rank: int, ranks: int, dtype: torch.dtype) -> nn.Module:
    """What vLLM's loaders make of a checkpoint on one rank, written out for these layers."""
    copies = max(1, ranks // KV_HEADS)
    kv_rows = KV_HEADS * HEAD // min(ranks, KV_HEADS)
    q_rows = HEADS * HEAD // ranks
    kv_start = rank // copies * kv_rows
    q, k, v = (values[f"layer.{x}_proj.weight"] for x in "qkv")
    qkv = torch.cat([q[rank * q_rows :][:q_rows], k[kv_start:][:kv_rows], v[kv_start:][:kv_rows]])
    inner = INNER * 4 // ranks
    gate_up = torch.cat([values[f"layer.{x}_proj.weight"][rank * inner :][:inner] for x in ("gate", "up")])
    columns = HEADS * HEAD // ranks
    per_rank = -(-VOCAB // ranks)
    start, stop = min(rank * per_rank, VOCAB), min((rank + 1) * per_rank, VOCAB)
    embed = torch.zeros(per_rank + 2, HIDDEN)  # padded, as vLLM pads vocabularies
    embed[: stop - start] = values["embed.weight"][start:stop]
    tp = {"tp_rank": rank, "tp_size": ranks}
    heads = {
        "num_heads": HEADS // ranks,
        "num_kv_heads": KV_HEADS // min(ranks, KV_HEADS),
        "num_kv_head_replicas": copies,
    }
    root, layer = nn.Module(), nn.Module()
    layer.qkv_proj = QKVParallelLinear(qkv.to(dtype), **tp, **heads, head_size=HEAD, v_head_size=HEAD)
    layer.o_proj = RowParallelLinear(values["layer.o_proj.weight"][:, rank * columns :][:, :columns].to(dtype), **tp)
    layer.gate_up_proj = MergedColumnParallelLinear(gate_up.to(dtype), **tp, output_sizes=[INNER * 4, INNER * 4])
    layer.fc = ColumnParallelLinear(values["layer.fc.weight"][rank * inner :][:inner].to(dtype), **tp)
    layer.norm = RMSNorm(values["layer.norm.weight"].to(dtype))
    root.layer = layer
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    root.embed = VocabParallelEmbedding(embed.to(dtype), shard_indices=indices)
    return root


def logical(value: Tensor) -> Tensor:
    return value if value.ndim == 2 else value[:, None]


def places(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Place]:
    found = {name: locate(model, name, tuple(logical(v).shape), FUSED) for name, v in values.items()}
    assert all(found.values()), found
    return found  # type: ignore[return-value]


def blocks_of_rank(values: dict[str, Tensor], rank: int, ranks: int, dtype: torch.dtype) -> dict[str, Block]:
    model = sharded(values, rank, ranks, dtype)
    parameters = dict(model.named_parameters())
    blocks = {}
    for name, place in places(model, values).items():
        assert fits(place, parameters, logical(values[name]))
        blocks[name] = place.block(name, parameters, "cpu")
        blocks[name].load(place.part(logical(values[name])))
    return blocks


def parts(blocks: dict[str, Block]) -> list[list]:
    return [
        [n, *b.shape, b.row_start, len(b.rows), b.column_start, len(b.columns), *map(str, b.sums())]
        for n, b in blocks.items()
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("basis", ["random", "aligned"])
def test_shards_take_an_update_as_the_whole_does(ranks: int, dtype: torch.dtype, basis: str) -> None:
    values = checkpoint()
    whole = {name: Block(name, logical(value).clone()) for name, value in values.items()}
    workers = [blocks_of_rank(values, rank, ranks, dtype) for rank in range(ranks)]
    assert combine_parts([p for blocks in workers for p in parts(blocks)]) == digest_blocks(whole)

    for index in range(3):
        update = make_update(whole, index, basis).incremental()
        for blocks in (whole, *workers):
            apply_blocks(blocks, update)
    assert combine_parts([p for blocks in workers for p in parts(blocks)]) == digest_blocks(whole)
    if dtype == torch.bfloat16:
        for blocks in workers:
            for name, block in blocks.items():
                rows, columns = slice(block.rows.start, block.rows.stop), slice(block.columns.start, block.columns.stop)
                assert torch.equal(block.value, split(whole[name].value[rows, columns].contiguous())[0])


def make_update(whole: dict[str, Block], index: int, basis: str) -> Update:
    """Aligned: new bases in Updates 0 and 2; Update 1 goes on with those of 0."""
    draw, factors = torch.Generator().manual_seed(index), {}
    for name in sorted(whole.keys() - {"layer.norm.weight", "embed.weight"}):
        rows, columns = whole[name].shape
        q = torch.randint(-90, 91, (rows, 3), dtype=torch.int8, generator=draw)
        first = index // 2 * 2
        again = torch.Generator().manual_seed(1000 * first + len(factors))
        bases = torch.randint(-127, 128, (3, columns), generator=again).to(torch.int8), first
        factors[name] = Factor(
            name, rows, columns, q, torch.full((rows,), -18 if basis == "random" else -25, dtype=torch.int8),
            *(bases if basis == "aligned" else (None, None)),
        )  # fmt: skip
    dense = {n: torch.randn(whole[n].shape, generator=draw) for n in ("layer.norm.weight", "embed.weight")}
    return Update(index, basis, index, 5, 3, 8, factors, decay=1e-3, dense=dense)


def test_each_name_of_a_fused_parameter_holds_the_columns_of_its_basis() -> None:
    values = checkpoint()
    whole = {name: Block(name, logical(value).clone()) for name, value in values.items()}
    workers = [blocks_of_rank(values, rank, 2, torch.bfloat16) for rank in range(2)]
    update = make_update(whole, 0, "aligned")
    for blocks in workers:
        apply_blocks(blocks, update)
        for name, factor in update.factors.items():
            block = blocks[name]
            assert block.basis is not None and block.basis_index == 0
            assert torch.equal(block.basis, factor.basis[:, block.columns.start : block.columns.stop])
    assert len(workers[1]["layer.o_proj.weight"].columns) == whole["layer.o_proj.weight"].shape[1] // 2
    assert workers[0]["layer.norm.weight"].basis is None


def test_views_share_the_fused_parameter() -> None:
    values = checkpoint()
    model = sharded(values, 0, 2, torch.float32)
    parameters = dict(model.named_parameters())
    place = places(model, values)["layer.k_proj.weight"]
    place.view(parameters).zero_()
    q_rows, kv_rows = HEADS * HEAD // 2, HEAD
    fused = model.layer.qkv_proj.weight
    assert not fused[q_rows : q_rows + kv_rows].any() and fused[:q_rows].all() and fused[q_rows + kv_rows :].all()


def test_another_layout_is_noticed_before_anything_is_written() -> None:
    values = checkpoint()
    model = sharded(values, 1, 2, torch.float32)
    parameters = dict(model.named_parameters())
    place = places(model, values)["layer.up_proj.weight"]
    model.layer.gate_up_proj.weight.copy_(model.layer.gate_up_proj.weight.flip(0))
    assert not fits(place, parameters, values["layer.up_proj.weight"])
    model.layer.o_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # repacked, as on CPU
    assert locate(model, "layer.o_proj.weight", (HIDDEN, HEADS * HEAD), FUSED) is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layer.absent.weight", (4, 4)),
        ("layer.norm.bias", (HIDDEN, 1)),
        ("layer.q_proj.weight", (HEADS * HEAD, HIDDEN + 1)),
        ("layer.norm.weight", (HIDDEN + 1, 1)),
        ("layer.qkv_proj.weight", (3 * HIDDEN, HIDDEN)),  # joined in the checkpoint and sharded: several ranges
        ("layer.gate_up_proj.weight", (8 * INNER, HIDDEN)),
    ],
)
def test_what_is_not_understood_has_no_place(name: str, shape: tuple[int, int]) -> None:
    assert locate(sharded(checkpoint(), 0, 2, torch.float32), name, shape, FUSED) is None


def test_matrices_joined_in_the_checkpoint_have_a_place_on_one_rank() -> None:
    model = sharded(checkpoint(), 0, 1, torch.float32)
    rows = (HEADS + 2 * KV_HEADS) * HEAD
    place = locate(model, "layer.qkv_proj.weight", (rows, HIDDEN), FUSED)
    assert place is not None and place.view(dict(model.named_parameters())).shape == (rows, HIDDEN)


def test_float16_cannot_be_exact_in_place() -> None:
    values = checkpoint()
    model = sharded(values, 0, 1, torch.float16)
    place = places(model, values)["layer.o_proj.weight"]
    assert not fits(place, dict(model.named_parameters()), values["layer.o_proj.weight"])
