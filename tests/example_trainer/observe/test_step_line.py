"""The trainer's line of a step, read back by the driver of an asynchronous run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.observe.metrics import StepFigures, read_step_line, step_line
from tests.example_trainer.observe.test_metrics import row_of_a_step

NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf"), float("-inf")])


@given(
    step=st.integers(1, 10**7),
    reward=NUMBERS,
    success=st.none() | st.floats(0, 1),
    rate=st.floats(0, 1e9),
    loss=NUMBERS,
    age=st.none() | st.integers(0, 99),
    prefix=st.sampled_from(["", "2026-11-26 18:00:00,123 INFO example_trainer: ", "[default0]:"]),
)
def test_what_is_written_is_read(
    step: int,
    reward: float,
    success: float | None,
    rate: float,
    loss: float,
    age: int | None,
    prefix: str,
) -> None:
    row = row_of_a_step(
        reward_mean=reward, tokens_per_second=rate, loss=loss, age_mean=age, age_max=age
    )
    row |= {} if success is None else {"success_rate": success}
    found = read_step_line(prefix.replace(":", ": ") + step_line(step, 10**7, row))
    assert found is not None
    assert (found.step, found.steps) == (step, 10**7)
    assert found.reward == pytest.approx(reward, abs=6e-4, nan_ok=True)
    assert (found.success is None) == (success is None)
    assert success is None or found.success == pytest.approx(success, abs=6e-4)
    assert found.rate == pytest.approx(rate, abs=0.6)
    assert found.age == ("?" if age is None else f"{age:.1f} (max {age})")


def test_other_lines_are_no_steps() -> None:
    for line in (
        "",
        "Step 1/10",
        "Waiting for a batch for 12 s: 0 of 64 sequences are queued",
        "Footstep 1/2  reward 1",
    ):
        assert read_step_line(line) is None


def test_the_short_line() -> None:
    assert str(StepFigures(7, 100, 0.5, 0.25, 1234.4, "1.0 (max 2)")) == (
        "step 7/100  reward 0.500  success 25.0 %  1234 tok/s  staleness 1.0 (max 2)"
    )
    assert (
        str(StepFigures(7, 100, -0.5, None, 2.0, "?"))
        == "step 7/100  reward -0.500  2 tok/s  staleness ?"
    )


def test_a_mixture_has_its_load_in_the_line() -> None:
    row = row_of_a_step(
        expert_load=1.234, expert_load_max=3.0, unused_experts=2.0, router_entropy=2.1039
    )
    assert step_line(1, 2, row).endswith(
        "  expert load 1.23 (max 3.00)  unused 2  router entropy 2.104"
    )
    assert "expert" not in step_line(1, 2, row_of_a_step())
    assert "expert" not in step_line(1, 2, row | {"expert_load": None})


def test_replayed_routers_have_their_share_in_the_line() -> None:
    row = row_of_a_step(rerouted_share=0.01234)
    assert step_line(1, 2, row).endswith("  rerouted 1.23%")
    assert "rerouted" not in step_line(1, 2, row | {"rerouted_share": None})
