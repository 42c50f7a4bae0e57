"""What a training will keep in memory, computed from the model's config.json before a weight is loaded.

`plan_memory` is arithmetic on sizes; `check_memory` compares its result with what is free and refuses what cannot fit.

How much one layer keeps for the backward pass is counted on `models/decoder.py`, tensor by tensor, in the manner of Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4); attention is taken to run
in kernels that keep no length × length matrix (FlashAttention, arXiv:2205.14135).
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.models.geometry import Geometry
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.models.layout import layout
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.single_copy import SingleCopyBridge

logger = logging.getLogger(__name__)

FLOAT32 = 4
ACTIVATIONS = "activations of the longest micro-batch"
GPU_WORKSPACE = 1 << 30
"""Bytes that matrix kernels, NCCL's buffers and the allocator's rounding take on a GPU."""
CPU_WORKSPACE = 300 << 20
"""Bytes that torch's thread pools, the HTTP client and TensorBoard take in RAM after the imports."""

_LORA_SIZES = {
    "q_proj": lambda g: g.hidden_size + g.q_size,
    "k_proj": lambda g: g.hidden_size + g.kv_size,
    "v_proj": lambda g: g.hidden_size + g.kv_size,
    "o_proj": lambda g: g.q_size + g.hidden_size,
    "gate_proj": lambda g: g.hidden_size + g.intermediate_size,
    "up_proj": lambda g: g.hidden_size + g.intermediate_size,
    "down_proj": lambda g: g.intermediate_size + g.hidden_size,
}
"""Inputs plus outputs of each projection: an adapter of rank r has r times as many parameters (arXiv:2106.09685)."""


class MemoryShortage(TrainerError):
    """The training would not fit. The message names the largest items, what is free, and what to change."""


@dataclass(frozen=True)
class MemoryRequest:
    """What is asked of one device.

    Attributes:
        geometry: the model.
        dtype: of its parameters.
        batch_size, seq_len: sequences in a micro-batch, and the tokens of the longest.
        gradient_checkpointing: layers are computed again in the backward pass.
        logprob_chunk: tokens whose logits exist at the same time.
        single_copy: the parameters are the server's memory.
        broadcast: the parameters are packed and sent.
        reference: a second model is held for the divergence from it.
        lora: rank and projections of the adapters; None trains every parameter.
        world_size: ranks over which parameters, masters, moments and gradients are divided.
        workspace: bytes for what cannot be counted.
    """

    geometry: Geometry
    dtype: torch.dtype
    batch_size: int
    seq_len: int
    gradient_checkpointing: bool = False
    logprob_chunk: int = 1024
    single_copy: bool = False
    broadcast: bool = False
    reference: bool = False
    lora: tuple[int, tuple[str, ...]] | None = None
    world_size: int = 1
    workspace: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for, the largest first. All of them exist together at the worst moment of a step."""

    items: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Bytes at the worst moment of a step."""
        return sum(size for _, size in self.items)

    @property
    def certain(self) -> int:
        """What is taken however long the sequences turn out to be."""
        return sum(size for name, size in self.items if name != ACTIVATIONS)

    def table(self) -> str:
        """One line an item, for the log."""
        rows = [f"  {size / 2**30:8.2f} GiB  {name}" for name, size in self.items]
        return "\n".join([*rows, f"  {self.total / 2**30:8.2f} GiB  in all"])


def parameter_count(geometry: Geometry) -> int:
    """Elements of every parameter, a tied output matrix once."""
    return sum(math.prod(part.shape) for parts in layout(geometry).values() for part in parts)


def lora_parameter_count(geometry: Geometry, rank: int, targets: tuple[str, ...]) -> int:
    """Elements of the adapters on `targets` in every layer: rank · (inputs + outputs) each."""
    return geometry.num_layers * rank * sum(_LORA_SIZES[name](geometry) for name in targets if name in _LORA_SIZES)


