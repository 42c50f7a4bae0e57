"""Which device a trainer runs on, and the dtype of its model's parameters."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.models.hf_checkpoint import checkpoint_dtype, find_checkpoint
from example_trainer.out_of_memory import ran_out_of_memory
from example_trainer.parallel.ranks import place_of


class DeviceOptions(Protocol):
    """What says which device is used; TrainerConfig has it."""

    @property
    def device(self) -> str:
        """auto, cpu, cuda or cuda:N."""

    @property
    def num_threads(self) -> int | None:
        """Torch's CPU threads."""


def choose_device(config: DeviceOptions) -> torch.device:
    """The device to train on; also sets the number of torch's CPU threads.

    Raises:
        ConfigError: there is no such device here, or it cannot be used.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    place = place_of(os.environ)
    if place is not None and name.startswith("cuda"):
        if name != "cuda":
            raise ConfigError(
                f"--device {name!r}: torchrun gives each rank its own GPU; give cuda, or set CUDA_VISIBLE_DEVICES"
            )
        name = f"cuda:{place[2]}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported; give auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"--device {name}: this process sees {count} GPUs; look at CUDA_VISIBLE_DEVICES, or give --device cpu"
        )
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device.index or 0)  # where libraries compute that are not told
        except RuntimeError as error:
            raise ConfigError(f"--device {name} cannot be used: {_what_ails(error)}") from error
    return device


def _what_ails(error: RuntimeError) -> str:
    if ran_out_of_memory(error):
        return "other programs have all of its memory; see which (nvidia-smi), and end them or choose another GPU"
    return f"{str(error).splitlines()[0]}; see whether nvidia-smi finds it well"


def choose_dtype(
    config: TrainerConfig, serving: torch.dtype | None, device: torch.device, converts: bool = False
) -> torch.dtype:
    """The dtype of the model's parameters: the server's, if it serves them.

    Args:
        converts: see WeightBridge; --dtype float32 is then obeyed whatever the server serves.

    Raises:
        ConfigError: --dtype asks for another one than the server serves, or it would be float16, in which gradients vanish: a
            token's share of a large batch is smaller than the least number there is.
    """
    dtype = _dtype(config, serving, device, converts and not config.deterministic)
    if dtype is torch.float16:
        whose = "the vLLM server holds" if serving is not None else "--dtype asks for" if config.dtype == "float16" else "has"
        what = f"--model-name {config.model_name} {whose}" if whose == "has" else whose
        give = "start server and trainer with" if serving is not None else "give"
        raise ConfigError(
            f"{what} float16 weights, whose gradients are too small for float16 in a batch of many tokens, so that training "
            f"would go in a wrong direction; {give} --dtype bfloat16 (or float32)"
        )
    return dtype


def _dtype(config: TrainerConfig, serving: torch.dtype | None, device: torch.device, converts: bool) -> torch.dtype:
    asked = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if serving is not None:
        if converts and asked is torch.float32 and serving is not torch.float16:
            return torch.float32
        if asked not in (None, serving):
            raise ConfigError(
                f"--dtype {config.dtype}, but the vLLM server holds {str(serving).removeprefix('torch.')}; give both the same"
            )
        return serving
    if asked is not None:
        dtype: torch.dtype = asked
        return dtype
    # bf16 arithmetic on CPUs is slow, and not to be trusted on all of them.
    return torch.float32 if device.type == "cpu" else checkpoint_dtype(find_checkpoint(config.model_name))
