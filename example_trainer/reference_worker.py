"""Computes the reference's logprobs of rollouts, between the environments and the trainer.

    python -m example_trainer.reference_worker --model-name Qwen/Qwen2.5-3B-Instruct --atropos-url http://localhost:8000

For a trainer with --kl-coef and --ref-logprobs-from-workers, which then holds no reference of its
own. A worker leases groups from the rollout service, runs the frozen model over them, and hands the
logprobs back. It keeps nothing: start as many as are needed, on as many machines, and kill them
when you like. A killed worker's groups go to another when its lease is over. The trainer sends how
it computes (dtype, operations, temperature); a worker that cannot do the same ends with one line.
"""

from __future__ import annotations

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()

import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from atroposlib.utils.waiting import LOG_EVERY
from example_trainer.api_keys import revealed
from example_trainer.batch.client import RefusedError, ServiceConnection
from example_trainer.batch.groups import GroupError
from example_trainer.command_line import Parser, add_section, checked, checked_config, read_flags
from example_trainer.config import (
    AlgorithmOptions,
    BatchOptions,
    ModelOptions,
    ReferenceWorkerOptions,
    RolloutOptions,
    Section,
    TrainerConfig,
)
from example_trainer.deterministic.pairing import pin_settings
from example_trainer.errors import ConfigError, OutOfMemoryError, RolloutServiceError
from example_trainer.models import load_model
from example_trainer.out_of_memory import ran_out_of_memory
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal, run
from example_trainer.training.model import (
    choose_device,
    choose_dtype,
    decoder_maker,
    fitted_to_model,
)
from example_trainer.training.reference import ReferenceScorer, ReferenceSettings
from vllm_patching.protocol.timeline import Activity, open_timeline

logger = logging.getLogger("example_trainer.reference_worker")

TAKEN: dict[type[Section], tuple[str, ...]] = {
    ModelOptions: ("model_name", "dtype", "device", "num_threads", "deterministic"),
    RolloutOptions: ("atropos_url", "atropos_api_key", "service_timeout"),
    BatchOptions: ("tokens_per_microbatch",),
    AlgorithmOptions: ("logprob_chunk",),
}
"""Fields of the trainer's sections whose flags are flags here too."""
MOST_TOKENS = 1 << 16
"""Limit of the tokens of the groups that are leased at a time."""
SHARE_OF_LEASE = 0.25
"""No more is leased than takes so much of a lease, so that a machine that is busy with something
else still answers in time."""
FIRST_POLL, LONGEST_POLL = 0.05, 1.0


def parse_arguments(arguments: Sequence[str]) -> tuple[TrainerConfig, ReferenceWorkerOptions]:
    """The options that it has in common with a trainer, and its own.

    Raises:
        ConfigError: an unknown flag, or a value that does not fit.
        SystemExit: --help was given.
    """
    about = "Compute the reference's logprobs of rollouts for a trainer."
    parser = Parser(
        prog="python -m example_trainer.reference_worker", description=about, allow_abbrev=False
    )
    for section, taken in TAKEN.items():
        add_section(parser, section, [name for name in section.model_fields if name not in taken])
    add_section(parser, ReferenceWorkerOptions)
    flags = read_flags(parser, arguments)
    own = {name: flags.pop(name) for name in ReferenceWorkerOptions.model_fields if name in flags}
    options = checked(ReferenceWorkerOptions, own, own)
    return checked_config(flags | {"weight_bridge_mode": "shared_vllm"}, flags), options


@dataclass
class Pace:
    """The number of tokens that are leased at a time.

    Attributes:
        lease_seconds: that it may take.
        tokens, seconds: computed so far, and in what time.
    """

    lease_seconds: float
    tokens: int = 0
    seconds: float = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """So much was done in so long; earlier ones count less and less, for they may have been of
        another kind.
        """
        self.tokens, self.seconds = self.tokens // 2 + tokens, self.seconds / 2 + seconds

    @property
    def next_tokens(self) -> int:
        """Tokens to lease now: one group to begin with, since nothing is known."""
        if not self.tokens:
            return 1
        if self.seconds <= 0:
            return MOST_TOKENS
        return max(
            1,
            min(MOST_TOKENS, int(SHARE_OF_LEASE * self.lease_seconds * self.tokens / self.seconds)),
        )


