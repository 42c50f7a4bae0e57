"""The part of each parameter that a tensor-parallel rank of vLLM holds. Pure arithmetic.

`plan_shards` plans it for a family of the table. For every other model the worker learns it, with
checkpoint tensors as sources.

A *full* tensor is a parameter as the trainer holds it: vLLM's name and merged rows at
tensor-parallel degree 1, the vocabulary not padded. A rank's parameter is made of slices of the
full tensor of the same name:

    qkv_proj       [its q heads; its k heads; its v heads]; k and v heads are repeated when there
                   are fewer than ranks
    gate_up_proj   [its gate rows; its up rows]
    o_proj, down_proj   a range of columns (their bias, if any, is whole on every rank)
    w13_weight     of each expert [its gate rows; its up rows]
    w2_weight      of each expert a range of columns
    embed_tokens, lm_head   a range of rows of the vocabulary, padded to a multiple of 64
    norms, gate of the experts   whole on every rank
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_patching.weights.families import (
    Geometry,
    Parameter,
    Part,
    UnsupportedModel,
    parameters,
)
from vllm_patching.weights.regions import row_major

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it over the ranks."""


@dataclass(frozen=True)
class Slice:
    """`length` indices along `dim`: from `source_start` of the full tensor to `local_start` of the
    rank's parameter.
    """

    dim: int
    source_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class ShardSpec:
    """One parameter of one rank.

    Attributes:
        name: vLLM's parameter name, the same as the trainer's.
        shape: the rank's shape, padding included.
        full_shape: the shape of the trainer's tensor.
        slices: how the rank's values are taken from the full tensor. Elements that no slice covers
            are padding.
    """

    name: str
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class SourceSlice:
    """A range of a rank's parameter, and the elements of a trainer's tensor that fill it in order.

    Attributes:
        source: name of the trainer's tensor.
        shape: of the elements, in both.
        source_offset, source_strides: of the elements in the tensor's row-major order.
        local_start: first element of the range in the rank's parameter.
    """

    source: str
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    local_start: int


@dataclass(frozen=True)
class LearnedShard:
    """One parameter of one rank, in a layout that was learned from vLLM's own loader.

    Attributes:
        name: vLLM's parameter name.
        shape: the rank's shape, padding included.
        sources: name and whole shape of each checkpoint tensor that fills a part of it.
        slices: in the order of the parameter's memory. Elements that no slice covers are padding.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    slices: tuple[SourceSlice, ...]


def source_slices(shard: ShardSpec | LearnedShard) -> tuple[SourceSlice, ...]:
    """The slices of a planned or a learned parameter, in one form.

    A planned parameter's are taken from the trainer's tensor of the same name.
    """
    if isinstance(shard, LearnedShard):
        return shard.slices
    if len(shard.slices) > 1 and shard.slices[0].dim:
        return (_joined(shard),)
    slices = []
    for piece in shard.slices:
        shape = list(shard.shape)
        shape[piece.dim] = piece.length
        steps = row_major(shard.full_shape).strides
        start = piece.local_start * row_major(shard.shape).strides[piece.dim]
        offset = piece.source_start * steps[piece.dim]
        slices.append(SourceSlice(shard.name, tuple(shape), offset, steps, start))
    return tuple(slices)


def _joined(shard: ShardSpec) -> SourceSlice:
    """Return the slices of the experts' rows as one slice, since none of them is contiguous.

    The slices have equal lengths and distances. Between the experts and their rows, the joined
    slice has a dimension that counts the slices.
    """
    first, second = shard.slices[:2]
    steps = row_major(shard.full_shape).strides
    step, length = steps[first.dim], first.length
    distance = (second.source_start - first.source_start) * step
    return SourceSlice(
        shard.name,
        (*shard.shape[: first.dim], len(shard.slices), length, *shard.shape[first.dim + 1 :]),
        first.source_start * step,
        (*steps[: first.dim], distance, step, *steps[first.dim + 1 :]),
        0,
    )


def sources(shard: ShardSpec | LearnedShard) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The name and the whole shape of each of the trainer's tensors that fill a parameter."""
    if isinstance(shard, LearnedShard):
        return shard.sources
    return ((shard.name, shard.full_shape),)


