"""Qwen3 on vLLM's kernels, made from arguments, called and loaded as TorchTitan's models are.

model = Qwen3VLLMCompatModel(Qwen3ModelArgs(dim=1024, n_layers=28, vocab_size=151936))
model.load_state_dict(load_file("qwen3.safetensors"))      # names of TorchTitan, Hugging Face or vLLM
logits = model(tokens)                                     # [batch, length, vocab]
logits.sum().backward()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.decoder import Decoder
from example_trainer.models.ops import invariant
from example_trainer.models.packing import Packing
from example_trainer.models.qwen3.args import geometry_of
from example_trainer.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


class Qwen3VLLMCompatModel(Decoder):
    """A Qwen3 with random weights whose forward pass is vLLM's. Its parameters have vLLM's names,
    merged projections included.

    Args:
        model_args: Qwen3ModelArgs, TorchTitan's own, or anything with the same attributes; missing
            ones are as in Qwen3ModelArgs.
        dtype: of the parameters; not given: bfloat16 on a GPU, where vLLM's attention takes nothing
            wider, else float32.
        device: not given: that of an enclosing `with torch.device(...)`, else the GPU, if there is
            one. On "meta" call `to_empty` and then `init_weights`, or load weights.

    Attributes:
        model_args: as given.

    Raises:
        ModelError: mixture of experts, or heads that do not divide.
    """

    def __init__(
        self,
        model_args: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        place = torch.device(device) if device is not None else _default_device()
        dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
        super().__init__(geometry_of(model_args), dtype, place, ops=invariant)
        self.model_args = model_args
        self.init_weights()

    def init_weights(self, buffer_device: torch.device | str | None = None) -> None:
        """Draw the weights from torch's global random numbers, and make the rotary table again.

        Matrices come from N(0, 0.02²). The two that add to the residual, o_proj and down_proj, have
        a standard deviation of 0.02 / √(2 (layer + 1)), or without `depth_init` 0.02 / √(2
        n_layers). Norms become 1, biases 0.

        Args:
            buffer_device: of the rotary table; not given: where it is.
        """
        by_depth = getattr(self.model_args, "depth_init", True)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                std = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    layers = int(name.split(".")[2]) + 1 if by_depth else self.geometry.num_layers
                    std /= (2 * layers) ** 0.5
                parameter.normal_(std=std)
        self._make_rotary(torch.device(buffer_device or self.rotary.device))

    def forward(
        self,
        tokens: Tensor,
        attention_masks: Packing | Any | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or with a Packing the hidden states of Decoder.forward.

        Args:
            tokens: [batch, length] int64; with a Packing [tokens].
            attention_masks: None: attention is causal within each row. TorchTitan's VarlenMetadata,
                or anything with its `cu_seq_q`: within each of the documents whose boundaries it
                has, in the rows laid one behind the other.
            positions: [batch, length] or [length] int64, by which queries and keys are rotated; not
                given: from 0 on in each row or document. They change no mask.

        Returns:
            [batch, length, vocab] in the parameters' dtype; with a Packing [tokens, hidden].

        Raises:
            ValueError: a mask of another kind, or boundaries or positions that do not fit the
                tokens.
            ModelError: a sequence or position is beyond max_seq_len.
        """
        if isinstance(attention_masks, Packing):
            packing = attention_masks
        else:
            if tokens.dim() != 2:
                raise ValueError(f"tokens {tuple(tokens.shape)}: give [batch, length]")
            packing = _packing_of(tokens, attention_masks)
        if positions is not None:
            packing.positions = self._checked_positions(tokens, positions)
        if tokens.dim() == 1:
            return super().forward(tokens, packing)
        return self.logits(tokens, packing)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights under the names of vLLM, Hugging Face or TorchTitan, the latter with or
        without merged projections.

        Raises:
            ModelError: no name is known, a projection lacks a part, or there is no output matrix
                and the model is not tied.
            RuntimeError: see torch.nn.Module.load_state_dict.
        """
        return super().load_state_dict(
            self.state_dict_adapter.to_model(state_dict, strict=strict),
            strict=strict,
            assign=assign,
        )

    @property
    def state_dict_adapter(self) -> Qwen3StateDictAdapter:
        """The adapter to the names of others."""
        return Qwen3StateDictAdapter(self.geometry)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Make the rotary table again where the model is moved or cast: vLLM computes it on the
        device, not elsewhere.
        """
        before = self.rotary.device, self.rotary.dtype
        result = super()._apply(fn, recurse)
        if (self.output_weight.device, self.output_weight.dtype) != before:
            self._make_rotary(self.output_weight.device)
        return result

    def _make_rotary(self, device: torch.device) -> None:
        self.rotary = self.arithmetic.ops.rotary_table(
            self.geometry, self.output_weight.dtype, device
        )

    def _checked_positions(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return a position for each token, [tokens] int64."""
        if (
            positions.shape != tokens.shape
            and positions.shape != tokens.shape[-1:]
            and positions.shape != (1, *tokens.shape[-1:])
        ):
            raise ValueError(
                f"positions {tuple(positions.shape)} do not fit tokens {tuple(tokens.shape)}"
            )
        flat = positions.to(tokens.device, torch.int64).expand(tokens.shape).reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.geometry.max_positions:
            raise ModelError(
                f"positions {int(flat.min())} to {int(flat.max())} are not within max_seq_len, {self.geometry.max_positions}"
            )
        return flat


def _default_device() -> torch.device:
    chosen = torch.get_default_device()
    return torch.device("cuda") if chosen.type == "cpu" and torch.cuda.is_available() else chosen


def _packing_of(tokens: Tensor, masks: Any) -> Packing:
    """The documents of [batch, length] tokens."""
    batch, length = tokens.shape
    if masks is None:
        return Packing([length] * batch, tokens.device)
    if not hasattr(masks, "cu_seq_q"):
        raise ValueError(
            f"attention_masks of type {type(masks).__name__}: attention here is causal within each row, or within documents; "
            "give None, or TorchTitan's VarlenMetadata"
        )
    bounds = torch.as_tensor(masks.cu_seq_q).tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    if not lengths or bounds[0] != 0 or bounds[-1] != batch * length or min(lengths) < 0:
        raise ValueError(
            f"attention_masks.cu_seq_q {bounds} does not fit {batch} rows of {length} tokens"
        )
    return Packing([size for size in lengths if size], tokens.device)
