"""The model to train and the one that it is kept near, as the options and the ranks want them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.models import Decoder, load_model
from example_trainer.models.lora.layers import BaseModel, attach_adapters
from example_trainer.models.lora.peft_format import check_same_adapter
from example_trainer.parallel.ranks import Ranks
from example_trainer.parallel.tensor import split_decoder
from vllm_patching.weights.families import Geometry

DecoderMaker = Callable[[Geometry, torch.dtype, torch.device], Decoder]


def decoder_maker(config: TrainerConfig, ranks: Ranks, trained: bool = True) -> DecoderMaker:
    """How this rank makes its part of a model: vLLM's shards for a single copy, else FSDP2's; all
    of it without other ranks.

    Args:
        trained: see sharded_decoder.
    """
    if ranks.world_size == 1:
        return deterministic_decoder if config.deterministic else Decoder
    if config.single_copy:
        return partial(
            split_decoder, rank=ranks.rank, size=ranks.world_size, group=dist.group.WORLD
        )
    # Only where it is used: it takes a third of a trainer's time to import everything.
    from example_trainer.parallel.fsdp import sharded_decoder

    return partial(sharded_decoder, world_size=ranks.world_size, trained=trained)


def make_model(
    config: TrainerConfig,
    start: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    make: DecoderMaker = Decoder,
) -> Decoder:
    """The model to train: whole, from the checkpoint `start` or as it was at first, or the frozen
    one with adapters.

    Adapters are new here even on a resume: their values are in the optimizer's state.

    Raises:
        ModelError: the model cannot be read.
        CheckpointError: `start` holds adapters of another shape.
    """
    if config.lora and start:
        check_same_adapter(start, config.lora, dtype)
    source = str(start or config.model_name)
    if config.lora:
        source = config.model_name
    model = load_model(source, dtype, device, make)
    model.gradient_checkpointing = bool(config.gradient_checkpointing)
    if config.lora:
        attach_adapters(model, config.lora)
    return model


def make_reference(
    config: TrainerConfig,
    model: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    make: DecoderMaker = Decoder,
) -> Decoder | None:
    """The model that --kl-coef keeps the policy near: under adapters that is the base model, which
    is in memory already. None if there is none, or reference workers have it."""
    if config.kl_coef and config.has_base_model:
        return BaseModel(model)
    if not config.loads_reference:
        return None
    return load_model(
        config.reference_model or config.model_name, dtype, device, make
    ).requires_grad_(False)
