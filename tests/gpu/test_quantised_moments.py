"""8-bit moments on a GPU: the compiled update against the CPU's, with the same bits whether
offloaded, resumed or neither.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from example_trainer.training.optimizer import MasterAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPES = {"first": (3000, 768), "second": (64, 4096), "third": (272, 96), "bias": (4096,)}


class Net(nn.Module):
    """Matrices whose rows are blocks, and one whose blocks span rows; their gradients are set by
    hand.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
            self.register_parameter(name, nn.Parameter(weight))


def optimizer_of(device: str, **options: object) -> MasterAdamW:
    return MasterAdamW(
        Net(device), lr=0.01, weight_decay=0.1, max_grad_norm=5.0, in_8_bits=True, **options
    )  # type: ignore[arg-type]


def take_steps(optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        for number, (name, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(100 * step + number)
            gradient = torch.randn(shape, generator=generator) * torch.logspace(-6, 0, shape[-1])
            optimizer.gradients()[name] = gradient.to(optimizer.device)
        optimizer.step()
        optimizer.write_weights()


def assert_same(one: MasterAdamW, two: MasterAdamW) -> None:
    there = two.state_dict()
    different = [
        key
        for key, tensor in one.state_dict().items()
        if not torch.equal(tensor.cpu(), there[key].cpu())
    ]
    assert different == []


@pytest.mark.parametrize("bucket", [1 << 25, 1 << 20, 50_000])
def test_an_offloaded_update_has_the_bits_of_one_that_is_not(bucket: int) -> None:
    resident, offloaded = (
        optimizer_of("cuda"),
        optimizer_of("cuda", offload=True, bucket_elements=bucket),
    )
    take_steps(resident, range(5))
    take_steps(offloaded, range(5))
    assert_same(resident, offloaded)


def test_a_resumed_update_has_the_bits_of_one_that_was_not_interrupted() -> None:
    through, resumed = optimizer_of("cuda"), optimizer_of("cuda", offload=True)
    take_steps(through, range(2))
    state = {key: tensor.cpu().clone() for key, tensor in through.state_dict().items()}
    resumed.load_state(
        {key: tuple(tensor.shape) for key, tensor in state.items()}, state.__getitem__, 2
    )
    take_steps(through, range(2, 5))
    take_steps(resumed, range(2, 5))
    assert_same(through, resumed)


def test_the_compiled_update_is_the_plain_one_up_to_rounding() -> None:
    on_gpu, on_cpu = optimizer_of("cuda"), optimizer_of("cpu")
    take_steps(on_gpu, range(1))
    take_steps(on_cpu, range(1))
    for name, master in on_cpu.masters.items():
        torch.testing.assert_close(
            on_gpu.masters[name].cpu(), master, rtol=1e-5, atol=1e-6, msg=name
        )
    there = on_gpu.state_dict()
    for key, tensor in on_cpu.state_dict().items():
        if tensor.dtype == torch.uint8:
            apart = (tensor.int() - there[key].cpu().int()).abs()
            assert int(apart.max()) <= 1, key
            assert float((apart > 0).double().mean()) < 1e-3, key
