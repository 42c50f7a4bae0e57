"""Every backward pass against float64 autograd, on whatever device there is; also a plain script:

python tests/example_trainer/deterministic/test_batch_invariant_backward.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

if __name__ == "__main__":
    from tests.example_trainer.deterministic.backward_check import main

    sys.exit(main())

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from example_trainer.batch_invariant_backward import patch_batch_invariant_with_gradients
from example_trainer.models.ops import invariant as functions
from example_trainer.models.packing import Packing
from tests.example_trainer.deterministic.cases import (
    CASES,
    INVARIANT_CASES,
    LIMITS,
    Draws,
    Sizes,
    errors,
    gradients,
    relative_error,
)

LENGTHS = st.lists(
    st.sampled_from([1, 2, 3, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]), min_size=1, max_size=4
)
HYPOTHESIS = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Sizes(
        lengths=tuple(draw(LENGTHS)),
        hidden=draw(st.sampled_from([8, 24, 40])),
        inner=draw(st.sampled_from([4, 12, 36])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 20])),
        vocab=draw(st.integers(2, 70)),
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "f32", "f64"]
)
@pytest.mark.parametrize("name", INVARIANT_CASES)
@HYPOTHESIS
@given(sizes=sizes(), seed=st.integers(0, 1000))
def test_gradients_equal_those_of_float64(
    name: str, dtype: torch.dtype, sizes: Sizes, seed: int
) -> None:
    for key, error in errors(name, sizes, dtype, seed=seed).items():
        assert error <= LIMITS[dtype], f"{key} of {name}, {sizes}"


def test_a_leak_between_sequences_would_be_seen() -> None:
    """The comparison has teeth: if the last query of a sequence saw one key of the one before, the
    limit would be exceeded.
    """
    _, apart = gradients(
        CASES["attention"](Draws(Sizes((60, 4)), torch.float64, "cpu", 0), functions), 1
    )
    _, leaking = gradients(
        CASES["attention"](Draws(Sizes((59, 5)), torch.float64, "cpu", 0), functions), 1, exact=True
    )
    assert relative_error(apart["qkv"], leaking["qkv"]) > 10 * LIMITS[torch.bfloat16]


def test_logits_are_never_kept_whole() -> None:
    """Chunks change no bit of logprobs, entropy or gradients."""
    d = Draws(Sizes((70, 129, 5)), torch.float32, "cpu", 3)
    hidden, weight, targets = d.normal(204, 48), d.normal(101, 48), d.ids(204)
    results = []
    for chunk in (1, 64, 130, 5000):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logprobs, entropy = functions.chosen_logprobs(*leaves, targets, d.packing, chunk)
        logprobs.square().sum().backward()
        results.append([logprobs, entropy, *(leaf.grad for leaf in leaves)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))
    log_table = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    torch.testing.assert_close(
        results[0][1].double(), -(log_table.exp() * log_table).sum(-1), atol=1e-5, rtol=1e-5
    )


def test_attention_keeps_no_square_matrix() -> None:
    """The tensors that are saved for the backward pass grow with the tokens, not with their
    square.
    """

    def saved(length: int) -> int:
        q = torch.randn(length, 1, 8, requires_grad=True)
        out = functions.attention(q, q, q, Packing([length]), 1.0)
        return sum(tensor.numel() for tensor in out.grad_fn.saved_tensors)  # type: ignore[union-attr]

    assert saved(128) == 2 * saved(64)


def test_patching_gives_batched_products_their_gradient_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's mode puts a function without gradient in torch.bmm's place."""
    original = torch.bmm

    def without_gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return original(a.detach(), b.detach())

    monkeypatch.setattr(torch, "bmm", without_gradient)
    a, b = (torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert not torch.bmm(a, b).requires_grad
    assert patch_batch_invariant_with_gradients() == ["torch.bmm"]
    assert torch.autograd.gradcheck(torch.bmm, (a, b))
    assert patch_batch_invariant_with_gradients() == [], "a second call finds it done"
