"""Learn the layouts of tiny random models from the real vLLM, and check each against a real load.

Run as a program: prints for each case and rank the slices, or the reason that there are none.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.tiny_models import make_model
from vllm_patching.weights.sharding import LearnedShard
from vllm_patching.worker.learned_layout import LearnedLayout, learn_layout
from vllm_patching.worker.parameters import LayoutError, own_parameters


def assembled(shard: LearnedShard, checkpoint: dict[str, torch.Tensor]) -> torch.Tensor:
    """A parameter put together from its slices; padding is zero."""
    local = torch.zeros(math.prod(shard.shape))
    for piece in shard.slices:
        source = checkpoint[piece.source].reshape(-1)
        values = source.as_strided(piece.shape, piece.source_strides, piece.source_offset)
        local[piece.local_start : piece.local_start + values.numel()] = values.reshape(-1)
    return local.view(shard.shape)


def check(model: nn.Module, layout: LearnedLayout, checkpoint: dict[str, torch.Tensor]) -> None:
    """Compare the slices with what vLLM's own loader does."""
    parameters = own_parameters(model)
    assert all(bool(p.isnan().all()) for p in parameters.values()), "learning writes nothing"
    model.load_weights(iter(checkpoint.items()))  # type: ignore[operator]
    tensors = {**own_parameters(model), **dict(model.named_buffers())}
    for shard in layout.shards:
        loaded = tensors[shard.name].data.float()
        assert torch.equal(loaded, assembled(shard, checkpoint)), shard.name
    assert parameters.keys() <= {shard.name for shard in layout.shards}


def learn(name: str, ranks: list[tuple[int, int]]) -> dict[str, Any]:
    """The layout of one model on some ranks."""
    folder = tempfile.mkdtemp()
    checkpoint = make_model(name, Path(folder))
    meta = {key: torch.empty_like(value, device="meta") for key, value in checkpoint.items()}
    model_config = ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64
    )
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
    answers = {}
    for size, rank in ranks:
        with set_current_vllm_config(config):
            group = tensor_parallel_group(folder)
            group.world_size, group.rank_in_group = size, rank
            make, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
            config.compilation_config.static_forward_context.clear()
            with set_default_torch_dtype(torch.float32):
                model = make(vllm_config=config, prefix="")
            model.load_weights(iter(checkpoint.items()))  # some loaders make parameters
            for parameter in own_parameters(model).values():
                parameter.data.fill_(math.nan)
            try:
                layout = learn_layout(model, meta)
                check(model, layout, checkpoint)
                answers[f"{name} {size} {rank}"] = described(layout)
            except LayoutError as error:
                answers[f"{name} {size} {rank}"] = {"error": str(error)}
            group.world_size, group.rank_in_group = 1, 0
    return answers


def described(layout: LearnedLayout) -> dict[str, Any]:
    shards = {
        shard.name: {"shape": shard.shape, "slices": [vars(piece) for piece in shard.slices]}
        for shard in layout.shards
    }
    return {"shards": shards, "padding": layout.padding, "unused": layout.unused}


def tensor_parallel_group(folder: str) -> Any:
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        if parallel_state._EP is None:  # made only if the first model has experts
            parallel_state._EP = parallel_state.init_model_parallel_group(
                [[0]], 0, "gloo", group_name="ep"
            )
    return parallel_state.get_tp_group()


def main() -> None:
    asked: dict[str, list[tuple[int, int]]] = json.loads(sys.argv[1])
    answers: dict[str, Any] = {}
    for name, ranks in asked.items():
        answers |= learn(name, ranks)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
