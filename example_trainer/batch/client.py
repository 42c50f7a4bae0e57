"""The trainer's side of the rollout service's wire: register, fetch batches, acknowledge them.

Every wait ends: the service may be away for `service_timeout` seconds at a time, and a batch may
take `batch_timeout`. One thread may fetch batches while another acknowledges batches that were
fetched before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.service_client import BlockingServiceClient, RejectedByService
from atroposlib.utils.waiting import LOG_EVERY
from atroposlib.wire import MAX_SESSIONS, TrainerSession
from example_trainer.config import TrainerConfig
from example_trainer.errors import RolloutServiceError
from example_trainer.process import StopRequested, StopSignal

# A trainer's registration with the rollout service.


@dataclass(frozen=True)
class Registration:
    """The trainer's settings for the service, and through it for the environments.

    Attributes:
        batch_size: sequences in each batch.
        max_token_len: longest sequence in tokens.
        save_checkpoint_interval: steps between checkpoints, 0 for none but the last.
        starting_step, num_steps: optimizer steps done and to be done in all.
        max_staleness: oldest data wanted, in weight versions; None for any.
        model: what is trained; with checkpoint_dir it keeps one run's rollouts from another's
            trainer.
        weight_epoch: of the weights that this trainer makes; see ages.
        run: names the run over all its resumes; None for one without a name.
        lives: [weight epoch, starting step] of each trainer of the run, this one last.
        positions: of the last batch that the weights have learned from, {} before the first; None
            if that is not known.
        replay: policy, max_reuse and seed, by which the service uses groups; None for each once,
            oldest first.
        ref_logprobs_from_workers: groups that come without ref_logprobs wait for reference workers.
        reference: what those are to compute; see training.reference.
        log_dir: where the trainer writes its figures, for the service's page.
        inference_servers: addresses of the vLLM servers that it was started with, for the same page.
    """

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    max_staleness: int | None = None
    model: str | None = None
    weight_epoch: int = 0
    run: str | None = None
    lives: list[list[int]] | None = None
    positions: dict[str, int] | None = None
    replay: dict[str, Any] | None = None
    ref_logprobs_from_workers: bool = False
    reference: dict[str, str | float | bool] | None = None
    log_dir: str | None = None
    inference_servers: list[str] | None = None


def addresses_of_servers(config: TrainerConfig) -> list[str] | None:
    """The vLLM servers that get this trainer's weights, for the service's page; None if the options
    name none.
    """
    if config.weight_bridge_mode not in ("shared_vllm", "lora_only") and not config.starts_vllm:
        return None
    return [f"http://{host}:{port}" for host, port in config.vllm_addresses]


def registration(
    config: TrainerConfig,
    starting_step: int,
    lives: Sequence[TrainerSession] = (),
    positions: dict[str, int] | None = None,
    reference: dict[str, str | float | bool] | None = None,
    run: str | None = None,
) -> Registration:
    """Return the registration of a trainer.

    Args:
        starting_step: optimizer steps behind its weights.
        lives: the trainers of its run, itself last; see ages.
        positions: where its data goes on.
        reference: for reference workers to compute; None without them.
        run: the run's name; None if it has none.
    """
    project, group = config.wandb_names
    return Registration(
        wandb_group=group,
        wandb_project=project,
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path.resolve()),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=starting_step,
        num_steps=config.training_steps,
        max_staleness=config.oldest_rollouts,
        model=config.model_name,
        weight_epoch=lives[-1].epoch if lives else 0,
        run=run,
        lives=[[life.epoch, life.start] for life in lives[-MAX_SESSIONS:]] or None,
        positions=positions,
        replay={"policy": config.replay, "max_reuse": config.max_reuse, "seed": config.seed}
        if config.replays
        else None,
        ref_logprobs_from_workers=reference is not None,
        reference=reference,
        log_dir=str(config.log_dir.resolve()),
        inference_servers=addresses_of_servers(config),
    )


# The trainer's connection to the rollout service, whose waits a signal ends.

_LOOK_SECONDS = 0.25
"""Longest time until an interruption is noticed."""
_LAST_WORD_SECONDS = 10.0
"""Longest wait for an absent service after a signal, for a call that a signal must not prevent."""


class Interrupted(Exception):
    """`interrupt` was called during a wait that it may end."""


class RefusedError(RejectedByService, RolloutServiceError):
    """The service answered with a 4xx status."""


class ServiceConnection(BlockingServiceClient):
    """Calls to one rollout service.

    Args:
        stop: heeded while the service is away.
        service_timeout: seconds that it may be away at a time.
        caller: program that is refused if the key is wrong.
    """

    key_remedy = "give --atropos-api-key, or set ROLLOUT_API_KEY"
    start_remedy = (
        "start it with `python -m atroposlib.cli.run_api`, or raise the limit (--service-timeout)"
    )
    unavailable = failure = RolloutServiceError
    rejected = RefusedError

    def __init__(
        self,
        url: str,
        stop: StopSignal,
        api_key: str | None = None,
        service_timeout: float = 300.0,
        caller: str = "trainer",
    ) -> None:
        super().__init__(url, service_timeout, api_key)
        self.stop, self.caller = stop, caller
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """From now on, end what is interruptible with Interrupted, in whatever thread it waits."""
        self._interrupted.set()

    def wait(self, seconds: float, interruptible: bool) -> None:
        """Wait, but no longer than until a signal comes, or an interruption if it may end this
        wait.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if interruptible and self._interrupted.is_set():
                raise Interrupted
            self.stop.wait(min(left, _LOOK_SECONDS))

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: dict[str, int] | None = None,
        timeout: float = math.inf,
        interruptible: bool = False,
    ) -> dict[str, Any]:
        """See `request`. A signal ends the wait.

        Args:
            interruptible: `interrupt` ends the wait for the service.

        Raises:
            RolloutServiceError: it is away for too long, or answers something else than a JSON
                object.
            RefusedError: it answers that the request is wrong.
            StopRequested: a signal came.
        """
        wait = functools.partial(self.wait, interruptible=interruptible)
        return self.request(method, path, body, query, timeout, wait, self.stop.check)

    def last_call(
        self, path: str, body: dict[str, Any], timeout: float = math.inf
    ) -> dict[str, Any]:
        """POST what a signal must not keep from being sent: it shortens the wait for a service that
        is away.

        Raises:
            StopRequested: a signal came, and the service is away.
        """
        began = time.monotonic()

        def wait(seconds: float) -> None:
            try:
                self.wait(seconds, interruptible=False)
            except StopRequested:
                if time.monotonic() - began > _LAST_WORD_SECONDS:
                    raise
                time.sleep(seconds)

        return self.request("POST", path, body, timeout=timeout, pause=wait)


