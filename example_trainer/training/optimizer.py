"""AdamW on float32 masters.

In one process, and where ranks hold vLLM's shards, the masters are apart from the parameters. The
parameters may then be bf16, and may be views on memory that an inference server samples from. The
forward pass reads them, and `write_weights` alone writes them, at a moment that the weight bridge
chooses. Gradients leave the parameters as soon as they are complete and are summed in float32.

Where FSDP2 spreads the model, the parameters are the masters, and FSDP2 sums their gradients.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from example_trainer.config import TrainerConfig
from example_trainer.errors import CheckpointError, NonFiniteError, TrainerError
from example_trainer.models import Decoder
from example_trainer.models.shards import Shards, Sums
from example_trainer.training.quantised import (
    QUANTISED_BLOCK,
    Rates,
    adamw_8bit,
    can_be_quantised,
    dequantise,
    prepare,
    quantise,
    scale_shape,
)

# Tensors in host memory that a GPU reads and writes at full speed, and work on them in buckets
# that pass through the GPU.

BUCKET_ELEMENTS = 32 << 20
"""Elements of each kind of tensor that are on the GPU at once. They are large enough that a copy
over the bus runs at its full rate.
"""
SLOTS = 3
"""Buckets on the device at the same time: one comes, one is worked on, one goes."""
_ALIGNED = 16
"""Elements; every piece of a tensor but its last is a multiple of them, so that cutting changes no
vectorised loop's tail."""


