"""Batches without logprobs of the samples: the refused ones, the flag to blame, and the ones that
are only logged.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from example_trainer.batch.reader import BatchFigures, BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError
from example_trainer.training.trainer import require_rollout_logprobs, uncorrected_note
from tests.example_trainer.batch.test_groups import VOCAB, make_group

NONE = {"inference_logprobs": None}


def config(**options: Any) -> TrainerConfig:
    return TrainerConfig(model_name="m", **options)


def figures(*changes: dict[str, Any], ranks: int = 2) -> BatchFigures:
    groups = [make_group(**change) for change in changes]
    return (
        BatchReader(config(), VOCAB, tokens_per_bin=64, data_ranks=ranks).read(groups, 0).figures(0)
    )


def test_logprobs_are_counted_over_all_ranks() -> None:
    found = figures({}, NONE, {"inference_logprobs": [[1.0] * 4, [1.0, 1.0, -1.0, 1.0, -1.0]]})
    assert (found.forwarded_targets, found.targets_with_logprobs) == (15, 5 + 2)


@pytest.mark.parametrize(
    ("options", "flag", "remedy"),
    [
        ({"correction": "token_mask"}, "--correction token_mask", "give --correction none"),
        (
            {"correction": "token_mask", "correction_low": 0.2},
            "--correction token_mask",
            "give --correction none",
        ),
        ({"correction_high": 3.0}, "--correction-high 3.0", "give --correction none"),
        ({"correction_ratio": "now"}, "--correction-ratio now", "give --correction none"),
        (
            {"correction": "none", "sequence_kl_limit": 0.1},
            "--sequence-kl-limit 0.1",
            "leave out --sequence-kl-limit",
        ),
        (
            {"sequence_kl_limit": 0.1},
            "--sequence-kl-limit 0.1",
            "give --correction none and leave out --sequence-kl-limit",
        ),
    ],
)
def test_a_refusal_names_the_flag_that_asks_and_a_remedy_that_works(
    options: dict[str, Any], flag: str, remedy: str
) -> None:
    message = (
        f"^{re.escape(flag)}: none of the batch's tokens came with the logprob .*, or {remedy}$"
    )
    with pytest.raises(BatchError, match=message):
        require_rollout_logprobs(config(**options), figures(NONE))
    require_rollout_logprobs(config(**options), figures(NONE, {}))


@pytest.mark.parametrize(
    "options", [{}, {"correction": "none"}, {"correction": "none", "correction_high": 3.0}]
)
def test_who_asks_for_no_correction_is_refused_nothing(options: dict[str, Any]) -> None:
    require_rollout_logprobs(config(**options), figures(NONE))


def test_what_is_corrected_in_part_is_said() -> None:
    assert uncorrected_note(config(), figures({})) is None
    whole, part = (
        uncorrected_note(config(), figures(NONE)),
        uncorrected_note(config(), figures(NONE, {})),
    )
    assert whole is not None
    assert whole.endswith("is not corrected (--correction token_truncate does nothing)")
    assert part is not None
    assert part.startswith(
        "50.0% of a batch's tokens came without the logprobs that they were sampled with: "
    )
    assert uncorrected_note(config(correction="none"), figures(NONE, {})) is None
    limited = uncorrected_note(config(correction="none", sequence_kl_limit=0.1), figures(NONE))
    assert limited is not None
    assert limited.endswith("is not corrected (--sequence-kl-limit 0.1 does nothing)")