def layer_activation_bytes(geometry: Geometry, itemsize: int) -> int:
    """Bytes that one layer keeps for its backward pass, for each token.

    With s = itemsize, H hidden, I intermediate, q and k the sizes of all query and of all key heads:

        two norms        2 · (w + 4 + s) · H         float32 copy of the input (w = 4, none if it is float32), scaled, output
        qkv_proj         s · (q + 2k)                its output, of which the values stay
        q_norm, k_norm   (w + 4 + s) · (q + k)       as the norms above, if there are any
        rotation         s · (q + k)                 what attention is given
        attention        2 · s · q + 4 · heads       output, the same in the order of o_proj, log-sum-exp
        MLP              4 · s · I                   gate and up (2), silu(gate), their product
        residual path    s · H                       the sum that the next norm starts from
    """
    g, s = geometry, itemsize
    norm = (FLOAT32 if s < FLOAT32 else 0) + FLOAT32 + s
    queries_and_keys = g.q_size + g.kv_size
    total = 2 * norm * g.hidden_size + s * g.hidden_size
    total += s * (g.q_size + 2 * g.kv_size) + s * queries_and_keys + (norm * queries_and_keys if g.qk_norm else 0)
    total += 2 * s * g.q_size + FLOAT32 * g.num_heads
    return total + 4 * s * g.intermediate_size


def activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations at the end of the forward pass over a micro-batch in which every sequence is `seq_len` long."""
    g, s = request.geometry, request.dtype.itemsize
    tokens = request.batch_size * min(request.seq_len, g.max_positions)
    layer = layer_activation_bytes(g, s)
    if request.gradient_checkpointing:
        # Each layer's input, and one layer's activations while it is computed again.
        kept = g.num_layers * s * g.hidden_size + layer
    else:
        kept = g.num_layers * layer
    # Gradients in flight in the backward pass of the MLP: of the product (1), of its two factors (2), and of these joined (2);
    # and the last norm with the states it gives out.
    in_flight = 5 * s * g.intermediate_size
    last = 2 * (FLOAT32 + s) * g.hidden_size
    return tokens * (kept + in_flight + last)


def logits_bytes(request: MemoryRequest) -> int:
    """Bytes of the largest moment in loss.chosen_logprobs: two float32 tables of chunk × vocab and one in the parameters'
    dtype, and the float32 gradient of the output matrix with what is being added to it.
    """
    g, s = request.geometry, request.dtype.itemsize
    table = min(request.logprob_chunk, request.batch_size * request.seq_len) * g.vocab_size
    matrix = 0 if request.lora else g.vocab_size * g.hidden_size
    return table * (2 * FLOAT32 + s) + matrix * (2 * FLOAT32 + s)


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """The bytes of each part of a training on one device; see the module's docstring for the sources."""
    g, s, ranks = request.geometry, request.dtype.itemsize, request.world_size
    parameters = parameter_count(g)
    trained = lora_parameter_count(g, *request.lora) if request.lora else parameters
    largest = max(sum(math.prod(part.shape) for part in parts) for parts in layout(g).values())
    items = {
        "weights (this trainer's own copy)": 0 if request.single_copy else s * parameters // ranks,
        "float32 masters": FLOAT32 * trained // ranks,
        "AdamW's two moments": 2 * FLOAT32 * trained // ranks,
        "float32 gradients": FLOAT32 * trained // ranks,
        "reference model": s * parameters // ranks if request.reference else 0,
        "packing for the broadcast": s * largest if request.broadcast else 0,
        "one layer, gathered": s * parameters // max(1, g.num_layers) if ranks > 1 else 0,
        ACTIVATIONS: activation_bytes(request),
        "logits and their gradient": logits_bytes(request),
        "workspaces": request.workspace,
    }
    return MemoryPlan(tuple(sorted(((k, v) for k, v in items.items() if v), key=lambda item: -item[1])))


