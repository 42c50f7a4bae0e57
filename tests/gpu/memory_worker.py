"""One configuration of tests/gpu/check_memory_plan.py, in a process of its own: real steps, and the most
bytes in each part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.live_bytes import Meter
from bench.gpu.processes import answer_once
from bench.gpu.shapes import SHAPES
from bench.gpu.synthetic import Work, gradient_of, joined_group, random_bin, random_weights
from example_trainer.batch.packing import PackedBin
from example_trainer.config import TrainerConfig
from example_trainer.models.decoder import Decoder
from example_trainer.models.head import default_chunk
from example_trainer.models.lora.layers import attach_adapters
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.models.ops import choose_table
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.memory_plan import (
    GRADIENTS,
    SEND_BUFFERS,
    MemoryRequest,
    plan_memory,
)
from example_trainer.training.optimizer import MasterAdamW, make_optimizer
from example_trainer.weight_bridge.stream import Cohort, SendPlan, WeightStream
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.lane import SENDER, Lane, LanePlace, lane_places, nobody_lost
from vllm_patching.transport.rendezvous import Meeting
from vllm_patching.weights.families import PROJECTIONS, Geometry
from vllm_patching.weights.sharding import plan_shards

WARM_UP_STEPS, MICROBATCHES, PROMPT = 1, 2, 16
SECONDS = 600.0


@dataclass(frozen=True)
class Configuration:
    """A training and its options.

    Attributes:
        shape: of bench.gpu.shapes.
        batch: sequences in a micro-batch, each `length` tokens long.
        lora_rank: of adapters on every projection; 0 trains every parameter.
        offload: masters and moments are in the host's memory.
        ranks: processes, sharded by FSDP2.
        vllm_ranks: ranks for which weights are packed to be sent; 0: none.
        device: cuda or cpu.
    """

    name: str
    shape: str
    dtype: str = "bfloat16"
    batch: int = 4
    length: int = 2048
    checkpointing: bool = False
    reference: bool = False
    lora_rank: int = 0
    offload: bool = False
    ranks: int = 1
    vllm_ranks: int = 0
    device: str = "cuda"


class Parts:
    """Return the greatest use in each part of a step; parts end where the gradient reaches the last
    norm, and the embedding.
    """

    def __init__(self, model: Decoder, meter: Meter) -> None:
        self.peaks: dict[str, int] = {}
        self.after_forward = 0
        self._meter = meter
        model.model.norm.register_forward_hook(self._forward_ended)
        model.model.embed_tokens.register_forward_hook(self._embedded)

    def end(self, part: str) -> None:
        """Assign the work since the last call to `part`."""
        self.peaks[part] = max(self.peaks.get(part, 0), self._meter.peak)
        self._meter.reset()

    def _forward_ended(
        self, module: object, inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        if outputs[0].requires_grad:
            self.after_forward = max(self.after_forward, self._meter.now)
            outputs[0].register_hook(lambda _: self.end("backward of the loss"))

    def _embedded(self, module: object, inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.end("backward of the layers"))


def manifests(shape: str, dtype: torch.dtype, tp_size: int) -> list[Manifest]:
    """Return the manifests of a vLLM of that many ranks."""
    geometry = Geometry.from_config(SHAPES[shape])
    ranks = [plan_shards(geometry, rank, tp_size) for rank in range(tp_size)]
    return [
        Manifest(
            rank, tp_size, tuple(ManifestEntry(spec, dtype_name(dtype), "cpu") for spec in specs)
        )
        for rank, specs in enumerate(ranks)
    ]


def random_model(
    asked: Configuration,
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    trained: bool = True,
) -> Decoder:
    """A decoder with small random weights, of this rank."""
    if asked.ranks > 1:
        from example_trainer.parallel.fsdp import sharded_decoder  # takes a second to import

        model = sharded_decoder(geometry, dtype, device, asked.ranks, trained)
    else:
        model = Decoder(geometry, dtype, device)
    random_weights(model, model.shards)
    model.gradient_checkpointing = asked.checkpointing
    if asked.lora_rank:
        attach_adapters(
            model, LoraSettings(asked.lora_rank, 2.0 * asked.lora_rank, 0.0, PROJECTIONS)
        )
    return model


def group_ranks(count: int) -> Ranks:
    """The processes of torch's default group."""
    if count == 1:
        return Ranks()
    store = dist.PrefixStore("ranks", dist.distributed_c10d._get_default_store())
    control = dist.ProcessGroupGloo(store, dist.get_rank(), count, timedelta(seconds=SECONDS))
    return Ranks(dist.get_rank(), count, SECONDS, control)


class _Nowhere(Lane):
    """A lane without a listener: the memory for sending is counted, and nothing is sent."""

    def __init__(self, place: LanePlace, device: torch.device) -> None:
        super().__init__(place, None, 1.0)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        return None

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        return None


