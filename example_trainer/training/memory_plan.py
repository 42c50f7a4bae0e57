"""The memory that a training needs, computed from the model's config.json before a weight is
loaded.

`plan_memory` puts together the items that are counted first. `require_memory` refuses a sum that is
more than what is free, and names the flags with which the training fits. `memory_choice` takes the
first way to train that fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import torch

from example_trainer.batch.packing import SEEN_PER_TOKEN
from example_trainer.errors import TrainerError
from example_trainer.models.transformers_activations import Activations
from example_trainer.models.transformers_layout import TransformersGeometry
from example_trainer.training.optimizer import BUCKET_ELEMENTS, SLOTS, free_host_memory
from example_trainer.training.quantised import QUANTISED_BLOCK, can_be_quantised
from example_trainer.weight_bridge.stream import buffer_bytes
from vllm_patching.protocol.manifest import Manifest
from vllm_patching.weights.families import (
    FAMILIES,
    PROJECTIONS,
    Geometry,
    Parameter,
    adapted_projections,
    parameters,
)

# The bytes that a training takes on one device, and in which moment of a step: arithmetic on sizes
# alone.
#
# Some things are there all the time (weights, masters, AdamW's moments, buffers to send from). The
# others come and go. For each moment in which a step may be at its greatest, everything that exists
# in it is summed up here.
#
# The memory that one layer keeps for the backward pass is counted on `models/decoder.py` and on
# each table of `models/ops`, tensor by tensor. The manner is that of Korthikanti et al., "Reducing
# Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4). Attention
# runs in kernels that keep no length × length matrix (FlashAttention, arXiv:2205.14135). The memory
# that FSDP2 gathers and reduces at the same time is counted on torch 2.11 to 2.13. A unit's
# parameters come in one flat buffer and are copied out of it. In the meantime the next unit's are
# under way and the unit before is still being reduced, in float32.

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
        expert_parallel: ranks that share a layer's experts, and send each other rows.
        workspace: bytes for what cannot be counted.
        activations: of a model of transformers; where they are not measured, they are counted as if
            it were a decoder of ours.
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
    expert_parallel: int = 1
    workspace: int = 0
    activations: Activations | None = None

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
            moe_intermediate_size=g.moe_intermediate_size // ranks,
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
        return _count(one for one in parameters(self.geometry).values() if not one.frozen)

    def of_rank(self, count: int) -> int:
        """Return the part of `count` that the rank with the most parameters has.

        Args:
            count: of the whole model, in proportion to its trained elements.
        """
        if not self.sharded:
            return count // self.world_size
        return count * largest_part(self.geometry, self.world_size) // self.trained

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
def largest_part(geometry: Geometry, ranks: int) -> int:
    """Trained elements that the first of several FSDP2 ranks holds: whole rows of each parameter,
    and whole experts.
    """
    trained = [one for one in parameters(geometry).values() if not one.frozen]
    return sum(-(-one.shape[0] // ranks) * (one.size // one.shape[0]) for one in trained)


@functools.lru_cache
def layer_parameter_count(geometry: Geometry, expert_parallel: int = 1) -> int:
    """Elements of the parameters that FSDP2 gathers for the largest layer.

    Args:
        expert_parallel: see MemoryRequest.
    """
    if isinstance(geometry, TransformersGeometry):
        return geometry.largest_layer
    sizes = [0] * geometry.num_layers
    for name, parameter in parameters(geometry).items():
        if name.startswith("model.layers."):
            size = parameter.size
            if parameter.stacked:
                size //= expert_parallel
            sizes[int(name.split(".")[2])] += size
    return max(sizes)


@functools.lru_cache
def root_parameter_count(geometry: Geometry) -> int:
    """Elements of what is outside of the layers: embedding, last norm, and the output matrix unless
    it is tied.
    """
    if isinstance(geometry, TransformersGeometry):
        return parameter_count(geometry) - geometry.all_layers
    return _count(
        parameter
        for name, parameter in parameters(geometry).items()
        if not name.startswith("model.layers.")
    )


def _count(counted: Iterable[Parameter]) -> int:
    return sum(parameter.size for parameter in counted)


def lora_parameter_count(geometry: Geometry, rank: int, targets: Sequence[str]) -> int:
    """Elements of the adapters on `targets` in every layer: rank · (inputs + outputs) each."""
    own = adapted_projections(geometry, targets)
    return rank * sum(
        sum(part.shape)
        for parameter in parameters(geometry).values()
        if parameter.adapted
        for part in parameter.tensors
        if part.projection in own
    )


def layer_activation_bytes(
    geometry: Geometry,
    itemsize: int,
    lora: tuple[int, Sequence[str]] | None = None,
    table: Table = "reference",
    share_prefixes: bool = False,
    sparse: bool = False,
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
    keys. These are SEEN_PER_TOKEN for each token, which is as many as packing lets them see. The
    invariant table makes them again in the backward pass, when what the MLP kept is gone.

    A norm behind a step keeps its input alone. The fast table also keeps the inputs of a norm over
    all heads, and gelu(gate).

    A sparse layer has experts in place of the MLP; see `_experts_bytes`.

    Under adapters the reference keeps nothing for frozen weights: not what norms have scaled, and
    the inputs of those projections alone that have an adapter. Every table keeps the adapters'
    inner values.
    """
    g, s = geometry, itemsize
    rank, targets = lora or (0, PROJECTIONS)
    if sparse:  # the experts have no adapters
        targets = [name for name in targets if name not in _OF_MLPS]
    total: float = (
        s * (g.q_size + 2 * g.kv_size)
        + s * (g.q_size + g.kv_size)
        + s * g.q_size
        + FLOAT32 * g.num_heads
    )
    if share_prefixes and table != "invariant":
        total += s * (2 * SEEN_PER_TOKEN - 1) * g.kv_size
    if table == "reference":
        total += _reference_bytes(g, s, bool(lora), frozenset(targets), sparse)
    else:
        inner = 3 * g.intermediate_size * (not sparse)
        total += s * ((2 + _norms(g)) * g.hidden_size + inner + _kept_by_torch(g))
    if sparse:
        total += _experts_bytes(g, s, table, bool(lora))
    return int(total) + s * rank * len(targets)


