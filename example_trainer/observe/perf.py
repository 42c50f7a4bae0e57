"""Speed of a step, and its share of the device's rate; torch's profiler, and the history of a GPU's
memory.

The model's arithmetic is counted as in appendix B of PaLM (Chowdhery et al., arXiv:2204.02311). A
product with a matrix of P elements takes 2·P operations for each token forward. It takes twice as
many backward, for the gradients of its input and of itself, hence 6·P. Attention takes 2·d
operations for a query and a key that it sees, and 2·d for the value, in each head of width d. That
makes 12·d forward and backward. Only pairs that causal attention really has count, and the prompt
that several responses share counts once, since it is forwarded once. A layer with a sliding window
counts as one that attends to everything, so MFU is too high there. The embedding is a lookup and
counts nothing; the output matrix counts for the trained tokens, whose logits alone are made.
Repeated computations (gradient checkpointing, the logits of the head) do not belong to the model,
and are not counted. Model FLOPs utilisation, MFU, is that by the time of forward, backward and
optimizer, divided by the device's rate.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from atroposlib.utils.files import remedy
from example_trainer.batch.reader import BatchFigures
from example_trainer.errors import ConfigError
from example_trainer.models import Decoder
from vllm_patching.weights.families import Geometry, parameters

_DENSE_BF16 = {
    "A100": 312e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Operations a second of bf16 matrix products without sparsity, as NVIDIA's data sheets have them,
by words of the name that CUDA gives."""


def peak_rate(device_name: str, dtype: torch.dtype) -> float | None:
    """Operations a second that a device is sold with for matrix products of a dtype; None where
    that is not known.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it, such as "NVIDIA H100 80GB HBM3".
        dtype: of the model's weights; float32 has no rate here.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = device_name.replace("-", " ").split()
    fitting = [name for name in _DENSE_BF16 if set(name.split()) <= set(words)]
    return _DENSE_BF16.get(max(fitting, key=len, default=""))


def matrix_elements(geometry: Geometry) -> int:
    """Elements of the matrices that every forwarded token is multiplied with: all in the layers."""
    return sum(p.multiplied for p in parameters(geometry).values())


def step_flops(
    geometry: Geometry,
    forwarded_tokens: int,
    trained_tokens: int,
    attended_pairs: int,
    adapter_elements: int | None = None,
    reference: float = 0.0,
    epochs: float = 1.0,
    ahead: float = 0.0,
) -> float:
    """Operations of a step's forward and backward passes; see above.

        6 · (M·forwarded + H·V·trained) + 12 · layers · heads · d · pairs        M: matrix_elements, H·V: the output matrix

    Frozen matrices have no gradient: under adapters they take 4 for each element and token, and the
    adapters 6.

    Args:
        forwarded_tokens: what the layers compute on.
        trained_tokens: whose logits are made.
        attended_pairs: of a query and a key that it sees, of all spans.
        adapter_elements: of LoRA's matrices; None where the whole model is trained.
        reference: share of the batch that a second model of this geometry is run forward on, once
            for a batch.
        epochs: how often a batch is gone through, forward and backward.
        ahead: share of the batch that is also run forward without a gradient, for its logprobs
            under the batch's first weights.
    """
    matrices = (
        matrix_elements(geometry) * forwarded_tokens
        + geometry.hidden_size * geometry.vocab_size * trained_tokens
    )
    attention = 4.0 * geometry.num_layers * geometry.q_size * attended_pairs
    passes = 6.0 if adapter_elements is None else 4.0
    total = passes * matrices + 3.0 * attention + 6.0 * (adapter_elements or 0) * forwarded_tokens
    forward = 2.0 * matrices + attention
    own_forward = forward + 2.0 * (adapter_elements or 0) * forwarded_tokens
    return epochs * total + reference * forward + ahead * own_forward


@dataclass(frozen=True)
class Speed:
    """The rates that a trainer's steps are compared with.

    Attributes:
        geometry: of the model.
        peak: operations a second of all its ranks' devices together; None where that is not known.
        adapter_elements: see step_flops.
        reference: whether a second model scores the tokens that came without their logprobs under
            it.
    """

    geometry: Geometry
    peak: float | None = None
    adapter_elements: int | None = None
    reference: bool = False

    def row(
        self,
        figures: BatchFigures,
        seconds: tuple[float, float, float],
        peak_memory: int,
        epochs: float = 1.0,
        ahead: float = 0.0,
    ) -> dict[str, int | float | None]:
        """The figures of a step.

        Args:
            figures: of its batch, all ranks together.
            seconds: waiting for the batch, computing the step, handing over the weights.
            peak_memory: bytes, see peak_memory.
            epochs, ahead: see step_flops.
        """
        scored = 0.0
        if self.reference:
            scored = 1 - figures.targets_with_reference / figures.forwarded_targets
        flops = step_flops(
            self.geometry,
            figures.forwarded_tokens,
            figures.forwarded_targets,
            figures.attended_pairs,
            self.adapter_elements,
            scored,
            epochs,
            ahead,
        )
        waited, computed, _ = seconds
        return {
            "forwarded_tokens_per_second": epochs * figures.forwarded_tokens / computed,
            "packing_ratio": figures.forwarded_tokens / figures.sequence_tokens,
            "flops": flops,
            "mfu": self.peak and flops / computed / self.peak,
            "peak_memory_bytes": peak_memory,
            "waiting_share": waited / sum(seconds),
        }


def make_speed(
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int = 1,
    adapters: bool = False,
    reference: bool = False,
) -> Speed:
    """Return the rates for the steps of a model on devices like this one.

    Args:
        ranks: how many devices there are.
        adapters: only parameters with requires_grad are trained.
        reference: see Speed.
    """
    rate = trained = None
    if device.type == "cuda":
        rate = peak_rate(torch.cuda.get_device_name(device), dtype)
    if adapters:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Speed(model.geometry, rate and rate * ranks, trained, reference)


def peak_memory(device: torch.device) -> int:
    """Bytes that torch's tensors took on a GPU at most since this was asked last; on a CPU, that
    the process ever had.
    """
    if device.type == "cuda":
        largest = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(largest)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


# Where a step's time and memory go: torch's profiler for chosen steps, and the history of a GPU's
# memory.
#
# A trace opens in https://ui.perfetto.dev, a snapshot in https://pytorch.org/memory_viz.

logger = logging.getLogger(__name__)

_EVENTS = 200_000
"""Allocations that the history of memory keeps, the newest ones; about 1 KiB each, with where they
were made."""


class StepProfiler:
    """Writes one trace of the steps that --profile names. Does nothing before and after them.

    Args:
        steps: one after the other, counted from 1; empty for none.
        folder: gets `steps_3-5.rank0.json.gz`.
        rank: of this process.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, steps: range, folder: Path, rank: int = 0) -> None:
        self._steps = steps
        self._profile: profile | None = None
        if steps:
            _make(folder, "--profile")
            self._path = folder / f"steps_{steps[0]}-{steps[-1]}.rank{rank}.json.gz"

    def begin(self, step: int) -> None:
        """A step begins, and with it the trace if it is the first of them; behind the last one the
        trace is written.
        """
        if step not in self._steps:
            self.close()
        elif self._profile is None:
            activities = [ProfilerActivity.CPU] + [
                ProfilerActivity.CUDA
            ] * torch.cuda.is_available()
            self._profile = profile(activities=activities)
            self._profile.start()

    def close(self) -> None:
        """Write the trace that has begun, if one has."""
        begun, self._profile = self._profile, None
        if begun is None:
            return
        begun.stop()
        try:
            begun.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            # The run is worth more than its trace, and half a trace is worth nothing.
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            logger.warning(
                "--profile: cannot write %s: %s; %s",
                self._path,
                error,
                remedy(error, "give another --log-dir"),
            )
            return
        logger.info("Profile of steps %d to %d: %s", self._steps[0], self._steps[-1], self._path)


