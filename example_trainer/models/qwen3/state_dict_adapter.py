"""Weights of a Qwen3 under the names of TorchTitan, of Hugging Face and of Qwen3VLLMCompatModel.

    TorchTitan                                   Hugging Face                              here, as in vLLM
    layers.0.attention.wq, wk, wv                model.layers.0.self_attn.q_proj, k_, v_   …self_attn.qkv_proj
    layers.0.feed_forward.w1, w3 (gate_up_proj)  model.layers.0.mlp.gate_proj, up_proj     …mlp.gate_up_proj
    layers.0.feed_forward.w2 (down_proj)         model.layers.0.mlp.down_proj              …mlp.down_proj

In brackets are the names of TorchTitan's own model for vLLM's kernels, which merges those two
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.qwen3.args import geometry_of
from vllm_patching.weights.families import Geometry, parameters

_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_WHOLE = {
    "tok_embeddings.weight": _EMBEDDING,
    "norm.weight": "model.norm.weight",
    "output.weight": _OUTPUT,
}
_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_MERGED = {
    "feed_forward.gate_up_proj": "mlp.gate_up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")


class Qwen3StateDictAdapter:
    """Renames, merges and splits weights. Every result is a copy.

    Args:
        model_args: Qwen3ModelArgs, TorchTitan's own, anything with their attributes, or a Geometry.
        hf_assets_path: accepted because TorchTitan's adapters take it; nothing is read.
    """

    def __init__(self, model_args: Any, hf_assets_path: str | None = None) -> None:
        self.geometry = model_args if isinstance(model_args, Geometry) else geometry_of(model_args)
        self._plan = {name: planned.parts for name, planned in parameters(self.geometry).items()}

    def to_model(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> dict[str, Tensor]:
        """Return weights under the names of Qwen3VLLMCompatModel, from names of any of the three
        kinds.

        Args:
            state_dict: unknown names are passed on as they are.
            strict: also refuse a projection that lacks a part.

        Raises:
            ModelError: no name is known; a merged projection lacks a part; the shapes do not fit.
                Or the model is not tied and has an embedding alone; or it is tied and the two
                matrices differ.
        """
        named = {_known_name(name): tensor for name, tensor in state_dict.items()}
        parts = {part.name: part for parts in self._plan.values() for part in parts}
        if not named.keys() & (self._plan.keys() | parts.keys()):
            some = ", ".join(list(state_dict)[:3])
            raise ModelError(
                f"none of {len(state_dict)} weights has a name of vLLM, Hugging Face or TorchTitan for a Qwen3 of "
                f"{self.geometry.num_layers} layers: {some or 'there are none'}"
            )
        self._check_output(named)
        found: dict[str, Tensor] = {}
        for name, sources in self._plan.items():
            there = [part for part in sources if part.name in named]
            if name in named:
                found[name] = named.pop(name).detach().clone()
            elif len(there) == len(sources):
                found[name] = torch.cat([named.pop(part.name).detach() for part in sources])
            elif there and strict:
                missing = ", ".join(part.name for part in sources if part not in there)
                raise ModelError(
                    f"{name} is made of {len(sources)} weights, and {missing} is missing"
                )
        return found | named

    def from_hf(self, hf_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a Hugging Face checkpoint under the model's names; see `to_model`."""
        return self.to_model(hf_state_dict)

    def to_hf(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's weights under Hugging Face's names.

        A tied output matrix is left out, as in its files.
        """
        weights = self.to_model(state_dict)
        return {
            part.name: weights[name][part.start : part.stop].clone()
            for name, parts in self._plan.items()
            if name in weights
            for part in parts
        }

    def to_torchtitan(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's weights under TorchTitan's names, split; a tied output matrix is there
        twice, as in its models.
        """
        hf = self.to_hf(state_dict)
        if self.geometry.tie_word_embeddings and _EMBEDDING in hf:
            hf[_OUTPUT] = hf[_EMBEDDING].clone()
        return {_torchtitan_name(name): tensor for name, tensor in hf.items()}

    def _check_output(self, named: dict[str, Tensor]) -> None:
        """Drop a tied output matrix. Raises ModelError if the matrices do not fit the model."""
        if not self.geometry.tie_word_embeddings:
            if _EMBEDDING in named and _OUTPUT not in named:
                raise ModelError(
                    "the weights have no output matrix, so they are of a model that ties it to the embedding; make this one "
                    "with enable_weight_tying=True"
                )
            return
        output = named.pop(_OUTPUT, None)
        if (
            output is not None
            and _EMBEDDING in named
            and not torch.equal(output, named[_EMBEDDING])
        ):
            raise ModelError(
                "the weights have an output matrix other than their embedding; make the model with enable_weight_tying=False"
            )


def torchtitan_to_vllm_compat(torchtitan_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names of Qwen3VLLMCompatModel. The sizes are read off the weights.

    Raises:
        ModelError: see Qwen3StateDictAdapter.to_model.
    """
    return Qwen3StateDictAdapter(_geometry_of_weights(torchtitan_state_dict)).to_model(
        torchtitan_state_dict
    )


def vllm_compat_to_torchtitan(vllm_compat_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a Qwen3VLLMCompatModel under TorchTitan's names. The sizes are read off
    the weights.

    Raises:
        ModelError: see Qwen3StateDictAdapter.to_model.
    """
    return Qwen3StateDictAdapter(_geometry_of_weights(vllm_compat_state_dict)).to_torchtitan(
        vllm_compat_state_dict
    )


def _known_name(name: str) -> str:
    """TorchTitan's name as Hugging Face's or vLLM's; any other as it is."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _WHOLE.get(name, name)
    inside = _IN_LAYER.get(layer[2]) or _MERGED.get(layer[2])
    return name if inside is None else f"model.layers.{layer[1]}.{inside}.weight"


def _torchtitan_name(name: str) -> str:
    """Hugging Face's name as TorchTitan's."""
    layer = _LAYER.fullmatch(name.removeprefix("model."))
    if layer is None:
        return {theirs: titan for titan, theirs in _WHOLE.items()}[name]
    inside = {theirs: titan for titan, theirs in _IN_LAYER.items()}[layer[2]]
    return f"layers.{layer[1]}.{inside}.weight"


def _geometry_of_weights(state_dict: Mapping[str, Tensor]) -> Geometry:
    """The sizes that decide how weights are merged and split; all else is a default."""
    named = {_known_name(name): tensor for name, tensor in state_dict.items()}
    first = "model.layers.0."
    try:
        vocab, hidden = named[_EMBEDDING].shape
        queries = named[f"{first}self_attn.o_proj.weight"].shape[1]
        inner = named[f"{first}mlp.down_proj.weight"].shape[1]
        keys = named.get(f"{first}self_attn.k_proj.weight")
        kv = (
            (len(named[f"{first}self_attn.qkv_proj.weight"]) - queries) // 2
            if keys is None
            else len(keys)
        )
    except KeyError as error:
        raise ModelError(
            f"these are not the weights of a whole Qwen3: there is no {error.args[0]}"
        ) from error
    norm = named.get(f"{first}self_attn.q_norm.weight")
    width = kv if norm is None else len(norm)
    layers = {
        int(found[1]) for name in named if (found := _LAYER.fullmatch(name.removeprefix("model.")))
    }
    return Geometry(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=max(layers) + 1,
        num_heads=queries // width,
        num_kv_heads=kv // width,
        head_dim=width,
        max_positions=1,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=norm is not None,
        tie_word_embeddings=_OUTPUT not in named,
    )
