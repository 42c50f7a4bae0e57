"""Adapters on the decoder's merged projections.

The decoder keeps [q; k; v] in one matrix and [gate; up] in another, as vLLM does. An adapter in
PEFT's format belongs to one projection: it is added to that projection's slice of the merged
output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from example_trainer.errors import ModelError
from example_trainer.models.decoder import Decoder, Linear
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.models.packing import Packing
from vllm_patching.weights.families import parameters


class Adapter(nn.Module):
    """scale · B A dropout(x) for one projection (arXiv:2106.09685).

    Attributes:
        lora_A: [rank, inputs], at first Kaiming-uniform with a = √5, that is, uniform in ±
            1/√inputs, as PEFT makes it.
        lora_B: [outputs, rank], at first 0, so that training starts from the base model.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        settings: LoraSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.scale, self.dropout = settings.scale, settings.dropout
        first = torch.empty(settings.rank, inputs, dtype=torch.float32)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        self.lora_A = nn.Parameter(first.to(dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, settings.rank, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        return self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with adapters on some slices of its output.

    It takes over the layer's own parameters under their names, so that checkpoints and the weight
    bridge find them.

    Args:
        base: the layer; its parameters get no gradient from now on.
        sizes: rows of each projection in the merged output, in order, by name.
        settings: projections that are not among its targets stay as they are.
    """

    def __init__(self, base: Linear, sizes: dict[str, int], settings: LoraSettings) -> None:
        super().__init__()
        self.weight, self.bias, self.arithmetic = base.weight, base.bias, base.arithmetic
        self.sizes = sizes
        self.enabled = True
        outputs, inputs = self.weight.shape
        if sum(sizes.values()) != outputs:
            raise ModelError(
                f"a layer of {outputs} rows cannot hold projections of {sizes} rows; adapters need whole layers"
            )
        self.adapters = nn.ModuleDict(
            {
                name: Adapter(inputs, rows, settings, self.weight.dtype, self.weight.device)
                for name, rows in sizes.items()
                if name in settings.targets
            }
        )

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        y = self.arithmetic.ops.linear(x, self.weight, self.bias, packing)
        if not self.enabled:
            return y
        parts = [
            part + self.adapters[name](x) if name in self.adapters else part
            for name, part in zip(
                self.sizes, y.split(list(self.sizes.values()), dim=-1), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def attach_adapters(model: Decoder, settings: LoraSettings) -> None:
    """Freeze the model and put adapters on every layer. They are drawn from torch's global random
    numbers.

    Raises:
        ModelError: the model's layers are not the plain ones that adapters know, or have adapters
            already.
    """
    settings = settings.of_model(model.geometry)
    model.requires_grad_(False)
    for parameter in parameters(model.geometry).values():
        sizes = {tensor.projection: tensor.shape[0] for tensor in parameter.tensors}
        if not parameter.adapted or not sizes.keys() & set(settings.targets):
            continue
        base = model.get_submodule(parameter.module)
        if type(base) is not Linear:
            raise ModelError(
                f"cannot put an adapter on {parameter.module}: it is a {type(base).__name__}, "
                "not a plain Linear"
            )
        model.set_submodule(parameter.module, AdaptedLinear(base, sizes, settings))


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter and where it is.

    Attributes:
        projection: Hugging Face name of the projection's module, such as
            `model.layers.0.self_attn.q_proj`.
        layer: the parameter-name prefix of the merged layer, such as
            `model.layers.0.self_attn.qkv_proj`.
        start: the projection's first row in the merged layer.
        adapter: the module.
    """

    projection: str
    layer: str
    start: int
    adapter: Adapter

    def parameter_name(self, matrix: str) -> str:
        """The model's name for the parameter `lora_A` or `lora_B`."""
        return f"{self.layer}.adapters.{self.projection.rpartition('.')[2]}.{matrix}"


def adapters_of(model: nn.Module) -> Iterator[NamedAdapter]:
    """Every adapter of a model, in the order of the forward pass."""
    for path, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            start = 0
            for name, rows in module.sizes.items():
                if name in module.adapters:
                    adapter = module.adapters[name]
                    assert isinstance(adapter, Adapter)
                    yield NamedAdapter(f"{path.rpartition('.')[0]}.{name}", path, start, adapter)
                start += rows


class BaseModel(Decoder):
    """A model without its adapters, in the same memory: what it was before it was trained."""

    def __init__(self, adapted: Decoder) -> None:
        nn.Module.__init__(self)
        self.geometry, self.split, self.shards, self.source = (
            adapted.geometry,
            adapted.split,
            adapted.shards,
            adapted.source,
        )
        self.adapted, self.arithmetic = adapted, adapted.arithmetic

    @property
    def dtype(self) -> torch.dtype:
        """See Decoder.dtype."""
        return self.adapted.dtype

    @property
    def output_weight(self) -> Tensor:
        """See Decoder.output_weight."""
        return self.adapted.output_weight

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """See Decoder.forward.

        Not for training: a recomputed layer would have its adapters again.
        """
        with torch.no_grad(), without_adapters(self.adapted):
            hidden: Tensor = self.adapted(tokens, packing)
            return hidden


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base model, within the block."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True
