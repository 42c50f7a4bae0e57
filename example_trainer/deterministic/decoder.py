"""The decoder on the kernels that vLLM runs: equal weights and tokens give vLLM's own hidden states, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from example_trainer.batch.groups import MicroBatch
from example_trainer.errors import ModelError
from example_trainer.models.decoder import Attention, Decoder, Layer, Linear, RMSNorm
from example_trainer.models.geometry import Geometry
from example_trainer.models.ops import invariant as functions
from example_trainer.models.ops.invariant import Total
from example_trainer.models.packing import Packing, pack
from vllm_patching.batch_invariant import ops

_HEAD_OF_TIED = ":as output matrix"


class GradientSums:
    """float32 sums of the gradients of a model's parameters over the microbatches of a step, each begun when first added to."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def of(self, key: str, parameter: Tensor) -> Tensor:
        """The sum under a name, zeros at first."""
        if key not in self._sums:
            self._sums[key] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return self._sums[key]

    def take(self) -> dict[str, Tensor]:
        """Everything summed so far, by parameter; the next addition begins anew."""
        sums, self._sums = self._sums, {}
        for key in [key for key in sums if key.endswith(_HEAD_OF_TIED)]:
            head, name = sums.pop(key), key.removesuffix(_HEAD_OF_TIED)
            # Two uses of one matrix: each is summed by itself, for the order of the two must not depend on the microbatches.
            sums[name] = head + sums[name] if name in sums else head
        return sums


