"""The bytes that a model of transformers keeps for its backward pass, measured.

Classes of transformers differ too much to count. So the first layers of the model, one of each
kind, are run over a few tokens with made-up weights. That is done before the real weights are
loaded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from example_trainer.models.packing import Packing
from example_trainer.models.transformers_model import TransformersModel

MEASURED_TOKENS = 256
"""Tokens of the first of two passes; the second one has twice as many."""


@dataclass(frozen=True)
class Growth:
    """Bytes that grow with the tokens of a pass: by the token, and by pairs of tokens, as masks and
    tables of attention do.
    """

    by_token: float
    by_pair: float

    @classmethod
    def through(cls, tokens: int, once: int, twice: int) -> Growth:
        """Return the growth that has `once` bytes for some tokens, and `twice` for two times as
        many.
        """
        by_pair = max(0.0, (twice - 2 * once) / (2 * tokens**2))
        return cls(twice / (2 * tokens) - by_pair * 2 * tokens, by_pair)

    def bytes(self, tokens: int) -> int:
        """Return the bytes of a pass over so many tokens."""
        return int(self.by_token * tokens + self.by_pair * tokens**2)


@dataclass(frozen=True)
class Activations:
    """Bytes that a pass keeps.

    Attributes:
        layers: of each layer.
        rest: of what is outside of them.
    """

    layers: tuple[Growth, ...]
    rest: Growth

    def kept(self, tokens: int, input_bytes: int, recomputed: bool) -> int:
        """Return the bytes at the end of the forward pass.

        Args:
            input_bytes: of a layer's input, for a token.
            recomputed: layers keep their inputs alone.
        """
        layers = sum(layer.bytes(tokens) for layer in self.layers)
        if recomputed:
            layers = len(self.layers) * input_bytes * tokens
        return self.rest.bytes(tokens) + layers

    def largest(self, tokens: int) -> int:
        """Return the bytes of the largest layer."""
        return max((layer.bytes(tokens) for layer in self.layers), default=0)


def measure_activations(model: TransformersModel, device: torch.device) -> Activations:
    """Run the first layers of a model on a device.

    Args:
        model: uninitialised; it loses the other layers before the host has taken memory for them.

    Raises:
        RuntimeError: transformers cannot run them alone, or the device has too little memory.
    """
    layers = model.parts.layers
    kinds = [_kind(layer) for layer in layers]
    first = {kind: kinds.index(kind) for kind in kinds}
    del layers[max(first.values(), default=-1) + 1 :]
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.choose_way()
    tokens = min(MEASURED_TOKENS, model.geometry.max_positions)
    once, twice = (_kept_bytes(model, count) for count in (tokens, 2 * tokens))
    grown = {
        number: Growth.through(tokens, once[number], twice[number])
        for number in (None, *range(len(layers)))
    }
    return Activations(tuple(grown[first[kind]] for kind in kinds), grown[None])


def _kind(layer: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(one.shape)) for name, one in layer.named_parameters())
    return type(layer), shapes


def _kept_bytes(model: TransformersModel, tokens: int) -> dict[int | None, int]:
    """Return the bytes that a pass over two sequences keeps, by the number of the layer, and None
    for what is outside of them.
    """
    sizes: dict[int | None, int] = defaultdict(int)
    places: list[int | None] = [None]
    seen = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[places[-1]] += storage.nbytes()
        return tensor

    def enter(number: int, *_: object) -> None:
        places.append(number)

    def leave(*_: object) -> None:
        places.pop()

    hooks = []
    for number, layer in enumerate(model.parts.layers):
        hooks += [
            layer.register_forward_pre_hook(partial(enter, number)),
            layer.register_forward_hook(leave),
        ]
    device = model.output_weight.device
    packing = Packing([tokens // 2, tokens - tokens // 2], device)
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(torch.zeros(tokens, dtype=torch.int64, device=device), packing)
    for hook in hooks:
        hook.remove()
    del hidden
    return sizes