logger = logging.getLogger(__name__)

_FIRST_POLL, _LONGEST_POLL = 0.02, 0.25
_END_SECONDS = 10.0
"""Longest wait of a finished run for a service that is away."""
_LONGEST_REASON = 1000


@dataclass(frozen=True)
class TrainedBatch:
    """A batch's name: of one that is trained on, and of the last one in a checkpoint's weights.

    Attributes:
        id: the rollout service's number for it.
        uuid: of the registration under which it was handed out, which identifies service and
            which trainer it was.
        positions: where the environments that can be resumed exactly go on after it: the number of
            an item, by stream; None if there are none.
    """

    id: int
    uuid: int | None
    positions: dict[str, int] | None = None


@dataclass(frozen=True)
class LastRun:
    """The run that the rollout service had before: its name, the folder of its checkpoints, and a
    step that it has saved there.
    """

    name: str | None
    folder: Path
    saved_step: int

    @classmethod
    def read(cls, answer: Any) -> LastRun | None:
        """Read it from an answer of the service; None if that names none."""
        try:
            return cls(answer["run"], Path(answer["checkpoint_dir"]), int(answer["saved_step"]))
        except (TypeError, KeyError, ValueError):
            return None


@dataclass(frozen=True)
class FetchedBatch:
    """A batch as the service handed it out.

    Attributes:
        groups: as they were posted.
        lease: names it; None if the service leases none.
        queue_size: groups that the service then held for later batches.
        environments: names of the environments that the groups are from, by id; empty if the
            service names none.
        uses: how often each group was learned from before; empty if unknown.
    """

    groups: list[dict[str, Any]]
    lease: TrainedBatch | None
    queue_size: int
    environments: dict[str, Any] = field(default_factory=dict)
    uses: list[int] = field(default_factory=list)


