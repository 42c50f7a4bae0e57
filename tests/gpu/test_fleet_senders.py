"""A trainer that is killed, stopped or late in an update, with all weights on GPUs: the same tests
as without one.

All servers are on the trainer's GPU. On another one they would be sent to one after the other. A
fault in the first one's update would find the second one before its own. The program
tests/gpu/check_bridge_faults.py does that to a real vLLM.
"""

from __future__ import annotations

import pytest
import torch

from tests.example_trainer.weight_bridge.test_fleet_senders import (
    servers,
    starter,
    test_a_server_that_comes_in_the_middle_of_an_update_waits_for_its_end_and_joins,
    test_a_trainer_rank_that_is_late_blames_no_server_and_the_version_is_sent_again,
    test_a_trainer_that_is_killed_in_an_update_leaves_nothing_mixed_behind,
    test_a_trainer_that_is_stopped_for_too_long_blames_no_server_and_does_the_update_anew,
)
from tests.light_servers import Devices

__all__ = [
    "servers",
    "starter",
    "test_a_server_that_comes_in_the_middle_of_an_update_waits_for_its_end_and_joins",
    "test_a_trainer_rank_that_is_late_blames_no_server_and_the_version_is_sent_again",
    "test_a_trainer_that_is_killed_in_an_update_leaves_nothing_mixed_behind",
    "test_a_trainer_that_is_stopped_for_too_long_blames_no_server_and_does_the_update_anew",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def devices() -> Devices:
    return Devices("cuda:0", ("cuda:0",) * 3)


@pytest.fixture(autouse=True)
def a_gpu_for_each_rank(request: pytest.FixtureRequest) -> None:
    """Not by a mark: it would be the function's, and so skip the test that has no GPUs too."""
    late = test_a_trainer_rank_that_is_late_blames_no_server_and_the_version_is_sent_again
    if request.function is late and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs, one for each rank")