def _reference_bytes(
    g: Geometry, s: int, adapters: bool, targets: frozenset[str], sparse: bool
) -> float:
    """Bytes that the reference keeps for its MLP, and otherwise than the other tables; see
    layer_activation_bytes.
    """
    scaled = FLOAT32 * (not adapters)
    total: float = _norms(g) * (FLOAT32 + scaled + FLOAT32 / g.hidden_size) * g.hidden_size
    inputs = int(not targets.isdisjoint({"q_proj", "k_proj", "v_proj"}))
    inputs += not targets.isdisjoint({"gate_proj", "up_proj"}) or (sparse and not adapters)
    total += s * g.hidden_size * inputs + s * g.head_dim
    if g.qk_norm:
        copied = FLOAT32 * (s < FLOAT32)
        total += (copied + scaled) * (g.q_size + g.kv_size)
        total += FLOAT32 * (g.num_heads + g.num_kv_heads)
    total += s * g.q_size * ("o_proj" in targets)
    if not sparse:
        total += s * g.intermediate_size * (3 + ("down_proj" in targets))
    return total


_OF_MLPS = frozenset(("gate_proj", "up_proj", "gate_up_proj", "down_proj"))


def _experts_bytes(g: Geometry, s: int, table: Table, adapters: bool) -> int:
    """Bytes that the router and the experts of a layer keep for each token.

    With E experts, k of them for each token, and I their inner width:

                         fast, invariant         reference
        router           s · E                   4 · E                   the logits; their softmax
        choice           28 · k                  36 · k                  weights, and int64 numbers, their order and places
        experts          2 · s · k · I           s · k · (H + 4 · I)     outputs of gate and up projection; the rows, as an MLP
        sum              none                    4 · k · H               the rows in float32

    Under adapters the reference keeps no inputs of the experts' matrices.
    """
    k, inner, hidden = g.experts_per_token, g.moe_intermediate_size, g.hidden_size
    if table != "reference":
        return s * g.num_experts + k * (28 + 2 * s * inner)
    rows = 3 * inner
    if not adapters:
        rows += hidden + inner
    return FLOAT32 * g.num_experts + k * (36 + FLOAT32 * hidden + s * rows)


