"""The one table of model families: every parameter of a model, written once.

`FAMILIES` names the blocks of a family's layers and reads its switches from config.json.
`parameters` lists a model's parameters: the checkpoint tensors behind each, their shapes, their
split over tensor-parallel ranks, and which take adapters. From this list follow

* the trainer's modules, checkpoints, adapters, memory plan and FLOP counts;
* the slices that vLLM's ranks hold (`sharding.py`), and the adapters that a server accepts.

A parameter has vLLM's name. Its rows are those of its checkpoint tensors, one below the other:
`qkv_proj` is [q; k; v], and `gate_up_proj` is [gate; up].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

_DEFAULT_ROPE_THETA = 10_000.0  # transformers' value for each family if the file names none


class UnsupportedModel(ValueError):
    """A config.json of a model that is not supported, or a split that the model does not allow."""


# The families


@dataclass(frozen=True)
class Block:
    """A step of a layer. The norm reads the residual stream; the step's output is added to it.

    Attributes:
        kind: selects the parameters here, and the computation in the decoder.
        name, norm: the modules of the step and of its norm, within the layer.
    """

    kind: Literal["attention", "gated_mlp"]
    name: str
    norm: str


DENSE = (
    Block("attention", "self_attn", "input_layernorm"),
    Block("gated_mlp", "mlp", "post_attention_layernorm"),
)


@dataclass(frozen=True)
class Family:
    """Models with the same layers.

    Attributes:
        architecture: the name in `architectures` of config.json.
        qkv_bias, o_bias, mlp_bias: whether these linear layers have a bias, or the key of
            config.json that decides.
        qk_norm: queries and keys are normalised, head by head.
        window_key: the key of config.json that switches a sliding window on.
        defaults: transformers' values for keys that config.json lacks.
        layer: the blocks of a layer, in the order of the forward pass.
    """

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_key: str = "use_sliding_window"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer: tuple[Block, ...] = DENSE


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family("Qwen2ForCausalLM", qkv_bias=True, defaults={"num_key_value_heads": 32}),
        # vLLM has no bias in o_proj: a server refuses such a model when it compares parameters.
        Family(
            "Qwen3ForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            defaults={"head_dim": 128, "num_key_value_heads": 32},
        ),
        Family(
            "MistralForCausalLM",
            window_key="sliding_window",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
    )
}
"""The supported families, by architecture."""


# The sizes of one model, and their reader


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary frequencies, for long contexts.

    Attributes:
        kind: "linear" (every frequency divided by `factor`) or "llama3" (only the low ones, with a
            smooth passage).
        factor: the divisor.
        low_freq_factor, high_freq_factor, original_max_positions: bounds of the passage; used by
            "llama3" only.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Geometry:
    """Sizes and switches of a decoder-only transformer. All sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False

    @property
    def family(self) -> Family:
        """The row of the table."""
        return FAMILIES[self.architecture]

    @property
    def q_size(self) -> int:
        """Rows of the query part of qkv_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key part, and of the value part, of qkv_proj."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> Geometry:
        """Read the keys of a `config.json`, as written by transformers 4 or 5.

        Args:
            config: the parsed file.
            where: the file's name in errors.

        Raises:
            UnsupportedModel: the architecture, or a feature the config switches on, is not
                supported; a key is missing.
        """
        family = _family(config, where)
        config = {**family.defaults, **config}
        _refuse_unsupported(config, family, where)

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise UnsupportedModel(
                    f"{where} has no '{key}', which {family.architecture} needs; "
                    "is the file complete?"
                )
            return config[key]

        def switch(value: bool | str) -> bool:
            return bool(config.get(value, False)) if isinstance(value, str) else value

        hidden_size, num_heads = int(need("hidden_size")), int(need("num_attention_heads"))
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"{where}: {num_heads} attention heads cannot share {num_kv_heads} "
                "key/value heads evenly"
            )
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA
        return cls(
            architecture=family.architecture,
            vocab_size=int(need("vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(need("intermediate_size")),
            num_layers=int(need("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            max_positions=int(need("max_position_embeddings")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}, where),
            qkv_bias=switch(family.qkv_bias),
            o_bias=switch(family.o_bias),
            mlp_bias=switch(family.mlp_bias),
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


def _family(config: Mapping[str, Any], where: str) -> Family:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    named = ", ".join(map(str, names)) or f"none named (model_type {config.get('model_type')!r})"
    raise UnsupportedModel(
        f"{where}: architecture {named} is not supported; supported: {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    if config.get("quantization_config"):
        raise UnsupportedModel(
            f"{where}: a quantised checkpoint cannot be trained; use the unquantised one of the "
            "same model"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(
            f"{where}: hidden_act {activation!r} is not supported for {family.architecture}; "
            "supported: 'silu'"
        )
    window = config.get(family.window_key)
    if window or "sliding_attention" in (config.get("layer_types") or []):
        raise UnsupportedModel(
            f"{where}: sliding-window attention is not supported; switch {family.window_key} off "
            f"(it is {window!r}) if the model was trained without a window"
        )


def _rope_scaling(parameters: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise UnsupportedModel(
            f"{where}: rope scaling {kind!r} is not supported; supported: default, linear, llama3"
        )
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [key for key in needed if key not in parameters]
    if missing:
        raise UnsupportedModel(f"{where}: rope scaling {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(parameters["factor"]))
    return RopeScaling(
        kind=kind,
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_positions=int(parameters["original_max_position_embeddings"]),
    )


# The parameters of one model

Split = Literal["rows", "kv_heads", "columns", "vocabulary", "whole"]
"""The division of a checkpoint tensor among tensor-parallel ranks. `kv_heads` are rows by whole
heads, which several ranks share if there are fewer heads than ranks. A `vocabulary` is padded
first."""


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor and the rows of the parameter that it fills.

    Attributes:
        name: the tensor's name in the checkpoint.
        start: first row in the parameter.
        shape: the tensor's shape.
        split: over tensor-parallel ranks.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    split: Split

    @property
    def stop(self) -> int:
        """One past the last row in the parameter."""
        return self.start + self.shape[0]

    @property
    def module(self) -> str:
        """Hugging Face's name of the tensor's module, such as `model.layers.0.mlp.up_proj`."""
        return self.name.rpartition(".")[0]

    @property
    def projection(self) -> str:
        """The last part of the module's name, such as `up_proj`."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the decoder and of vLLM.

    Attributes:
        name: vLLM's name.
        parts: the checkpoint tensors, one below the other.
        adapted: each part is a projection that can have an adapter.
        partial: each tensor-parallel rank holds all of it and sees some of its uses, so the ranks'
            gradients add up.
    """

    name: str
    parts: tuple[Part, ...]
    adapted: bool = False
    partial: bool = False

    @property
    def module(self) -> str:
        """The name of the parameter's module, such as `model.layers.0.mlp.gate_up_proj`."""
        return self.name.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape, on one rank and without padding."""
        return (self.parts[-1].stop, *self.parts[0].shape[1:])

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


Rows = Mapping[str, tuple[int, Split]]
"""For each projection of a linear layer the rows and their split."""


@lru_cache
def parameters(geometry: Geometry) -> Mapping[str, Parameter]:
    """Every parameter by name, in the order of vLLM's modules."""
    return {parameter.name: parameter for parameter in _model(geometry)}


