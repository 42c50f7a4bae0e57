"""Trainers that run in the test's own process, with a real rollout service, and that a test can
hurt or kill where it likes.

A death is an exception that no handler of the trainer's sees, so nothing is saved or sent
afterwards. The remains are as after SIGKILL: the folder, and the service's view.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from example_trainer import grpo
from example_trainer.batch.client import RolloutClient
from example_trainer.batch.packing import PackedBin
from example_trainer.command_line import parse_config
from example_trainer.launcher import roles
from example_trainer.process import StopSignal
from example_trainer.training import checkpoints as checkpointing
from example_trainer.training import step, trainer
from example_trainer.training.runs import SavedStep, steps_in
from example_trainer.weight_bridge.base import NoBridge
from tests.example_trainer.test_grpo import made_up_group, small_flags

STEPS = 4


class Killed(BaseException):
    """Stands for SIGKILL."""


def responses(one: PackedBin) -> list[list[int]]:
    """The trained tokens of each of a bin's sequences."""
    return [part.tolist() for part in one.targets.split(one.counts.tolist())]


class Trainers:
    """One run of several trainer processes, which may each die at a point; and the groups that
    their weights have learned from.

    Attributes:
        line: which group each step of the present weights learned from, the first step's first.
        acknowledged: groups that the service knows as trained, in that order.
        skipped: reasons with which batches were acknowledged that nothing was learned from.
        faults: by the number of a batch's first group, what happens to its logprobs.
    """

    def __init__(
        self, url: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.url, self.model, self.folder = url, model, folder
        self.line: list[int] = []
        self.acknowledged: list[int] = []
        self.skipped: list[str] = []
        self.point, self.passes = "", 0
        self.faults: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._in_hand = -1
        httpx.get(f"{url}/reset_data", timeout=120).raise_for_status()
        self._watch(monkeypatch)

    def post(self, *numbers: int) -> None:
        for number in numbers:
            httpx.post(
                f"{self.url}/scored_data", json=made_up_group(number), timeout=120
            ).raise_for_status()

    def stats(self) -> dict[str, Any]:
        """The statistics of the service."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=120).json()
        return answer

    def train(self, *options: str, point: str = "", passes: int = 1) -> bool:
        """Run one trainer, to its end or until it has passed a point so many times.

        Returns whether it came to its end.
        """
        self.point, self.passes = point, passes
        words = small_flags(self.model, self.url, self.folder, training_steps=STEPS)
        words += roles.flags(batch_size=4, gradient_accumulation_steps=1, device="cpu")
        words += roles.flags(batch_timeout=120, service_timeout=120)
        try:
            grpo.train(parse_config([*words, *options]), StopSignal())
        except Killed:
            return False
        return True

    def saved(self) -> dict[int, SavedStep]:
        """The checkpoints that a resume can begin from."""
        steps = steps_in(self.folder / "checkpoints")
        return {
            step: SavedStep.read(path)
            for step, path in steps.items()
            if (path / "trainer_state").is_dir()
        }

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return [
            json.loads(line)
            for line in (self.folder / "logs" / "metrics.jsonl").read_text().splitlines()
        ]

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the last step."""
        return load_file(self.folder / "checkpoints" / f"step_{STEPS}" / "model.safetensors")

    def _passed(self, point: str) -> None:
        if point and point == self.point:
            self.passes -= 1
            if self.passes == 0:
                raise Killed

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._watch_steps(monkeypatch)
        self._watch_the_client(monkeypatch)
        self._watch_places(monkeypatch)

    def _watch_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pass the points before and after calls."""

        def around(
            owner: Any,
            name: str,
            before: str = "",
            after: str = "",
            note: Callable[..., None] | None = None,
        ) -> None:
            real = getattr(owner, name)

            def watched(*arguments: Any, **options: Any) -> Any:
                self._passed(before)
                if note is not None:
                    note(*arguments, **options)
                outcome = real(*arguments, **options)
                self._passed(after)
                return outcome

            monkeypatch.setattr(owner, name, watched)

        def note_acknowledged(
            client: RolloutClient,
            lease: object,
            version: int,
            skipped: str | None = None,
            report: object = None,
        ) -> None:
            if skipped is None:
                self.acknowledged.append(self._in_hand)
            else:
                self.skipped.append(skipped)

        around(NoBridge, "sync", after="synced")
        around(checkpointing.Checkpoints, "begin", after="begun")
        around(
            checkpointing, "put_in_place", before="writing", after="written"
        )  # in the writing thread
        around(RolloutClient, "acknowledge", "acknowledging", "acknowledged", note_acknowledged)
        around(RolloutClient, "acknowledge_earlier", after="settled")
        around(RolloutClient, "end_run", before="ending")

    def _watch_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note which group each step takes, and spoil its logprobs if it shall be."""
        numbers = {
            tuple(row[3:]): number
            for number in range(50)
            for row in made_up_group(number)["tokens"]
        }
        take_step, logprobs = trainer.guarded_step, step.response_logprobs

        def take(
            model: Any, optimizer: Any, minibatches: Sequence[Sequence[PackedBin]], *rest: Any
        ) -> Any:
            self._in_hand = min(
                numbers[tuple(row)]
                for bins in minibatches
                for one in bins
                for row in responses(one)
            )
            taken = take_step(model, optimizer, minibatches, *rest)
            self.line.append(self._in_hand)
            self._passed("stepped")
            return taken

        def logprobs_with_faults(*arguments: Any) -> Any:
            chosen, entropy = logprobs(*arguments)
            return self.faults.get(self._in_hand, lambda value: value)(chosen), entropy

        monkeypatch.setattr(step, "response_logprobs", logprobs_with_faults)
        monkeypatch.setattr(trainer, "guarded_step", take)

    def _watch_the_client(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note where a registration lets the line go on."""
        register = RolloutClient.register

        def register_and_note(client: RolloutClient, registration: Any) -> None:
            del self.line[registration.starting_step :]
            register(client, registration)
            self._passed("registered")

        monkeypatch.setattr(RolloutClient, "register", register_and_note)