def _norms(g: Geometry) -> int:
    family = FAMILIES.get(g.architecture)  # none for a model of transformers
    return 2 if family is None else len(family.norms)


def _kept_by_torch(g: Geometry) -> int:
    """Elements of a token that a family's layer keeps beside what the fast kernels keep."""
    family = FAMILIES.get(g.architecture)
    if family is None:
        return 0
    joint_norms = (g.q_size + g.kv_size) * family.joint_qk_norm
    return joint_norms + g.intermediate_size * (family.activation != "silu")


def _layer_bytes(request: MemoryRequest) -> tuple[int, int]:
    """Bytes that the layers keep for each token: all of them, and the largest one."""
    g = request.local
    of_kind = [
        layer_activation_bytes(
            g, request.dtype.itemsize, request.lora, request.table, request.share_prefixes, sparse
        )
        for sparse in (False, True)
    ]
    of_kind[1] += exchanged_bytes(request)
    sparse = len(g.sparse_layers)
    dense = g.num_layers - sparse
    largest = max(bytes_ for bytes_, count in zip(of_kind, (dense, sparse), strict=True) if count)
    return dense * of_kind[0] + sparse * of_kind[1], largest


def exchanged_bytes(request: MemoryRequest) -> int:
    """Bytes that a layer keeps more for each token because its experts are on several ranks.

    With H hidden and k choices of a token:

        fast, invariant   2 · s · k · H     the rows that came from other ranks; outputs, as they come back
        reference         (s - 4) · k · H   outputs, in place of float32 copies; it keeps rows anyway
        every table       12 · k            places

    This is for an even load. A rank whose experts get more tokens keeps more.
    """
    g, s = request.geometry, request.dtype.itemsize
    if request.expert_parallel == 1:
        return 0
    rows = 2 * s
    if request.table == "reference":
        rows = s - FLOAT32
    return g.experts_per_token * (rows * g.hidden_size + 12)


def _flight(request: MemoryRequest) -> int:
    """Elements of the dtype for each token that the backward pass of a layer's MLP needs at once.

    Beside the gradients of the two factors, experts need rows of the gradient, gathered for each
    choice, and the inner values times the weights. Rows that travel exist on both ways.
    """
    g, table = request.local, request.table
    dense = 2 * g.intermediate_size * (len(g.sparse_layers) < g.num_layers)
    rows = g.hidden_size + 4 * g.moe_intermediate_size
    if table == "reference":  # it drops what it kept of the rows as it goes back
        rows = 2 * g.moe_intermediate_size
    if request.expert_parallel > 1:
        rows += 2 * g.hidden_size
    return max(dense, g.experts_per_token * rows)


def kept_activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations at the end of the forward pass.

    Add to the layers' (their two inputs alone, if they are computed again) the tensors that the
    last norm keeps. Add the rows that the logits are made of.
    """
    g, s = request.local, request.dtype.itemsize
    if request.activations is not None:
        inputs, recomputed = s * g.hidden_size, request.gradient_checkpointing
        return request.activations.kept(request.tokens, inputs, recomputed)
    layers, norm = _layer_bytes(request)[0], s
    if request.gradient_checkpointing:
        layers = g.num_layers * 2 * s * g.hidden_size
    if request.table == "reference":
        norm = FLOAT32 * (1 + (not request.lora))
    return request.tokens * (layers + (norm + s) * g.hidden_size)


def backward_activation_bytes(request: MemoryRequest) -> int:
    """Bytes of activations and their gradients where the backward pass goes through the last
    layer's MLP.

    With checkpointing, that layer's activations are there again. In flight are the gradients of the
    layer's output, of its input (under adapters with its float32 copy), and of the MLP's two
    factors. The last norm's tensors are gone. (The reference makes a weight's gradient from float32
    copies; what they take has gone with the MLP's activations by then.)
    """
    g, s = request.local, request.dtype.itemsize
    if request.activations is not None:
        # A layer's activations, if they are computed again, and as many gradients of them.
        again = 1 + request.gradient_checkpointing
        largest = request.activations.largest(request.tokens)
        return kept_activation_bytes(request) + again * largest
    kept, largest = _layer_bytes(request)
    if request.gradient_checkpointing:
        kept = g.num_layers * 2 * s * g.hidden_size + largest
    copied = FLOAT32 * bool(request.lora and s < FLOAT32)
    flight = s * _flight(request) + (2 * s + copied) * g.hidden_size
    return request.tokens * (kept + flight)


def logits_bytes(request: MemoryRequest) -> int:
    """Bytes of the largest moment of the output head, in which logits of a chunk exist.

        fast         one table of chunk × vocab in the parameters' dtype, in which their gradient is made
        invariant    the logits, a copy without padding, their gradient; where ranks split the vocabulary,
                     the logits of all ranks, as they come, as rows, and without padding
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
    gathered = 0
    if request.table == "invariant" and request.local != request.geometry:
        gathered = 3 * s * table * request.world_size
    return max(tables * table, s * table + gathered) + FLOAT32 * matrix


