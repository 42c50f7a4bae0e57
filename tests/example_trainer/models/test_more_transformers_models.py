"""The tests of transformers' models, for the architectures that the default tier leaves out."""

from __future__ import annotations

import pytest

from tests.example_trainer.models.test_transformers_model import (
    test_a_checkpoint_is_read_and_written_bit_for_bit,
    test_a_pass_in_bfloat16_is_as_near_to_float32_as_that_of_transformers,
    test_packed_logprobs_and_gradients_are_those_of_the_sequences_alone,
)
from tests.example_trainer.models.transformers_cases import CONFIGS, SAMPLE
from tests.example_trainer.training.test_transformers_training import test_a_run_resumes_bit_for_bit
from tests.tiny_models import SERVED

__all__ = [
    "test_a_checkpoint_is_read_and_written_bit_for_bit",
    "test_a_pass_in_bfloat16_is_as_near_to_float32_as_that_of_transformers",
    "test_a_run_resumes_bit_for_bit",
    "test_packed_logprobs_and_gradients_are_those_of_the_sequences_alone",
]
pytestmark = pytest.mark.nightly


@pytest.fixture(params=sorted({*CONFIGS, *SERVED} - {*SAMPLE}))
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen
