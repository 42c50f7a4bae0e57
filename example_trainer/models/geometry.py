"""What a Hugging Face `config.json` says about a decoder, checked and reduced to what the
computation needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from example_trainer.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_DEFAULT_ROPE_THETA = 10_000.0  # what transformers takes for all of them when the file names none


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    Attributes:
        kind: "linear" (every frequency divided by `factor`) or "llama3" (only the low ones, with a
            smooth passage).
        factor: by how much.
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
            where: how to name the file in errors.

        Raises:
            ModelError: the architecture, or a feature the config switches on, is not supported; a
                key is missing.
        """
        architecture = _architecture(config, where)
        _refuse_unsupported(config, architecture, where)

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise ModelError(
                    f"{where} has no '{key}', which {architecture} needs; is the file complete?"
                )
            return config[key]

        hidden_size, num_heads = int(need("hidden_size")), int(need("num_attention_heads"))
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{where}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
            )
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
        attention_bias = bool(config.get("attention_bias", False))
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA
        return cls(
            architecture=architecture,
            vocab_size=int(need("vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(need("intermediate_size")),
            num_layers=int(need("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(config.get("head_dim") or default_head_dim),
            max_positions=int(need("max_position_embeddings")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}, where),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or f"none named (model_type {config.get('model_type')!r})"
    raise ModelError(
        f"{where}: architecture {found} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any], architecture: str, where: str) -> None:
    if config.get("quantization_config"):
        raise ModelError(
            f"{where}: a quantised checkpoint cannot be trained; use the unquantised one of the same model"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"{where}: hidden_act {activation!r} is not supported for {architecture}; supported: 'silu'"
        )
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or []):
        raise ModelError(
            f"{where}: sliding-window attention is not supported; set use_sliding_window to false if unused"
        )


def _rope_scaling(parameters: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"{where}: rope scaling {kind!r} is not supported; supported: default, linear, llama3"
        )
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [key for key in needed if key not in parameters]
    if missing:
        raise ModelError(f"{where}: rope scaling {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(parameters["factor"]))
    return RopeScaling(
        kind=kind,
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_positions=int(parameters["original_max_position_embeddings"]),
    )
