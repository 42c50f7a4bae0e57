"""The bytes that a training takes on one device, and in which moment of a step: arithmetic on sizes
alone.

Some things are there all the time (weights, masters, AdamW's moments, buffers to send from). The
others come and go: what is summed up here is, for each moment in which a step may be at its
greatest, everything that exists in it.

How much one layer keeps for the backward pass is counted on `models/decoder.py` and on each table
of `models/ops`, tensor by tensor, in the manner of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4); attention runs in kernels
that keep no length × length matrix (FlashAttention, arXiv:2205.14135). How much FSDP2 gathers and
reduces at the same time is counted on torch 2.11 to 2.13: a unit's parameters come in one flat
buffer and are copied out of it, the next unit's are under way meanwhile, and the unit before is
still being reduced, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from example_trainer.batch.packing import SEEN_PER_TOKEN
from example_trainer.training.host_memory import BUCKET_ELEMENTS, SLOTS
from example_trainer.training.quantised import QUANTISED_BLOCK, can_be_quantised
from example_trainer.weight_bridge.stream import buffer_bytes
from vllm_patching.protocol.manifest import Manifest
from vllm_patching.weights.families import PROJECTIONS, Geometry, Parameter, parameters

FLOAT32 = 4
ACTIVATIONS = "activations of the largest microbatch"
GRADIENTS = "float32 gradients"
MASTERS, MOMENTS = "float32 masters", "AdamW's two moments"
SEND_BUFFERS = "buffers to send from"
WORKSPACES = "workspaces"

Table = Literal["reference", "fast", "invariant"]
OptimizerName = Literal["adamw", "adamw-8bit"]


@dataclass(frozen=True)
class MemoryRequest:
    """A training, as one device sees it.

    Attributes:
        geometry: the model.
        dtype: that it computes in.
        tokens_per_microbatch, seq_len: tokens in a bin, and of the longest sequence, which may be a
            bin of its own.
        table: whose operations the decoder computes with.
        share_prefixes: what rollouts have in common is forwarded once.
        optimizer: adamw-8bit has moments of one byte and a scale for each block of QUANTISED_BLOCK.
        offload: moments, and masters that are not the parameters, are in the host's memory.
        gradient_checkpointing: layers are computed again in the backward pass.
        logprob_chunk: tokens whose logits exist at the same time.
        single_copy: the parameters are the server's memory; several ranks are then tensor-parallel.
        layouts: for each kind of server that the parameters are sent to, what its ranks hold.
        packs: whether a bucket of them is packed whole before it is sent (see buffer_bytes).
        reference: a second model is held for the divergence from it.
        lora: rank and projections of the adapters; None trains every parameter.
        world_size: ranks over which parameters, masters, moments and gradients are divided.
        workspace: bytes for what cannot be counted.
    """

    geometry: Geometry
    dtype: torch.dtype
    tokens_per_microbatch: int
    seq_len: int
    table: Table = "reference"
    share_prefixes: bool = False
    optimizer: OptimizerName = "adamw"
    offload: bool = False
    gradient_checkpointing: bool = False
    logprob_chunk: int = 1024
    single_copy: bool = False
    layouts: tuple[tuple[Manifest, ...], ...] = ()
    packs: bool = False
    reference: bool = False
    lora: tuple[int, tuple[str, ...]] | None = None
    world_size: int = 1
    workspace: int = 0

    @property
    def sharded(self) -> bool:
        """Return whether FSDP2 spreads the parameters."""
        return self.world_size > 1 and not self.single_copy

    @property
    def trains_masters(self) -> bool:
        """Return whether the parameters are the float32 masters."""
        return self.sharded and self.lora is None

    @property
    def offloadable(self) -> str:
        """The state of the optimizer that `offload` moves, in words."""
        return "moments" if self.trains_masters else "masters and moments"

    @property
    def held(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.float32 if self.trains_masters else self.dtype

    @property
    def local(self) -> Geometry:
        """The sizes of this rank's part of a layer that tensor-parallel ranks split; else the
        model's.
        """
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
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.seq_len, self.geometry.max_positions)

    @property
    def tokens(self) -> int:
        """In the largest bin."""
        return max(self.tokens_per_microbatch, self.longest)

    @property
    def trained(self) -> int:
        """Trained elements of the whole model."""
        if self.lora:
            return lora_parameter_count(self.geometry, *self.lora)
        return parameter_count(self.geometry)

    @property
    def quantised(self) -> int:
        """Trained elements of the whole model whose moments have 8 bits."""
        if self.optimizer != "adamw-8bit" or self.lora is not None:
            return 0
        return quantised_count(self.geometry, self.world_size > 1)

    @property
    def moment_bytes(self) -> int:
        """Bytes of both moments of the whole model."""
        in_8_bits = int(2 * self.quantised * (1 + FLOAT32 / QUANTISED_BLOCK))
        return 2 * FLOAT32 * (self.trained - self.quantised) + in_8_bits

    @property
    def sums(self) -> bool:
        """Return whether the backward pass adds to float32 sums itself, see MasterAdamW.sums."""
        return not self.sharded and self.lora is None


@functools.lru_cache
def parameter_count(geometry: Geometry) -> int:
    """Elements of every parameter, a tied output matrix once."""
    return _count(parameters(geometry).values())


@functools.lru_cache
def quantised_count(geometry: Geometry, spread: bool) -> int:
    """Elements of the parameters whose moments adamw-8bit keeps in 8 bits, in one process or spread
    over ranks.
    """
    return _count(
        parameter
        for parameter in parameters(geometry).values()
        if can_be_quantised(parameter.shape, spread)
    )


@functools.lru_cache
def layer_parameter_count(geometry: Geometry) -> int:
    """Elements of one layer's parameters: one unit of FSDP2."""
    return _count(
        parameter
        for name, parameter in parameters(geometry).items()
        if name.startswith("model.layers.0.")
    )


