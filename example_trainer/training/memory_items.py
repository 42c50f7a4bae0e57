"""How many bytes a training takes on one device, and in which moment of a step: arithmetic on sizes alone.

Some things are there all the time (weights, masters, AdamW's moments, buffers to send from). The others come and go: what is
summed up here is, for each moment in which a step may be at its greatest, everything that exists in it.

How much one layer keeps for the backward pass is counted on `models/decoder.py`, tensor by tensor, in the manner of Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4); attention runs in kernels
that keep no length × length matrix (FlashAttention, arXiv:2205.14135). How much FSDP2 gathers and reduces at the same time is
counted on torch 2.11 to 2.13: a unit's parameters come in one flat buffer and are copied out of it, the next unit's are under
way meanwhile, and the unit before is still being reduced, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from example_trainer.models.geometry import Geometry
from example_trainer.models.layout import Part, layout
from example_trainer.weight_bridge.base import Receiver

FLOAT32 = 4
ACTIVATIONS = "activations of the longest micro-batch"
GRADIENTS = "float32 gradients"
SEND_BUFFERS = "buffers to send from"
WORKSPACES = "workspaces"

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
ALL_PROJECTIONS = tuple(_LORA_SIZES)


@dataclass(frozen=True)
class MemoryRequest:
    """What is asked of one device.

    Attributes:
        geometry: the model.
        dtype: of its parameters.
        batch_size, seq_len: sequences in a micro-batch, and the tokens of the longest.
        gradient_checkpointing: layers are computed again in the backward pass.
        logprob_chunk: tokens whose logits exist at the same time.
        single_copy: the parameters are the server's memory; several ranks are then tensor-parallel.
        receivers: to whom the parameters are sent, if they are.
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
    receivers: tuple[Receiver, ...] = ()
    reference: bool = False
    lora: tuple[int, tuple[str, ...]] | None = None
    world_size: int = 1
    workspace: int = 0

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 spreads the parameters."""
        return self.world_size > 1 and not self.single_copy

    @property
    def local(self) -> Geometry:
        """The sizes of this rank's part of a layer that tensor-parallel ranks split; else the model's."""
        g, ranks = self.geometry, self.world_size
        if ranks == 1 or not self.single_copy:
            return g
        return replace(
            g,
            vocab_size=-(-g.vocab_size // ranks),
            num_heads=g.num_heads // ranks,
            num_kv_heads=max(1, g.num_kv_heads // ranks),
            intermediate_size=g.intermediate_size // ranks,
        )

    @property
    def tokens(self) -> int:
        """In a micro-batch in which every sequence is as long as it may be."""
        return self.batch_size * min(self.seq_len, self.geometry.max_positions)


def parameter_count(geometry: Geometry) -> int:
    """Elements of every parameter, a tied output matrix once."""
    return _count(part for _, part in _named_parts(geometry))


def layer_parameter_count(geometry: Geometry) -> int:
    """Elements of one layer's parameters: one unit of FSDP2."""
    return _count(part for name, part in _named_parts(geometry) if name.startswith("model.layers.0."))


def root_parameter_count(geometry: Geometry) -> int:
    """Elements of what is outside of the layers: embedding, last norm, and the output matrix unless it is tied."""
    return _count(part for name, part in _named_parts(geometry) if not name.startswith("model.layers."))


def _named_parts(geometry: Geometry) -> Iterator[tuple[str, Part]]:
    return ((name, part) for name, parts in layout(geometry).items() for part in parts)


def _count(parts: Iterable[Part]) -> int:
    return sum(math.prod(part.shape) for part in parts)


def lora_parameter_count(geometry: Geometry, rank: int, targets: Sequence[str]) -> int:
    """Elements of the adapters on `targets` in every layer: rank · (inputs + outputs) each."""
    return geometry.num_layers * rank * sum(_LORA_SIZES[name](geometry) for name in targets if name in _LORA_SIZES)


def layer_activation_bytes(geometry: Geometry, itemsize: int, lora: tuple[int, Sequence[str]] | None = None) -> int:
    """Bytes that one layer keeps for its backward pass, for each token.

    With s = itemsize, H hidden, I intermediate, q and k the sizes of all query and of all key heads:

        two norms        2 · (4 + 4 + s) · H         the input in float32, the same scaled, the output; 4 each: 1/rms
        qkv_proj         s · (q + 2k)                its output, of which the values stay
        q_norm, k_norm   (w + 4) · (q + k)           as above (w = 4; float32 parameters need no copy of the input: w = 0)
        rotation         s · (q + k)                 what attention is given
        attention        s · q + 4 · heads           output, log-sum-exp
        MLP              4 · s · I                   gate and up (2), silu(gate), their product

    Under adapters nothing is kept for frozen weights: not what norms have scaled, and the inputs of those projections alone
    that have an adapter, with its inner values.
    """
    g, s = geometry, itemsize
    scaled = 0 if lora else FLOAT32
    targets = ALL_PROJECTIONS if lora is None else tuple(lora[1])
    before_attention, before_mlp = {"q_proj", "k_proj", "v_proj"} & set(targets), {"gate_proj", "up_proj"} & set(targets)
    total = 2 * (FLOAT32 + scaled + FLOAT32 / g.hidden_size) * g.hidden_size
    total += s * g.hidden_size * (bool(before_attention) + bool(before_mlp))
    total += s * (g.q_size + 2 * g.kv_size) + s * (g.q_size + g.kv_size)
    if g.qk_norm:
        copied = FLOAT32 if s < FLOAT32 else 0
        total += (copied + scaled) * (g.q_size + g.kv_size) + FLOAT32 * (g.num_heads + g.num_kv_heads)
    total += s * g.q_size + FLOAT32 * g.num_heads
    total += s * g.intermediate_size * (4 if "down_proj" in targets else 3)
    return int(total) + (s * lora[0] * len(targets) if lora else 0)


