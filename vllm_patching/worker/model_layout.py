"""The layout of a worker's model: planned by the table of families, or learned at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm_patching.compat.loggers import worker_logger
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name
from vllm_patching.weights.families import FAMILIES, Geometry
from vllm_patching.worker.learned_layout import (
    LearnedLayout,
    ProcessedWeights,
    learn_layout,
    recomputation,
)
from vllm_patching.worker.parameters import LayoutError, build_manifest, own_parameters

logger = worker_logger("lockstep.worker")

_SHOWN = 4


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model that updates write, and the work after an update.

    Attributes:
        manifest: of this rank.
        tensors: by the names in the manifest.
        recompute: calls that bring derived tensors up to date.
    """

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    recompute: tuple[Callable[[], object], ...] = ()


@dataclass
class _Learned:
    """A layout as it was learned, or the reason that there is none."""

    layout: LearnedLayout | None = None
    recompute: tuple[Callable[[], object], ...] = ()
    reason: str = ""


_learned: WeakKeyDictionary[nn.Module, _Learned] = WeakKeyDictionary()


@contextmanager
def learn_while_loading(model: nn.Module, model_config: Any) -> Iterator[None]:
    """Learn the layout of a model without a row in the table, around vLLM's processing of it.

    See compat.model_loading.watch_processing.
    """
    if is_planned(model_config.hf_config):
        yield
        return
    _learned[model] = found = _Learned()
    try:
        _refuse_quantised(model_config)
        layout = learn_layout(model, checkpoint_headers(model_config))
    except LayoutError as error:
        found.reason = str(error)
        yield
        return
    weights = ProcessedWeights(model)
    yield
    try:
        changed = weights.changed(shard.name for shard in layout.shards)
        if changed:
            raise LayoutError(
                f"vLLM stores {len(changed)} parameters otherwise than it loads them "
                f"({_some(changed)})"
            )
        derived = weights.derived()
        found.recompute = tuple(recomputation(derived, model_config.dtype))
    except LayoutError as error:
        found.reason = str(error)
        return
    found.layout = layout
    _report(_name(model_config.hf_config), layout, list(derived))


def is_planned(config: Any) -> bool:
    """Return whether the table of families has a row for a model."""
    return not FAMILIES.keys().isdisjoint(getattr(config, "architectures", None) or [])


def _name(config: Any) -> str:
    return ", ".join(getattr(config, "architectures", None) or [type(config).__name__])


def layout_of(model: nn.Module, config: Any, rank: int, size: int) -> ModelLayout:
    """Return the layout of a loaded model.

    Args:
        config: transformers' configuration of the model.
        rank, size: of the tensor-parallel group.

    Raises:
        LayoutError: updates cannot be written into this model.
    """
    parameters = own_parameters(model)
    if is_planned(config):
        manifest = build_manifest(Geometry.from_config(config.to_dict()), parameters, rank, size)
        return ModelLayout(manifest, parameters)
    found = _learned.get(model) or _Learned(
        reason="vLLM's loader was not seen; start the server with --load-format auto"
    )
    if found.layout is None:
        raise LayoutError(f"{_name(config)} cannot be updated: {found.reason}")
    held = {**parameters, **dict(model.named_buffers())}
    tensors = {shard.name: held[shard.name] for shard in found.layout.shards}
    entries = tuple(
        ManifestEntry(shard, dtype_name(tensors[shard.name].dtype), str(tensors[shard.name].device))
        for shard in found.layout.shards
    )
    return ModelLayout(Manifest(rank, size, entries), tensors, found.recompute)


def checkpoint_headers(model_config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's checkpoint, without data, by name.

    Args:
        model_config: vLLM's.

    Raises:
        LayoutError: the checkpoint has no safetensors files here, or they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(model_config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                model_config.model, revision=model_config.revision, local_files_only=True
            )
        )
    headers: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    header = file.get_slice(name)
                    headers[name] = torch.empty(
                        header.get_shape(), dtype=_dtype(header.get_dtype()), device="meta"
                    )
    except (OSError, SafetensorError) as error:
        raise LayoutError(f"{folder}: a safetensors file cannot be read: {error}") from error
    if not headers:
        raise LayoutError(f"{folder} has no *.safetensors, whose names the layout is learned from")
    return headers


def _dtype(name: str) -> torch.dtype:
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if name not in dtypes:
        raise LayoutError(f"the checkpoint has tensors of {name}; supported: {', '.join(dtypes)}")
    return dtypes[name]


def _refuse_quantised(model_config: Any) -> None:
    if getattr(model_config, "quantization", None):
        raise LayoutError(
            f"its weights are quantised ({model_config.quantization}); serve the unquantised "
            "checkpoint of the same model, without --quantization"
        )


def _report(name: str, layout: LearnedLayout, derived: list[str]) -> None:
    count = sum(len(shard.slices) for shard in layout.shards)
    logger.info(
        "[vLLM Patch] Layout of %s learned from vLLM's loader: %d parameters in %d slices",
        name,
        len(layout.shards),
        count,
    )
    for what, names in (
        ("Padded", list(layout.padding)),
        ("Recomputed after each update", derived),
        ("Checkpoint tensors that vLLM does not load here", list(layout.unused)),
    ):
        if names:
            logger.info("[vLLM Patch] %s: %s", what, _some(names))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
