"""Small models, made-up rollouts, and a training loop without a server: what tests of whole steps
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from example_trainer.batch.groups import Batch, TrainedSequence
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.deterministic.parity import ParityCheck, weights_sha
from example_trainer.models import Decoder, Geometry
from example_trainer.models.packing import Packing
from example_trainer.models.shards import GradientSums
from example_trainer.process import StopSignal
from example_trainer.training.optimizer import make_optimizer
from example_trainer.training.step import guarded_step, make_objective

SMALL = Geometry(
    architecture="Qwen3ForCausalLM", vocab_size=97, hidden_size=48, intermediate_size=40, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_positions=512, rms_norm_eps=1e-6, rope_theta=1e4, qk_norm=True,
    tie_word_embeddings=True,
)  # fmt: skip
QWEN3_LAYERS = Geometry(
    architecture="Qwen3ForCausalLM", vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_layers=4, num_heads=16,
    num_kv_heads=8, head_dim=128, max_positions=4096, rms_norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
    tie_word_embeddings=True,
)  # fmt: skip
"""Four layers of Qwen3-0.6B."""


def decoder_for(device: str, seed: int = 0, geometry: Geometry | None = None) -> Decoder:
    """A model with random weights whose logits are not all alike; on a GPU in bfloat16, with layers
    of a real size.
    """
    chosen = geometry or (SMALL if device == "cpu" else QWEN3_LAYERS)
    model = deterministic_decoder(
        chosen, torch.float32 if device == "cpu" else torch.bfloat16, device
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            inputs = parameter.shape[-1]
            parameter.copy_(noise * inputs**-0.5 if parameter.dim() >= 2 else 1 + 0.2 * noise)
    return model


def summed_gradients(model: Decoder, sequences: Sequence[Tensor], size: int) -> dict[str, Tensor]:
    """float32 gradient of each parameter for the sum of next-token logprobs, `size` sequences in
    each pass.
    """
    model.arithmetic.sums = sums = GradientSums(model)
    for first in range(0, len(sequences), size):
        part = sequences[first : first + size]
        packing = Packing([len(sequence) for sequence in part], part[0].device)
        hidden = model(torch.cat(list(part)), packing)
        targets = torch.cat([sequence.roll(-1) for sequence in part])
        logprobs, _ = model.chosen_logprobs(hidden, targets, packing, 128)
        logprobs.sum().backward()
    return sums.take()


def tree_logprobs(
    model: Decoder, tokens: Tensor, tree: Packing, together: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the tokens behind the first span of a tree, for each sequence that
    a further span ends.

    Args:
        tokens: of the tree.
        together: forward each span once, and not each sequence as a whole.
    """
    first, paths = tree.lengths[0], [rows.to(tokens.device) for rows in tree.rows_seen[1:]]
    packing, ids, places = tree, tokens, paths
    if not together:
        packing = Packing([len(path) for path in paths], tokens.device)
        ids = torch.cat([tokens[path] for path in paths])
        places = list(torch.arange(len(ids), device=tokens.device).split(packing.lengths))
    sources = torch.cat([place[first - 1 : -1] for place in places])
    targets = torch.cat([tokens[path[first:]] for path in paths])
    counts = Packing([len(path) - first for path in paths], tokens.device)
    hidden = model.arithmetic.ops.rows(model(ids, packing), sources, packing)
    logprobs, entropies = model.chosen_logprobs(hidden, targets, counts)
    return logprobs, entropies


def tree_gradients(
    model: Decoder, tokens: Tensor, tree: Packing, together: bool
) -> dict[str, Tensor]:
    """Gradient of each parameter for a sum of weighted logprobs; see tree_logprobs."""
    model.arithmetic.sums = sums = GradientSums(model)
    logprobs, _ = tree_logprobs(model, tokens, tree, together)
    (logprobs * torch.cos(torch.arange(len(logprobs), device=tokens.device))).sum().backward()
    return sums.take()


PROMPT = 36
"""Tokens of a prompt that the rollouts of a group share: as many as packing shares in groups of two."""


