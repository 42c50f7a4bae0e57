"""Data parallelism with sharded parameters (ZeRO stage 3, arXiv:1910.02054) by torch's FSDP2.

Each rank works on its own bins of tokens and holds a range of rows of every parameter and of its
moments. A layer's parameters are whole only while that layer computes. The parameters of a trained
model are its float32 masters. FSDP2 rounds them to the dtype that the model computes in whenever it
gathers them, and sums their gradients over bins and ranks in float32. It sums, and does not
average: the loss weights count in the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from example_trainer.models.decoder import Decoder
from example_trainer.models.ops import choose_operations
from example_trainer.models.shards import (
    PassGradients,
    Shards,
    Sums,
    add_in_order,
    rows_of,
    sum_in_order,
)
from example_trainer.models.transformers_layout import TransformersGeometry
from example_trainer.parallel.experts import expert_mesh, spread_experts
from vllm_patching.weights.families import Geometry, parameters


class FsdpShards(Shards):
    """Rows of each parameter in equal chunks, the last ones shorter or empty, as `torch.chunk` cuts
    them.

    Attributes:
        divided: names of parameters whose rows in the model are one part of the whole's rows, and
            the number of parts.
    """

    spread = True
    masters = True

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        self.layout = f"FSDP2 over {self._size} ranks"
        self._whole_shapes: dict[str, tuple[int, ...]] = {}
        self.divided: tuple[Collection[str], int] = ((), 1)

    def sums(self, model: nn.Module) -> Sums:
        return PassGradients()

    def local(self, parameter: Tensor) -> Tensor:
        tensor = parameter.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        names, parts = self.divided
        shape = tuple(parameter.shape)
        if name in names:
            shape = (parts * shape[0], *shape[1:])
        self._whole_shapes[name] = shape
        return self._whole_shapes[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._whole_shapes[name]

    def take(self, name: str, whole: Tensor, block: int = 1) -> Tensor:
        rows = self.rows(name)
        return whole[rows.start : rows.stop]

    def rows(self, name: str) -> range:
        first, count = rows_of(self._whole_shapes[name][0], self._rank, self._size)
        return range(first, first + count)

    def whole(self, name: str, local: Tensor) -> Tensor:
        shape = self._whole_shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        return sharded.full_tensor()

    def local_shape(self, name: str, rank: int, block: int = 1) -> tuple[int, ...]:
        rows, *width = self._whole_shapes[name]
        count = rows_of(rows, rank, self._size)[1]
        return (count, *width[:-1], *(last // block for last in width[-1:]))

    def joined(self, name: str, parts: Sequence[Tensor], block: int = 1) -> Tensor:
        return torch.cat(list(parts))

    def ranges(self, name: str, local: Tensor) -> Sequence[tuple[int, Tensor]]:
        return [(self.rows(name).start * math.prod(self._whole_shapes[name][1:]), local)]

    def total(self, values: Tensor) -> Tensor:
        return add_in_order(values, self._mesh.get_group())

    def sum_figures(self, figures: Tensor) -> Tensor:
        return self.total(figures)

    def release(self, model: nn.Module) -> None:
        if isinstance(model, FSDPModule):
            # the root keeps its parameters whole for a backward pass that does not come
            model.reshard()


def sharded_decoder(
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    trained: bool = True,
    deterministic: bool = False,
    expert_parallel: int = 1,
) -> Decoder:
    """A decoder with this rank's shards alone, uninitialised. Collective.

    Args:
        dtype: that the model computes in.
        trained: the parameters are float32 masters. A frozen model has them in `dtype`.
        deterministic: the forward pass has the bits of one process, and gradients are added in the
            order of the ranks.
        expert_parallel: ranks that share a layer's experts and send each other tokens; see
            `require_expert_parallel`.

    Raises:
        ModelError: a part of the model has no such operations.
    """
    mesh = init_device_mesh(device.type, (world_size,))
    ops = choose_operations(device, dtype, deterministic)
    held = torch.promote_types(dtype, torch.float32) if trained else dtype
    if isinstance(geometry, TransformersGeometry):
        from example_trainer.models.transformers_model import TransformersModel

        whole = TransformersModel(geometry, held, computes_in=dtype)
        whole.arithmetic.ops = ops
        frozen = _keep_whole(whole, dtype, device, trained)
        _shard(whole, whole.parts.layers, mesh, dtype, frozen)
        return whole
    model = Decoder(geometry, held, "meta", ops=ops)
    alone = None if geometry.tie_word_embeddings else model.model.embed_tokens
    replicas = None
    if expert_parallel > 1:
        table = expert_mesh(device, world_size, expert_parallel)
        replicas = spread_experts(model, table), table["replicas"]
    _shard(model, model.model.layers, mesh, dtype, alone=alone, replicas=replicas)
    if deterministic:
        for module in _units(model):
            module.set_custom_reduce_scatter(cast(Any, OrderedReduceScatter()))
    model.to_empty(device=device)
    model.make_rotary(dtype, device)
    return model


class OrderedReduceScatter:
    """Adds the ranks' gradients in the order of the ranks.

    Every rank sends each other rank its part, as a reduce-scatter does, and adds the parts itself.
    It takes the memory of its gradients once more. The collectives of NCCL and Gloo choose an order
    by the size and the machine.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        if async_op or op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed at once, not {op} (async_op={async_op})")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        output_tensor.copy_(sum_in_order(parts.chunk(group.size())))


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _shard(
    model: Decoder,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    whole: Collection[nn.Parameter] = (),
    alone: nn.Module | None = None,
    replicas: tuple[Sequence[nn.Module], DeviceMesh] | None = None,
) -> None:
    """Spread a model's parameters: each layer is a unit of FSDP2, and the rest is another.

    Args:
        whole: parameters that each rank holds whole.
        alone: a module that is whole in the forward pass alone, and is reduced by itself.
        replicas: modules that hold a part of each parameter already, and the ranks that hold the
            same part and share it.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(whole))
    model.shards = shards = FsdpShards(mesh)
    if replicas is not None:
        modules, ranks = replicas
        for held in modules:
            fully_shard(held, mesh=ranks, mp_policy=policy)
        shards.layout += f", experts over {mesh.size() // ranks.size()}"
        shards.divided = _names(model, modules), mesh.size() // ranks.size()
    for layer in layers:
        shard(layer)
    if alone is not None:
        shard(alone).set_unshard_in_backward(False)
    shard(model)
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for name, parameter in model.named_parameters():
        shards.whole_shape(name, parameter)


def _names(model: nn.Module, modules: Sequence[nn.Module]) -> frozenset[str]:
    """The names of the modules' parameters in the model."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    return frozenset(name for name, one in model.named_parameters() if id(one) in own)


def _keep_whole(
    model: Decoder, dtype: torch.dtype, device: torch.device, trained: bool
) -> list[nn.Parameter]:
    """Return the parameters outside of the text part, which each rank holds whole in `dtype`.

    FSDP2 gathers parameters of one dtype: a model that is not trained has no others.
    """
    planned = parameters(model.geometry)
    frozen = []
    for name, parameter in model.named_parameters():
        if planned[name].frozen:
            parameter.data = parameter.data.to(device, dtype)
            frozen.append(parameter)
        elif not trained:
            parameter.data = parameter.data.to(dtype)
    return frozen
