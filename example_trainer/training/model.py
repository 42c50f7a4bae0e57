"""The model to train and the reference, for the options and ranks; their device and dtype."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from example_trainer.config import TrainerConfig, flag_of
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.errors import ConfigError
from example_trainer.models import Decoder, load_model
from example_trainer.models.hf_checkpoint import (
    checkpoint_dtype,
    find_checkpoint,
    make_whole,
    read_geometry,
)
from example_trainer.models.lora.layers import BaseModel, attach_adapters
from example_trainer.models.lora.peft_format import check_same_adapter
from example_trainer.models.router import RouterLosses
from example_trainer.models.router_replay import RouterReplay
from example_trainer.out_of_memory import ran_out_of_memory
from example_trainer.parallel.experts import require_expert_parallel
from example_trainer.parallel.launch import place_of
from example_trainer.parallel.ranks import Ranks
from example_trainer.parallel.tensor import split_decoder
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.weights.families import FAMILIES, Geometry, parameters

# Which device a trainer runs on, and the dtype of its model's parameters.

logger = logging.getLogger(__name__)


def choose_device(name: str, num_threads: int | None) -> torch.device:
    """The device to train on; also sets the number of torch's CPU threads.

    Raises:
        ConfigError: the device does not exist here, or cannot be used.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    place = place_of(os.environ)
    if place is not None and name.startswith("cuda"):
        if name != "cuda":
            raise ConfigError(
                f"--device {name!r}: each rank has a GPU of its own; give cuda, or set CUDA_VISIBLE_DEVICES"
            )
        name = f"cuda:{place[2]}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"--device {name!r} is not a device; give auto, cpu, cuda or cuda:N"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported; give auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"--device {name}: this process sees {count} GPUs; look at CUDA_VISIBLE_DEVICES, or give --device cpu"
        )
    if device.type == "cuda":
        try:
            torch.cuda.set_device(
                device.index or 0
            )  # for libraries that compute on the current device
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
    """The dtype of the model's parameters: the server's, if it serves them; bfloat16 (float32 on a
    CPU) in place of float16.

    Gradients vanish in float16: the part of one token in a large batch is below the smallest
    number. So a trainer beside a float16 server, or with a float16 checkpoint, computes in another
    dtype, and logs it.

    Args:
        serving: of the server's weights; None if the server has none of its own.
        converts: see WeightBridge; --dtype float32 is then obeyed whatever the server serves.

    Raises:
        ConfigError: --dtype is float16, or another dtype than the server's where the bridge does
            not convert.
    """
    asked = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if asked is torch.float16:
        raise ConfigError(
            "--dtype float16: gradients of a batch of many tokens are too small for float16, so "
            "that training would go in a wrong direction. Give --dtype bfloat16 or float32 (a "
            "vLLM server may serve float16 beside it)"
        )
    if serving is torch.float16:
        return _beside_float16(config, asked, device, converts)
    if serving is not None:
        obeys = converts and asked is torch.float32 and not config.deterministic
        if asked not in (None, serving) and not obeys:
            raise ConfigError(
                f"--dtype {config.dtype}, but the vLLM server holds {_name(serving)}; give both the same"
            )
        return asked or serving
    if asked is not None:
        return asked
    # bf16 arithmetic on CPUs is slow, and not to be trusted on all of them.
    stored = (
        torch.float32
        if device.type == "cpu"
        else checkpoint_dtype(find_checkpoint(config.model_name))
    )
    if stored is not torch.float16:
        return stored
    logger.info(
        "--model-name %s holds float16 weights: training them in bfloat16 (--dtype)",
        config.model_name,
    )
    return torch.bfloat16


def _beside_float16(
    config: TrainerConfig, asked: torch.dtype | None, device: torch.device, converts: bool
) -> torch.dtype:
    if not converts or config.deterministic:
        needs = "a single copy trains in its memory"
        instead = ", or train with --use-shared-memory (broadcast), which sends it float16"
        if config.deterministic:
            needs, instead = "--deterministic compares the bits of both", ""
        raise ConfigError(
            f"the vLLM server holds float16 weights, in which gradients vanish, and {needs}: start the server with "
            f"--dtype bfloat16{instead}"
        )
    dtype = asked or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    logger.info(
        "The vLLM server holds float16 weights: training in %s, and rounding what it gets",
        _name(dtype),
    )
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DecoderMaker = Callable[[Geometry, torch.dtype, torch.device], Decoder]