class Outgoing:
    """The work of BroadcastBridge with the weights in an update, without servers."""

    def __init__(
        self, model: Decoder, layout: Sequence[Manifest], ranks: Ranks, device: torch.device
    ) -> None:
        plan = SendPlan(ranks.world_size, len(layout))
        route = Route.NCCL if device.type == "cuda" else Route.GLOO
        self._stream = WeightStream(model, layout, plan, ranks, device, route)
        self._cohort = Cohort(ranks, plan, device, timeout=SECONDS)
        own = plan.own_lanes(ranks.rank)
        places = (
            lane_places(Meeting("localhost", 1, ""), "", r, [lane], SENDER, 1, route)[0]
            for r, lane in own
        )
        self._cohort._lanes = {
            where: _Nowhere(place, device) for where, place in zip(own, places, strict=True)
        }
        self._cohort._store = dist.HashStore()

    def send(self) -> None:
        """One update."""
        self._stream.not_finite()
        self._stream.send(self._cohort, nobody_lost)


def measure(asked: Configuration, device: torch.device) -> dict[str, Any]:
    """Train a few steps. Returns planned and measured bytes by part, and the plan's items."""
    dtype, geometry = getattr(torch, asked.dtype), Geometry.from_config(SHAPES[asked.shape])
    config = TrainerConfig(
        model_name=asked.shape, batch_size=asked.batch, gradient_accumulation_steps=MICROBATCHES * asked.ranks,
        seq_len=asked.length, optimizer_offload=asked.offload, kl_coef=0.1 if asked.reference else 0.0,
    )  # fmt: skip
    layouts = manifests(asked.shape, dtype, asked.vllm_ranks) if asked.vllm_ranks else []
    request = MemoryRequest(
        geometry=geometry, dtype=dtype, tokens_per_microbatch=asked.batch * asked.length, seq_len=asked.length,
        table=choose_table(device, dtype), offload=asked.offload,
        gradient_checkpointing=asked.checkpointing, logprob_chunk=config.logprob_chunk or default_chunk(device),
        layouts=(tuple(layouts),) if layouts else (), packs=device.type == "cpu",
        reference=asked.reference, lora=(asked.lora_rank, PROJECTIONS) if asked.lora_rank else None,
        world_size=asked.ranks,
    )  # fmt: skip
    ranks = group_ranks(asked.ranks)
    rank = ranks.rank
    allocated: dict[str, int] = {}
    with Meter(device) as meter:
        model = random_model(asked, geometry, dtype, device)
        reference = (
            random_model(asked, geometry, dtype, device, trained=False).requires_grad_(False)
            if asked.reference
            else None
        )
        optimizer = make_optimizer(config, model)
        allocated["after loading"] = meter.now
        outgoing = Outgoing(model, layouts, ranks, device) if layouts else None
        allocated["after connecting"] = meter.now
        # Sequences of the greatest length, every token but the first few trained.
        work = Work(asked.length, asked.batch * asked.length, PROMPT)
        bins = [
            random_bin(work, geometry.vocab_size, device, asked.ranks * n + rank)
            for n in range(MICROBATCHES)
        ]
        for _ in range(WARM_UP_STEPS):
            take_step(model, optimizer, bins, config, reference, outgoing)
        allocated["after a step"] = meter.now
        parts = Parts(model, meter)
        meter.reset()
        take_step(model, optimizer, bins, config, reference, outgoing, parts)
        allocated["end of the forward pass"] = parts.after_forward
        allocated |= parts.peaks
        allocated["greatest"] = max(parts.peaks.values())
        reserved = meter.reserved
    answer = {
        "planned": planned(request),
        "allocated": allocated,
        "items": dict(plan_memory(request).items),
        "reserved": reserved,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        answer["device_used"] = total - free  # others on the GPU included, if there are any
    return answer


def take_step(
    model: Decoder, optimizer: MasterAdamW, bins: list[PackedBin], config: TrainerConfig, reference: Decoder | None,
    outgoing: Outgoing | None, parts: Parts | None = None,
) -> None:  # fmt: skip
    """One step of the training loop, without a server."""
    gradient_of(model, optimizer, bins, config, reference)
    if parts:
        parts.end("end of the backward pass")
    optimizer.step()
    if parts:
        parts.end("optimizer")
    optimizer.write_weights()
    if outgoing is not None:
        outgoing.send()
    if parts:
        parts.end("update of the server")


def planned(request: MemoryRequest) -> dict[str, int]:
    """Return the plan's bytes of each part."""
    plan = plan_memory(request)
    lasting = sum(plan.lasting.values())
    buffers = plan.lasting[SEND_BUFFERS]
    moments = {name: lasting + sum(items.values()) for name, items in plan.moments.items()}
    if request.lora:  # these two cannot be distinguished where no gradient reaches the embedding
        moments["end of the backward pass"] = max(
            moments.pop("backward of the layers"), moments["end of the backward pass"]
        )
    return {
        "after loading": lasting - buffers,
        "after connecting": lasting,
        "after a step": lasting,
        **moments,
        "optimizer": lasting + plan.moments["backward of the loss"][GRADIENTS],
        "greatest": plan.total,
    }


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration's figures; with several ranks, the figures of the largest."""
    configuration = Configuration(**asked)
    device = torch.device(configuration.device)
    torch.manual_seed(0)
    with joined_group(configuration.ranks, device) as device:
        answer = measure(configuration, device)
        if configuration.ranks > 1:
            answers: list[Any] = [None] * configuration.ranks
            dist.all_gather_object(answers, answer)
            answer = max(answers, key=lambda one: one["allocated"]["greatest"])
    return {"configuration": asdict(configuration), **answer}


if __name__ == "__main__":
    answer_once(main)
