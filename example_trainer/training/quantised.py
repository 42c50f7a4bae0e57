"""Moments of AdamW in 8 bits: which tensors have them, and the update on them. The quantisation is
torchao's.

A block of QUANTISED_BLOCK elements shares one float32 scale, its greatest magnitude. An element is
an index (uint8) into a table of 256 values between -1 and 1, or 0 and 1. The values are denser near
0 (Dettmers et al., arXiv:2110.02861). Masters stay in float32: the weights that come out differ
from plain AdamW's by the rounding of the moments alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from example_trainer.errors import ConfigError, TrainerError
from example_trainer.out_of_memory import ran_out_of_memory
from vllm_patching.compat.torchao_logs import quiet_torchao

TORCHAO = "torchao==0.18.0"
QUANTISED_BLOCK = 256
"""Elements that share a scale."""
_LEAST_ELEMENTS = 4096
"""Smaller tensors stay in float32, as in torchao: they take little memory."""
_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements of one pass by type of device: float32 copies of the moments exist for so many. A
multiple of the block."""


def rows_of_blocks(width: int) -> int:
    """The fewest rows of `width` elements that are whole blocks."""
    return QUANTISED_BLOCK // math.gcd(QUANTISED_BLOCK, width)


def can_be_quantised(shape: Sequence[int], spread: bool = False) -> bool:
    """Return whether a parameter of this shape has 8-bit moments.

    Blocks go through the rows, one after another. Buckets of offloaded state hold multiples of 16
    rows (see host_memory.cut), and each must be whole blocks. Ranks hold any number of rows, so
    there each row must be.

    Args:
        spread: whether ranks hold parts of it.
    """
    if len(shape) < 2 or math.prod(shape) < _LEAST_ELEMENTS:
        return False
    rows = rows_of_blocks(math.prod(shape[1:]))
    return rows <= (1 if spread else 16) and shape[0] % rows == 0


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of the scales of a matrix: a row for each group of rows that are whole blocks.

    If matrices are stacked, each one counts as a row.
    """
    width = math.prod(shape[1:])
    rows = rows_of_blocks(width)
    return shape[0] // rows, rows * width // QUANTISED_BLOCK


@functools.cache
def quantisation() -> ModuleType:
    """torchao's functions for blocks of 8-bit values.

    Raises:
        ConfigError: torchao is missing, or lacks them.
    """
    quiet_torchao()
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise ConfigError(
            f"--optimizer adamw-8bit needs {TORCHAO} ({' '.join(str(error).split())}): pip install {TORCHAO}"
        ) from error
    return quant_utils


@functools.cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of a code, ascending (float32)."""
    return torch.tensor(
        quantisation().create_dynamic_map(signed=signed), dtype=torch.float32, device=device
    )


def quantise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8, of the same shape) and scales (float32, see scale_shape) of a matrix."""
    table, found = _table(signed, values.device), quantisation()
    codes, scales = (
        torch.empty_like(values, dtype=torch.uint8, memory_format=torch.contiguous_format),
        [],
    )
    # In parts, since the codes are int64 on the way.
    flat = codes.view(-1).split(_AT_ONCE["cpu"])
    for part, goal in zip(values.contiguous().view(-1).split(_AT_ONCE["cpu"]), flat, strict=True):
        scaled, scale = found.scale_tensor(part, QUANTISED_BLOCK)
        goal.copy_(found.quantize_8bit_with_qmap(scaled, table))
        scales.append(scale)
    return codes, torch.cat(scales).view(scale_shape(values.shape))


def dequantise(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The float32 values of codes and scales, in the shape of the codes."""
    values: Tensor = quantisation().dequant_with_qmap(
        codes.contiguous(), _table(signed, codes.device), scale.reshape(-1)
    )
    return values