class RolloutClient:
    """A trainer's client of one rollout service.

    A batch is *held* from when it is fetched until it is acknowledged. Several may be: each is
    learned from one version later than the one before, and so they are acknowledged in that order.

    Example:
        client = RolloutClient("http://localhost:8000", StopSignal())
        client.register(registration)
        batch = client.next_batch()
        ...
        client.acknowledge(batch.lease, weight_version)
    """

    def __init__(
        self,
        url: str,
        stop: StopSignal,
        api_key: str | None = None,
        service_timeout: float = 300.0,
        batch_timeout: float = 1800.0,
    ) -> None:
        self._service = ServiceConnection(url, stop, api_key, service_timeout)
        self.url, self.stop, self.batch_timeout = self._service.url, stop, batch_timeout
        self._registration: Registration | None = None
        self._version = 0
        self._positions: dict[str, int] | None = None
        self._query: dict[str, int] = {}
        self._logged_no_leases = False
        self.server_trouble: Callable[[], str] = lambda: ""
        """Return which servers cannot be sampled from, each with its reason, for the log line on
        what is waited for."""
        self._changed = threading.Condition()
        """Guards `_held`, `_version` and `_positions`."""
        self._held: deque[TrainedBatch | None] = deque()

    def close(self) -> None:
        """Close the connection."""
        self._service.close()

    def interrupt(self) -> None:
        """From now on, end `next_batch` with Interrupted, in whatever thread it waits."""
        self._service.interrupt()

    def weight_epoch(self, least: int, run: str | None) -> tuple[int, LastRun | None]:
        """Return the epoch for this trainer's weights: `least`, or a higher one that no other
        trainer has. Return also the run before it, if that has saved a checkpoint and not ended.

        A service that gives no epochs (the public one) leaves it at `least`.

        Raises:
            RolloutServiceError: the service is not there in time, or its answer is not an epoch.
        """
        try:
            answer = self._service.call("POST", "/weight-epoch", {"asked": least, "run": run})
        except RefusedError as error:
            logger.info(
                "The rollout service at %s gives no weight epochs, so the clock does: %s",
                self.url,
                error,
            )
            return least, None
        epoch = answer.get("weight_epoch")
        if not isinstance(epoch, int) or epoch < least:
            raise RolloutServiceError(
                f"{self.url}/weight-epoch answered {str(answer)[:200]}: an epoch of at least {least} is needed; "
                "is --atropos-url a rollout service?"
            )
        return epoch, LastRun.read(answer.get("last_run"))

    def register(self, registration: Registration) -> None:
        """Wait until the service is there, and register as its trainer.

        Raises:
            RolloutServiceError: it is not there in time, or refuses.
        """
        self._registration, self._version = registration, registration.starting_step
        self._positions = registration.positions
        self._register()
        logger.info("Registered with the rollout service at %s", self.url)

    def _register(self) -> None:
        if self._registration is None:
            raise RuntimeError("register() comes first")
        body = asdict(self._registration) | {
            **{"starting_step": self._version, "positions": self._positions, "ack_batches": True}
        }
        uuid = self._service.call("POST", "/register", body).get("uuid")
        self._query = {} if uuid is None else {"uuid": uuid}

    def next_batch(self, waited: Callable[[], float] | None = None) -> FetchedBatch:
        """Poll for a batch.

        A service that has lost the registration is registered with again. A service that leases its
        batches hands the same batch out again if the connection broke before it arrived here. It
        also does so if an earlier trainer died before it acknowledged it.

        Args:
            waited: seconds for which the caller has been waiting for this batch; by default since
                this call. Fetching ahead may take as long as training does.

        Raises:
            RolloutServiceError: no batch came in time, or the service went away for too long.
            Interrupted: `interrupt` was called.
        """
        begun = time.monotonic()
        waited = waited or (lambda: time.monotonic() - begun)
        last_logged, delay = 0.0, _FIRST_POLL
        while True:
            answer = self._service.call("GET", "/batch", query=self._query, interruptible=True)
            if answer.get("status") == "error":
                logger.warning(
                    "Registering with the rollout service at %s again: %s",
                    self.url,
                    answer.get("message"),
                )
                self._wait_until_nothing_is_held(waited)
                self._register()
            elif groups := answer.get("batch"):
                if not isinstance(groups, list) or not all(
                    isinstance(group, dict) for group in groups
                ):
                    raise RolloutServiceError(
                        f"{self.url}/batch answered a batch that is not a list of groups: "
                        f"{str(groups)[:200]}"
                    )
                lease = self._leased(answer.get("batch_id"), answer.get("positions"))
                with self._changed:
                    self._held.append(lease)
                names = answer.get("environments")
                names = names if isinstance(names, dict) else {}
                return FetchedBatch(groups, lease, self.queue_size(), names, self._uses(answer))
            seconds = waited()
            if seconds > self.batch_timeout:
                raise RolloutServiceError(
                    f"no batch came from {self.url} within {self.batch_timeout:.0f} s (--batch-timeout): {self._progress()}"
                )
            last_logged = min(last_logged, seconds)  # another caller may have begun to wait
            if seconds - last_logged > LOG_EVERY:
                trouble = self.server_trouble()
                servers = f"; these vLLM servers do not serve: {trouble}" if trouble else ""
                logger.info(
                    "Waiting for a batch for %.0f s: %s%s", seconds, self._progress(), servers
                )
                last_logged = seconds
            self._service.wait(delay, interruptible=True)
            delay = min(_LONGEST_POLL, delay * 1.5)

    def _wait_until_nothing_is_held(self, waited: Callable[[], float]) -> None:
        """A service that has forgotten this trainer does not know of the batches that it holds. It
        would count the next batches as trained on too early by as many versions.
        """
        while self._held:
            if waited() > self.batch_timeout:
                raise RolloutServiceError(
                    f"{self.url} has forgotten batches that are held for {self.batch_timeout:.0f} s"
                )
            self._service.wait(_LONGEST_POLL, interruptible=True)

    def _progress(self) -> str:
        """Describe what is missing for the next batch."""
        try:
            why = self._service.call("GET", "/stats", interruptible=True).get("waiting_because")
        except RefusedError:  # the public Atropos server has no such route
            why = None
        if isinstance(why, str) and why:
            return why
        size = self._registration.batch_size if self._registration else 0
        return (
            f"{self.queue_size()} groups are queued, {size} sequences make a batch; "
            "see whether an environment is running, and whether vLLM answers it"
        )

    def queue_size(self) -> int:
        """Groups that the service holds for later batches."""
        answer = self._service.call("GET", "/status")
        return int(answer.get("queue_size") or 0)

    def _uses(self, answer: dict[str, Any]) -> list[int]:
        if self._registration is None or self._registration.replay is None:
            return []
        if not isinstance(uses := answer.get("uses"), list):
            raise RolloutServiceError(
                f"{self.url} uses each group once, oldest first: it knows nothing of --replay and --max-reuse; leave them out, "
                "or start the rollout service of this version"
            )
        return uses

    def _leased(
        self, batch_id: int | None, positions: dict[str, int] | None
    ) -> TrainedBatch | None:
        if batch_id is not None:
            self._query["received"] = batch_id
            return TrainedBatch(batch_id, self._query.get("uuid"), positions)
        if not self._logged_no_leases:
            self._logged_no_leases = True
            logger.info(
                "The rollout service at %s leases no batches: one is lost if the trainer dies with it",
                self.url,
            )
        return None

    def acknowledge(
        self,
        lease: TrainedBatch | None,
        weight_version: int,
        skipped: str | None = None,
        report: dict[str, Any] | None = None,
    ) -> None:
        """Acknowledge a batch: the service need not hand it out again.

        Nothing is sent to a service that leases no batches (the original wire).

        Args:
            lease: the oldest held batch.
            weight_version: optimizer steps behind the weights now.
            skipped: why the batch is not in them; None if it is.
            report: what was computed for its tokens; see observe.token_report. A service that does
                not take it does without.
        """
        with self._changed:
            if not self._held or self._held[0] != lease:
                raise RuntimeError(
                    f"{lease} is acknowledged, but what is held is {list(self._held)}: the first comes first"
                )
        if lease is not None:
            self._acknowledge(lease, weight_version, skipped, report=report)
        with self._changed:  # only now: a waiting thread registers at the new version
            self._version = weight_version
            if lease is not None and lease.positions is not None and skipped is None:
                self._positions = lease.positions
            self._held.popleft()

    def keep(
        self, lease: TrainedBatch | None, weight_version: int, report: dict[str, Any] | None = None
    ) -> None:
        """Report a batch, and all fetched before it, as trained on but not saved. The service waits
        for them no longer and does not forget them yet.

        Without it the service would take the sampler to be at an older version than it is. It would
        then ask for no new samples, because they would be too old. They are acknowledged later, as
        ever.
        """
        if lease is not None:
            self._acknowledge(lease, weight_version, keep=True, report=report)

    def acknowledge_earlier(self, batch: TrainedBatch, weight_version: int) -> None:
        """Acknowledge a batch that an earlier trainer learned from, under that trainer's
        registration: before `register`, by which what was leased is handed out again.

        It may have been acknowledged before, which does no harm. A service that has another
        registration, or none, has no such batch, or has given it to another trainer.
        """
        if batch.uuid is not None:  # else its number might be another service's
            self._acknowledge(batch, weight_version)

    def last_report(
        self,
        batch: TrainedBatch,
        report: dict[str, Any] | None = None,
        error: str | None = None,
        patience: float = _END_SECONDS,
    ) -> None:
        """Report the end of the run with a batch that is not acknowledged. The run ends as well if
        the report cannot be sent.

        Args:
            batch: that was trained on.
            report: what was computed for its tokens.
            error: that training on it raised; None if something else ends the run.
            patience: seconds that the service may be away.
        """
        optional = {"report": report, "error": error}
        body = _named(batch) | {
            name: value for name, value in optional.items() if value is not None
        }
        try:
            self._service.last_call("/batch/report", body, timeout=patience)
        except RolloutServiceError as failure:
            logger.info("The rollout service does not know what ends the run: %s", failure)
        except StopRequested:
            logger.info(
                "The rollout service does not know what ends the run: it is away, and a signal came"
            )

    def _acknowledge(
        self,
        batch: TrainedBatch,
        weight_version: int,
        skipped: str | None = None,
        keep: bool = False,
        report: dict[str, Any] | None = None,
    ) -> None:
        body = _named(batch) | {"weight_version": weight_version}
        if skipped is not None:
            body["skipped"] = skipped[:_LONGEST_REASON]
        if keep:
            body["keep"] = True
        try:
            if report is not None:
                with contextlib.suppress(
                    RefusedError
                ):  # whatever it minds, the acknowledgement must not be lost by it
                    self._service.call("POST", "/batch/ack", body | {"report": report})
                    return
            self._service.call("POST", "/batch/ack", body)
        except RefusedError as error:
            # Restarted without its store, or taken over by another trainer: the next poll finds out
            # which.
            logger.warning("Batch %d could not be acknowledged: %s", batch.id, error)

    def end_run(self, uuid: int | None = None) -> None:
        """End the run: what the service holds is not for a later trainer.

        The run is over and saved, so a service that is away is a warning alone.

        Args:
            uuid: of the registration that ends; by default this client's.
        """
        body = dict(self._query) if uuid is None else {"uuid": uuid}
        body.pop("received", None)
        try:
            self._service.call("POST", "/run/end", body, timeout=_END_SECONDS)
        except RefusedError as error:
            logger.info("The rollout service takes no end of the run: %s", error)
        except RolloutServiceError as error:
            logger.warning("The rollout service does not know that the run has ended: %s", error)


def _named(batch: TrainedBatch) -> dict[str, Any]:
    if batch.uuid is None:
        return {"batch_id": batch.id}
    return {"batch_id": batch.id, "uuid": batch.uuid}