@contextmanager
def memory_history(
    wanted: bool, device: torch.device, folder: Path, rank: int = 0
) -> Iterator[None]:
    """Record where GPU memory is taken and given back in the with block, if that is wanted.

    Writes `memory.rank0.pickle` at its end, and `out_of_memory_1.rank0.pickle` and so on in the
    moment in which memory runs out, when what fills it is still there.

    Raises:
        ConfigError: the device is not a GPU, or the folder cannot be made.
    """
    if not wanted:
        yield
        return
    if device.type != "cuda":
        raise ConfigError(
            f"--memory-snapshot records the memory of a GPU, and --device is {device}: torch keeps none of a CPU's; leave it "
            "out here"
        )
    _make(folder, "--memory-snapshot")
    shortages = 0

    def ran_out(device_index: int, wanted_bytes: int, limit: int, free: int) -> None:
        nonlocal shortages
        shortages += 1
        _write_snapshot(folder / f"out_of_memory_{shortages}.rank{rank}.pickle")

    torch.cuda.memory._record_memory_history(max_entries=_EVENTS, stacks="python")
    torch._C._cuda_attach_out_of_memory_observer(ran_out)  # type: ignore[attr-defined]  # in builds for GPUs alone
    try:
        yield
    finally:
        _write_snapshot(folder / f"memory.rank{rank}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


def _write_snapshot(path: Path) -> None:
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        logger.warning(
            "--memory-snapshot: cannot write %s: %s; %s",
            path,
            error,
            remedy(error, "give another --log-dir"),
        )
        return
    logger.info("Memory snapshot: %s", path)


def _make(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag} cannot write to {folder}: {error.strerror or error}; give another --log-dir"
        ) from error