def plan_shards(geometry: Geometry, tp_rank: int, tp_size: int) -> list[ShardSpec]:
    """Every parameter of rank `tp_rank`, in the order of the model's modules.

    Raises:
        UnsupportedModel: the heads or the feed-forward width do not divide by `tp_size`.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank {tp_rank} is not in [0, {tp_size})")
    obstacles = undividable(geometry, tp_size)
    if obstacles:
        raise UnsupportedModel(
            f"cannot split {', '.join(obstacles)} over {tp_size} tensor-parallel ranks"
        )
    return [
        _shard(parameter, geometry.head_dim, tp_rank, tp_size)
        for parameter in parameters(geometry).values()
    ]


def undividable(geometry: Geometry, tp_size: int) -> list[str]:
    """The sizes that keep vLLM from dividing the model over `tp_size` ranks; empty if it can."""
    obstacles = []
    if geometry.num_heads % tp_size:
        obstacles.append(f"{geometry.num_heads} attention heads")
    if geometry.num_kv_heads % tp_size and tp_size % geometry.num_kv_heads:
        obstacles.append(f"{geometry.num_kv_heads} key-value heads")
    if geometry.intermediate_size % tp_size and len(geometry.sparse_layers) < geometry.num_layers:
        obstacles.append(f"a feed-forward width of {geometry.intermediate_size}")
    if geometry.moe_intermediate_size % tp_size:
        obstacles.append(f"experts with an inner width of {geometry.moe_intermediate_size}")
    if 0 < geometry.num_experts < tp_size:
        obstacles.append(f"layers of {geometry.num_experts} experts")
    if VOCAB_PADDING % tp_size:
        obstacles.append(f"a vocabulary padded to multiples of {VOCAB_PADDING}")
    return obstacles


def vocabulary_range(vocab_size: int, rank: int, size: int) -> tuple[int, int, int]:
    """The token ids whose rows a rank holds, first and one past the last, and its padded rows."""
    rows = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING // size
    first = min(rank * rows, vocab_size)
    return first, min(first + rows, vocab_size), rows


def _shard(parameter: Parameter, head_dim: int, rank: int, size: int) -> ShardSpec:
    if parameter.stacked:
        return _stacked(parameter, rank, size)
    if parameter.parts[0].split == "columns":
        rows, columns = parameter.shape
        mine = columns // size
        slices = [Slice(1, rank * mine, 0, mine)]
        return ShardSpec(parameter.name, (rows, mine), parameter.shape, tuple(slices))
    slices, local = [], 0
    for part in parameter.parts:
        first, count, held = _rows(part, head_dim, rank, size)
        if count:
            slices.append(Slice(0, part.start + first, local, count))
        local += held
    shape = (local, *parameter.shape[1:])
    return ShardSpec(parameter.name, shape, parameter.shape, tuple(slices))


def _stacked(parameter: Parameter, rank: int, size: int) -> ShardSpec:
    """Split the inner width of every expert, as vLLM does."""
    experts, rows, columns = parameter.shape
    if parameter.parts[0].split == "columns":
        mine = columns // size
        own = Slice(2, rank * mine, 0, mine)
        return ShardSpec(parameter.name, (experts, rows, mine), parameter.shape, (own,))
    slices, local = [], 0
    for part in parameter.parts[: len(parameter.parts) // experts]:  # the first expert's
        mine = part.shape[0] // size
        slices.append(Slice(1, part.start + rank * mine, local, mine))
        local += mine
    return ShardSpec(parameter.name, (experts, local, columns), parameter.shape, tuple(slices))


def _rows(part: Part, head_dim: int, rank: int, size: int) -> tuple[int, int, int]:
    """Return the first row of a part that the rank holds, how many, and with padding how many."""
    rows = part.shape[0]
    if part.split == "whole":
        return 0, rows, rows
    if part.split == "vocabulary":
        first, end, held = vocabulary_range(rows, rank, size)
        return first, end - first, held
    heads = rows // head_dim
    if part.split == "kv_heads" and heads < size:
        return rank // (size // heads) * head_dim, head_dim, head_dim
    mine = rows // size
    return rank * mine, mine, mine
