"""Checkpoint tensors in the trainer's memory, for models without a row in the table of families.

vLLM's layout of such a model is learned from its own loader, so its slices name checkpoint tensors.
The trainer holds each of them as a part of one of its tensors. That is a whole parameter, or the
part of an expert in a parameter of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from example_trainer.errors import BridgeError
from vllm_patching.protocol.manifest import FlatSlice
from vllm_patching.weights.families import FAMILIES, Geometry, parameters
from vllm_patching.weights.regions import Copied, NotARegion, Region, row_major, through

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Whole shape and dtype name of each of the trainer's tensors that a server has, by name."""


@dataclass(frozen=True)
class Place:
    """The part of a tensor of the trainer's that is one checkpoint tensor.

    Attributes:
        name, shape: of the trainer's tensor.
        region: the checkpoint tensor's elements in it.
    """

    name: str
    shape: tuple[int, ...]
    region: Region


def held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model that checkpoints hold: its parameters, and perhaps buffers."""
    held = getattr(model, "held_tensors", None)
    return dict(model.named_parameters()) if held is None else held()


def is_planned(geometry: Geometry) -> bool:
    """Return whether a server plans this model's layout by the table; it learns any other."""
    return geometry.architecture in FAMILIES


def as_compared(geometry: Geometry, shapes: Shapes) -> Shapes:
    """The shapes that are compared with a server's: of parameters, or of checkpoint tensors.

    Args:
        shapes: of the model's tensors, by name.
    """
    if is_planned(geometry):
        return shapes
    return {
        part.name: (tuple(part.shape), shapes[name][1])
        for name, parameter in parameters(geometry).items()
        for part in parameter.tensors
    }


def frozen_sources(geometry: Geometry) -> frozenset[str]:
    """The checkpoint tensors that are not trained, such as a vision tower's; a server that serves
    text alone has none of them.
    """
    return frozenset(
        part.name
        for parameter in parameters(geometry).values()
        for part in parameter.tensors
        if parameter.frozen
    )


def held_in(model: torch.nn.Module) -> Callable[[FlatSlice], FlatSlice]:
    """Return what names, for a slice of a checkpoint tensor, the trainer's own tensor."""
    geometry: Geometry | None = getattr(model, "geometry", None)

    def look_up(item: FlatSlice) -> FlatSlice:
        if not item.learned or geometry is None:
            return item
        return in_own_tensor(item, checkpoint_places(geometry)[item.slice.source])

    return look_up


@lru_cache(maxsize=4)
def checkpoint_places(geometry: Geometry) -> Mapping[str, Place]:
    """The place of each checkpoint tensor, by name."""
    places = {}
    for name, parameter in parameters(geometry).items():
        whole = torch.empty(parameter.shape, device="meta")
        for part in parameter.tensors:
            view = part.view(whole)
            region = Region(view.storage_offset(), tuple(view.shape), view.stride())
            places[part.name] = Place(name, tuple(parameter.shape), region)
    return places


def in_own_tensor(item: FlatSlice, place: Place) -> FlatSlice:
    """Return a slice of a checkpoint tensor as a slice of the tensor that holds it.

    Raises:
        BridgeError: its elements are unevenly spaced there.
    """
    piece = item.slice
    wanted = Region(piece.source_offset, piece.shape, piece.source_strides)
    try:
        source = through(Copied(wanted, row_major(wanted.shape)), place.region).source
        if source.shape != piece.shape:
            raise NotARegion("its rows are not rows there")
    except NotARegion as error:
        raise BridgeError(
            f"{item.name} of vLLM cannot be filled from {place.name}, where this trainer holds "
            f"{piece.source}: {error}; train this model with --weight-bridge-mode none"
        ) from error
    own = replace(
        piece, source=place.name, source_offset=source.offset, source_strides=source.strides
    )
    return replace(item, slice=own, full_shape=place.shape)