def kept_activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations at the end of the forward pass.

    Beside the layers' (their inputs alone, if they are computed again), what the last norm keeps, and the states that the
    logits are made of.
    """
    g, s = request.local, request.dtype.itemsize
    layer = s * g.hidden_size if request.gradient_checkpointing else layer_activation_bytes(g, s, request.lora)
    scaled = 0 if request.lora else FLOAT32
    return request.tokens * (g.num_layers * layer + (FLOAT32 + scaled + s) * g.hidden_size)


def backward_activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations and their gradients where the backward pass goes through the last layer's MLP.

    With checkpointing, that layer's activations are there again. In flight are the gradients of the layer's output, of its
    input (under adapters with its float32 copy), and of the MLP's two factors; what the last norm kept is gone.
    """
    g, s = request.local, request.dtype.itemsize
    layer = layer_activation_bytes(g, s, request.lora)
    kept = g.num_layers * s * g.hidden_size + layer if request.gradient_checkpointing else g.num_layers * layer
    copied = FLOAT32 if request.lora and s < FLOAT32 else 0
    return request.tokens * (kept + 2 * s * g.intermediate_size + (2 * s + copied) * g.hidden_size)


def logits_bytes(request: MemoryRequest) -> int:
    """Bytes of the largest moment in loss.chosen_logprobs.

    Two float32 tables of chunk × vocab, beside the float32 gradient of the output matrix if it has one; or one table in the
    parameters' dtype, beside that gradient and what is added to it.
    """
    g, s = request.local, request.dtype.itemsize
    table = min(request.logprob_chunk, request.tokens) * g.vocab_size
    matrix = 0 if request.lora else g.vocab_size * g.hidden_size
    return max(2 * FLOAT32 * table + FLOAT32 * matrix, s * table + (FLOAT32 + s) * matrix)


def send_buffer_bytes(request: MemoryRequest) -> int:
    """Bytes that the rank which sends the most packs its slices into, and keeps.

    vLLM's rank r is sent to by the trainer's rank r modulo their number. A process that holds whole parameters packs columns
    alone; a sharded one packs all.
    """
    if not request.sharded:
        return sum(receiver.column_bytes for receiver in request.receivers)
    totals = [0] * request.world_size
    for receiver in request.receivers:
        totals[receiver.tp_rank % request.world_size] += receiver.shard_bytes
    return max(totals)


def lasting_items(request: MemoryRequest) -> dict[str, int]:
    """Bytes that are there in every moment after the first step, by what they are for."""
    g, s, ranks = request.geometry, request.dtype.itemsize, request.world_size
    parameters = parameter_count(g)
    trained = lora_parameter_count(g, *request.lora) if request.lora else parameters
    adapters = s * trained if request.lora else 0
    return {
        "weights (this trainer's own copy)": adapters + (0 if request.single_copy else s * parameters // ranks),
        "float32 masters": FLOAT32 * trained // ranks,
        "AdamW's two moments": 2 * FLOAT32 * trained // ranks,
        "reference model": s * parameters // ranks if request.reference else 0,
        "rotary tables": s * g.max_positions * g.head_dim * (2 if request.reference else 1),
        SEND_BUFFERS: send_buffer_bytes(request),
        WORKSPACES: request.workspace,
    }


def moments(request: MemoryRequest) -> dict[str, dict[str, int]]:
    """For each moment that may be a step's greatest, the bytes of what is there beside the lasting items.

    Gradients of the whole step are there in all of the backward pass, but in its first micro-batch.
    """
    g, s, ranks = request.geometry, request.dtype.itemsize, request.world_size
    trained = lora_parameter_count(g, *request.lora) if request.lora else parameter_count(g)
    gradients = {GRADIENTS: FLOAT32 * trained // ranks}
    root, layer = root_parameter_count(g), layer_parameter_count(g)
    head = 0 if request.lora else s * request.local.vocab_size * g.hidden_size
    gathered = {"embedding and output matrix, gathered": s * root} if request.sharded else {}
    states = s * request.tokens * g.hidden_size  # the gradient of those that the logits are made of
    loss = {
        ACTIVATIONS: kept_activation_bytes(request) + states,
        "logits and their gradient": logits_bytes(request),
        **gathered,
    }
    layers = {ACTIVATIONS: backward_activation_bytes(request), **gathered}
    if request.sharded:
        # Two layers whole (one computes, one comes), gradients of one, and of the one before in float32.
        layers["layers, gathered and reduced"] = (3 * s + FLOAT32) * layer
        layers["output matrix's gradient"] = head
        end = {
            "gradients as FSDP2 hands them over": s * trained // ranks,
            "embedding and output matrix, reduced": (s + FLOAT32) * root + FLOAT32 * root // ranks,
        }
    else:
        widest = max(2 * request.local.intermediate_size, request.local.q_size + 2 * request.local.kv_size) * g.hidden_size
        layers["a matrix's gradient"] = 0 if request.lora else s * widest
        # Of a tied matrix it waits for the embedding's share; another's has been collected.
        layers["output matrix's gradient"] = head if g.tie_word_embeddings else 0
        end = {"embedding's gradient": head * (2 if g.tie_word_embeddings else 1)}
    largest = max(_count(parts) for parts in layout(g).values())
    update = {"a parameter, gathered": s * largest} if request.sharded and request.receivers else {}
    return {
        "backward of the loss": gradients | loss,
        "backward of the layers": gradients | layers,
        "end of the backward pass": gradients | end,
        "update of the server": update,
    }