@functools.lru_cache
def root_parameter_count(geometry: Geometry) -> int:
    """Elements of what is outside of the layers: embedding, last norm, and the output matrix unless
    it is tied.
    """
    return _count(
        parameter
        for name, parameter in parameters(geometry).items()
        if not name.startswith("model.layers.")
    )


def _count(counted: Iterable[Parameter]) -> int:
    return sum(parameter.size for parameter in counted)


def lora_parameter_count(geometry: Geometry, rank: int, targets: Sequence[str]) -> int:
    """Elements of the adapters on `targets` in every layer: rank · (inputs + outputs) each."""
    return rank * sum(
        sum(part.shape)
        for parameter in parameters(geometry).values()
        if parameter.adapted
        for part in parameter.parts
        if part.projection in targets
    )


def layer_activation_bytes(
    geometry: Geometry,
    itemsize: int,
    lora: tuple[int, Sequence[str]] | None = None,
    table: Table = "reference",
    share_prefixes: bool = False,
) -> int:
    """Bytes that one layer keeps for its backward pass, for each token.

    With s = itemsize, H hidden, I intermediate, d of a head, q and k the sizes of all query and of
    all key heads:

                         fast, invariant         reference
        two norms        2 · 2s · H              2 · (4 + 4 + s) · H     its input, and its output; the reference has the input
                                                                         in float32, the same scaled, and 4 each for 1/rms
        qkv_proj         s · (q + 2k)            s · (q + 2k)            its output, of which the values stay
        q_norm, k_norm   none                    (w + 4) · (q + k)       w = 4; with float32 parameters no copy: w = 0
        rotation         s · (q + k)             s · (q + k + d)         what attention is given; cosines and sines
        attention        s · q + 4 · heads       2 · s · q + 4 · heads   output, log-sum-exp; the reference puts spans together
        MLP              3 · s · I               4 · s · I               gate and up (2), their product; silu(gate)

    Spans that share prefixes have the keys and values that they see laid out again, in place of the
    keys: SEEN_PER_TOKEN for each token, which is as many as packing lets them see.

    Under adapters the reference keeps nothing for frozen weights: not what norms have scaled, and
    the inputs of those projections alone that have an adapter. Every table keeps the adapters'
    inner values.
    """
    g, s = geometry, itemsize
    rank, targets = lora or (0, PROJECTIONS)
    total: float = (
        s * (g.q_size + 2 * g.kv_size)
        + s * (g.q_size + g.kv_size)
        + s * g.q_size
        + FLOAT32 * g.num_heads
    )
    if share_prefixes:
        total += s * (2 * SEEN_PER_TOKEN - 1) * g.kv_size
    if table == "reference":
        scaled = FLOAT32 * (not lora)
        before_attention, before_mlp = (
            {"q_proj", "k_proj", "v_proj"} & set(targets),
            {"gate_proj", "up_proj"} & set(targets),
        )
        total += 2 * (FLOAT32 + scaled + FLOAT32 / g.hidden_size) * g.hidden_size
        total += s * g.hidden_size * (bool(before_attention) + bool(before_mlp)) + s * g.head_dim
        if g.qk_norm:
            copied = FLOAT32 * (s < FLOAT32)
            total += (copied + scaled) * (g.q_size + g.kv_size) + FLOAT32 * (
                g.num_heads + g.num_kv_heads
            )
        total += s * g.q_size * ("o_proj" in targets)
        total += s * g.intermediate_size * (3 + ("down_proj" in targets))
    else:
        total += 4 * s * g.hidden_size + 3 * s * g.intermediate_size
    return int(total) + s * rank * len(targets)


