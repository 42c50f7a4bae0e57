"""Made-up models and batches for a trainer of several ranks, and a few steps that every way of
spreading must equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from example_trainer.batch.groups import parse_batch
from example_trainer.batch.packing import pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.models import Decoder, Geometry
from example_trainer.models.router import RouterLosses
from example_trainer.process import StopSignal
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import guarded_step, make_objective
from tests.geometries import geometry_of

STEPS = 3
SEQ_LEN = 48
TOKENS = 90
"""In a bin; a few sequences, so that there are several bins and ranks get different ones."""


MIXTURE = 11
"""The number of the case that is a mixture of experts."""


@dataclass
class Mesh:
    """One rank's view of a line of ranks, as FsdpShards sees it."""

    rank: int
    ranks: int

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.ranks


def make_geometry(seed: int) -> Geometry:
    """A small Qwen3-MoE as case MIXTURE; else a small Qwen3, Qwen2 or Llama, by turns. The random
    sizes can be shared by two ranks. There are few and many key/value heads, odd vocabularies (one
    so small that the second rank has padding only), biases, tied and untied.
    """
    if seed == MIXTURE:
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return geometry_of("Qwen3Moe", 2, 32, 20, 4, 2, 8, 61, **sizes)
    rng = random.Random(seed)
    architecture = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")[seed % 3]
    heads = rng.choice([2, 4])
    llama_biases = architecture == "LlamaForCausalLM" and rng.random() < 0.7
    return Geometry(
        architecture=architecture,
        vocab_size=rng.choice([29, 61, 97, 131]),
        hidden_size=rng.choice([24, 32, 40]),
        intermediate_size=rng.choice([20, 36]),
        num_layers=2,
        num_heads=heads,
        num_kv_heads=rng.choice([1, 2]),
        head_dim=rng.choice([8, 12]),
        max_positions=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        qkv_bias=architecture == "Qwen2ForCausalLM" or llama_biases,
        o_bias=llama_biases,
        mlp_bias=llama_biases,
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=rng.random() < 0.5,
    )


def make_whole(geometry: Geometry, seed: int) -> Decoder:
    """A one-process model with random weights, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(geometry, torch.float32)
    for parameter in model.parameters():
        parameter.data.copy_(
            0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
        )
    return model


def make_batch(seed: int, vocab_size: int) -> list[dict[str, Any]]:
    """Groups as the rollout service hands them out; 11 sequences, so that ranks get different
    numbers of bins.
    """
    rng = random.Random(seed)
    groups = []
    for size in (4, 4, 3):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(18, 24))]
        responses = [
            [rng.randrange(vocab_size) for _ in range(rng.randint(1, 15))] for _ in range(size)
        ]
        groups.append(
            {
                "tokens": [prompt + response for response in responses],
                "masks": [[-100] * len(prompt) + response for response in responses],
                "scores": [float(i % 2) for i in range(size)],
                "inference_logprobs": [
                    [1.0] * len(prompt) + [-3.4 + rng.gauss(0, 0.3) for _ in r] for r in responses
                ],
            }
        )
    return groups


def make_config(seed: int) -> TrainerConfig:
    """Options that exercise what ranks must agree on. They are clipping of the norm, divergence
    from a reference and recomputation; several updates of a batch, corrections by sequence, a
    gradient of the entropy.
    """
    return TrainerConfig(
        model_name="-",
        seq_len=SEQ_LEN,
        batch_size=4,
        lr=0.02,
        adam_eps=1e-3,
        max_grad_norm=0.2 if seed % 2 else 0.0,
        weight_decay=0.05,
        kl_coef=0.05 if seed % 4 == 1 else 0.0,
        gradient_checkpointing=seed % 4 == 2,
        ppo_epochs=2 if seed % 3 == 0 else 1,
        minibatches=2 if seed % 3 == 0 else 1,
        correction="sequence_truncate" if seed % 2 else "token_truncate",
        entropy_coef=0.01 if seed % 4 == 3 else 0.0,
        router_balance_coef=0.05,
        router_z_coef=0.02,
        temperature=0.9,
        logprob_chunk=16,
    )


def make_optimizer(model: Decoder, config: TrainerConfig) -> MasterAdamW:
    """As the trainer makes it."""
    optimizer = MasterAdamW(
        model,
        lr=config.lr,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        shards=model.shards,
    )
    model.arithmetic.sums = optimizer.sums
    if model.arithmetic.routers is not None:
        model.arithmetic.routers.losses = RouterLosses(
            config.router_balance_coef, config.router_z_coef
        )
    return optimizer


def whole_state(optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    """Masters and moments as one process would hold them. Collective."""
    return {
        key: optimizer.shards.whole(key.partition(".")[2], part)
        for key, part in optimizer.state_dict().items()
    }


def take_steps(
    model: Decoder,
    optimizer: MasterAdamW,
    reference: Decoder | None,
    config: TrainerConfig,
    seed: int,
    rank: int = 0,
    ranks: int = 1,
) -> list[dict[str, float]]:
    """Train up to STEPS steps, as one of several data-parallel ranks.

    Returns:
        each step's figures, the norm of the gradient among them.
    """
    figures = []
    model.gradient_checkpointing = config.gradient_checkpointing
    while optimizer.steps < STEPS:
        batch = parse_batch(
            make_batch(seed * 100 + optimizer.steps, model.geometry.vocab_size),
            SEQ_LEN,
            model.geometry.vocab_size,
        )
        packed = pack_batch(
            batch,
            tokens_per_bin=TOKENS,
            ranks=ranks,
            normalisation=config.method.loss_normalisation,
            max_tokens=config.seq_len,
            share_prefixes=seed % 2 == 0 and type(model) is Decoder,
            minibatches=config.minibatches,
        )
        mine, frozen = [shares[rank] for shares in packed], reference if config.kl_coef else None
        row = guarded_step(
            model, optimizer, mine, config, make_objective(config), StopSignal(), frozen
        )
        optimizer.write_weights()
        figures.append(comparable(row))
    return figures


def comparable(row: dict[str, float | None]) -> dict[str, float]:
    """Return a batch's figures, unknown ones as -1; without the classes of a histogram, at whose
    edges a token can be in either.
    """
    chosen = {
        name: value for name, value in row.items() if not name.startswith(("ratio_p", "ratio_max"))
    }
    return {name: -1.0 if value is None else value for name, value in chosen.items()}
