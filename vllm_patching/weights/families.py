"""The one table of model families: every parameter of a model, written once.

`FAMILIES` names the blocks of a family's layers and reads its switches from config.json.
`parameters` lists a model's parameters: the checkpoint tensors behind each, their shapes, their
split over tensor-parallel ranks, and which take adapters. From this list follow

* the trainer's modules, checkpoints, adapters, memory plan and FLOP counts;
* the slices that vLLM's ranks hold (`sharding.py`), and the adapters that a server accepts.

A parameter has vLLM's name. Its rows are its checkpoint tensors' rows, one below the other:
`qkv_proj` is [q; k; v], and `gate_up_proj` is [gate; up]. The experts of a layer are stacked in
the first dimension: `w13_weight` has [gate; up] of each expert, and `w2_weight` has its down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

_DEFAULT_ROPE_THETA = 10_000.0  # transformers' value for each family if the file names none


class UnsupportedModel(ValueError):
    """A config.json of a model that is not supported, or a split that the model does not allow."""


# The families


@dataclass(frozen=True)
class Block:
    """A step of a layer. It reads the residual stream, and its output is added to it.

    Attributes:
        kind: selects the parameters here, and the computation in the decoder.
        name: the step's module within the layer.
        norm: the norm of what the step reads; None: it reads the stream itself.
        norm_after: the norm of what the step adds; None: it adds its output.
    """

    kind: Literal["attention", "gated_mlp", "moe"]
    name: str
    norm: str | None = None
    norm_after: str | None = None


DENSE = (
    Block("attention", "self_attn", "input_layernorm"),
    Block("gated_mlp", "mlp", "post_attention_layernorm"),
)


LayerType = Callable[[Mapping[str, Any], int], bool]
"""A rule by config.json and a layer's number: true if the layer has a sliding window."""


def _switched_window(config: Mapping[str, Any], layer: int) -> bool:
    """Qwen's rule."""
    return bool(config["use_sliding_window"]) and layer >= config["max_window_layers"]


def _window_everywhere(config: Mapping[str, Any], layer: int) -> bool:
    """Mistral's rule."""
    return config.get("sliding_window") is not None


def _pattern_of_windows(config: Mapping[str, Any], layer: int) -> bool:
    """Gemma's rule."""
    return bool((layer + 1) % config["sliding_window_pattern"])


@dataclass(frozen=True)
class Family:
    """Models with the same layers.

    Attributes:
        architecture: the name in `architectures` of config.json.
        qkv_bias, o_bias, mlp_bias: whether these linear layers have a bias, or the key of
            config.json that decides.
        qk_norm: queries and keys are normalised, head by head.
        joint_qk_norm: they are normalised over all heads.
        activation, activation_key: of the gated MLP, and its key in config.json.
        norms_less_one: checkpoints store norms' weights less 1.
        scaled_embedding: embeddings are multiplied by the root of the hidden size.
        off: keys of config.json for features that are not supported.
        no_determinism: the reason why the family has no deterministic mode; empty: it has one.
        fused: parameters that the checkpoint stores as one tensor, and not projection by projection.
        interleaved: neighbours (2i, 2i + 1) of a head are rotated, and not (i, i + half).
        windowed: the rule for layers with a sliding window, where config.json has no `layer_types`;
            None: no layer has one.
        defaults: transformers' values for keys that config.json lacks.
        layer: the blocks of a layer, in the order of the forward pass. In a layer without experts
            a "gated_mlp" takes the place of a "moe"; see Geometry.blocks.
    """

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    activation_key: str = "hidden_act"
    norms_less_one: bool = False
    scaled_embedding: bool = False
    off: tuple[str, ...] = ()
    no_determinism: str = ""
    fused: tuple[str, ...] = ()
    interleaved: bool = False
    windowed: LayerType | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer: tuple[Block, ...] = DENSE

    @property
    def norms(self) -> list[str]:
        """The norms of a layer: those before the blocks, then those after them."""
        names = [block.norm for block in self.layer] + [block.norm_after for block in self.layer]
        return [name for name in names if name is not None]


