"""Options of simple_rl.py that the trainer's own cannot judge."""

from __future__ import annotations

import pytest

from example_trainer.errors import ConfigError
from example_trainer.simple_rl import last_gpu, parse_arguments, trainer_config


@pytest.mark.parametrize("words", ["--minibatches 2", "--ppo-epochs 3"])
def test_several_updates_of_a_batch_need_two_copies(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing is a flag of this script, not of the trainer's."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments(words.split())
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert f"{words} needs --two-copies: between the updates of a batch the trainer's weights change" in told
    config = trainer_config(parse_arguments([*words.split(), "--two-copies"]), port=1)
    assert config.several_updates
    assert (config.single_copy, config.use_shared_memory) == (False, True)


@pytest.mark.parametrize("words", ["", "--minibatches 1 --ppo-epochs 1"])
def test_one_update_is_on_one_copy(words: str) -> None:
    config = trainer_config(parse_arguments(words.split()), port=1)
    assert (config.single_copy, config.several_updates) == (True, False)


def test_what_is_no_number_is_refused_by_the_trainers_options() -> None:
    with pytest.raises(ConfigError, match=r"^--minibatches 'two': input should be a valid integer"):
        trainer_config(parse_arguments(["--minibatches", "two"]), port=1)


def test_vllms_copy_is_on_the_last_gpu_or_beside_the_trainer() -> None:
    assert last_gpu(2, "") == "1"
    assert last_gpu(3, "5,2,7") == "7"
    assert last_gpu(1, "3") == "3"
