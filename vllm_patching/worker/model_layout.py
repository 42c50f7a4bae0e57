"""The layout of a worker's model: planned by the table of families, or learned at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm_patching.compat.loggers import worker_logger
from vllm_patching.compat.model_loading import reloader
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name
from vllm_patching.weights.families import FAMILIES, Geometry
from vllm_patching.weights.sharding import LearnedShard
from vllm_patching.worker.learned_layout import (
    LearnedLayout,
    ProcessedWeights,
    learn_layout,
    recomputation,
)
from vllm_patching.worker.parameters import LayoutError, build_manifest, own_parameters
from vllm_patching.worker.reloading import ReloadedModel

logger = worker_logger("lockstep.worker")

_SHOWN = 4


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model that updates write, and the work after an update.

    Attributes:
        manifest: of this rank.
        tensors: by the names in the manifest.
        recompute: what vLLM must do after an update, if anything: it returns the checksum of all
            parameters, where they are not the tensors above.
    """

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    recompute: Callable[[], str] | None = None


@dataclass
class _Learned:
    """A layout as it was learned, or the reason that there is none.

    Attributes:
        reloaded: the other way of updates, where there is no layout.
    """

    layout: LearnedLayout | None = None
    recompute: Callable[[], str] | None = None
    reason: str = ""
    reloaded: ReloadedModel | None = None


_learned: WeakKeyDictionary[nn.Module, _Learned] = WeakKeyDictionary()


@contextmanager
def learn_while_loading(model: nn.Module, model_config: Any) -> Iterator[None]:
    """Learn the layout of a model without a row in the table, around vLLM's processing of it.

    The layout of a mixture of experts with a row is planned, and checked here. Some of vLLM's
    kernels swap, pad or pack the weights of experts. See compat.model_loading.watch_processing.
    """
    if is_planned(model_config.hf_config):
        with _experts_unmoved(model, model_config.hf_config):
            yield
        return
    _learned[model] = learned = _Learned()
    name = _name(model_config.hf_config)
    try:
        _refuse_quantised(model_config)
        folder = _folder(model_config)
        headers = checkpoint_headers(folder)
    except LayoutError as error:
        learned.reason = str(error)
        yield
        return
    computed: frozenset[str] = frozenset()
    try:
        layout, weights = learn_layout(model, headers), ProcessedWeights(model)
    except LayoutError as error:
        learned.reason, computed = str(error), error.computed
    yield
    try:
        if not learned.reason:
            layout = _without_tied(model, layout)
            derived = _unmoved(layout, weights)
            learned.recompute = recomputation(derived, model_config.dtype)
            learned.layout = layout
            _report(name, layout, list(derived))
            return
    except LayoutError as error:
        learned.reason = str(error)
    try:
        learned.reloaded = ReloadedModel(
            model, folder, headers, computed, model_config.dtype, reloader(model, model_config)
        )
    except LayoutError as error:
        learned.reason = f"{learned.reason}; and {error}"
        return
    logger.warning(
        "[vLLM Patch] Updates of %s go through vLLM's loader, from a copy of the whole checkpoint "
        "on each rank: %s",
        name,
        learned.reason,
    )


@contextmanager
def _experts_unmoved(model: nn.Module, config: Any) -> Iterator[None]:
    """Check that vLLM's processing leaves a planned mixture of experts as it was loaded."""
    layers = Geometry.from_config(config.to_dict()).sparse_layers
    if not layers:
        yield
        return
    weights = ProcessedWeights(model)
    yield
    learned = _learned[model] = _Learned()
    changed = weights.changed(weights.sums)
    if changed:
        learned.reason = (
            f"vLLM stores {len(changed)} parameters otherwise than it loads them "
            f"({_some(changed)}); start the server with --moe-backend triton, whose kernels "
            "take them as they are loaded"
        )
        return
    logger.info(
        "[vLLM Patch] Experts of %d layers of %s are stored as they are loaded",
        len(layers),
        _name(config),
    )


def _without_tied(model: nn.Module, layout: LearnedLayout) -> LearnedLayout:
    """Leave out parameters in whose place vLLM has put others while it processed them.

    Some checkpoints hold the head of a model that ties it to the embedding. vLLM loads such a head,
    and ties it if both are equal.
    """
    own, every = own_parameters(model), dict(model.named_parameters(remove_duplicate=False))
    held = {id(parameter) for parameter in own.values()}
    tied = [
        shard
        for shard in layout.shards
        if shard.name not in own and id(every.get(shard.name)) in held
    ]
    return replace(
        layout,
        shards=tuple(shard for shard in layout.shards if shard not in tied),
        unused=(*layout.unused, *(piece.source for shard in tied for piece in shard.slices)),
    )


def _unmoved(layout: LearnedLayout, weights: ProcessedWeights) -> Mapping[str, nn.Module]:
    """Return the tensors that vLLM has derived from parameters that it left as they were loaded.

    Raises:
        LayoutError: it has changed some.
    """
    changed = weights.changed(shard.name for shard in layout.shards)
    if changed:
        raise LayoutError(
            f"vLLM stores {len(changed)} parameters otherwise than it loads them ({_some(changed)})"
        )
    return weights.derived()


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
    learned = _learned.get(model) or _Learned(
        reason="vLLM's loader was not seen; start the server with --load-format auto"
    )
    if is_planned(config):
        geometry = Geometry.from_config(config.to_dict())
        if geometry.sparse_layers and learned.reason:
            raise LayoutError(f"{_name(config)} cannot be updated: {learned.reason}")
        return ModelLayout(build_manifest(geometry, parameters, rank, size), parameters)
    if learned.reloaded is not None:
        tensors: Mapping[str, torch.Tensor] = learned.reloaded.tensors
        shards: Sequence[LearnedShard] = learned.reloaded.shards()
        recompute: Callable[[], str] | None = learned.reloaded.update
    elif learned.layout is not None:
        held = {**parameters, **dict(model.named_buffers())}
        shards, recompute = learned.layout.shards, learned.recompute
        tensors = {shard.name: held[shard.name] for shard in shards}
    else:
        raise LayoutError(f"{_name(config)} cannot be updated: {learned.reason}")
    entries = tuple(
        ManifestEntry(shard, dtype_name(tensors[shard.name].dtype), str(tensors[shard.name].device))
        for shard in shards
    )
    return ModelLayout(Manifest(rank, size, entries), tensors, recompute)


def _folder(model_config: Any) -> Path:
    """Return the folder of the checkpoint that vLLM has loaded."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    revision = model_config.revision
    return Path(snapshot_download(model_config.model, revision=revision, local_files_only=True))


def checkpoint_headers(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, without data, by name.

    Raises:
        LayoutError: the checkpoint has no safetensors files here, or they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

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
