"""From options to the parts that the training loop is made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from example_trainer.api_keys import revealed
from example_trainer.batch.client import Registration, RolloutClient
from example_trainer.batch.shared_client import NoMetrics, SharedRollouts
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.models import Decoder, load_model
from example_trainer.models.geometry import Geometry
from example_trainer.models.hf_checkpoint import checkpoint_dtype, find_checkpoint
from example_trainer.models.lora.layers import BaseModel, attach_adapters
from example_trainer.models.lora.peft_format import AdapterWriter, check_same_adapter
from example_trainer.models.lora.settings import base_model_name
from example_trainer.models.ops import choose_operations
from example_trainer.observe.exporter import MetricsServer
from example_trainer.observe.metrics import MetricsLog
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, place_of
from example_trainer.parallel.tensor import split_decoder
from example_trainer.process import StopSignal
from example_trainer.training.adapter_checkpoints import ADAPTER_PREFIX, AdapterCheckpoints
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.resume import Start
from example_trainer.training.runs import PREFIX

DecoderMaker = Callable[[Geometry, torch.dtype, torch.device], Decoder]


def choose_device(config: TrainerConfig) -> torch.device:
    """The device to train on; also sets the number of torch's CPU threads.

    Raises:
        ConfigError: there is no such device here.
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
    if place is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def choose_dtype(config: TrainerConfig, serving: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of the model's parameters: the server's, if it serves them.

    Raises:
        ConfigError: --dtype asks for another one than the server serves, or it would be float16, in which gradients vanish: a
            token's share of a large batch is smaller than the least number there is.
    """
    dtype = _dtype(config, serving, device)
    if dtype is torch.float16:
        whose = "the vLLM server holds" if serving is not None else "--dtype asks for" if config.dtype == "float16" else "has"
        what = f"--model-name {config.model_name} {whose}" if whose == "has" else whose
        give = "start server and trainer with" if serving is not None else "give"
        raise ConfigError(
            f"{what} float16 weights, whose gradients are too small for float16 in a batch of many tokens, so that training "
            f"would go in a wrong direction; {give} --dtype bfloat16 (or float32)"
        )
    return dtype


def _dtype(config: TrainerConfig, serving: torch.dtype | None, device: torch.device) -> torch.dtype:
    asked = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if serving is not None:
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


def checkpoint_prefix(config: TrainerConfig) -> str:
    """What the names of this run's checkpoints begin with."""
    return ADAPTER_PREFIX if config.lora else PREFIX


def refuse_ranks(config: TrainerConfig, ranks: Ranks) -> None:
    """Say so if the options ask for something that a trainer of several ranks does not do.

    Raises:
        ConfigError: names the option.
    """
    if ranks.world_size > 1 and config.deterministic:
        raise ConfigError(
            "--deterministic trains in one process, for ranks sum in an order of their own; start it without torchrun"
        )
    if ranks.world_size > 1 and config.lora:
        raise ConfigError("--weight-bridge-mode lora_only trains in one process; start it without torchrun")
    if ranks.world_size > 1 and config.vllm_restart_interval is not None:
        raise ConfigError(
            "--vllm-restart-interval needs a trainer of one process; start it without torchrun, or use shared_vllm"
        )


def whole_decoder(geometry: Geometry, dtype: torch.dtype, device: torch.device, deterministic: bool) -> Decoder:
    """All of a decoder, with the operations for its device and mode."""
    return Decoder(geometry, dtype, device, ops=choose_operations(device, dtype, deterministic))


def decoder_maker(config: TrainerConfig, ranks: Ranks) -> DecoderMaker:
    """How this rank makes its part of a model: vLLM's shards for a single copy, else FSDP2's; all of it without other ranks."""
    if ranks.world_size == 1:
        return partial(whole_decoder, deterministic=config.deterministic)
    if config.single_copy:
        return partial(split_decoder, rank=ranks.rank, size=ranks.world_size, group=dist.group.WORLD)
    return partial(sharded_decoder, world_size=ranks.world_size)


def make_model(
    config: TrainerConfig, start: Path | None, dtype: torch.dtype, device: torch.device, make: DecoderMaker = Decoder
) -> Decoder:
    """The model to train: whole, from the checkpoint `start` or as it was at first, or the frozen one with adapters.

    Adapters are new here even on a resume: their values are in the optimizer's state.

    Raises:
        ModelError: the model cannot be read.
        CheckpointError: `start` holds adapters of another shape.
    """
    if config.lora and start:
        check_same_adapter(start, config.lora, dtype)
    model = load_model(config.model_name if config.lora else str(start or config.model_name), dtype, device, make)
    model.gradient_checkpointing = config.gradient_checkpointing
    if config.lora:
        attach_adapters(model, config.lora)
    return model


def make_reference(
    config: TrainerConfig, model: Decoder, dtype: torch.dtype, device: torch.device, make: DecoderMaker = Decoder
) -> Decoder | None:
    """The model that --kl-coef keeps the policy near: under adapters that is the base model, which is in memory already."""
    if not config.kl_coef:
        return None
    if config.lora and config.reference_model is None:
        return BaseModel(model)
    return load_model(config.reference_model or config.model_name, dtype, device, make).requires_grad_(False)


def make_client(config: TrainerConfig, stop: StopSignal, ranks: Ranks) -> RolloutClient | SharedRollouts:
    """Who speaks with the rollout service: rank 0, for all."""
    client = None
    if ranks.is_main:
        client = RolloutClient(
            config.atropos_url, stop, revealed(config.atropos_api_key), config.service_timeout, config.batch_timeout
        )
        if ranks.world_size == 1:
            return client
    return SharedRollouts(ranks, client, config.service_timeout, config.service_timeout + config.batch_timeout)


def make_metrics(config: TrainerConfig, first_step: int, exporter: MetricsServer | None, ranks: Ranks) -> MetricsLog:
    """Where the figures go; they are the same on every rank, and rank 0 writes them."""
    if not ranks.is_main:
        return NoMetrics()
    wandb = config.wandb_names if config.use_wandb else None
    return MetricsLog(config.log_dir, config.shareable, first_step, wandb, exporter)


def make_checkpoints(config: TrainerConfig, model: Decoder, start: Start, ranks: Ranks) -> Checkpoints:
    """Where the run saves: `step_N/`, or `adapter_step_N/` in PEFT's format."""
    last = start.saved.step if start.saved else None
    if not config.lora:
        return Checkpoints(config.save_path, start.run, config.keep_optimizer_states, last, ranks)
    writer = AdapterWriter(model, config.lora, base_model_name(config.model_name))
    return AdapterCheckpoints(config.save_path, start.run, config.keep_optimizer_states, last, writer)


def make_optimizer(config: TrainerConfig, model: Decoder) -> MasterAdamW:
    """The optimizer that the options describe, with masters of the model's present weights; gradients are added to its sums."""
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
    )
    model.arithmetic.sums = optimizer.sums
    return optimizer


def registration(config: TrainerConfig, starting_step: int, weight_epoch: int = 0) -> Registration:
    """What the rollout service is told. `weight_epoch` names this trainer's weights; see weight_age."""
    project, group = config.wandb_names
    return Registration(
        wandb_group=group,
        wandb_project=project,
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path.resolve()),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=starting_step,
        num_steps=config.training_steps,
        max_staleness=config.oldest_rollouts,
        model=config.model_name,
        weight_epoch=weight_epoch,
    )