_QWEN = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family("Qwen2ForCausalLM", qkv_bias=True, windowed=_switched_window, defaults=_QWEN),
        # vLLM has no bias in o_proj: a server refuses such a model when it compares parameters.
        Family(
            "Qwen3ForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windowed=_switched_window,
            defaults=_QWEN | {"head_dim": 128},
        ),
        Family(
            "MistralForCausalLM",
            windowed=_window_everywhere,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Family(
            "Olmo2ForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            joint_qk_norm=True,
            no_determinism="OLMo 2, which vLLM runs through transformers,",
            layer=(
                Block("attention", "self_attn", norm_after="post_attention_layernorm"),
                Block("gated_mlp", "mlp", norm_after="post_feedforward_layernorm"),
            ),
        ),
        Family(
            "Phi3ForCausalLM",
            fused=("qkv_proj", "gate_up_proj"),
            windowed=_window_everywhere,
            defaults={"partial_rotary_factor": 1.0},
        ),
        Family(
            "Gemma3ForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            activation="gelu_pytorch_tanh",
            activation_key="hidden_activation",
            norms_less_one=True,
            scaled_embedding=True,
            off=(
                "final_logit_softcapping",
                "attn_logit_softcapping",
                "use_bidirectional_attention",
            ),
            no_determinism="Gemma 3, whose norms and gated MLP have kernels of their own in vLLM,",
            windowed=_pattern_of_windows,
            defaults={
                "num_key_value_heads": 4,
                "head_dim": 256,
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
            },
            layer=(
                Block("attention", "self_attn", "input_layernorm", "post_attention_layernorm"),
                Block(
                    "gated_mlp",
                    "mlp",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                ),
            ),
        ),
        Family(
            "Glm4ForCausalLM",
            qkv_bias="attention_bias",
            fused=("gate_up_proj",),
            interleaved=True,
            defaults={
                "num_key_value_heads": 2,
                "head_dim": 128,
                "attention_bias": True,
                "partial_rotary_factor": 0.5,
            },
            layer=(
                Block("attention", "self_attn", "input_layernorm", "post_self_attn_layernorm"),
                Block("gated_mlp", "mlp", "post_attention_layernorm", "post_mlp_layernorm"),
            ),
        ),
        # vLLM has no window in this family, so one would be lost without a word there.
        Family(
            "Qwen3MoeForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            off=("use_sliding_window",),
            windowed=_switched_window,
            defaults=_QWEN
            | {
                "num_key_value_heads": 4,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "num_local_experts": 128,
                "norm_topk_prob": False,
            },
            layer=(
                Block("attention", "self_attn", "input_layernorm"),
                Block("moe", "mlp", "post_attention_layernorm"),
            ),
        ),
    )
}
"""The supported families, by architecture."""


# The sizes of one model, and their reader


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary frequencies, for long contexts.

    Attributes:
        kind: "linear" (every frequency divided by `factor`), or "llama3" or "yarn" (only the low
            ones, each with a smooth passage of its own).
        factor: the divisor.
        low_freq_factor, high_freq_factor: bounds of the passage, in turns over the original
            context. YaRN calls them beta_slow and beta_fast.
        original_max_positions: the original context.
        magnitude: factor of cosines and sines.
        whole_bounds: YaRN's bounds are rounded to whole frequencies.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    magnitude: float = 1.0
    whole_bounds: bool = True


