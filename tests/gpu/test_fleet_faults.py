"""The faults of a fleet of three with the weights on GPUs: the same tests as without one, over the
routes that GPUs have.

`check_fleet_faults.py` runs them and notes how long each took.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.example_trainer.weight_bridge.test_fleet_faults import (
    servers,
    test_a_second_trainer_takes_over_and_the_first_one_is_told,
    test_all_are_gone_and_back,
    test_one_of_three_fails_and_training_does_not_miss_a_step,
    test_one_that_serves_another_version_is_left_out_until_a_full_update,
    trainer,
)
from tests.light_servers import Devices

__all__ = [
    "servers",
    "test_a_second_trainer_takes_over_and_the_first_one_is_told",
    "test_all_are_gone_and_back",
    "test_one_of_three_fails_and_training_does_not_miss_a_step",
    "test_one_that_serves_another_version_is_left_out_until_a_full_update",
    "trainer",
]

PATIENCE, SLOW_SECONDS = 5.0, 10.0
"""A process that uses a GPU for the first time, or NCCL, takes a second or two for it."""
ONE_GPU = Devices("cuda:0", ("cuda:0",) * 3, PATIENCE)
TWO_GPUS = Devices("cuda:0", ("cuda:1", "cuda:1", "cuda:0"), PATIENCE)
"""The second is the faulty one. It and the first, on the same GPU, get their weights by NCCL; the
third reads the trainer's."""
FOUR_GPUS = Devices("cuda:0", ("cuda:1", "cuda:2", "cuda:3"), PATIENCE)
"""All three get their weights in one stream by NCCL."""

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        torch.cuda.device_count() < gpus, reason=f"needs {gpus} NVIDIA GPU(s)"
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ONE_GPU, id="one_gpu", marks=needs(1)),
        pytest.param(TWO_GPUS, id="two_gpus", marks=needs(2)),
        pytest.param(FOUR_GPUS, id="four_gpus", marks=needs(4)),
    ],
)
def devices(request: pytest.FixtureRequest) -> Devices:
    found: Devices = request.param
    return found


@pytest.fixture(scope="module", autouse=True)
def slower_than_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEET_SLOW_SECONDS", str(SLOW_SECONDS))
        yield