def free_memory(device: torch.device, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes free and in all: of the GPU, or of RAM within the limit of this process's control group."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    free, total = values["MemAvailable"], values["MemTotal"]
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        free, total = min(free, max(0, limit - used)), limit
    return free, total


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" where there is no limit


def remedies(request: MemoryRequest, free: int, total: int, device: torch.device) -> list[str]:
    """What makes room, with the GiB needed then; what suffices by itself comes first, and nothing else if anything does."""
    now = plan_memory(request).total
    changes: list[tuple[str, MemoryRequest]] = []
    if not request.gradient_checkpointing:
        changes.append(("--gradient-checkpointing", replace(request, gradient_checkpointing=True)))
    if request.batch_size > 1:
        changes.append((f"--batch-size {request.batch_size // 2}", replace(request, batch_size=request.batch_size // 2)))
    if not request.gradient_checkpointing and request.batch_size > 1:
        changes.append(("--gradient-checkpointing --batch-size 1", replace(request, gradient_checkpointing=True, batch_size=1)))
    if device.type == "cuda" and request.lora is None and not request.single_copy:
        for ranks in (2, 4, 8, 16, 32, 64):
            spread = replace(request, world_size=ranks * request.world_size, gradient_checkpointing=True)
            if plan_memory(spread).total <= free:
                changes.append((f"{spread.world_size} GPUs (torchrun) and --gradient-checkpointing", spread))
                break
    if request.lora is None:
        adapters = replace(request, lora=(16, tuple(_LORA_SIZES)), single_copy=False, gradient_checkpointing=True)
        changes.append(("--weight-bridge-mode lora_only --gradient-checkpointing", adapters))
    found = [(text, plan_memory(changed).total) for text, changed in changes]
    enough = [(text, size) for text, size in found if size <= free]
    said = [f"{text} ({size / 2**30:.2f} GiB then)" for text, size in enough or found if size < now]
    share = math.floor(100 * (total - now) / total) / 100
    if device.type == "cuda" and request.single_copy and share >= 0.05:
        said.insert(0, f"start vLLM with --gpu-memory-utilization {share:.2f} or less")
    return said or ["a device with more memory"]


def require_memory(request: MemoryRequest, free: int, total: int, device: torch.device) -> MemoryPlan:
    """The plan, if it fits.

    On a GPU everything must fit. On a CPU it is enough that the part does which is certain: RAM is taken page by page as
    sequences really get long, and few of them are as long as they may be.

    Raises:
        MemoryShortage: it does not fit into the free bytes.
    """
    plan = plan_memory(request)
    if (plan.total if device.type == "cuda" else plan.certain) > free:
        ways = remedies(request, free, total, device)
        biggest = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items[:3])
        raise MemoryShortage(
            f"the training needs about {plan.total / 2**30:.2f} GiB and {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free "
            f"on {device}; the largest items are {biggest}; what helps: {', or '.join(ways)}; "
            "--skip-memory-check tries it all the same"
        )
    return plan


def _ranks(variable: str) -> int:
    return max(1, int(os.environ.get(variable, "1")))


def check_memory(config: TrainerConfig, bridge: WeightBridge, dtype: torch.dtype, device: torch.device) -> None:
    """Log what the training will take, and refuse it if that is more than is free. Reads config.json, loads nothing.

    Raises:
        MemoryShortage: it does not fit, and --skip-memory-check was not given.
        ModelError: the model cannot be found or is not supported.
    """
    geometry, _ = read_geometry(find_checkpoint(config.model_name))
    lora = config.weight_bridge_mode == "lora_only"
    request = MemoryRequest(
        geometry=geometry,
        dtype=dtype,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        gradient_checkpointing=config.gradient_checkpointing,
        logprob_chunk=config.logprob_chunk,
        single_copy=isinstance(bridge, SingleCopyBridge),
        broadcast=config.weight_bridge_mode == "shared_vllm" and not isinstance(bridge, SingleCopyBridge),
        reference=bool(config.kl_coef) and not (lora and config.reference_model is None),
        lora=(config.lora_r, tuple(config.lora_target_modules)) if lora else None,
        world_size=_ranks("WORLD_SIZE"),
        workspace=GPU_WORKSPACE if device.type == "cuda" else CPU_WORKSPACE,
    )
    free, total = free_memory(device)
    if device.type == "cpu":
        free //= _ranks("LOCAL_WORLD_SIZE")  # the ranks share this machine's memory
    try:
        plan = require_memory(request, free, total, device)
    except MemoryShortage as error:
        if not config.skip_memory_check:
            raise
        logger.warning("Going on because of --skip-memory-check: %s", error)
        return
    logger.info("Memory of %s, at most, with %.2f GiB free:\n%s", device, free / 2**30, plan.table())
    if plan.total > free:
        logger.warning(
            "Micro-batches of %d sequences of %d tokens would not fit; if they come, the machine runs out of memory",
            config.batch_size, config.seq_len,
        )  # fmt: skip