@dataclass(frozen=True)
class Geometry:
    """Sizes and switches of a decoder-only transformer. All sizes in elements.

    Attributes:
        windows: the sliding window of each layer, in tokens with the query's own, or None for a
            layer without one. It is empty if no layer has one.
        local_rope_theta: theta of the layers with a window; None: the others' theta and scaling.
        query_scalar: scores are divided by its root; None: by the root of head_dim.
        partial_rotary_factor: the part of a head that is rotated, in whole pairs.
        num_experts: of each layer that has experts; 0: no layer has any.
        experts_per_token: the experts that the router chooses for a token.
        moe_intermediate_size: the inner width of an expert.
        norm_topk_prob: the weights of a token's experts are divided by their sum.
        dense_layers: numbers of the layers without experts, where others have them.
        media_tokens: ids that stand for images, sounds or films.
        ignored: patterns of checkpoint tensors that the model does not use.
    """

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
    windows: tuple[int | None, ...] = ()
    partial_rotary_factor: float = 1.0
    local_rope_theta: float | None = None
    query_scalar: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: frozenset[int] = frozenset()
    media_tokens: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)  # of old checkpoints

    @property
    def family(self) -> Family:
        """The row of the table."""
        return FAMILIES[self.architecture]

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        return self.windows[layer] if self.windows else None

    def blocks(self, layer: int) -> tuple[Block, ...]:
        """The blocks of a layer, in the order of the forward pass."""
        if self.num_experts and layer not in self.dense_layers:
            return self.family.layer
        return tuple(
            replace(block, kind="gated_mlp") if block.kind == "moe" else block
            for block in self.family.layer
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        layers = range(self.num_layers) if self.num_experts else ()
        return tuple(layer for layer in layers if layer not in self.dense_layers)

    @property
    def local_rope(self) -> Geometry | None:
        """The same model with the rotation of its layers with a window; None: all rotate alike."""
        if self.local_rope_theta is None:
            return None
        return replace(self, rope_theta=self.local_rope_theta, rope_scaling=None)

    @property
    def attention_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that are rotated, the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def inexact(self) -> str:
        """The part of the model that has no deterministic mode; empty: all of it has one."""
        if self.family.no_determinism:
            return self.family.no_determinism
        if self.rope_scaling is not None:
            return f"rope scaling {self.rope_scaling.kind!r}"
        return "sliding-window attention" if self.windows else ""

    @property
    def q_size(self) -> int:
        """Rows of the query part of qkv_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key part, and of the value part, of qkv_proj."""
        return self.num_kv_heads * self.head_dim

    def listed(self) -> Iterator[Parameter]:
        """Yield every parameter; see `parameters`."""
        return _model(self)

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
        if "num_experts" in config:  # transformers 4's key
            config = {"num_local_experts": config["num_experts"], **config}
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
        max_positions = int(need("max_position_embeddings"))
        rope, local_theta = _rope(config, where)
        return cls(
            architecture=family.architecture,
            vocab_size=int(need("vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(need("intermediate_size")),
            num_layers=int(need("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            max_positions=max_positions,
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_rope_scaling(rope, max_positions, where),
            qkv_bias=switch(family.qkv_bias),
            o_bias=switch(family.o_bias),
            mlp_bias=switch(family.mlp_bias),
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config, family, max_positions, where),
            partial_rotary_factor=_partial_rotary(rope, family, where),
            local_rope_theta=local_theta,
            query_scalar=config.get("query_pre_attn_scalar"),
            **_experts(config, family, where),
        )


def own_family(config: Mapping[str, Any]) -> Family | None:
    """The row of the table for the model of a config.json; None: the table has none."""
    names = config.get("architectures") or []
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def _family(config: Mapping[str, Any], where: str) -> Family:
    family = own_family(config)
    if family is not None:
        return family
    names = config.get("architectures") or []
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
    activation = config.get(family.activation_key, family.activation)
    if activation != family.activation:
        raise UnsupportedModel(
            f"{where}: {family.activation_key} {activation!r} is not supported for "
            f"{family.architecture}; supported: {family.activation!r}"
        )
    on = next((key for key in family.off if config.get(key)), None)
    if on is not None:
        raise UnsupportedModel(
            f"{where}: {on} {config[on]!r} is not supported for {family.architecture}; "
            "use a model that was trained without it"
        )


def _windows(
    config: Mapping[str, Any], family: Family, max_positions: int, where: str
) -> tuple[int | None, ...]:
    layers, window = range(int(config["num_hidden_layers"])), config.get("sliding_window")
    if family.windowed is None:
        if window or "sliding_attention" in (config.get("layer_types") or []):
            raise UnsupportedModel(
                f"{where}: {family.architecture} has no sliding-window attention in transformers; "
                f"remove sliding_window (it is {window!r}) and layer_types if the model was "
                "trained without a window"
            )
        return ()
    types = config.get("layer_types") or [
        "sliding_attention" if family.windowed(config, layer) else "full_attention"
        for layer in layers
    ]
    if len(types) != len(layers) or not {*types} <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"{where}: layer_types has {len(types)} entries of {', '.join(sorted({*types}))} for "
            f"{len(layers)} layers; supported: full_attention or sliding_attention for each layer"
        )
    if "sliding_attention" not in types:
        return ()
    if not window or not config.get("use_sliding_window", True):
        raise UnsupportedModel(
            f"{where}: layer_types has sliding_attention, but the window is off (sliding_window "
            f"{window!r}); set one of the two as the model was trained"
        )
    if window >= max_positions and "rope_local_base_freq" not in family.defaults:
        return ()  # it hides nothing
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _experts(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Read the sizes of the experts, as arguments of Geometry."""
    if all(block.kind != "moe" for block in family.layer):
        return {}
    experts, chosen = int(config["num_local_experts"] or 0), int(config["num_experts_per_tok"])
    if not experts:
        return {}
    if not 0 < chosen <= experts:
        raise UnsupportedModel(
            f"{where}: num_experts_per_tok is {chosen}, and a layer has {experts} experts; "
            f"give a number from 1 to {experts}, as the model was trained"
        )
    step, dense = int(config["decoder_sparse_step"]), set(config.get("mlp_only_layers") or ())
    layers = range(int(config["num_hidden_layers"]))
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate_size": int(config["moe_intermediate_size"]),
        "norm_topk_prob": bool(config["norm_topk_prob"]),
        "dense_layers": frozenset(n for n in layers if n in dense or (n + 1) % step),
    }


def _rope(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], float | None]:
    """Read transformers 5's keys of rotary embeddings, or the older ones beside the others.

    Returns:
        The keys of a layer that sees everything, and theta of the layers with a window if it is
        another one.
    """
    newer = config.get("rope_parameters") or {}
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key)}
    rope = {"rope_theta": _DEFAULT_ROPE_THETA} | older
    rope |= newer.get("full_attention") or newer or config.get("rope_scaling") or {}
    local = newer.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModel(
            f"{where}: rope scaling {local['rope_type']!r} of layers with a sliding window is not "
            "supported; supported: default"
        )
    theta = local.get("rope_theta") or config.get("rope_local_base_freq")
    return rope, theta and float(theta)


def _partial_rotary(rope: Mapping[str, Any], family: Family, where: str) -> float:
    factor = float(rope.get("partial_rotary_factor") or 1)
    if factor != 1 and "partial_rotary_factor" not in family.defaults:
        raise UnsupportedModel(
            f"{where}: partial_rotary_factor {factor} is not supported for {family.architecture}, "
            "whose heads are rotated as a whole; remove the key"
        )
    return factor


_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("original_max_position_embeddings",),
}
"""The keys that each kind of rope scaling needs."""


def refuse_rope(kind: str, where: str) -> None:
    """Raise UnsupportedModel if vLLM and transformers rotate the same sequence differently."""
    if kind == "longrope":
        raise UnsupportedModel(
            f"{where}: rope scaling 'longrope' is not supported, since vLLM chooses its factors "
            "by --max-model-len and transformers by the batch. Take a model without it, such as "
            "microsoft/phi-4"
        )


def _rope_scaling(
    parameters: Mapping[str, Any], max_positions: int, where: str
) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    refuse_rope(kind, where)
    if kind not in _ROPE_KEYS:
        raise UnsupportedModel(
            f"{where}: rope scaling {kind!r} is not supported; supported: default, "
            f"{', '.join(_ROPE_KEYS)}"
        )
    missing = [key for key in _ROPE_KEYS[kind] if key not in parameters]
    if missing:
        raise UnsupportedModel(f"{where}: rope scaling {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(parameters["factor"]))
    original = int(parameters["original_max_position_embeddings"])
    if kind == "yarn":
        return _yarn(parameters, original, max_positions)
    return RopeScaling(
        kind=kind,
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_positions=original,
    )


def _yarn(parameters: Mapping[str, Any], original: int, max_positions: int) -> RopeScaling:
    """Read YaRN's keys (arXiv:2309.00071), with transformers' values for absent ones."""
    factor = float(parameters.get("factor") or max_positions / original)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own = parameters.get("attention_factor")
    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if own is None and one and all_dims:
        own = magnitude(one) / magnitude(all_dims)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        low_freq_factor=float(parameters.get("beta_slow") or 1),
        high_freq_factor=float(parameters.get("beta_fast") or 32),
        original_max_positions=original,
        magnitude=float(magnitude(1) if own is None else own),
        whole_bounds=bool(parameters.get("truncate", True)),
    )


# The parameters of one model

Split = Literal["rows", "kv_heads", "columns", "vocabulary", "whole"]
"""The division of a checkpoint tensor among tensor-parallel ranks. `kv_heads` are rows by whole
heads, which several ranks share if there are fewer heads than ranks. A `vocabulary` is padded
first."""


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor, or a projection's rows of a fused one, and the rows of the parameter
    that it fills.

    Attributes:
        name: the tensor's name in the checkpoint.
        start: first row in the parameter. The rows of stacked matrices are counted through.
        shape: the rows' shape.
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

    def view(self, whole: Any) -> Any:
        """Return the part of a whole parameter that is this tensor; shares its memory."""
        rows = whole.flatten(0, whole.dim() - len(self.shape))
        return rows[self.start : self.stop]

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
        parts: its rows, one below the other.
        adapted: each checkpoint tensor is a projection that can have an adapter.
        partial: each tensor-parallel rank holds all of it and sees some of its uses, so the ranks'
            gradients add up.
        float32: checkpoints hold it in float32, whatever the dtype of the others.
        integer: it is a table of ids, which checkpoints hold in int64.
        frozen: it is not trained, or is not a parameter.
        stacked: the equal matrices, one per expert, that its first dimension counts; 0: the
            parameter is not stacked.
        chosen: the stacked matrices that each token is multiplied with.
    """

    name: str
    parts: tuple[Part, ...]
    adapted: bool = False
    partial: bool = False
    float32: bool = False
    integer: bool = False
    frozen: bool = False
    stacked: int = 0
    chosen: int = 0

    @property
    def multiplied(self) -> int:
        """Elements that each token is multiplied with in the layers."""
        if self.stacked:
            return self.size // self.stacked * self.chosen
        return self.size * (self.adapted or self.name.endswith(_ROUTER))

    @property
    def tensors(self) -> tuple[Part, ...]:
        """The checkpoint tensors, one below the other: the parts, but a fused tensor as a whole."""
        joined: dict[str, Part] = {}
        for part in self.parts:
            first = joined.setdefault(part.name, part)
            if part is not first:
                shape = (part.stop - first.start, *part.shape[1:])
                joined[part.name] = replace(first, shape=shape)
        return tuple(joined.values())

    @property
    def module(self) -> str:
        """The name of the parameter's module, such as `model.layers.0.mlp.gate_up_proj`."""
        return self.name.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape, on one rank and without padding."""
        rows, tail = self.parts[-1].stop, self.parts[0].shape[1:]
        if self.stacked:
            return (self.stacked, rows // self.stacked, *tail)
        return (rows, *tail)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


Rows = Mapping[str, tuple[int, Split]]
"""For each projection of a linear layer the rows and their split."""


@lru_cache
def parameters(geometry: Geometry) -> Mapping[str, Parameter]:
    """Every parameter by name, in the order of vLLM's modules."""
    return {parameter.name: parameter for parameter in geometry.listed()}


def _model(g: Geometry) -> Iterator[Parameter]:
    yield _one("model.embed_tokens.weight", (g.vocab_size, g.hidden_size), "vocabulary")
    for number in range(g.num_layers):
        layer = f"model.layers.{number}"
        for block in g.blocks(number):
            yield from _BLOCKS[block.kind](f"{layer}.{block.name}", g)
        for norm in g.family.norms:
            yield _one(f"{layer}.{norm}.weight", (g.hidden_size,))
    yield _one("model.norm.weight", (g.hidden_size,))
    if not g.tie_word_embeddings:
        yield _one("lm_head.weight", (g.vocab_size, g.hidden_size), "vocabulary")


def _attention(path: str, g: Geometry) -> Iterator[Parameter]:
    qkv: Rows = {
        "q_proj": (g.q_size, "rows"),
        "k_proj": (g.kv_size, "kv_heads"),
        "v_proj": (g.kv_size, "kv_heads"),
    }
    yield from _linear(path, "qkv_proj", qkv, g, g.qkv_bias)
    yield from _linear_over_columns(path, "o_proj", g.hidden_size, g.q_size, g.o_bias)
    if g.qk_norm:
        sizes = (g.head_dim, g.head_dim)
        if g.family.joint_qk_norm:
            sizes = (g.q_size, g.kv_size)
        for norm, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            yield _one(f"{path}.{norm}.weight", (size,), partial=True)


def _gated_mlp(path: str, g: Geometry) -> Iterator[Parameter]:
    rows: tuple[int, Split] = (g.intermediate_size, "rows")
    gate_up = {"gate_proj": rows, "up_proj": rows}
    yield from _linear(path, "gate_up_proj", gate_up, g, g.mlp_bias)
    yield from _linear_over_columns(
        path, "down_proj", g.hidden_size, g.intermediate_size, g.mlp_bias
    )


_ROUTER = ".mlp.gate.weight"


def _moe(path: str, g: Geometry) -> Iterator[Parameter]:
    inner, hidden = g.moe_intermediate_size, g.hidden_size
    yield _one(f"{path}.gate.weight", (g.num_experts, hidden), partial=True)
    gate_up, down = list[Part](), list[Part]()
    for expert in range(g.num_experts):
        own = f"{path}.experts.{expert}"
        for half, name in enumerate(("gate_proj", "up_proj")):
            start = (2 * expert + half) * inner
            gate_up.append(Part(f"{own}.{name}.weight", start, (inner, hidden), "rows"))
        start = expert * hidden
        down.append(Part(f"{own}.down_proj.weight", start, (hidden, inner), "columns"))
    for name, parts in (("w13_weight", gate_up), ("w2_weight", down)):
        yield Parameter(
            f"{path}.experts.{name}",
            tuple(parts),
            stacked=g.num_experts,
            chosen=g.experts_per_token,
        )


_BLOCKS = {"attention": _attention, "gated_mlp": _gated_mlp, "moe": _moe}


def _linear(path: str, name: str, rows: Rows, g: Geometry, bias: bool) -> Iterator[Parameter]:
    """Yield the weight and the bias of projections that are merged and split by rows."""
    fused = name in g.family.fused
    yield _merged(path, f"{name}.weight", rows, (g.hidden_size,), fused, adapted=True)
    if bias:
        yield _merged(path, f"{name}.bias", rows, (), fused)


def _linear_over_columns(
    path: str, name: str, outputs: int, inputs: int, bias: bool
) -> Iterator[Parameter]:
    """Yield the weight of one projection, split by columns, and its bias, which each rank has."""
    yield _one(f"{path}.{name}.weight", (outputs, inputs), "columns", adapted=True)
    if bias:
        yield _one(f"{path}.{name}.bias", (outputs,))


def _merged(
    path: str,
    name: str,
    rows: Rows,
    tail: tuple[int, ...],
    fused: bool,
    adapted: bool = False,
) -> Parameter:
    kind = name.rpartition(".")[2]
    parts, start = [], 0
    for projection, (count, split) in rows.items():
        tensor = name if fused else f"{projection}.{kind}"
        parts.append(Part(f"{path}.{tensor}", start, (count, *tail), split))
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


_FUSED = {
    "qkv_proj": frozenset(("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": frozenset(("gate_proj", "up_proj")),
}


def _projections() -> tuple[str, ...]:
    smallest = (Geometry(name, 1, 1, 1, 1, 1, 1, 1, 1, 1e-6, 1e4) for name in FAMILIES)
    adapted = (p for geometry in smallest for p in parameters(geometry).values() if p.adapted)
    names = dict.fromkeys(tensor.projection for p in adapted for tensor in p.tensors)
    return tuple(name for name in names if name not in _FUSED)


PROJECTIONS = _projections()
"""The projections of all families that can have an adapter, by their Hugging Face names, in the
order of the forward pass. A fused tensor is adapted as a whole, under its own name."""


def adapted_projections(geometry: Geometry, targets: Collection[str]) -> tuple[str, ...]:
    """The model's own names of the projections `targets`, in the order of the forward pass. A fused
    tensor is named if any of its projections is among them.
    """
    own = [t.projection for p in parameters(geometry).values() if p.adapted for t in p.tensors]
    return tuple(
        name
        for name in dict.fromkeys(own)
        if name in targets or not _FUSED.get(name, frozenset()).isdisjoint(targets)
    )