class DeterministicDecoder(Decoder):
    """A decoder whose forward pass is vLLM's and whose backward pass adds in a fixed order. Its parameters are Decoder's.

    Attributes:
        sums: None: gradients go to the parameters' `grad`, as autograd's do, in their dtype. Else they are summed here in
            float32, token after token, and `deliver_gradients` hands them on; the order of the additions, and so every bit,
            is then the same however the sequences are spread over microbatches.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(geometry, dtype, device)
        if geometry.rope_scaling is not None:
            raise ModelError(
                f"rope scaling {geometry.rope_scaling.kind!r} has no deterministic mode yet; train without --deterministic"
            )
        g = geometry
        self.sums: GradientSums | None = None
        # vLLM computes its table on the device, and a GPU's cosine is not a CPU's in the last bit.
        self.rotary = ops.rotary_table(g.head_dim, g.max_positions, g.rope_theta, dtype, torch.device(device))
        self.mirrored: Tensor
        self.register_buffer("mirrored", functions.mirrored_table(self.rotary), persistent=False)
        self._names = {id(parameter): name for name, parameter in self.named_parameters()}

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states after the last norm; see Decoder.forward."""
        return self.packed_hidden(tokens).view(*tokens.shape, -1)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length, vocab] logits in the parameters' dtype."""
        return self.project(self.packed_hidden(tokens), tokens.shape[0])

    def packed_hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states [batch · length, hidden] after the last norm, of [batch, length] ids, each row a sequence."""
        return self.packed(tokens.flatten(), Packing([tokens.shape[1]] * tokens.shape[0], tokens.device))

    def project(self, hidden: Tensor, batch: int) -> Tensor:
        """[batch, length, vocab] logits of hidden states [batch · length, hidden]."""
        packing = Packing([len(hidden) // batch] * batch, hidden.device)
        total = self._total(self.output_weight, _HEAD_OF_TIED if self.lm_head is None else "")
        logits = functions.linear(hidden, self.output_weight, packing=packing, total=total)
        return logits.view(batch, len(hidden) // batch, -1)

    def packed(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm, of packed sequences.

        Args:
            tokens: [tokens] int64, the sequences one behind the other.
            packing: where each of them is.

        Raises:
            ModelError: a sequence is longer than the model has positions.
        """
        if packing.max_length > self.geometry.max_positions:
            raise ModelError(
                f"a sequence of {packing.max_length} tokens exceeds the model's {self.geometry.max_positions} positions; "
                "lower --seq-len"
            )
        embedding = self.model.embed_tokens.weight
        x = functions.embedding(tokens, embedding, self._total(embedding))
        residual: Tensor | None = None
        for module in self.model.layers:
            layer = cast(Layer, module)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, residual = checkpoint(self._layer, layer, x, residual, packing, use_reentrant=False)
            else:
                x, residual = self._layer(layer, x, residual, packing)
        hidden, _ = self._add_norm(self.model.norm, x, residual, packing)
        return hidden

    def response_logprobs(self, micro: MicroBatch, chunk: int) -> tuple[Tensor, Tensor]:
        """Logprob and entropy ([n] float32 each) at the trained tokens of a microbatch, whose padding is not computed.

        Args:
            micro: the sequences; their trained tokens are in order.
            chunk: tokens whose logits exist at the same time, about.
        """
        tokens, packing = pack(micro.tokens, micro.lengths.tolist())
        length = micro.tokens.shape[1]
        rows = torch.div(micro.sources, length, rounding_mode="floor")
        sources = packing.cu_seqlens.long()[rows] + micro.sources % length
        trained = torch.bincount(rows, minlength=len(micro.tokens)).tolist()
        hidden = functions.distinct_rows(self.packed(tokens, packing), sources)
        return functions.chosen_logprobs(
            hidden,
            self.output_weight,
            micro.targets,
            Packing([count for count in trained if count], tokens.device),
            chunk,
            self._total(self.output_weight, _HEAD_OF_TIED if self.lm_head is None else ""),
        )

    def deliver_gradients(self, masters: Mapping[str, Tensor] | MutableMapping[str, Tensor]) -> None:
        """Make what was summed the gradients of the float32 masters.

        Args:
            masters: by parameter name; a master that no gradient reached is left without one.
        """
        for name, gradient in (self.sums.take() if self.sums is not None else {}).items():
            masters[name].grad = gradient

    def _layer(self, layer: Layer, x: Tensor, residual: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        normed, residual = self._add_norm(layer.input_layernorm, x, residual, packing)
        attended = self._attention(layer.self_attn, normed, packing)
        normed, residual = self._add_norm(layer.post_attention_layernorm, attended, residual, packing)
        inner = functions.silu_and_mul(self._linear(layer.mlp.gate_up_proj, normed, packing))
        return self._linear(layer.mlp.down_proj, inner, packing), residual

    def _attention(self, layer: Attention, x: Tensor, packing: Packing) -> Tensor:
        g = self.geometry
        q, k, v = self._linear(layer.qkv_proj, x, packing).split([g.q_size, g.kv_size, g.kv_size], dim=-1)
        q, k, v = (part.view(len(x), -1, g.head_dim) for part in (q, k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(layer.q_norm, q, packing), self._norm(layer.k_norm, k, packing)
        q, k = functions.rotary_embedding(packing.positions, q, k, g.head_dim, self.rotary, self.mirrored)
        attended = functions.attention(q, k, v, packing, ops.attention_scale(g.head_dim))
        return self._linear(layer.o_proj, attended.reshape(len(x), g.q_size), packing)

    def _linear(self, layer: Linear, x: Tensor, packing: Packing) -> Tensor:
        bias_total = None if layer.bias is None else self._total(layer.bias)
        return functions.linear(x, layer.weight, layer.bias, packing, self._total(layer.weight), bias_total)

    def _norm(self, layer: RMSNorm, x: Tensor, packing: Packing) -> Tensor:
        return functions.rms_norm(x, layer.weight, layer.eps, packing, self._total(layer.weight))

    def _add_norm(self, layer: RMSNorm, x: Tensor, residual: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        if residual is None:  # before the first layer there is nothing to add
            return self._norm(layer, x, packing), x
        return functions.fused_add_rms_norm(x, residual, layer.weight, layer.eps, packing, self._total(layer.weight))

    def _total(self, parameter: Tensor, use: str = "") -> Total | None:
        """Where the gradient of a parameter is summed; None for autograd's own way."""
        if self.sums is None or not parameter.requires_grad:
            return None
        return partial(self.sums.of, self._names[id(parameter)] + use, parameter)