def rollouts(
    model: Decoder, seed: int, version: int, count: int = 6, shared: bool = False
) -> Batch:
    """Sequences of made-up tokens with the logprobs that `model` gives them, each alone: what an
    exact sampler would have sent.

    Args:
        shared: two rollouts each form a group, and begin with its prompt of PROMPT tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for number in range(count):
        longest = 100 if number == 1 else 20  # one of more than a tile
        length, prompt = int(torch.randint(longest - 15, longest, (1,), generator=generator)), 2
        tokens = torch.randint(0, model.geometry.vocab_size, (length,), generator=generator)
        if shared:
            begun = torch.Generator().manual_seed(1000 * seed + number // 2)
            common = torch.randint(0, model.geometry.vocab_size, (PROMPT,), generator=begun)
            length, prompt, tokens = length + PROMPT, PROMPT, torch.cat((common, tokens))
        device = model.output_weight.device
        there = tokens.to(device)
        with torch.no_grad():
            hidden = model(there[:-1], Packing([length - 1], device))[prompt - 1 :]
            counts = Packing([length - prompt], device)
            logprobs, _ = model.chosen_logprobs(hidden, there[prompt:], counts)
        trained = length - prompt
        sequences.append(
            TrainedSequence(
                tokens=tokens.numpy(),
                positions=torch.arange(prompt, length).numpy(),
                fields={
                    "rollout_logprobs": logprobs.cpu().numpy(),
                    "advantages": torch.full((trained,), 1.0 if number % 2 else -1.0).numpy(),
                    "versions": torch.full((trained,), version).numpy(),
                },
                score=float(number % 2),
                weight_version=version,
                order=(number // 2, number % 2),
            )
        )
    return Batch(sequences)


def config(folder: Path, **changes: object) -> TrainerConfig:
    """Options of a deterministic run."""
    values: dict[str, object] = {
        "model_name": "made-up", "weight_bridge_mode": "shared_vllm", "deterministic": True, "batch_size": 2, "lr": 1e-2,
        "seq_len": 128, "save_path": folder,
    }  # fmt: skip
    return TrainerConfig.model_validate(values | changes)


def minibatches(
    batch: Batch, tokens: int, count: int, share: bool = False
) -> list[list[PackedBin]]:
    """A batch packed for one rank."""
    packed = pack_batch(
        batch,
        tokens_per_bin=tokens,
        ranks=1,
        normalisation="token",
        max_tokens=128,
        share_prefixes=share,
        minibatches=count,
    )
    return [shares[0] for shares in packed]


def bins(batch: Batch, tokens: int = 200, share: bool = False) -> list[PackedBin]:
    """A batch of one minibatch."""
    return minibatches(batch, tokens, 1, share)[0]


def train(options: TrainerConfig, steps: int, seed: int = 0, tokens: int = 200) -> list[str]:
    """Train a new small model on what it would sample itself; returns the hash of its weights after
    each step. With --share-prefixes there is something to share.

    Raises:
        ParityError: a recomputed logprob differs from the rollout's.
    """
    model = decoder_for("cpu", seed)
    model.gradient_checkpointing = options.gradient_checkpointing
    optimizer = make_optimizer(options, model)
    parity = ParityCheck({"linear": "reference"}, {"linear": "reference"})
    hashes = []
    for step in range(steps):
        share = options.shares_prefixes
        batch = rollouts(model, 100 * seed + step, step, shared=share)
        parts = minibatches(batch, tokens, options.minibatches, share)
        assert share == any(one.packing.shared for part in parts for one in part)
        row = guarded_step(
            model, optimizer, parts, options, make_objective(options), StopSignal(), parity=parity
        )
        assert (row["ratio_mean"], row["ess"], row["updates"]) == (
            1,
            1,
            options.ppo_epochs * options.minibatches,
        )
        optimizer.write_weights()
        assert parity.row(optimizer.masters)["compared_tokens"] == batch.trained_tokens
        hashes.append(weights_sha(optimizer.masters))
    return hashes
