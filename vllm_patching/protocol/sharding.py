"""Which part of each full tensor a tensor-parallel rank of vLLM holds. Pure arithmetic, no I/O, no
vLLM.

A *full* tensor is a parameter as the trainer holds it: vLLM's name and merged layout at
tensor-parallel degree 1, the vocabulary not padded. A rank's parameter is made of slices of the
full tensor of the same name:

    qkv_proj       [its q heads; its k heads; its v heads]; k and v heads are repeated when there are fewer than ranks
    gate_up_proj   [its gate rows; its up rows]
    o_proj, down_proj   a range of columns (their bias, if any, is whole on every rank)
    embed_tokens, lm_head   a range of rows of the vocabulary, padded to a multiple of 64
    norms          whole on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it over the ranks."""

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The model's architecture, or its split over this many ranks, is not one that the bridge knows
    how to map.
    """


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
class ModelGeometry:
    """The sizes of a dense decoder that decide its parameters' shapes."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Read the sizes from the contents of a Hugging Face config.json.

        Raises:
            UnsupportedModel: the model_type is not a dense Llama, Qwen2 or Qwen3.
        """
        model_type = str(config.get("model_type", ""))
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModel(
                f"model_type {model_type!r} is not supported by the weight bridge, only {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        heads = int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if model_type == "qwen2" else attention_bias,
            o_bias=attention_bias if model_type == "llama" else False,
            mlp_bias=bool(config.get("mlp_bias", False)) if model_type == "llama" else False,
            qk_norm=model_type == "qwen3",
        )


def plan_shards(geometry: ModelGeometry, tp_rank: int, tp_size: int) -> list[ShardSpec]:
    """Every parameter of rank `tp_rank`, in the order of the model's modules.

    Raises:
        UnsupportedModel: the heads or the feed-forward width do not divide by `tp_size`.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank {tp_rank} is not in [0, {tp_size})")
    _check_divisible(geometry, tp_size)
    return list(_plan(geometry, tp_rank, tp_size))


def _check_divisible(geometry: ModelGeometry, tp_size: int) -> None:
    problems = []
    if geometry.num_heads % tp_size:
        problems.append(f"{geometry.num_heads} attention heads")
    if geometry.num_kv_heads % tp_size and tp_size % geometry.num_kv_heads:
        problems.append(f"{geometry.num_kv_heads} key-value heads")
    if geometry.intermediate_size % tp_size:
        problems.append(f"a feed-forward width of {geometry.intermediate_size}")
    if VOCAB_PADDING % tp_size:
        problems.append(f"a vocabulary padded to multiples of {VOCAB_PADDING}")
    if problems:
        raise UnsupportedModel(
            f"cannot split {', '.join(problems)} over {tp_size} tensor-parallel ranks"
        )


def _plan(g: ModelGeometry, rank: int, size: int) -> Iterator[ShardSpec]:
    yield _vocab_rows("model.embed_tokens.weight", g, rank, size)
    for layer in range(g.num_layers):
        prefix = f"model.layers.{layer}."
        yield _qkv(prefix + "self_attn.qkv_proj.weight", g, rank, size, (g.hidden_size,))
        if g.qkv_bias:
            yield _qkv(prefix + "self_attn.qkv_proj.bias", g, rank, size, ())
        yield _columns(
            prefix + "self_attn.o_proj.weight", g.hidden_size, g.num_heads * g.head_dim, rank, size
        )
        if g.o_bias:
            yield _whole(prefix + "self_attn.o_proj.bias", (g.hidden_size,))
        if g.qk_norm:
            yield _whole(prefix + "self_attn.q_norm.weight", (g.head_dim,))
            yield _whole(prefix + "self_attn.k_norm.weight", (g.head_dim,))
        yield _gate_up(prefix + "mlp.gate_up_proj.weight", g, rank, size, (g.hidden_size,))
        if g.mlp_bias:
            yield _gate_up(prefix + "mlp.gate_up_proj.bias", g, rank, size, ())
        yield _columns(
            prefix + "mlp.down_proj.weight", g.hidden_size, g.intermediate_size, rank, size
        )
        if g.mlp_bias:
            yield _whole(prefix + "mlp.down_proj.bias", (g.hidden_size,))
        yield _whole(prefix + "input_layernorm.weight", (g.hidden_size,))
        yield _whole(prefix + "post_attention_layernorm.weight", (g.hidden_size,))
    yield _whole("model.norm.weight", (g.hidden_size,))
    if not g.tied:
        yield _vocab_rows("lm_head.weight", g, rank, size)


def _whole(name: str, shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(name, shape, shape, (Slice(0, 0, 0, shape[0]),))


def _rows(
    name: str, pieces: list[tuple[int, int]], full_rows: int, rest: tuple[int, ...]
) -> ShardSpec:
    """A parameter made of row ranges (start, length) of the full tensor, one below the other."""
    slices, local = [], 0
    for start, length in pieces:
        slices.append(Slice(0, start, local, length))
        local += length
    return ShardSpec(name, (local, *rest), (full_rows, *rest), tuple(slices))


def _qkv(name: str, g: ModelGeometry, rank: int, size: int, rest: tuple[int, ...]) -> ShardSpec:
    q_rows = g.num_heads * g.head_dim
    kv_rows = g.num_kv_heads * g.head_dim
    my_q = q_rows // size
    if g.num_kv_heads >= size:
        my_kv = kv_rows // size
        kv_start = rank * my_kv
    else:
        my_kv = g.head_dim
        kv_start = (rank // (size // g.num_kv_heads)) * g.head_dim
    pieces = [(rank * my_q, my_q), (q_rows + kv_start, my_kv), (q_rows + kv_rows + kv_start, my_kv)]
    return _rows(name, pieces, q_rows + 2 * kv_rows, rest)


def _gate_up(name: str, g: ModelGeometry, rank: int, size: int, rest: tuple[int, ...]) -> ShardSpec:
    mine = g.intermediate_size // size
    return _rows(
        name,
        [(rank * mine, mine), (g.intermediate_size + rank * mine, mine)],
        2 * g.intermediate_size,
        rest,
    )


def _columns(name: str, rows: int, full_columns: int, rank: int, size: int) -> ShardSpec:
    mine = full_columns // size
    return ShardSpec(name, (rows, mine), (rows, full_columns), (Slice(1, rank * mine, 0, mine),))


def _vocab_rows(name: str, g: ModelGeometry, rank: int, size: int) -> ShardSpec:
    padded = -(-g.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    mine = padded // size
    start = rank * mine
    real = max(0, min(g.vocab_size, start + mine) - start)
    slices = (Slice(0, start, 0, real),) if real else ()
    return ShardSpec(name, (mine, g.hidden_size), (g.vocab_size, g.hidden_size), slices)