def free_host_memory(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Bytes of RAM free and in all, within the limit of this process's control group.

    Memory that only caches files counts as free.
    """
    lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
    values = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")
    }
    free, total = values["MemAvailable"], values["MemTotal"]
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        free, total = min(free, max(0, limit - used + _cached_files(cgroup / "memory.stat"))), limit
    return free, total


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" without a limit


def _cached_files(path: Path) -> int:
    """Bytes of the control group that the kernel takes back when they are needed: what checkpoints
    were read into, mostly.
    """
    try:
        words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    return sum(int(size) for name, size in words if name in ("active_file", "inactive_file"))


@dataclass(frozen=True)
class Kind:
    """A kind of tensor that exists for each of several parameters.

    Attributes:
        name: of the kind, such as `exp_avg`.
        dtype: of its elements.
        block: consecutive elements of the parameter for which there is one element.
        shape: makes the tensor's shape of the parameter's; not given: the same.
    """

    name: str
    dtype: torch.dtype = torch.float32
    block: int = 1
    shape: Callable[[Sequence[int]], tuple[int, ...]] = tuple


class HostArena:
    """One block of host memory with named tensors of one dtype in it, page-locked if a GPU is to
    copy them.

    torch's own pinned memory is not used: its allocator takes the next power of two, up to twice
    what is asked for.

    Args:
        shapes: of the tensors; they lie in this order, zeros at first.
        device: copies the tensors. On a CPU nothing is locked.
        dtype: of the tensors.
        aligned: elements; each tensor begins at a multiple of them.

    Raises:
        TrainerError: the machine has no such memory, or does not let it be locked.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        aligned: int = _ALIGNED,
    ) -> None:
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.offsets[name] = end
            end += -(-math.prod(shape) // aligned) * aligned
        try:
            self.flat = torch.empty(end, dtype=dtype)
        except RuntimeError as error:
            size = end * dtype.itemsize / 2**30
            raise TrainerError(
                f"{size:.2f} GiB of host memory cannot be allocated: {error}"
            ) from error
        self.flat.zero_()  # which takes the pages
        self.tensors = {
            name: self.flat[self.offsets[name] : self.offsets[name] + math.prod(shape)].view(*shape)
            for name, shape in shapes.items()
        }
        if device.type == "cuda" and end:
            self._lock_pages(device)

    def _lock_pages(self, device: torch.device) -> None:
        # In one call: the driver refuses copies that reach from one locked range into the next.
        driver, start = torch.cuda.cudart(), self.flat.data_ptr()
        with torch.cuda.device(device):
            status = int(driver.cudaHostRegister(start, self.flat.nbytes, 0))
        if status != 0:
            raise TrainerError(
                f"the driver does not lock {self.flat.nbytes / 2**30:.2f} GiB of host memory for "
                f"the GPU (CUDA error {status}). Look at the memory that is free, and at this "
                "container's limit"
            )
        weakref.finalize(self, driver.cudaHostUnregister, start).atexit = False


@dataclass(frozen=True)
class Piece:
    """Whole rows of one tensor (elements, of a vector) that lie in a bucket.

    Attributes:
        name: of the tensor.
        start, stop: its rows.
        offset: of the first element in the bucket.
        shape: of the piece.
    """

    name: str
    start: int
    stop: int
    offset: int
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor of the same shape."""
        return tensor[self.start : self.stop]


@dataclass(frozen=True)
class Bucket:
    """A range of the arenas, and what lies in it."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def cut(shapes: Mapping[str, Sequence[int]], offsets: Mapping[str, int], most: int) -> list[Bucket]:
    """Buckets of at most `most` elements, as long as the rows of the tensors are no longer than
    that.
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    begin = end = 0
    for name, shape in shapes.items():
        rows, width = shape[0], math.prod(shape[1:])
        step = _ALIGNED * max(1, most // (_ALIGNED * max(1, width)))
        if _ALIGNED * width > most and width % QUANTISED_BLOCK == 0:
            step = max(1, most // width)  # stacked matrices, each of whole blocks
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            first, last = offsets[name] + start * width, offsets[name] + stop * width
            if pieces and last - begin > most:
                buckets.append(Bucket(begin, end, tuple(pieces)))
                pieces, begin = [], first
            pieces.append(Piece(name, start, stop, first - begin, (stop - start, *shape[1:])))
            end = last
    return [*buckets, Bucket(begin, end, tuple(pieces))] if pieces else buckets


Work = Callable[[Sequence[Piece], Sequence[Sequence[Tensor]]], None]
"""Gets the pieces of a bucket and, for each arena, their tensors on the device; changes these in
place."""


class HostTensors:
    """Several arenas of the same named tensors, worked on by a device that does not hold them.

    Buckets pass through the device. While one is worked on, the next one comes and the one before
    goes back, each in a stream of its own. In ZeRO-Offload (arXiv:2101.06840) the arithmetic is on
    the CPU; here the GPU does it.

    Args:
        shapes: of the parameters, at least one dimension each.
        kinds: of tensors that there are for each parameter, one arena each; the first has the
            parameter's shape.
        device: does the work.
        bucket_elements: of the first arena that are on the device at once.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        kinds: Sequence[Kind],
        device: torch.device,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.device, self._kinds = device, tuple(kinds)
        self.arenas = [
            HostArena(
                {name: kind.shape(shape) for name, shape in shapes.items()},
                device,
                kind.dtype,
                max(1, _ALIGNED // kind.block),
            )
            for kind in kinds
        ]
        self._buckets = cut(shapes, self.arenas[0].offsets, bucket_elements)
        longest = max((bucket.stop - bucket.start for bucket in self._buckets), default=0)
        self._slots: list[list[Tensor]] = []
        if device.type == "cuda":
            # Taken now: memory that ran out in the middle of a step would leave it half done.
            self._slots = [
                [
                    torch.empty(longest // kind.block, dtype=kind.dtype, device=device)
                    for kind in self._kinds
                ]
                for _ in range(SLOTS)
            ]
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @torch.no_grad()
    def work(self, count: int, work: Work, write_back: bool) -> None:
        """Call `work` for every bucket of the first `count` kinds in turn. Return when host memory
        holds the results.

        Args:
            write_back: whether it changes the tensors.
        """
        kinds, arenas = self._kinds[:count], self.arenas[:count]
        if not self._slots:
            for bucket in self._buckets:
                ranges = [
                    _range(arena.flat, bucket, kind)
                    for arena, kind in zip(arenas, kinds, strict=True)
                ]
                work(
                    bucket.pieces,
                    [
                        _tensors(flat, bucket, kind)
                        for flat, kind in zip(ranges, kinds, strict=True)
                    ],
                )
            return
        here = torch.cuda.current_stream(self.device)
        self._coming.wait_stream(here)
        left: list[torch.cuda.Event | None] = [None] * SLOTS
        for number, bucket in enumerate(self._buckets):
            slot = number % SLOTS
            parts = [
                _range(arena.flat, bucket, kind) for arena, kind in zip(arenas, kinds, strict=True)
            ]
            staged = [
                buffer[: part.numel()]
                for buffer, part in zip(self._slots[slot], parts, strict=False)
            ]
            before = left[slot]
            with torch.cuda.stream(self._coming):
                if before is not None:
                    self._coming.wait_event(before)
                for buffer, part in zip(staged, parts, strict=True):
                    buffer.copy_(part, non_blocking=True)
            here.wait_stream(self._coming)
            work(
                bucket.pieces,
                [
                    _tensors(buffer, bucket, kind)
                    for buffer, kind in zip(staged, kinds, strict=True)
                ],
            )
            self._going.wait_stream(here)
            with torch.cuda.stream(self._going):
                for buffer, part in zip(staged, parts, strict=True) if write_back else ():
                    part.copy_(buffer, non_blocking=True)
            left[slot] = self._going.record_event()
        self._going.synchronize()  # the host may read


def _range(flat: Tensor, bucket: Bucket, kind: Kind) -> Tensor:
    return flat[bucket.start // kind.block : bucket.stop // kind.block]


def _tensors(flat: Tensor, bucket: Bucket, kind: Kind) -> list[Tensor]:
    tensors = []
    for piece in bucket.pieces:
        start, shape = piece.offset // kind.block, kind.shape(piece.shape)
        tensors.append(flat[start : start + math.prod(shape)].view(shape))
    return tensors


# Masters and moments of parameters: on the parameters' device, or in host memory that passes
# through the device in buckets.

MASTER = Kind("master")
FLOAT32_KINDS = (MASTER, Kind("exp_avg"), Kind("exp_avg_sq"))
"""An update's tensors for each parameter, all of its shape."""
QUANTISED_KINDS = (
    MASTER,
    Kind("exp_avg_codes", torch.uint8),
    Kind("exp_avg_scale", block=QUANTISED_BLOCK, shape=scale_shape),
    Kind("exp_avg_sq_codes", torch.uint8),
    Kind("exp_avg_sq_scale", block=QUANTISED_BLOCK, shape=scale_shape),
)
"""As FLOAT32_KINDS, with moments in 8 bits: see quantised.py."""


class StateGroup:
    """Masters and moments of the parameters whose moments have the same kinds.

    Args:
        weights: this rank's part of each parameter, by name. The moments begin as zeros.
        kinds: the masters first.
        device: of the parameters.
        offload: the tensors are in host memory.
        bucket_elements: of each kind that are on the device at once.
        are_masters: `weights` are the masters, and stay on the device. Otherwise the masters begin
            as copies of them.

    Attributes:
        names: of the parameters, in their order.
        kinds: what there is for each of them.
        tensors: by the kind's name, then by the parameter's.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        kinds: Sequence[Kind],
        device: torch.device,
        offload: bool,
        bucket_elements: int,
        are_masters: bool = False,
    ) -> None:
        self.names, self.kinds = tuple(weights), tuple(kinds)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        own_kinds = self.kinds[1:] if are_masters else self.kinds
        self._host = HostTensors(shapes, own_kinds, device, bucket_elements) if offload else None
        self._masters = weights if are_masters else None
        self.tensors: dict[str, Mapping[str, Tensor]] = {MASTER.name: weights}
        if self._host is not None:
            for kind, arena in zip(own_kinds, self._host.arenas, strict=True):
                self.tensors[kind.name] = arena.tensors
        else:
            for kind in own_kinds:
                self.tensors[kind.name] = {
                    name: torch.zeros(kind.shape(shape), dtype=kind.dtype, device=device)
                    for name, shape in shapes.items()
                }
        self._pieces = [Piece(name, 0, shape[0], 0, shape) for name, shape in shapes.items()]
        if not are_masters:
            for name, tensor in weights.items():
                self.tensors[MASTER.name][name].copy_(tensor)

    def work(self, kinds: int, work: Work, write_back: bool) -> None:
        """Call `work` with pieces of the first `kinds` kinds of tensors, on the device, until all
        have had their turn.

        Args:
            write_back: whether it changes them.
        """
        if not self.names:
            return
        masters = self._masters
        if self._host is not None and masters is not None:

            def work_with_masters(
                pieces: Sequence[Piece], state: Sequence[Sequence[Tensor]]
            ) -> None:
                work(pieces, [[piece.of(masters[piece.name]) for piece in pieces], *state])

            self._host.work(kinds - 1, work_with_masters, write_back)
            return
        if self._host is not None:
            self._host.work(kinds, work, write_back)
            return
        work(self._pieces, [list(self.tensors[kind.name].values()) for kind in self.kinds[:kinds]])


def saved_kinds(name: str, saved: Mapping[str, object]) -> tuple[Kind, ...]:
    """The kinds of tensors that a saved state has for a parameter.

    Args:
        saved: by key, such as `exp_avg.model.norm.weight`.
    """
    return QUANTISED_KINDS if f"{QUANTISED_KINDS[1].name}.{name}" in saved else FLOAT32_KINDS


def read_whole(
    name: str, kinds: Sequence[Kind], saved: Mapping[str, object], read: Callable[[str], Tensor]
) -> Iterator[tuple[Kind, Tensor]]:
    """Each whole tensor of a parameter from a saved state. Moments of the other kinds are converted
    to these.

    Args:
        kinds: that are wanted: FLOAT32_KINDS or QUANTISED_KINDS.
        saved: by key.
        read: gives one whole tensor by its key.
    """
    if saved_kinds(name, saved) == tuple(kinds):
        yield from ((kind, read(f"{kind.name}.{name}")) for kind in kinds)
        return
    yield MASTER, read(f"{MASTER.name}.{name}")
    for number, moment in enumerate(FLOAT32_KINDS[1:]):
        codes, scale = QUANTISED_KINDS[1 + 2 * number : 3 + 2 * number]
        signed = number == 0
        if tuple(kinds) == QUANTISED_KINDS:
            yield from zip(
                (codes, scale), quantise(read(f"{moment.name}.{name}"), signed), strict=True
            )
        else:
            yield (
                moment,
                dequantise(read(f"{codes.name}.{name}"), read(f"{scale.name}.{name}"), signed),
            )


logger = logging.getLogger(__name__)

_REMEDIES = {
    True: "lower --lr or --max-grad-norm, and look at the last lines of metrics.jsonl; --skip-nonfinite N leaves out up to N "
    "such batches in a row",
    False: "lower --lr, and go on from the newest checkpoint (--resume auto)",
}
"""By whether the weights are unchanged since the step before."""

LearningRateSchedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int, schedule: LearningRateSchedule, warmup_steps: int, total_steps: int
) -> float:
    """The factor of the learning rate at optimizer step `step`, counted from 0.

    It rises in equal parts over the warm-up, reaching 1 with the first step after it. Then it stays
    (constant), or falls to 0 at `total_steps` along a line (linear) or half a cosine wave (cosine,
    arXiv:1608.03983).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))


def decays(name: str, dimensions: int) -> bool:
    """Return whether weight decay acts on a parameter: on matrices, but not on norms and biases.

    Some models stack the biases of their experts, or the norms of their heads, in a matrix.
    """
    module, _, kind = name.rpartition(".")
    return dimensions >= 2 and not kind.endswith("bias") and "norm" not in module.rpartition(".")[2]


@dataclass(frozen=True)
class StepReport:
    """The outcome of one update.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate.
    """

    grad_norm: float
    lr: float


class LocalParameters(Mapping[str, Tensor]):
    """This rank's part of each parameter, by name.

    It is looked up each time: FSDP2 moves shards that it pads when it first gathers them.
    """

    def __init__(self, shards: Shards, parameters: Mapping[str, Tensor]) -> None:
        self._shards, self._parameters = shards, parameters

    def __getitem__(self, name: str) -> Tensor:
        return self._shards.local(self._parameters[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class MasterAdamW:
    """AdamW (arXiv:1711.05101) over the float32 masters of a model's trainable parameters.

    A *step* is what is learned from a batch, and makes a weight version. It is one *update* of the
    masters, or several. After each of these the model needs the new weights for the next. After the
    last one the step is ended.

    Example:
        for part in parts_of_a_batch:
            ...                         # backward passes
            optimizer.update()
            optimizer.write_weights()
        optimizer.end_step()            # or, for a batch of one update, optimizer.step() instead of both

    Made from the weights as they are now. Make it after the checkpoint is read, and before a
    single-copy bridge puts the parameters onto the server's memory.

    Args:
        model: its parameters with requires_grad are trained.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; decay acts on matrices only, not on
            norms and biases.
        max_grad_norm: gradients are scaled down to this global norm; 0 leaves them as they are.
        schedule, warmup_steps, total_steps: see learning_rate_factor.
        shards: what this rank holds of the parameters; masters, gradients and moments are of the
            same part. With several ranks `update` is collective.
        offload: moments, and masters that are not the parameters, are in host memory, and pass
            through the parameters' device in each update. The bits are the same as without
            it.
        bucket_elements: elements of each of them that are on the device at once.
        in_8_bits: the moments of matrices are kept in 8 bits, see quantised.py.
        missing_is_zero: a parameter that no backward pass reached, such as an expert without
            tokens, has a gradient of zeros.

    Attributes:
        steps: batches learned from, which is the weight version of the masters; the learning rate
            follows it.
        updates: updates taken, which AdamW's correction of its moments counts.
        sums: where the backward pass may add the gradients itself: set `model.arithmetic.sums` to
            it before the first pass. None for adapters: their gradients are few, and come through
            autograd.
        sound: whether masters and moments come from `updates` whole updates, and finite. False
            while an update changes them, and for good if it does not come to its end.
        device: of this rank's parameters.
        wait_for_readers: called before masters and moments change; a thread that reads them
            makes it wait.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        total_steps: int = 1,
        shards: Shards | None = None,
        offload: bool = False,
        bucket_elements: int = BUCKET_ELEMENTS,
        in_8_bits: bool = False,
        missing_is_zero: bool = False,
    ) -> None:
        self.shards = shards = shards or Shards()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.whole_shapes = {
            name: shards.whole_shape(name, p) for name, p in self._parameters.items()
        }
        self.lr, self.max_grad_norm = lr, max_grad_norm
        self.schedule, self.warmup_steps, self.total_steps = schedule, warmup_steps, total_steps
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._missing_is_zero = missing_is_zero
        self.steps = self.updates = 0
        self.sound = True
        self.wait_for_readers: Callable[[], None] = lambda: None
        self._local = local = LocalParameters(shards, self._parameters)
        self.device = next(iter(local.values())).device
        quantised = [
            name
            for name, shape in self.whole_shapes.items()
            # Blocks go along the rows, which are shorter where ranks split columns.
            if in_8_bits and can_be_quantised((*shape[:-1], local[name].shape[-1]), shards.spread)
        ]
        if quantised:
            prepare(self.device, Rates(lr, betas, eps, weight_decay, 1))
        self._groups = [
            StateGroup(
                LocalParameters(shards, {name: self._parameters[name] for name in names}),
                kinds,
                self.device,
                offload,
                bucket_elements,
                shards.masters,
            )
            for names, kinds in (
                ([name for name in local if name not in set(quantised)], FLOAT32_KINDS),
                (quantised, QUANTISED_KINDS),
            )
        ]
        self._group_of = {name: group for group in self._groups for name in group.names}
        self._gradients: dict[str, Tensor] = {}
        whole_model = len(self._parameters) == sum(1 for _ in model.parameters())
        self.sums: Sums | None = shards.sums(model) if whole_model else None
        if not shards.masters:
            for name, parameter in self._parameters.items():
                parameter.register_post_accumulate_grad_hook(partial(self._collect, name))

    @property
    def masters(self) -> dict[str, Tensor]:
        """float32 weights by parameter, this rank's part; on the host if they are offloaded."""
        return {name: self._group_of[name].tensors[MASTER.name][name] for name in self._parameters}

    def _collect(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        self._add(name, parameter.grad, is_ours=False)
        parameter.grad = None

    def _add(self, name: str, gradient: Tensor, is_ours: bool) -> None:
        if name in self._gradients:
            self._gradients[name] += gradient
        else:
            self._gradients[name] = gradient.to(torch.float32, copy=not is_ours)

    def gradients(self) -> dict[str, Tensor]:
        """The float32 gradient summed so far for each parameter that one reached: the sums
        themselves, not a copy.
        """
        for name, gradient in (self.sums.take() if self.sums is not None else {}).items():
            self._add(name, gradient, is_ours=True)
        if self.shards.masters:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self._gradients[name] = self.shards.local(parameter.grad)
        return self._gradients

    def zero_grad(self) -> None:
        """Forget the gradients summed so far, and what a backward pass that was broken off left on
        the parameters.
        """
        self.gradients().clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> StepReport:
        """The one update of a batch, and the end of its step. Raises what `update` raises."""
        report = self.update()
        self.end_step()
        return report

    def end_step(self) -> None:
        """The updates of a batch are done: what the masters are now is the next weight version."""
        self.steps += 1

    @torch.no_grad()
    def update(self) -> StepReport:
        """Apply the summed gradients to the masters and forget them. Parameters that are not the
        masters stay as they are.

        An error that is raised before the masters are touched leaves `sound` true: the gradients
        can be dropped.

        Raises:
            NonFiniteError: a gradient or, after the update, a weight is NaN or infinite; names the
                first such parameter.
            RuntimeError: a parameter received no gradient, so it would silently stay what it is.
        """
        summed = self.gradients()
        without = [name for name in self._parameters if name not in summed]
        if self._missing_is_zero:
            for name in without:
                summed[name] = torch.zeros_like(self._local[name], dtype=torch.float32)
        elif without:
            raise RuntimeError(
                f"no gradient reached {len(without)} of {len(self._parameters)} parameters, "
                f"first {without[0]}"
            )
        gradients = {name: summed[name] for name in self._parameters}
        self.shards.complete(gradients)
        norms = self._finite(self.shards.norms(gradients), "the gradient of")
        grad_norm = math.hypot(*norms)
        divisor: float | None = None
        if 0 < self.max_grad_norm < grad_norm:
            # AdamW's kernel divides as it reads: clipping costs no pass of its own.
            divisor = (grad_norm + 1e-6) / self.max_grad_norm
        lr = self.lr * learning_rate_factor(
            self.steps, self.schedule, self.warmup_steps, self.total_steps
        )
        self.wait_for_readers()
        self.sound = False
        norms_after = self._update(gradients, lr, divisor)
        self.zero_grad()
        self.updates += 1
        self._finite(norms_after, "the weight")
        self.sound = True
        return StepReport(grad_norm=grad_norm, lr=lr)

    def _update(self, gradients: Mapping[str, Tensor], lr: float, divisor: float | None) -> Tensor:
        """Change masters and moments.

        Returns the norm of each master (float64), over what all ranks hold; collective.
        """
        numbers = {name: number for number, name in enumerate(self._parameters)}
        squares = torch.zeros(len(numbers), dtype=torch.float64, device=self.device)
        rates = Rates(lr, self._betas, self._eps, self._weight_decay, self.updates + 1, divisor)

        def work(pieces: Sequence[Piece], state: Sequence[Sequence[Tensor]]) -> None:
            found = [piece.of(gradients[piece.name]) for piece in pieces]
            decayed = [decays(piece.name, len(piece.shape)) for piece in pieces]
            if len(state) == len(FLOAT32_KINDS):
                self._adamw(found, state, decayed, lr, divisor)
            else:
                on_device, still = rates.tensor(self.device), replace(rates, weight_decay=0.0)
                for number, gradient in enumerate(found):
                    own = rates if decayed[number] else still
                    adamw_8bit([kind[number] for kind in state], gradient, own, on_device)
            norms = torch.stack(torch._foreach_norm(list(state[0]))).double()
            where = torch.tensor([numbers[piece.name] for piece in pieces])
            squares.index_add_(0, where.to(self.device, non_blocking=True), norms.square())

        for group in self._groups:
            group.work(len(group.kinds), work, write_back=True)
        return self.shards.total(squares).sqrt()

    def _adamw(
        self,
        gradients: Sequence[Tensor],
        state: Sequence[Sequence[Tensor]],
        decayed: Sequence[bool],
        lr: float,
        divisor: float | None,
    ) -> None:
        """One pass over tensors on the device: elementwise, so its result depends neither on
        threads nor on grouping.
        """
        scale = None
        if divisor is not None:
            scale = torch.tensor(divisor, dtype=torch.float32, device=self.device)
        for shrinks in (True, False):
            chosen = [number for number, one in enumerate(decayed) if one == shrinks]
            if not chosen:
                continue
            masters, first, second = ([kind[number] for number in chosen] for kind in state)
            adamw(
                masters,
                [gradients[number] for number in chosen],
                first,
                second,
                [],
                list(torch.full((len(chosen),), float(self.updates), device=self.device).unbind()),
                fused=True,
                grad_scale=scale,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr,
                weight_decay=self._weight_decay if shrinks else 0.0,
                eps=self._eps,
                maximize=False,
            )

    def _finite(self, norms: Tensor, what: str) -> list[float]:
        """The norms of all parameters as numbers, for which the device is waited for;
        NonFiniteError if one is none.
        """
        values: list[float] = norms.tolist()
        bad = [
            name
            for name, value in zip(self._parameters, values, strict=True)
            if not math.isfinite(value)
        ]
        if bad:
            raise NonFiniteError(
                f"{what} {bad[0]} (and {len(bad) - 1} more) is NaN or infinite at optimizer step {self.steps}; "
                + _REMEDIES[self.sound]
            )
        return values

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into the model's parameters, wherever their memory is now, unless the
        parameters are the masters.
        """
        if self.shards.masters:
            return
        parameters = self._local

        def work(pieces: Sequence[Piece], state: Sequence[Sequence[Tensor]]) -> None:
            # One launch for many tensors: an inference server may be standing still.
            torch._foreach_copy_(
                [piece.of(parameters[piece.name]) for piece in pieces], list(state[0])
            )

        for group in self._groups:
            group.work(1, work, write_back=False)

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next update depends on but the two counts: masters and moments, by parameter
        (no copies).
        """
        return {
            f"{kind.name}.{name}": self._group_of[name].tensors[kind.name][name]
            for name, kind in self._kinds()
        }

    def _kinds(self) -> list[tuple[str, Kind]]:
        return [(name, kind) for name in self._parameters for kind in self._group_of[name].kinds]

    def kind_of(self, key: str) -> Kind:
        """The kind of the tensor that `state_dict` has by a key."""
        kind, _, name = key.partition(".")
        return next(one for one in self._group_of[name].kinds if one.name == kind)

    def whole_state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of the whole model's `state_dict`, in its order."""
        return {
            f"{kind.name}.{name}": (kind.dtype, kind.shape(self.whole_shapes[name]))
            for name, kind in self._kinds()
        }

    @torch.no_grad()
    def load_state(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
        steps: int,
        updates: int | None = None,
    ) -> None:
        """Continue from a whole model's state after `steps` steps, whatever the number of ranks
        was.

        Moments in 8 bits become float32 or the other way round if this optimizer has the other
        kind, with a warning.

        Args:
            shapes: of everything that is there, by name.
            read: gives one whole tensor; they are asked for one after another.
            updates: of these steps; not given: one each.

        Raises:
            CheckpointError: it belongs to another model.
        """
        expected = {
            f"{kind.name}.{name}": kind.shape(shape)
            for name, shape in self.whole_shapes.items()
            for kind in saved_kinds(name, shapes)
        }
        if expected != dict(shapes):
            different = sorted(
                key
                for key in expected.keys() | shapes.keys()
                if expected.get(key) != shapes.get(key)
            )
            raise CheckpointError(
                f"the optimizer state is of another model: {len(different)} tensors differ, first {different[0]}"
            )
        self.wait_for_readers()
        for name, group in self._group_of.items():
            for kind, whole in read_whole(name, group.kinds, shapes, read):
                group.tensors[kind.name][name].copy_(self.shards.take(name, whole, kind.block))
        converted = [
            name
            for name, group in self._group_of.items()
            if saved_kinds(name, shapes) != group.kinds
        ]
        if converted:
            logger.warning(
                "The saved moments of %d parameters, such as %s, were converted %s (--optimizer): "
                "the next steps differ from "
                "a run without an interruption",
                len(converted), converted[0], "to 8 bits" if self._group_of[converted[0]] is self._groups[1] else "to float32",
            )  # fmt: skip
        self.steps, self.updates = steps, steps if updates is None else updates


def make_optimizer(config: TrainerConfig, model: Decoder) -> MasterAdamW:
    """The optimizer that the options describe, with masters of the model's present weights;
    gradients are added to its sums.
    """
    optimizer = MasterAdamW(
        model,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=config.lr_schedule,
        warmup_steps=config.warmup_steps,
        total_steps=config.training_steps,
        shards=model.shards,
        offload=config.optimizer_offload is True,
        in_8_bits=config.optimizer == "adamw-8bit",
        missing_is_zero=model.reaches_some,
    )
    model.arithmetic.sums = optimizer.sums
    return optimizer
