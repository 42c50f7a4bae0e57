"""A tiny model whose training is the same every time: for tests of what is saved, and of what goes
on from it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from example_trainer.models import Decoder, Geometry, load_model, save_model
from example_trainer.training.optimizer import MasterAdamW

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}


def make_start(folder: Path) -> Path:
    """A checkpoint to begin with."""
    torch.manual_seed(0)
    model = Decoder(Geometry.from_config(CONFIG), torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    save_model(model, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def load(folder: Path, offload: bool = False) -> tuple[Decoder, MasterAdamW]:
    model = load_model(str(folder), torch.bfloat16)
    return model, MasterAdamW(
        model, lr=0.02, schedule="cosine", total_steps=10, offload=offload, bucket_elements=64
    )


def train(model: Decoder, optimizer: MasterAdamW, until: int, updates: int = 1) -> None:
    while optimizer.steps < until:
        for _ in range(updates):
            give_gradient(model, optimizer)
            optimizer.update()
            optimizer.write_weights()
        optimizer.end_step()


def give_gradient(model: Decoder, optimizer: MasterAdamW) -> None:
    tokens = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(optimizer.steps))
    model.logits(tokens).float().logsumexp(-1).mean().backward()
