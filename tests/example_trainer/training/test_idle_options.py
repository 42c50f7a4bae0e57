"""Options that are switched off by others are logged, and active ones are not."""

from __future__ import annotations

import shlex

import pytest

from example_trainer.command_line import parse_config
from example_trainer.training.idle_options import idle_options
from example_trainer.training.step import make_objective

LOSS = "tests.example_trainer.training.test_updates:spoiled"


def told(words: str) -> list[str]:
    config = parse_config(["--model-name", "m", *shlex.split(words)])
    return idle_options(config, make_objective(config))


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--correction none --correction-low 0.2 --correction-high 3",
         "--correction-high 3.0 and --correction-low 0.2 do nothing: --correction is none"),
        ("--correction none --correction-ratio now", "--correction-ratio now does nothing: --correction is none"),
        ("--correction none --sequence-kl-limit 1 --correction-high 3",
         "--correction-high 3.0 does nothing: --correction is none"),
        ("--truncated-answers mask --overlong-buffer 9", "--overlong-buffer 9 does nothing: --truncated-answers is mask"),
        ("--truncated-answers train --overlong-penalty 2", "--overlong-penalty 2.0 does nothing: --truncated-answers is train"),
        ("--kl-in reward --kl-coef 0", "--kl-in reward does nothing: --kl-coef is 0"),
        ("--reference-model m", "--reference-model m does nothing: --kl-coef is 0"),
        ("--kl-coef 0 --ref-logprobs-from-workers", "--ref-logprobs-from-workers True does nothing: --kl-coef is 0"),
        ("--distill-in loss --distill-coef 0", "--distill-in loss does nothing: --distill-coef is 0"),
        ("--advantages batch --advantage-beta 0.2", "--advantage-beta 0.2 does nothing: --advantages is batch"),
        ("--lora-r 8 --lora-dropout 0.1",
         "--lora-r 8 and --lora-dropout 0.1 do nothing: --weight-bridge-mode is none"),
        ("--clip-eps 0.1", "--clip-eps 0.1 does nothing: with --correction token_truncate and one update of a batch the "),
        ("--loss dual_clip --dual-clip 4 --clip-eps-high 0.3 --correction sequence_mask",
         "--clip-eps-high 0.3 and --dual-clip 4.0 do nothing: with --correction sequence_mask and one update of a batch "),
        ("--clip-eps 0.1 --minibatches 2 --correction-ratio now",
         "--clip-eps 0.1 does nothing: with --correction-ratio now and --correction token_truncate the correction has "),
    ],
)  # fmt: skip
def test_what_does_nothing_is_told_with_what_switches_it_off(words: str, note: str) -> None:
    (found,) = told(words)
    assert found.startswith(note)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--weight-bridge-mode lora_only --lora-r 8",
        "--loss dapo",  # a bound of the method's own is not asked for
        "--clip-eps 0.1 --minibatches 2",
        "--advantages exponential --advantage-beta 0.2",
        "--clip-eps 0.1 --ppo-epochs 2 --correction sequence_truncate",
        "--clip-eps 0.1 --correction none",
        "--clip-eps 0.1 --correction token_mask --correction-ratio now",
        f"--clip-eps 0.1 --loss {LOSS}",  # may be used as it likes
        "--correction none --sequence-kl-limit 1 --correction-ratio now",
        "--correction token_mask --correction-high 3 --correction-low 0.2",
        "--truncated-answers penalise --overlong-buffer 9",
        "--kl-in reward --kl-coef 0.1 --distill-in loss --distill-coef 0.1",
    ],
)
def test_what_acts_is_not_told(words: str) -> None:
    assert told(words) == []
