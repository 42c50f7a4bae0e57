"""The layout of a model that has no row in the table of families, learned from vLLM's own loader.

Before vLLM processes the weights that it has loaded, its loader runs once more. Its tensors then
have the checkpoint's names and shapes and no data (`copy_recorder`). From the recorded copies
follows the part of each parameter that each checkpoint tensor fills. Every element of every
parameter must be filled exactly once; padding that the loader fills with zeros is excepted.

Nothing here imports vLLM.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.weights.regions import Copied, coverage, runs
from vllm_patching.weights.sharding import LearnedShard, SourceSlice
from vllm_patching.worker.copy_recorder import CopyRecorder, Records
from vllm_patching.worker.parameters import LayoutError, own_parameters

MOST_SLICES = 4096
"""Limit for one parameter. More slices cost more time in an update than vLLM's own loader."""
_SHOWN = 6


@dataclass(frozen=True)
class LearnedLayout:
    """The layout of one rank.

    Attributes:
        shards: in the order of the model's parameters.
        padding: parameters with elements that the loader fills with zeros, and their number.
        unused: checkpoint tensors that this rank does not load.
    """

    shards: tuple[LearnedShard, ...]
    padding: Mapping[str, int]
    unused: tuple[str, ...]


def learn_layout(model: nn.Module, checkpoint: Mapping[str, torch.Tensor]) -> LearnedLayout:
    """Learn the layout of a model whose weights vLLM has loaded and not processed yet.

    The model keeps its values.

    Args:
        checkpoint: tensors on the meta device, by their names in the checkpoint.

    Raises:
        LayoutError: the loader does more than copy, or leaves elements of a parameter out, or
            fills some twice. The message names the parameters.
    """
    parameters = own_parameters(model)
    targets: dict[str, torch.Tensor] = {**parameters, **dict(model.named_buffers())}
    recorder = CopyRecorder(checkpoint, targets)
    data = {name: target.data for name, target in targets.items()}
    try:
        with torch.no_grad(), _parameters_kept(model), recorder:
            model.load_weights(iter(checkpoint.items()))  # type: ignore[operator]
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise LayoutError(
            f"vLLM's loader does not load tensors without data ({type(error).__name__}: {reason})"
        ) from error
    for name, target in targets.items():
        if target.data_ptr() != data[name].data_ptr():
            target.data = data[name]
            recorder.records.problems[name] = "the loader puts other memory in its place"
    written = {record.target for record in recorder.records.copies}
    expected = {
        name: target
        for name, target in targets.items()
        if name in parameters or name in written | recorder.records.problems.keys()
    }
    try:
        return _layout(recorder.records, expected, checkpoint)
    except LayoutError as error:
        error.computed = frozenset(recorder.records.computed)
        raise


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Keep the model's parameters where the loader makes new ones in their places.

    A new one of the same shape shares the memory of the old one while the block lasts.
    """
    own = {module: dict(module._parameters) for module in model.modules()}

    def share(module: nn.Module, name: str, new: nn.Parameter | None) -> nn.Parameter | None:
        old = own.get(module, {}).get(name)
        if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            return new
        return nn.Parameter(old.data, requires_grad=False)

    # It takes the parameter that the hook returns, and is annotated without one.
    hook = register_module_parameter_registration_hook(share)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
        for module, parameters in own.items():
            module._parameters.update(parameters)


def _layout(
    records: Records,
    targets: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, torch.Tensor],
) -> LearnedLayout:
    slices, fills = _slices(records), _fills(records)
    problems = dict(records.problems)
    padding: dict[str, int] = {}
    shards = []
    for name, target in targets.items():
        mine = sorted(slices[name], key=lambda piece: piece.local_start)
        ranges = [_range(piece) for piece in mine]
        missing = _count(coverage(target.numel(), [*ranges, *fills[name]]).missing)
        covered = coverage(target.numel(), ranges)
        if not mine:
            missing = target.numel()
        if name in problems:
            continue
        if missing:
            problems[name] = f"{missing} of {target.numel()} elements come from no tensor"
        elif covered.doubled:
            problems[name] = f"{_count(covered.doubled)} of {target.numel()} elements come twice"
        elif not target.is_contiguous():
            problems[name] = "its memory is not contiguous"
        elif len(mine) > MOST_SLICES:
            problems[name] = f"it has {len(mine)} slices, the limit is {MOST_SLICES}"
        if covered.missing:
            padding[name] = _count(covered.missing)
        names = dict.fromkeys(piece.source for piece in mine)
        shapes = tuple((source, tuple(checkpoint[source].shape)) for source in names)
        shards.append(LearnedShard(name, tuple(target.shape), shapes, tuple(mine)))
    if problems:
        listed = [f"{name}: {reason}" for name, reason in list(problems.items())[:_SHOWN]]
        raise LayoutError(f"{len(problems)} parameters cannot be mapped: {'; '.join(listed)}")
    used = {record.source for record in records.copies}
    unused = tuple(name for name in checkpoint if name not in used)
    return LearnedLayout(tuple(shards), padding, unused)


def _slices(records: Records) -> Mapping[str, list[SourceSlice]]:
    slices: dict[str, dict[SourceSlice, None]] = defaultdict(dict)
    for record in records.copies:
        if record.target in records.problems:
            continue
        for piece in runs(record.copied):
            source = piece.source
            one = SourceSlice(
                record.source, source.shape, source.offset, source.strides, piece.target.offset
            )
            slices[record.target][one] = None  # a loader may load the same tensor twice
    return defaultdict(list, {name: list(found) for name, found in slices.items()})


def _fills(records: Records) -> Mapping[str, list[tuple[int, int]]]:
    """For each parameter the ranges that the loader fills with one value."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, region in records.fills:
        for piece in runs(Copied(region, region)):
            ranges[name].append((piece.target.offset, piece.target.offset + piece.target.size))
    return ranges


