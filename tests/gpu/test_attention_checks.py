"""The checks of a backward pass of attention on the CPU: they pass, and each fails for its own
mistake.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.ops import flash_attention_4, torch_gradients
from example_trainer.models.packing import Packing
from tests.gpu import attention_checks
from tests.gpu.attention_checks import Heads, alone_as_packed, close_to_float64, same_bits_again

TINY = Heads(8, device="cpu", dtype=torch.float32)
LENGTHS = (1, 2, 17, 33)
CHECKS = (close_to_float64, same_bits_again, alone_as_packed)


@pytest.fixture(autouse=True)
def few_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "NEIGHBOURS", (((), (5,)), ((7, 3), (1,))))


@pytest.mark.parametrize("check", CHECKS)
def test_torchs_backward_pass_passes(check: Any) -> None:
    passed, seen = check(torch_gradients.attention_backward, TINY, LENGTHS)
    assert passed, seen


def scaled(factor: Any) -> Any:
    """A backward pass whose dk is multiplied by factor(packing)."""

    def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch_gradients.attention_backward(*arguments)
        return dq, dk * factor(arguments[6]), dv

    return backward


def test_a_wrong_gradient_is_found() -> None:
    assert not close_to_float64(scaled(lambda packing: 1.01), TINY, LENGTHS)[0]


def test_bits_that_change_from_run_to_run_are_found() -> None:
    runs = iter((1, 1, 1 + 1e-6))
    assert not same_bits_again(scaled(lambda packing: next(runs)), TINY, LENGTHS)[0]


def test_bits_that_depend_on_the_bin_are_found() -> None:
    def by_bin(packing: Packing) -> float:
        return 1 + 1e-6 * (len(packing.lengths) > 2)

    passed, seen = alone_as_packed(scaled(by_bin), TINY, LENGTHS)
    assert not passed
    assert "17 at place 2 of 4" in seen
    assert "at place 0" not in seen


def test_flash_attention_4_is_refused_where_it_cannot_run() -> None:
    q, packing = torch.zeros(2, 4, 64), Packing([2])
    assert flash_attention_4.refusal(q) == "FlashAttention 4 has kernels for GPUs alone"
    with pytest.raises(ModelError, match="for GPUs alone"):
        flash_attention_4.attention_backward(q, q, q, q, q, torch.zeros(4, 2), packing, 1.0)


class Named(torch.Tensor):
    """Claims to be on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "reason"),
    [
        (torch.bfloat16, 64, (8, 0), "known for compute capability 9, not 8"),
        (torch.bfloat16, 64, (10, 0), "known for compute capability 9, not 10"),
        (torch.float32, 64, (9, 0), "takes 16-bit numbers, not torch.float32"),
        (torch.bfloat16, 256, (9, 0), "heads have 256 dimensions"),
        (torch.bfloat16, 20, (9, 0), "heads have 20 dimensions"),
        (torch.bfloat16, 64, (9, 0), "cannot be imported from vLLM"),
    ],
)
def test_each_reason_has_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    width: int,
    capability: tuple[int, int],
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(__import__("sys").modules, "vllm.vllm_flash_attn.cute.interface", None)
    flash_attention_4._library.cache_clear()
    q = torch.zeros(1, 4, width, dtype=dtype).as_subclass(Named)
    assert reason in flash_attention_4.refusal(q)
    flash_attention_4._library.cache_clear()


def test_the_library_gets_our_forward_pass_and_writes_our_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: dict[str, Any] = {}

    def library(*tensors: Any, **named: Any) -> None:
        names = ("q", "k", "v", "out", "dout", "lse", "softmax_scale")  # as vLLM names them
        passed.update(zip(names, tensors, strict=True), **named)
        for number, name in enumerate(("dq", "dk", "dv")):
            named[name].fill_(number)

    monkeypatch.setattr(flash_attention_4, "refusal", lambda q: "")
    monkeypatch.setattr(flash_attention_4, "_library", lambda: library)
    wide, out, lse = torch.randn(5, 8, 8), torch.randn(5, 4, 8), torch.randn(4, 5)
    q, k, v = wide[:, :4], wide[:, 4:6], wide[:, 6:]
    packing = Packing([2, 3])
    gradients = flash_attention_4.attention_backward(out + 1, q, k, v, out, lse, packing, 0.5)
    assert [gradient.unique().tolist() for gradient in gradients] == [[0], [1], [2]]
    assert [tuple(g.shape) for g in gradients] == [(5, 4, 8), (5, 2, 8), (5, 2, 8)]
    assert all(gradient.is_contiguous() for gradient in gradients)
    assert torch.equal(passed["dout"], out + 1)
    assert (passed["lse"], passed["softmax_scale"]) == (lse, 0.5)
    assert passed["deterministic"] is passed["causal"] is True
    assert passed["cu_seqlens_q"].tolist() == passed["cu_seqlens_k"].tolist() == [0, 2, 5]
    assert passed["max_seqlen_q"] == passed["max_seqlen_k"] == 3