@dataclass(frozen=True)
class Rates:
    """The numbers of one update.

    Attributes:
        lr: learning rate.
        betas, eps, weight_decay: as in torch.optim.AdamW.
        update: its number, counted from 1.
        divisor: of the gradient; None leaves it as it is.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    update: int
    divisor: float | None = None

    def tensor(self, device: torch.device) -> Tensor:
        """lr, both corrections of the moments, and the divisor ([4] float32), so that a compiled
        update holds none of them.
        """
        corrections = [1.0 - beta**self.update for beta in self.betas]
        values = [self.lr, corrections[0], math.sqrt(corrections[1]), self.divisor or 1.0]
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def adamw_8bit(state: Sequence[Tensor], gradient: Tensor, rates: Rates, numbers: Tensor) -> None:
    """One update of a parameter, in place.

    Args:
        state: master ([...] float32), codes and scales of the first moment, codes and scales of the
            second; contiguous.
        gradient: of the master's shape, float32.
        numbers: `rates.tensor` on the device.
    """
    kind = state[0].device.type
    update = _update(compiled=kind == "cuda")
    tables = _table(True, state[0].device), _table(False, state[0].device)
    options = (*rates.betas, rates.eps, rates.weight_decay)
    gradient = gradient.contiguous().view(-1)
    most, flat = _AT_ONCE[kind], [tensor.view(-1) for tensor in state]
    for start in range(0, gradient.numel(), most):
        stop = min(start + most, gradient.numel())
        blocks = slice(start // QUANTISED_BLOCK, stop // QUANTISED_BLOCK)
        parts = [
            tensor[start:stop] if tensor.numel() == gradient.numel() else tensor[blocks]
            for tensor in flat
        ]
        update(parts, gradient[start:stop], numbers, tables, *options)


@functools.cache
def _update(compiled: bool) -> Callable[..., None]:
    """The update of flat tensors; compiled, it is a few fused kernels for all sizes, else many
    passes over memory.
    """
    scale_tensor = quantisation().scale_tensor
    to_codes, from_codes = quantisation().quantize_8bit_with_qmap, quantisation().dequant_with_qmap

    def update(
        state: Sequence[Tensor],
        gradient: Tensor,
        numbers: Tensor,
        tables: tuple[Tensor, Tensor],
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        master, first_codes, first_scale, second_codes, second_scale = state
        lr, correction1, root_of_correction2, divisor = numbers.unbind()
        gradient = gradient / divisor
        first = from_codes(first_codes, tables[0], first_scale).lerp(gradient, 1 - beta1)
        second = from_codes(second_codes, tables[1], second_scale).lerp(
            gradient.square(), 1 - beta2
        )
        # The step is taken with the moments before they are rounded again.
        step = lr * (first / correction1) / (second.sqrt() / root_of_correction2 + eps)
        master.copy_(master * (1 - lr * weight_decay) - step)
        for moment, table, codes, scale in (
            (first, tables[0], first_codes, first_scale),
            (second, tables[1], second_codes, second_scale),
        ):
            scaled, greatest = scale_tensor(moment, QUANTISED_BLOCK)
            codes.copy_(to_codes(scaled, table))
            scale.copy_(greatest)

    return torch.compile(update, fullgraph=True, dynamic=True) if compiled else update


@torch.no_grad()  # as in an update: with gradients it would be compiled once more there
def prepare(device: torch.device, rates: Rates) -> None:
    """Compile the update before the first step, whose memory and masters an error would leave half
    changed.

    Raises:
        TrainerError: it cannot be compiled.
    """
    quantisation()
    if device.type != "cuda":
        return
    blocks = 64
    state = [torch.zeros(blocks * QUANTISED_BLOCK, device=device)]
    for _ in range(2):
        state += [
            torch.zeros(blocks * QUANTISED_BLOCK, dtype=torch.uint8, device=device),
            torch.zeros(blocks, device=device),
        ]
    try:
        adamw_8bit(state, torch.zeros_like(state[0]), rates, rates.tensor(device))
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        raise TrainerError(
            f"--optimizer adamw-8bit: the update cannot be compiled for {device} ({' '.join(str(error).split())[:500]}); "
            "install a C compiler for Triton, or leave the flag out"
        ) from error