def fitted_to_model(config: TrainerConfig, ranks: int = 1) -> TrainerConfig:
    """Return the options as the model allows them: one of the second tier, which transformers
    computes, shares no prefixes. Log its tier.

    Args:
        ranks: of the trainer.

    Raises:
        ConfigError: an option needs a decoder of the first tier.
        ModelError: the model cannot be found or is not supported.
    """
    geometry = read_geometry(find_checkpoint(config.model_name))[0]
    _require_experts(config, geometry)
    require_expert_parallel(config.expert_parallel, ranks, geometry)
    if geometry.architecture in FAMILIES:
        if config.lora is not None:
            config.lora.of_model(geometry)  # raises now, and not after the weights are read
        return config
    needs = {
        "--deterministic": (config.deterministic, "leave it out, or take a model of these"),
        "--single-copy": (config.single_copy, "use --use-shared-memory instead"),
        "--weight-bridge-mode lora_only": (config.lora is not None, "train all weights"),
        "--share-prefixes": (bool(config.share_prefixes), "leave it out"),
    }
    for flag, (is_given, remedy) in needs.items():
        if is_given:
            raise ConfigError(
                f"{flag} needs an architecture with a decoder of its own ({', '.join(FAMILIES)}), and "
                f"--model-name {config.model_name} is a {geometry.architecture}: {remedy}"
            )
    frozen = sum(one.frozen for one in parameters(geometry).values())
    logger.info(
        "model: tier 2, transformers' %s, not exact: logprobs differ from vLLM's by rounding. "
        "Prefixes are not shared, and %d tensors outside of the text part are frozen",
        geometry.architecture,
        frozen,
    )
    return config.model_copy(update={"share_prefixes": False})


def _require_experts(config: TrainerConfig, geometry: Geometry) -> None:
    """Raise ConfigError if an option is of routers that the model does not have."""
    if config.router_replay and not geometry.sparse_layers:
        raise ConfigError(
            f"--router-replay takes the experts that the sampler chose, and --model-name "
            f"{config.model_name} ({geometry.architecture}) has none that this trainer computes: leave it out"
        )
    if config.router_replay and config.deterministic:
        raise ConfigError(
            "--router-replay cannot be combined with --deterministic, in which both sides choose "
            "the same experts: leave one of them out"
        )
    for name in ("router_balance_coef", "router_z_coef"):
        if getattr(config, name) and not geometry.sparse_layers:
            raise ConfigError(
                f"{flag_of(name)} {getattr(config, name):g} is the weight of a loss of routers, and --model-name "
                f"{config.model_name} ({geometry.architecture}) has none that this trainer computes: leave it out"
            )


def decoder_maker(
    config: TrainerConfig, ranks: Ranks, trained: bool = True, plan: SumPlan | None = None
) -> DecoderMaker:
    """Return the function that makes this rank's part of a model: vLLM's shards for a single copy,
    else FSDP2's; the whole model without other ranks.

    Args:
        trained: see sharded_decoder.
        plan: of the servers' sums, in deterministic mode.
    """
    make = _rank_maker(config, ranks, trained)
    if not config.deterministic:
        return make

    def with_plan(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Decoder:
        model = make(geometry, dtype, device)
        model.arithmetic.plan = plan or SumPlan()
        return model

    return with_plan


def _rank_maker(config: TrainerConfig, ranks: Ranks, trained: bool) -> DecoderMaker:
    if ranks.world_size == 1:
        return deterministic_decoder if config.deterministic else make_whole
    if config.single_copy:
        return partial(
            split_decoder,
            rank=ranks.rank,
            size=ranks.world_size,
            group=dist.group.WORLD,
            deterministic=config.deterministic,
        )
    # Only where it is used: it takes a third of a trainer's time to import everything.
    from example_trainer.parallel.fsdp import sharded_decoder

    return partial(
        sharded_decoder,
        world_size=ranks.world_size,
        trained=trained,
        deterministic=config.deterministic,
        expert_parallel=config.expert_parallel,
    )


def make_model(
    config: TrainerConfig,
    start: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    make: DecoderMaker = make_whole,
) -> Decoder:
    """The model to train: whole, from the checkpoint `start` or as it was at first, or the frozen
    one with adapters.

    Adapters are new here even on a resume: their values are in the optimizer's state.

    Raises:
        ModelError: the model cannot be read.
        CheckpointError: `start` holds adapters of another shape.
    """
    if config.lora and start:
        geometry, _ = read_geometry(find_checkpoint(config.model_name))
        check_same_adapter(start, config.lora.of_model(geometry), dtype)
    source = str(start or config.model_name)
    if config.lora:
        source = config.model_name
    model = load_model(source, dtype, device, make)
    model.gradient_checkpointing = bool(config.gradient_checkpointing)
    if model.arithmetic.routers is not None:
        model.arithmetic.routers.losses = RouterLosses(
            config.router_balance_coef, config.router_z_coef
        )
    if config.router_replay:
        g = model.geometry
        model.arithmetic.routing = RouterReplay(g.sparse_layers, g.experts_per_token)
    if config.lora:
        attach_adapters(model, config.lora)
    return model


def make_reference(
    config: TrainerConfig,
    model: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    make: DecoderMaker = make_whole,
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