def _model(g: Geometry) -> Iterator[Parameter]:
    yield _one("model.embed_tokens.weight", (g.vocab_size, g.hidden_size), "vocabulary")
    for number in range(g.num_layers):
        layer = f"model.layers.{number}"
        for block in g.family.layer:
            yield from _BLOCKS[block.kind](f"{layer}.{block.name}", g)
        for block in g.family.layer:
            yield _one(f"{layer}.{block.norm}.weight", (g.hidden_size,))
    yield _one("model.norm.weight", (g.hidden_size,))
    if not g.tie_word_embeddings:
        yield _one("lm_head.weight", (g.vocab_size, g.hidden_size), "vocabulary")


def _attention(path: str, g: Geometry) -> Iterator[Parameter]:
    qkv: Rows = {
        "q_proj": (g.q_size, "rows"),
        "k_proj": (g.kv_size, "kv_heads"),
        "v_proj": (g.kv_size, "kv_heads"),
    }
    yield from _linear(path, "qkv_proj", qkv, g.hidden_size, g.qkv_bias)
    yield from _linear_over_columns(path, "o_proj", g.hidden_size, g.q_size, g.o_bias)
    if g.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield _one(f"{path}.{norm}.weight", (g.head_dim,), partial=True)


def _gated_mlp(path: str, g: Geometry) -> Iterator[Parameter]:
    rows: tuple[int, Split] = (g.intermediate_size, "rows")
    gate_up = {"gate_proj": rows, "up_proj": rows}
    yield from _linear(path, "gate_up_proj", gate_up, g.hidden_size, g.mlp_bias)
    yield from _linear_over_columns(
        path, "down_proj", g.hidden_size, g.intermediate_size, g.mlp_bias
    )


_BLOCKS = {"attention": _attention, "gated_mlp": _gated_mlp}


def _linear(path: str, name: str, rows: Rows, inputs: int, bias: bool) -> Iterator[Parameter]:
    """Yield the weight and the bias of projections that are merged and split by rows."""
    yield _merged(path, f"{name}.weight", rows, (inputs,), adapted=True)
    if bias:
        yield _merged(path, f"{name}.bias", rows, ())


def _linear_over_columns(
    path: str, name: str, outputs: int, inputs: int, bias: bool
) -> Iterator[Parameter]:
    """Yield the weight of one projection, split by columns, and its bias, which each rank has."""
    yield _one(f"{path}.{name}.weight", (outputs, inputs), "columns", adapted=True)
    if bias:
        yield _one(f"{path}.{name}.bias", (outputs,))


def _merged(
    path: str, name: str, rows: Rows, tail: tuple[int, ...], adapted: bool = False
) -> Parameter:
    kind = name.rpartition(".")[2]
    parts, start = [], 0
    for projection, (count, split) in rows.items():
        parts.append(Part(f"{path}.{projection}.{kind}", start, (count, *tail), split))
        start += count
    return Parameter(f"{path}.{name}", tuple(parts), adapted)


def _one(
    name: str,
    shape: tuple[int, ...],
    split: Split = "whole",
    adapted: bool = False,
    partial: bool = False,
) -> Parameter:
    return Parameter(name, (Part(name, 0, shape, split),), adapted, partial)


def _projections() -> tuple[str, ...]:
    smallest = (Geometry(name, 1, 1, 1, 1, 1, 1, 1, 1, 1e-6, 1e4) for name in FAMILIES)
    adapted = (p for geometry in smallest for p in parameters(geometry).values() if p.adapted)
    return tuple(dict.fromkeys(part.projection for p in adapted for part in p.parts))


PROJECTIONS = _projections()
"""The projections of all families that can have an adapter, by their Hugging Face names, in the
order of the forward pass."""
