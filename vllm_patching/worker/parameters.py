"""The parameters of the model in a vLLM worker, compared with the family's plan."""

from __future__ import annotations

import torch

from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_EXPERTS = ".experts.routed_experts."


class LayoutError(RuntimeError):
    """The parameters that vLLM built are not the ones that the sharding plan expects.

    Attributes:
        computed: checkpoint tensors that vLLM's loader computes with, where the layout was learned.
    """

    computed: frozenset[str] = frozenset()


def own_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the model's parameters, by their names without modules that vLLM puts in between.

    These are LoRA's wrappers around layers, and the module that holds the weights of experts. vLLM
    may list a tied embedding a second time under the head's name.
    """
    parameters = {
        name.replace(".base_layer.", ".").replace(_EXPERTS, ".experts."): parameter
        for name, parameter in model.named_parameters()
    }
    if _OUTPUT in parameters and parameters[_OUTPUT] is parameters.get(_EMBEDDING):
        del parameters[_OUTPUT]
    return parameters


def build_manifest(
    geometry: Geometry, parameters: dict[str, torch.nn.Parameter], tp_rank: int, tp_size: int
) -> Manifest:
    """Return the manifest of a rank, if vLLM built exactly the parameters that the plan names.

    Raises:
        LayoutError: a parameter is missing, unexpected, of another shape or not contiguous; all
            differences are named.
    """
    specs = {spec.name: spec for spec in plan_shards(geometry, tp_rank, tp_size)}
    problems = [
        f"{name} is planned but vLLM has no such parameter"
        for name in specs.keys() - parameters.keys()
    ]
    problems += [f"{name} is in vLLM but not planned" for name in parameters.keys() - specs.keys()]
    for name in specs.keys() & parameters.keys():
        shape = tuple(parameters[name].shape)
        if shape != specs[name].shape:
            problems.append(f"{name} is planned as {specs[name].shape}, vLLM has {shape}")
        elif not parameters[name].is_contiguous():
            problems.append(f"{name} is not contiguous in vLLM")
    if problems:
        raise LayoutError(
            f"rank {tp_rank}: {len(problems)} of {len(specs)} parameters cannot be mapped: "
            f"{'; '.join(sorted(problems)[:8])}"
        )
    entries = (
        ManifestEntry(spec, dtype_name(parameters[name].dtype), str(parameters[name].device))
        for name, spec in specs.items()
    )
    return Manifest(tp_rank, tp_size, tuple(entries))


def tensor_parallel() -> tuple[int, int]:
    """Return this worker's rank and the number of ranks."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