def send_buffer_bytes(request: MemoryRequest) -> int:
    """Bytes of the buffers that a rank sends from. For each kind of server there are two for a
    bucket each. A process of whole parameters needs them for tensors that do not lie in place.
    Sharded ranks have one more for the rows that they hand to each other.
    """
    return sum(
        buffer_bytes(layout, request.world_size, request.held, request.packs).total
        for layout in request.layouts
    )


def lasting_items(request: MemoryRequest) -> dict[str, int]:
    """Bytes that are there in every moment, by what they are for."""
    g, s = request.geometry, request.dtype.itemsize
    parameters, trained = parameter_count(g), request.trained
    masters = request.trains_masters
    adapters, copies = s * trained * bool(request.lora), not (request.single_copy or masters)
    on_device, references = not request.offload, int(request.reference)
    staged = min(BUCKET_ELEMENTS, request.of_rank(trained)) * request.offload
    state_bytes = FLOAT32 * (not masters) + request.moment_bytes / trained  # of an element
    return {
        "weights (this trainer's own copy)": adapters + copies * request.of_rank(s * parameters),
        MASTERS: (on_device or masters) * request.of_rank(FLOAT32 * trained),
        MOMENTS: on_device * request.of_rank(request.moment_bytes),
        "masters and moments on their way": int(SLOTS * state_bytes * staged),
        "reference model": references * request.of_rank(s * parameters),
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
    A tied matrix's gradients are summed in two places, by its two uses.
    """
    g, s, ranks = request.geometry, request.dtype.itemsize, request.world_size
    matrix = request.local.vocab_size * g.hidden_size
    twice = matrix * (request.sums and g.tie_word_embeddings)
    gradients = {GRADIENTS: FLOAT32 * (request.of_rank(request.trained) + twice)}
    root, layer = root_parameter_count(g), layer_parameter_count(g, request.expert_parallel)
    embedding = g.vocab_size * g.hidden_size * (not g.tie_word_embeddings)
    head, gathered = FLOAT32 * matrix * (not request.lora), {}
    if request.sharded:
        gathered = {"output matrix, gathered": s * (root - embedding)}
    states = s * request.tokens * g.hidden_size  # the gradient of the logits' inputs
    loss = {
        ACTIVATIONS: kept_activation_bytes(request) + states,
        "logits and their gradient": logits_bytes(request),
        **gathered,
    }
    layers = {ACTIVATIONS: backward_activation_bytes(request), **gathered}
    end: dict[str, int] = {}
    if request.sharded:
        # A sum in the order of the ranks needs the gradients of the others beside its own.
        ordered = int(request.table == "invariant")
        # Two layers whole (one computes, one comes), and float32 gradients of two: one is computed,
        # one is reduced.
        layers["layers, gathered and reduced"] = (2 * s + (2 + ordered) * FLOAT32) * layer
        layers["output matrix's gradient"] = head
        # Both matrices' gradients, and one of them as it is sent and as it comes back.
        reduced = max(root - embedding, embedding)
        end = {
            "embedding and output matrix, reduced": FLOAT32
            * (root + (1 + ordered) * reduced + reduced // ranks),
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


LEAST_SERVER_WORKSPACE = 2 << 30
"""Bytes that a vLLM server needs beside its weights, for keys, values and activations."""
BUDGETS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024)
"""Tokens per microbatch to choose from: a GPU does not get faster beyond the first, below the last its
products are small."""
OUTSIDE_SHARE = 2 << 30
"""Bytes that a vLLM process takes beyond its --gpu-memory-utilization: the CUDA context and
captured graphs."""
PLANNED_SHARE = 0.92
"""Share of the free memory: the plan is right within a few per cent, and the allocator's blocks do not
fit into each other."""


class MemoryShortage(TrainerError):
    """The training would not fit.

    The message names the largest items, what is free, and what to change.
    """


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for.

    Attributes:
        lasting: what is there all the time.
        moments: by the name of a moment, what is there in it beside that.
    """

    lasting: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]

    @property
    def greatest(self) -> str:
        """The moment of a step in which the most is there."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        """The items that exist together in the greatest moment, the largest first."""
        sizes = {**self.lasting, **self.moments[self.greatest]}
        return tuple(
            sorted(
                ((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1]
            )
        )

    @property
    def total(self) -> int:
        """Bytes in the greatest moment."""
        return sum(size for _, size in self.items)

    @property
    def certain(self) -> int:
        """Bytes that are taken however long the sequences turn out to be."""
        rests = [
            sum(size for name, size in items.items() if name != ACTIVATIONS)
            for items in self.moments.values()
        ]
        return sum(self.lasting.values()) + max(rests)

    def table(self) -> str:
        """One line an item, for the log."""
        rows = [f"  {size / 2**30:8.2f} GiB  {name}" for name, size in self.items]
        return "\n".join(
            [*rows, f"  {self.total / 2**30:8.2f} GiB  in all, in the {self.greatest}"]
        )


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """The bytes of each part of a training on one device."""
    return MemoryPlan(lasting_items(request), moments(request))


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes free and in all: of the GPU, or of RAM within the limit of this process's control
    group.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return free_host_memory()


@dataclass(frozen=True)
class Room:
    """Memory that is free for a training, in bytes.

    Attributes:
        device: of the parameters.
        free, total: of the device. Memory that vLLM lends in a turn counts as free.
        host: free memory of this machine, which all its ranks share.
        ranks_here: ranks of this trainer on this machine.
        lent: the part of `free` that vLLM takes back between turns; 0 without turns.
        server: memory of the device that is left to a vLLM server which the trainer will start
            there. It is not in `free`.
        server_share: --gpu-memory-utilization of a vLLM server that runs on the device; None if
            that is not known.
    """

    device: torch.device
    free: int
    total: int
    host: int
    ranks_here: int = 1
    lent: int = 0
    server: int = 0
    server_share: float | None = None

    def holds(self, request: MemoryRequest, share: float = 1.0) -> bool:
        """Return whether a training fits into `share` of the free memory, of the device and of the
        host.
        """
        plan = plan_memory(request)
        on_device = (
            plan.total if self.device.type == "cuda" else plan.certain
        ) <= share * self.free
        between_turns = not self.lent or sum(plan.lasting.values()) <= self.free - self.lent
        return on_device and between_turns and self.host_needed(request) <= share * self.host

    def host_needed(self, request: MemoryRequest) -> int:
        """Bytes of host memory that all ranks on this machine take together."""
        return host_bytes(request) * self.ranks_here


def remedies(request: MemoryRequest, room: Room) -> list[str]:
    """Flags and devices with which the training fits, and the GiB needed then.

    If nothing makes it fit, the flags that lower the need.
    """
    changes = _flag_changes(request, room)
    enough = [(flags, changed) for flags, changed in changes if room.holds(changed)]
    shortest = [
        (flags, changed)
        for flags, changed in enough
        if not any(set(other) < set(flags) for other, _ in enough)
    ]
    changed_plans = [
        (" ".join(flags), changed, room) for flags, changed in shortest[:3]
    ] + _larger_changes(request, room)
    if room.server:
        alone = replace(room, free=room.free + room.server, server=0)
        if alone.holds(request):
            changed_plans.insert(0, ("--vllm-gpus with the number of another GPU", request, alone))
    lower = _lower_share(request, room)
    if not changed_plans and not lower:
        now = plan_memory(request).total
        single = [(flags[0], changed, room) for flags, changed in changes if len(flags) == 1]
        changed_plans = [one for one in single if plan_memory(one[1]).total < now]
    lines = lower + [f"{text} ({_needs(changed, where)})" for text, changed, where in changed_plans]
    return lines or ["a device with more memory"]


def _lower_share(request: MemoryRequest, room: Room) -> list[str]:
    """The share of the GPU with which vLLM leaves enough for a training in its memory; empty if
    there is none.
    """
    if (
        room.device.type != "cuda"
        or not request.single_copy
        or room.host_needed(request) > room.host
    ):
        return []
    share = fitting_server_share(request, room)
    if share is None:
        return []
    return [f"start vLLM with --gpu-memory-utilization {share:.2f} or less"]


def fitting_server_share(request: MemoryRequest, room: Room) -> float | None:
    """The largest --gpu-memory-utilization of vLLM beside which a single copy fits, in hundredths.

    The server's present share is lowered by what is missing now. This counts what other programs
    and vLLM itself take beyond that share. Without a present share, the plan gets the rest of the
    device.

    Returns:
        None if the rest would not hold vLLM's weights, and some keys and values.
    """
    needed = plan_memory(request).total
    share = (room.total - needed - OUTSIDE_SHARE) / room.total
    if room.server_share is not None:
        share = room.server_share - (needed - room.free) / room.total
    share = (
        math.floor(100 * share + 1e-6) / 100
    )  # the decimal fraction that was given may lie below its hundredth
    weights = request.dtype.itemsize * parameter_count(request.geometry) / request.world_size
    if share * room.total <= weights + LEAST_SERVER_WORKSPACE:
        return None
    return share


def _flag_changes(
    request: MemoryRequest, room: Room
) -> list[tuple[tuple[str, ...], MemoryRequest]]:
    """Every combination of flags that lower the need, the fewest flags first."""
    single: list[tuple[str, dict[str, Any]]] = []
    if not request.gradient_checkpointing:
        single.append(("--gradient-checkpointing", {"gradient_checkpointing": True}))
    fewer = max(request.longest, request.tokens // 2)
    if fewer < request.tokens:
        single.append((f"--tokens-per-microbatch {fewer}", {"tokens_per_microbatch": fewer}))
    if ways := _expert_parallel_ways(request):
        single.append((f"--expert-parallel {ways}", {"expert_parallel": ways}))
    if room.device.type == "cuda" and request.lora is None:
        if not request.offload:
            single.append(("--optimizer-offload on", {"offload": True}))
        if request.optimizer == "adamw":
            single.append(("--optimizer adamw-8bit", {"optimizer": "adamw-8bit"}))
    return [
        (
            tuple(flag for flag, _ in chosen),
            replace(request, **{key: value for _, one in chosen for key, value in one.items()}),
        )
        for count in range(1, len(single) + 1)
        for chosen in combinations(single, count)
    ]


def _expert_parallel_ways(request: MemoryRequest) -> int:
    """The ranks that could share the experts in place of FSDP2; 0 if they do, or cannot."""
    experts, ranks = request.geometry.num_experts, request.world_size
    if not request.sharded or request.expert_parallel > 1 or not experts or experts % ranks:
        return 0
    return ranks


def _larger_changes(request: MemoryRequest, room: Room) -> list[tuple[str, MemoryRequest, Room]]:
    """The smallest number of GPUs that suffices, fewer with 8-bit moments, and adapters in place of
    all weights.
    """
    larger: list[tuple[str, MemoryRequest, Room]] = []
    if (
        room.device.type == "cuda"
        and request.lora is None
        and not request.single_copy
        and not room.server
    ):
        in_8_bits = replace(request, optimizer="adamw-8bit")
        spread = [
            _spread(request, room),
            _spread(in_8_bits, room) if request.optimizer == "adamw" else None,
        ]
        if spread[0] is not None:
            larger.append((f"{spread[0][0].world_size} GPUs", *spread[0]))
        if spread[1] is not None and (
            spread[0] is None or spread[1][0].world_size < spread[0][0].world_size
        ):
            larger.append(
                (f"{spread[1][0].world_size} GPUs and --optimizer adamw-8bit", *spread[1])
            )
    if request.lora is None:
        adapters = replace(request, lora=(16, PROJECTIONS), single_copy=False, offload=False)
        if room.holds(adapters):
            larger.append(("--weight-bridge-mode lora_only", adapters, room))
    return larger


def _spread(request: MemoryRequest, room: Room) -> tuple[MemoryRequest, Room] | None:
    """The training over the smallest number of GPUs like this one on which it fits; None if there
    is none up to 64 times.
    """
    for times in (2, 4, 8, 16, 32, 64):
        wider = replace(room, ranks_here=times * room.ranks_here)
        wide = replace(request, world_size=times * request.world_size)
        if wide.expert_parallel > 1 and wide.geometry.num_experts % wide.world_size:
            continue  # the experts cannot be divided
        for offload in sorted({False, request.offload}):
            if wider.holds(way := replace(wide, offload=offload)):
                return way, wider
    return None


def _needs(request: MemoryRequest, room: Room) -> str:
    """`100.61 GiB then`, or both sizes if host memory is needed too."""
    size = f"{plan_memory(request).total / 2**30:.2f} GiB then"
    host = room.host_needed(request)
    if not host:
        return size
    return f"{size}, and {host / 2**30:.2f} GiB of host memory"


def token_budget(request: MemoryRequest, free: int) -> int:
    """The value of --tokens-per-microbatch if it is not given: the largest of BUDGETS whose plan
    leaves some memory free.

    It is at least the longest sequence, which has a microbatch of its own anyway.
    """
    fitting = (
        b
        for b in BUDGETS
        if plan_memory(replace(request, tokens_per_microbatch=b)).total <= PLANNED_SHARE * free
    )
    return max(request.longest, next(fitting, BUDGETS[-1]))


def require_memory(request: MemoryRequest, room: Room) -> MemoryPlan:
    """The plan, if it fits.

    On a GPU everything must fit. On a CPU it is enough that the certain part does. RAM is taken
    page by page as sequences really get long, and few of them are as long as they may be.

    Raises:
        MemoryShortage: it does not fit into the memory of the device or of the host.
    """
    plan, needed = plan_memory(request), room.host_needed(request)
    if (plan.total if room.device.type == "cuda" else plan.certain) > room.free:
        biggest = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items[:3])
        raise MemoryShortage(
            f"the training needs about {plan.total / 2**30:.2f} GiB{_saved_already(request)} and "
            f"{room.free / 2**30:.2f} of {room.total / 2**30:.2f} GiB are free on "
            f"{room.device}{_beside(room)}. The largest items are {biggest}; what helps: "
            f"{', or '.join(remedies(request, room))}; --skip-memory-check tries it all the same"
        )
    require_between_turns(plan, room.free - room.lent, room.lent)
    if needed > room.host:
        on_gpu = plan_memory(replace(request, offload=False)).total
        raise MemoryShortage(
            f"{request.offloadable} in host memory (--optimizer-offload) need "
            f"{needed / 2**30:.2f} GiB, and {room.host / 2**30:.2f} are free. With them on "
            f"{room.device} the training needs {on_gpu / 2**30:.2f} GiB, and "
            f"{room.free / 2**30:.2f} are free; what helps: "
            f"{', or '.join(remedies(request, room))}; --skip-memory-check tries it all the same"
        )
    return plan


def _beside(room: Room) -> str:
    """The memory that a server of the trainer's needs, if it shares the device."""
    if not room.server:
        return ""
    return f" beside the {room.server / 2**30:.2f} GiB that the vLLM server needs there"


def _saved_already(request: MemoryRequest) -> str:
    """The ways to save memory that a need counts already."""
    ways = [f"{request.offloadable} in host memory"] * request.offload
    ways += ["layers computed again in the backward pass"] * request.gradient_checkpointing
    if not ways:
        return ""
    return f" ({', '.join(ways)})"


def require_between_turns(plan: MemoryPlan, free: int, lent: int) -> None:
    """Refuse what would leave vLLM no room for its keys and values between the trainer's turns.

    Args:
        free: bytes that are free beside them.
        lent: bytes of keys and values that vLLM gives in a turn; 0 without turns.

    Raises:
        MemoryShortage: what lasts does not fit beside them.
    """
    lasting = sum(plan.lasting.values())
    if lent and lasting > free:
        raise MemoryShortage(
            f"between its turns (--colocate) the training keeps {lasting / 2**30:.2f} GiB, and "
            f"beside vLLM's keys and values only {free / 2**30:.2f} are free. Add "
            "--optimizer-offload on, or start vLLM with a lower --gpu-memory-utilization. "
            "--skip-memory-check tries it all the same"
        )
