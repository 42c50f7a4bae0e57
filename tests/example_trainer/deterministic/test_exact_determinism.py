"""Equal bits where they are promised: run to run, packing to packing, and (on a GPU) trainer to
vLLM; also a plain script:

    python tests/example_trainer/deterministic/test_exact_determinism.py                       # the operations and the model
    python tests/example_trainer/deterministic/test_exact_determinism.py --vllm-url http://localhost:9001 --model FOLDER

With --vllm-url it samples from a server started with --deterministic, and compares every token's
logprob.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

if __name__ == "__main__":
    from tests.example_trainer.deterministic.determinism_check import main

    sys.exit(main())

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from example_trainer.models import Decoder
from example_trainer.models.ops import invariant as functions
from example_trainer.models.packing import Packing
from example_trainer.models.qwen3 import Qwen3ModelArgs, Qwen3VLLMCompatModel
from tests.example_trainer.deterministic.cases import INVARIANT_CASES, Draws, Sizes
from tests.example_trainer.deterministic.determinism_check import LENGTHS, packed_bits, run_bits
from tests.example_trainer.deterministic.training import SMALL, decoder_for, summed_gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", INVARIANT_CASES)
def test_the_same_inputs_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    sizes = Sizes(LENGTHS)
    assert run_bits(name, sizes, dtype, "cpu") == run_bits(name, sizes, dtype, "cpu")


def small_model() -> Qwen3VLLMCompatModel:
    torch.manual_seed(0)
    sizes = Qwen3ModelArgs(
        dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=97, head_dim=16, hidden_dim=40, max_seq_len=256,
        enable_weight_tying=True,
    )  # fmt: skip
    model = Qwen3VLLMCompatModel(sizes, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_sequence_has_the_bits_of_itself_alone() -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]
    together, _ = packed_bits(model, sequences)
    alone = [packed_bits(model, [sequence])[0][0] for sequence in sequences]
    assert together == alone
    assert packed_bits(model, sequences[::-1])[0] == alone[::-1]


def test_a_prefix_has_the_bits_of_the_longer_sequence() -> None:
    """A sample from a short sequence is trained on as part of a longer one."""
    model = small_model()
    tokens = torch.randint(0, 97, (130,), generator=torch.Generator().manual_seed(2))
    whole = model(tokens, Packing([130]))
    for length in (1, 63, 64, 65, 129):
        assert torch.equal(model(tokens[:length], Packing([length])), whole[:length])


MIXTURE = replace(
    SMALL,
    architecture="Qwen3MoeForCausalLM",
    num_experts=6,
    experts_per_token=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    dense_layers=frozenset([1]),
)


@pytest.fixture
def mixture() -> Decoder:
    """A mixture in deterministic mode."""
    return decoder_for("cpu", geometry=MIXTURE)


def test_a_sequence_of_a_mixture_has_the_bits_of_itself_alone(mixture: Decoder) -> None:
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]
    together, _ = packed_bits(mixture, sequences)
    assert together == [packed_bits(mixture, [sequence])[0][0] for sequence in sequences]


def test_gradients_of_a_mixture_do_not_depend_on_the_passes(mixture: Decoder) -> None:
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 97, (length,), generator=generator) for length in (9, 40, 1, 70)]
    gradients = [summed_gradients(mixture, sequences, size) for size in (1, 2, 4)]
    assert gradients[0].keys() == dict(mixture.named_parameters()).keys()
    for name, first in gradients[0].items():
        assert first.any(), name
        assert all(torch.equal(first, other[name]) for other in gradients[1:]), name


def test_gradients_through_attention_do_not_depend_on_the_packing() -> None:
    d = Draws(Sizes(LENGTHS), torch.bfloat16, "cpu", 4)
    q, k, v, dy = (
        d.normal(267, 4, 16),
        d.normal(267, 2, 16),
        d.normal(267, 2, 16),
        d.normal(267, 4, 16),
    )

    def gradients_of(rows: slice, lengths: tuple[int, ...]) -> list[Tensor]:
        leaves = [part[rows].clone().requires_grad_() for part in (q, k, v)]
        functions.attention(*leaves, Packing(lengths), 0.25).backward(dy[rows])
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    together, start = gradients_of(slice(0, 267), LENGTHS), 0
    for length in LENGTHS:
        alone = gradients_of(slice(start, start + length), (length,))
        assert all(
            torch.equal(a, b[start : start + length]) for a, b in zip(alone, together, strict=True)
        )
        start += length