def _layer_bytes(request: MemoryRequest) -> int:
    return layer_activation_bytes(
        request.local, request.dtype.itemsize, request.lora, request.table, request.share_prefixes
    )


def kept_activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations at the end of the forward pass.

    Beside the layers' (their two inputs alone, if they are computed again), what the last norm
    keeps, and the rows that the logits are made of.
    """
    g, s = request.local, request.dtype.itemsize
    layer, norm = _layer_bytes(request), s
    if request.gradient_checkpointing:
        layer = 2 * s * g.hidden_size
    if request.table == "reference":
        norm = FLOAT32 * (1 + (not request.lora))
    return request.tokens * (g.num_layers * layer + (norm + s) * g.hidden_size)


def backward_activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations and their gradients where the backward pass goes through the last
    layer's MLP.

    With checkpointing, that layer's activations are there again. In flight are the gradients of the
    layer's output, of its input (under adapters with its float32 copy), and of the MLP's two
    factors; what the last norm kept is gone. (The reference makes a weight's gradient from float32
    copies; what they take has gone with the MLP's activations by then.)
    """
    g, s = request.local, request.dtype.itemsize
    layer = _layer_bytes(request)
    kept = g.num_layers * layer
    if request.gradient_checkpointing:
        kept = g.num_layers * 2 * s * g.hidden_size + layer
    copied = FLOAT32 * bool(request.lora and s < FLOAT32)
    flight = 2 * s * g.intermediate_size + (2 * s + copied) * g.hidden_size
    return request.tokens * (kept + flight)


def logits_bytes(request: MemoryRequest) -> int:
    """Bytes of the largest moment of the output head, in which logits of a chunk exist.

        fast         one table of chunk × vocab in the parameters' dtype, in which their gradient is made
        invariant    the logits, a copy without padding, their gradient
        reference    two float32 tables; in the backward pass one, the same rounded, and that in float32 again

    An entropy that has a gradient needs no more: the reference's second table is then the chances
    of the first, in the backward pass too. FSDP2's ranks make the output matrix's gradient whole,
    in float32.
    """
    g, s = request.local, request.dtype.itemsize
    table = min(request.logprob_chunk, request.tokens) * g.vocab_size
    tables = {
        "fast": s,
        "invariant": 3 * s,
        "reference": max(2 * FLOAT32, (s + FLOAT32) * (s < FLOAT32)),
    }[request.table]
    matrix = g.vocab_size * g.hidden_size * request.trains_masters
    return tables * table + FLOAT32 * matrix