def _range(piece: SourceSlice) -> tuple[int, int]:
    return piece.local_start, piece.local_start + math.prod(piece.shape)


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(last - first for first, last in ranges)


class ProcessedWeights:
    """The effect of vLLM's processing after loading on the parameters of a model.

    Attributes:
        sums: of each parameter before the processing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = {id(module): _tensor_names(module) for module in model.modules()}
        self.sums = _sums_by_name(own_parameters(model))

    def changed(self, names: Iterable[str]) -> list[str]:
        """The parameters among `names` that no longer hold what was loaded into them."""
        now = own_parameters(self._model)
        sums = _sums_by_name(now)
        return [name for name in names if name in self.sums and sums.get(name) != self.sums[name]]

    def derived(self) -> dict[str, nn.Module]:
        """Tensors that the processing has made, by name, with their modules."""
        return {
            f"{path}.{name}".lstrip("."): module
            for path, module in self._model.named_modules()
            for name in sorted(_tensor_names(module) - self._tensors.get(id(module), set()))
        }


def recomputation(derived: Mapping[str, nn.Module], dtype: torch.dtype) -> Callable[[], str] | None:
    """Return what computes derived tensors from new weights, by vLLM's own hook; None if none are.

    Args:
        derived: by name, with the modules that hold them.
        dtype: that the model computes in.

    Raises:
        LayoutError: a module has no such hook.
    """
    calls: dict[int, Callable[[], object]] = {}
    for name, module in derived.items():
        hook = getattr(module, "process_weights_after_loading", None)
        if hook is None:
            raise LayoutError(f"{name} is derived from the weights, and nothing can recompute it")
        arguments = (dtype,) * len(inspect.signature(hook).parameters)
        calls[id(module)] = lambda hook=hook, arguments=arguments: hook(*arguments)  # type: ignore[misc]
    if not calls:
        return None

    def compute() -> str:
        for call in calls.values():
            call()
        return ""

    return compute


def _tensor_names(module: nn.Module) -> set[str]:
    """Names of the tensors that a module holds itself, registered or not, scalars excepted."""
    held = {**module._parameters, **module._buffers, **vars(module)}
    return {name for name, value in held.items() if isinstance(value, torch.Tensor) and value.dim()}


def _sums_by_name(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    named = [(name, tensor.data) for name, tensor in parameters.items() if tensor.numel()]
    sums = WeightSums([(name, tensor.contiguous()) for name, tensor in named])
    sums.all()
    return {
        name: (tuple(tensor.shape), *row)
        for (name, tensor), row in zip(named, sums.rows(), strict=True)
    }
