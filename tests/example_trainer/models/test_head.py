"""The output head against the same formula written naively over full logits, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.live_bytes import Meter
from example_trainer.models.head import _place, chosen_logprobs


class TestChosenLogprobs:
    def naive(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float | torch.Tensor,
    ) -> torch.Tensor:
        logits = (hidden @ weight.t()).float() / temperature
        return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    @given(
        st.integers(0, 2**31),
        st.integers(1, 30),
        st.integers(1, 9),
        st.integers(2, 50),
        st.integers(1, 40),
        st.floats(0.3, 2),
    )
    def test_values_and_gradients_equal_those_over_full_logits(
        self, seed: int, n: int, size: int, vocab: int, chunk: int, temperature: float
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(n, size, generator=generator).requires_grad_()
        weight = torch.randn(vocab, size, generator=generator).requires_grad_()
        targets = torch.randint(0, vocab, (n,), generator=generator)
        upstream = torch.randn(n, generator=generator)
        expected = self.naive(hidden, weight, targets, temperature)
        gradients = torch.autograd.grad(expected, (hidden, weight), upstream)
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, None, chunk, temperature)
        ours = torch.autograd.grad(logprobs, (hidden, weight), upstream)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
        for mine, theirs in zip(ours, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        logits = (hidden @ weight.t()).detach() / temperature
        torch.testing.assert_close(
            entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-4, rtol=1e-4
        )

    def test_in_double_precision_the_gradient_passes_a_finite_difference_check(self) -> None:
        torch.manual_seed(0)
        hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
        targets = torch.tensor([0, 6, 3, 3, 1])
        assert torch.autograd.gradcheck(
            lambda h, w: chosen_logprobs(h, w, targets, None, 2, 0.7)[0], (hidden, weight)
        )
        temperatures = torch.tensor([0.5, 1, 1.7, 0.9, 1])
        assert torch.autograd.gradcheck(
            lambda h, w: chosen_logprobs(
                h, w, targets, None, 2, temperatures, entropy_gradient=True
            ),
            (hidden, weight),
        )

    def test_each_row_at_its_own_temperature_and_the_entropys_gradient_equal_the_formulas(
        self,
    ) -> None:
        torch.manual_seed(2)
        hidden = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
        targets, temperatures = torch.randint(0, 11, (9,)), torch.linspace(0.4, 2, 9)
        logprobs, entropy = chosen_logprobs(
            hidden, weight, targets, None, 4, temperatures, entropy_gradient=True
        )
        logits = hidden @ weight.t()
        table = (logits / temperatures[:, None]).log_softmax(-1)
        torch.testing.assert_close(logprobs, table.gather(1, targets[:, None]).squeeze(1))
        upstream = torch.randn(9, dtype=torch.float64)
        # dH / dlogit_j = -p_j (log p_j + H) / T
        slope = -table.exp() * (table + entropy[:, None]) * (upstream / temperatures)[:, None]
        found = torch.autograd.grad(entropy, (hidden, weight), upstream)
        for mine, expected in zip(found, (slope @ weight, slope.t() @ hidden), strict=True):
            torch.testing.assert_close(mine, expected)

    def test_bfloat16_weights_get_bfloat16_gradients_and_float32_logprobs(self) -> None:
        torch.manual_seed(1)
        hidden = torch.randn(20, 16, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(33, 16, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, 33, (20,))
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, chunk=6)
        logprobs.sum().backward()
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert hidden.grad is not None
        assert weight.grad is not None
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
        exact_hidden = hidden.detach().float().requires_grad_()
        self.naive(exact_hidden, weight.detach().float(), targets, 1.0).sum().backward()
        assert exact_hidden.grad is not None
        assert (hidden.grad.float() - exact_hidden.grad).norm() < 0.02 * exact_hidden.grad.norm()

    def test_a_frozen_output_matrix_costs_no_gradient(self) -> None:
        hidden, weight = torch.randn(20, 4, requires_grad=True), torch.randn(3000, 4)
        targets = torch.arange(20)

        def gradient() -> tuple[torch.Tensor, int]:
            with Meter(torch.device("cpu")) as meter:
                logprobs, _ = chosen_logprobs(hidden, weight, targets, chunk=2)
                meter.reset()
                logprobs.sum().backward()
            found, hidden.grad = hidden.grad, None
            assert found is not None
            return found, meter.peak

        frozen, little = gradient()
        weight.requires_grad_()
        trained, much = gradient()
        assert torch.equal(frozen, trained)
        assert much >= little + weight.nbytes

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_entropys_gradient_takes_no_further_table_of_logits(
        self, dtype: torch.dtype
    ) -> None:
        n, vocab, chunk = 64, 2000, 16

        def peak(entropy_gradient: bool) -> int:
            hidden, weight = (
                torch.randn(n, 4).to(dtype).requires_grad_(),
                torch.randn(vocab, 4).to(dtype),
            )
            with Meter(torch.device("cpu")) as meter:
                logprobs, entropy = chosen_logprobs(
                    hidden,
                    weight,
                    torch.zeros(n, dtype=torch.long),
                    None,
                    chunk,
                    entropy_gradient=entropy_gradient,
                )
                (
                    logprobs.sum()
                    + entropy.detach().sum()
                    + (entropy.sum() if entropy_gradient else 0)
                ).backward()
            return meter.peak

        assert peak(entropy_gradient=True) < peak(entropy_gradient=False) + chunk * vocab

    def test_no_logits_are_kept_for_the_backward_pass(self) -> None:
        n, vocab, chunk = 512, 1000, 16
        hidden, weight = (
            torch.randn(n, 4, requires_grad=True),
            torch.randn(vocab, 4, requires_grad=True),
        )
        kept: list[int] = []

        def count(saved: torch.Tensor) -> torch.Tensor:
            kept.append(saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            chosen_logprobs(hidden, weight, torch.zeros(n, dtype=torch.long), None, chunk)
        assert sorted(kept) == [n, n, n * 4, vocab * 4]


@given(st.lists(st.integers(0, 29), min_size=1), st.sampled_from([1, 2, 3, 5]))
def test_each_target_has_a_row_on_one_rank(values: list[int], ranks: int) -> None:
    """The output matrix of 30 rows is split over the ranks; a row is its number."""
    targets, size = torch.tensor(values), 30 // ranks
    owners, rows = torch.zeros_like(targets), torch.zeros_like(targets)
    for first in range(0, 30, size):
        inside, row = _place(targets, first, first + size)
        owners += inside
        rows += torch.where(inside, torch.arange(first, first + size)[row], 0)
    assert owners.eq(1).all()
    assert torch.equal(rows, targets)
