"""What a trainer of float32 sends to a server of bfloat16: its present values, rounded."""

from __future__ import annotations

import torch

from example_trainer.weight_bridge.slices import WeightSlices
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.protocol.sharding import ModelGeometry, plan_shards

GEOMETRY = {
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_float32_model_is_rounded_anew_for_each_update() -> None:
    specs = plan_shards(ModelGeometry.from_hf_config(GEOMETRY), 0, 1)
    manifest = Manifest(0, 1, tuple(ManifestEntry(spec, "bfloat16", "cpu") for spec in specs))
    torch.manual_seed(0)
    parameters = {spec.name: torch.randn(spec.full_shape) for spec in specs}
    slices = WeightSlices(manifest, parameters, True, torch.device("cpu"))
    assert set(slices.packed_names) == parameters.keys()
    for _ in range(2):
        for name, parameter in parameters.items():
            parameter.add_(1.0)
            slices.pack(name, parameter)
        sent = slices.tensors(0, 1 << 30)
        assert all(tensor.dtype is torch.bfloat16 for tensor in sent)
        assert torch.equal(
            torch.cat([tensor.flatten() for tensor in sent]).double().sum(),
            torch.cat([p.bfloat16().flatten() for p in parameters.values()]).double().sum(),
        )
        assert slices.num_bytes == sum(tensor.nbytes for tensor in sent)
        assert slices.summary().not_finite == ""
