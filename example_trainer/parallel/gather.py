"""The whole of a parameter that is spread over several ranks. What the weight bridge needs of a parallel trainer."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from example_trainer.models.shards import Shards


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter as one process would hold it, without its gradient history.

    Collective for a sharded parameter (a DTensor, FSDP2): every rank calls this for the same parameters in the same order,
    and each gets a new, contiguous tensor on its own device. A plain tensor comes back as it is, without a copy: of a
    tensor-parallel trainer's parameter that is this rank's part.
    """
    if isinstance(parameter, DTensor):
        with torch.no_grad():
            whole: torch.Tensor = parameter.full_tensor()
        return whole.detach().contiguous()
    return parameter.detach()


def full_parameters(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, whole shape and dtype of every parameter, in the model's order; the same on every rank, nothing is sent."""
    shards = getattr(model, "shards", None) or Shards()
    return {name: (shards.whole_shape(name, parameter), parameter.dtype) for name, parameter in model.named_parameters()}
