"""Options of simple_rl.py that the trainer's own cannot judge."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from example_trainer import simple_defaults
from example_trainer.async_grpo.__main__ import parser
from example_trainer.batch.problems import GSM8K
from example_trainer.errors import ConfigError, ModelError
from example_trainer.simple_defaults import GUIDE_BYTES, STARTER_MODEL, choose_kernels, choose_run
from example_trainer.simple_rl import last_gpu, parse_arguments, trainer_config


@pytest.mark.parametrize(
    ("parse", "program", "given"),
    [
        (parse_arguments, "simple_rl.py", []),
        (parser().parse_args, "python -m example_trainer.async_grpo", ["--config", "run.yaml"]),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_the_nearest(
    parse: Callable[[list[str]], object],
    program: str,
    given: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse([*given, "--stesp", "3"])
    assert capsys.readouterr().err == (
        f"{program}: error: unrecognized arguments: --stesp 3; did you mean --steps? "
        f"(see {program} --help)\n"
    )


@pytest.mark.parametrize("words", ["--minibatches 2", "--ppo-epochs 3"])
def test_several_updates_of_a_batch_need_two_copies(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each missing flag is one of this script, not of the trainer."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments(words.split())
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert (
        f"{words} needs --two-copies: between the updates of a batch the trainer's weights change"
        in told
    )
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


class TestDefaults:
    """A machine with a GPU and the hub trains the guide's model; others train the starter model,
    and log that.
    """

    @pytest.fixture(autouse=True)
    def a_gpu_and_the_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine(monkeypatch)

    def machine(
        self,
        monkeypatch: pytest.MonkeyPatch,
        gpu: bool = True,
        memory: int = 2 * GUIDE_BYTES,
        hub: str = "",
        data: str = "",
    ) -> None:
        def find(error: str, kind: type[Exception]) -> object:
            if error:
                raise kind(error)
            return object()

        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory)
        )
        monkeypatch.setattr(simple_defaults, "find_checkpoint", lambda name: find(hub, ModelError))
        monkeypatch.setattr(simple_defaults, "find_task", lambda name: find(data, ConfigError))

    def chosen(self, words: str = "") -> tuple[SimpleNamespace, str | None]:
        options = parse_arguments(words.split())
        choose_kernels(options)
        note = choose_run(options)
        return options, note  # type: ignore[return-value]

    def test_the_guides_run_where_it_can_be_had(self) -> None:
        options, note = self.chosen()
        assert (options.model, options.problems, options.batch_invariant) == (
            "Qwen/Qwen3-1.7B",
            GSM8K,
            True,
        )
        assert (options.lr, options.max_tokens, options.thinking, note) == (1e-6, 512, False, None)
        config = trainer_config(options, port=1)
        assert (config.deterministic, config.lr, config.model_name) == (
            True,
            1e-6,
            "Qwen/Qwen3-1.7B",
        )

    def test_what_is_given_stays(self) -> None:
        options, _ = self.chosen("--lr 0.5 --no-batch-invariant --max-tokens 7")
        assert (options.model, options.lr, options.batch_invariant, options.max_tokens) == (
            "Qwen/Qwen3-1.7B",
            0.5,
            False,
            7,
        )

    @pytest.mark.parametrize("words", ["--model some/model", "--problems file.jsonl", "--digits 2"])
    def test_a_model_or_a_task_that_is_named_leaves_the_rest_as_it_was(self, words: str) -> None:
        options, note = self.chosen(words)
        assert note is None
        assert options.model == ("some/model" if "model" in words else STARTER_MODEL)
        assert (options.digits, options.lr, options.max_tokens, options.batch_invariant) == (
            2,
            3e-4,
            96,
            True,
        )

    @pytest.mark.parametrize(
        ("machine", "reason"),
        [
            ({"hub": "the hub cannot be reached"}, "the hub cannot be reached"),
            ({"data": "openai/gsm8k needs the datasets package"}, "needs the datasets package"),
            ({"memory": 24 << 30}, "the GPU has 24 GiB, and Qwen/Qwen3-1.7B needs 64"),
        ],
    )
    def test_without_the_hub_the_starter_model_learns_sums(
        self, machine: dict, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.machine(monkeypatch, **machine)
        options, note = self.chosen()
        assert (options.model, options.problems, options.batch_invariant, options.lr) == (
            STARTER_MODEL,
            None,
            True,
            3e-4,
        )
        assert note is not None
        assert note.startswith(
            "Training the starter model on sums, not Qwen/Qwen3-1.7B on openai/gsm8k: "
        )
        assert reason in note
        assert "\n" not in note

    def test_a_cpu_trains_with_ordinary_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine(monkeypatch, gpu=False)
        options, note = self.chosen()
        assert (options.model, options.batch_invariant) == (STARTER_MODEL, False)
        assert note is not None
        assert "starter model on sums with ordinary kernels" in note
        assert "there is no GPU here" in note
        _, note = self.chosen("--digits 3")
        assert (
            note
            == "Training with ordinary kernels, whose bits differ between vLLM and trainer: there is no GPU here"
        )
        assert self.chosen("--digits 3 --no-batch-invariant")[1] is None
        with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
            self.chosen("--batch-invariant")


def test_router_replay_without_a_gpu_is_refused_in_one_line() -> None:
    options = parse_arguments(["--router-replay", "--device", "cpu"])
    with pytest.raises(ConfigError, match="--router-replay needs an NVIDIA GPU, since vLLM's CPU"):
        choose_kernels(options)