def send_buffer_bytes(request: MemoryRequest) -> int:
    """Bytes of the buffers that a rank sends from: for each kind of server two for a bucket each,
    which a process of whole parameters needs for what does not lie in place; sharded ones also one
    for the rows that they hand to each other.
    """
    return sum(
        buffer_bytes(layout, request.world_size, request.held, request.packs).total
        for layout in request.layouts
    )


def lasting_items(request: MemoryRequest) -> dict[str, int]:
    """Bytes that are there in every moment, by what they are for."""
    g, s, ranks = request.geometry, request.dtype.itemsize, request.world_size
    parameters, trained = parameter_count(g), request.trained
    masters = request.trains_masters
    adapters, copies = s * trained * bool(request.lora), not (request.single_copy or masters)
    on_device, references = not request.offload, int(request.reference)
    staged = min(BUCKET_ELEMENTS, trained // ranks) * request.offload
    state_bytes = FLOAT32 * (not masters) + request.moment_bytes / trained  # of an element
    return {
        "weights (this trainer's own copy)": adapters + copies * (s * parameters // ranks),
        MASTERS: FLOAT32 * (on_device or masters) * trained // ranks,
        MOMENTS: on_device * request.moment_bytes // ranks,
        "masters and moments on their way": int(SLOTS * state_bytes * staged),
        "reference model": references * (s * parameters // ranks),
        "rotary tables": s * g.max_positions * g.head_dim * (1 + references),
        SEND_BUFFERS: send_buffer_bytes(request),
        WORKSPACES: request.workspace,
    }


def host_bytes(request: MemoryRequest) -> int:
    """Bytes of the host's memory that one rank keeps moments in, and masters that are not the
    parameters.
    """
    if not request.offload:
        return 0
    masters = FLOAT32 * request.trained * (not request.trains_masters)
    return (masters + request.moment_bytes) // request.world_size


def moments(request: MemoryRequest) -> dict[str, dict[str, int]]:
    """For each moment that may be a step's greatest, the bytes of what is there beside the lasting
    items.

    Gradients of the whole step are there in all of the backward pass, but in its first microbatch.
    Those of a tied matrix are summed in two places, by its two uses.
    """
    g, s, ranks = request.geometry, request.dtype.itemsize, request.world_size
    matrix = request.local.vocab_size * g.hidden_size
    twice = matrix * (request.sums and g.tie_word_embeddings)
    gradients = {GRADIENTS: FLOAT32 * (request.trained // ranks + twice)}
    root, layer = root_parameter_count(g), layer_parameter_count(g)
    embedding = g.vocab_size * g.hidden_size * (not g.tie_word_embeddings)
    head, gathered = FLOAT32 * matrix * (not request.lora), {}
    if request.sharded:
        gathered = {"output matrix, gathered": s * (root - embedding)}
    states = s * request.tokens * g.hidden_size  # the gradient of those that the logits are made of
    loss = {
        ACTIVATIONS: kept_activation_bytes(request) + states,
        "logits and their gradient": logits_bytes(request),
        **gathered,
    }
    layers = {ACTIVATIONS: backward_activation_bytes(request), **gathered}
    end: dict[str, int] = {}
    if request.sharded:
        # Two layers whole (one computes, one comes), and float32 gradients of two: one is computed,
        # one is reduced.
        layers["layers, gathered and reduced"] = (2 * s + 2 * FLOAT32) * layer
        layers["output matrix's gradient"] = head
        # Both matrices' gradients, and one of them as it is sent and as it comes back.
        reduced = max(root - embedding, embedding)
        end = {
            "embedding and output matrix, reduced": FLOAT32 * (root + reduced + reduced // ranks),
        }
    elif request.sums:
        end = {
            ACTIVATIONS: FLOAT32 * request.tokens * g.hidden_size
        }  # the gradient of the embedding's rows
    return {
        "backward of the loss": gradients | loss,
        "backward of the layers": gradients | layers,
        "end of the backward pass": gradients | end,
        "update of the server": {},  # through the buffers that are there all the time
    }