@dataclass
class Worker:
    """One worker: its model, and the service that it gets work from.

    Attributes:
        settings: its own; see ReferenceSettings.
        activity: its timeline.
    """

    scorer: ReferenceScorer
    settings: ReferenceSettings
    service: ServiceConnection
    options: ReferenceWorkerOptions
    name: str
    activity: Activity
    groups: int = 0
    tokens: int = 0
    _said: str = ""
    _told_at: float = field(default_factory=time.monotonic)

    def work(self, stop: StopSignal) -> None:
        """Until a signal comes; what is held then is finished first.

        Raises:
            StopRequested: a signal came.
            ConfigError: the trainer's reference is not this one.
            RolloutServiceError: the service is away for too long, or no such service.
        """
        pace, delay = Pace(self.options.lease_seconds), FIRST_POLL
        while True:
            stop.check()
            answer = self._lease(pace.next_tokens)
            groups = _groups_of(answer, self.service.url)
            settings = self.settings.agreed(answer.get("reference") or {})
            self._say(answer.get("reason"))
            if not groups:
                self.activity.be("waits")
                self.service.wait(delay, interruptible=False)
                delay = min(LONGEST_POLL, delay * 1.5)
                continue
            delay = FIRST_POLL
            self.activity.be("busy")
            begun = time.monotonic()
            for group in groups:
                self._answer(group, settings)
            pace.computed(sum(map(_tokens_of, groups)), time.monotonic() - begun)
            self._tell()

    def _lease(self, max_tokens: int) -> dict[str, Any]:
        body = {
            "worker": self.name,
            "model": self.settings.model,
            "max_tokens": max_tokens,
            "seconds": self.options.lease_seconds,
            "follows": [one.name for one in fields(ReferenceSettings)],
        }
        try:
            return self.service.call("POST", "/reference/lease", body)
        except RefusedError as error:
            raise ConfigError(" ".join(str(error).split())) from error

    def _answer(self, group: Mapping[str, Any], settings: ReferenceSettings) -> None:
        """Score a group and hand it back. A signal does not end this: the work would be lost."""
        result: dict[str, Any] = {"id": group["id"]}
        try:
            result["ref_logprobs"] = self._rows(group, settings)
        except GroupError as error:
            logger.warning("Nothing can be computed for group %d: %s", group["id"], error)
            result["unusable"] = str(error)[:1000]
        self.groups += 1
        self.tokens += _tokens_of(group)
        answer = self.service.last_call(
            "/reference/done", {"worker": self.name, "groups": [result]}
        )
        for refused in answer.get("refused") or ():
            logger.warning(
                "The rollout service does not take group %s: %s",
                refused.get("id"),
                refused.get("reason"),
            )

    def _rows(self, group: Mapping[str, Any], settings: ReferenceSettings) -> list[list[float]]:
        try:
            return self.scorer.rows(group, settings)
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"out of memory over a group of {_tokens_of(group)} tokens ({str(error).splitlines()[0]}); lower "
                "--tokens-per-microbatch or --logprob-chunk"
            ) from error

    def _say(self, reason: str | None) -> None:
        """Why there can be no groups, or that there may be: once for each change."""
        state = f"Waiting: {reason}" if reason else f"Working for the trainer of {self.service.url}"
        if state != self._said:
            self._said = state
            logger.info("%s", state)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at > LOG_EVERY:
            self._told_at = now
            logger.info("Computed %d groups, %d tokens so far", self.groups, self.tokens)


def _groups_of(answer: Mapping[str, Any], url: str) -> list[dict[str, Any]]:
    """The groups of a lease.

    Raises:
        RolloutServiceError: they are none.
    """
    groups = answer.get("groups")
    if not isinstance(groups, list) or not all(
        isinstance(one, dict) and isinstance(one.get("id"), int) for one in groups
    ):
        raise RolloutServiceError(
            f"{url}/reference/lease answered no list of groups: {str(answer)[:200]}"
        )
    return groups


def _tokens_of(group: Mapping[str, Any]) -> int:
    tokens = group.get("tokens")
    return (
        sum(len(row) for row in tokens if isinstance(row, list)) if isinstance(tokens, list) else 0
    )


def serve(config: TrainerConfig, options: ReferenceWorkerOptions, stop: StopSignal) -> None:
    """Load the model and work until a signal comes."""
    pin_settings(config)
    config = fitted_to_model(config)
    device = choose_device(config.device, config.num_threads)
    dtype = choose_dtype(config, None, device)
    try:
        model = load_model(
            config.model_name, dtype, device, decoder_maker(config, Ranks())
        ).requires_grad_(False)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"no room on {device} for --model-name {config.model_name} in {dtype}"
        ) from error
    name = options.called
    settings = ReferenceSettings.of(config, model)
    how = f"{settings.dtype} with the {settings.table} operations on {device}"
    logger.info("Reference worker %s: %s in %s", name, settings.model, how)
    with contextlib.ExitStack() as stack:
        timeline = open_timeline("reference", name)
        stack.callback(timeline.close)
        activity = Activity(timeline)
        stack.callback(activity.be, "")
        key = revealed(config.atropos_api_key)
        service = ServiceConnection(
            config.atropos_url, stop, key, config.service_timeout, "reference worker"
        )
        stack.callback(service.close)
        stop.defer()  # groups that are held are finished
        worker = Worker(ReferenceScorer(model, config), settings, service, options, name, activity)
        stack.callback(
            lambda: logger.info(
                "Computed %d groups, %d tokens in all", worker.groups, worker.tokens
            )
        )
        worker.work(stop)


if __name__ == "__main__":
    sys.exit(run(lambda stop: serve(*parse_arguments(sys.argv[1:]), stop)))
