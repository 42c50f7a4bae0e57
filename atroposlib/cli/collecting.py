"""The common part of `atropos-sft-gen` and `atropos-dpo-gen`: a trainer of a rollout service that
writes rows of each group to a file of JSON lines.

The rows of a batch are on the disk before the batch is acknowledged. A run that is killed in
between gets the batch again. It finds its rows at the end of the file, and does not write them
twice.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import orjson
from pydantic import BaseModel, Field, model_validator

from atroposlib.command_line import AtLeastOne
from atroposlib.errors import EnvironmentFailure, ServiceUnavailable, UsageError
from atroposlib.service_client import BlockingServiceClient, RejectedByService
from atroposlib.utils.files import append_whole, cannot_write
from atroposlib.utils.log_lines import LogLines
from atroposlib.utils.waiting import Patience
from atroposlib.web.addresses import HttpAddress
from atroposlib.web.keys import SERVICE_KEY, given_or_variable
from atroposlib.wire import PROMPT_MASK

logger = logging.getLogger(__name__)

Group = dict[str, Any]
Row = dict[str, Any]
ENDLESS = 2**31 - 1
"""Steps of the run, as the service knows it. The collector itself ends the run."""


class CollectorOptions(BaseModel):
    """The options that both commands have."""

    filepath: Path = Field(
        default=Path("sft_data.jsonl"), description="file of JSON lines to write"
    )
    api_url: HttpAddress = Field(
        default="http://localhost:8000",
        description="the rollout service; its key is $ROLLOUT_API_KEY",
    )
    group_size: AtLeastOne = Field(
        default=2, description="sequences of a group, as environments make them"
    )
    max_token_len: AtLeastOne = Field(default=2048, description="tokens that a sequence may have")
    tokenizer: str | None = Field(
        default=None,
        description="folder or name of the tokenizer of the model that is sampled",
    )
    save_messages: bool = Field(
        default=False, description="write messages, which not every environment posts"
    )
    num_seqs_to_save: AtLeastOne = Field(default=100, description="rows after which it ends")
    allow_negative_scores: bool = Field(
        default=False, description="keep responses with a score of 0 or below, too"
    )
    append_to_previous: bool = Field(
        default=False, description="add as many rows to a file that exists"
    )
    resume: bool = Field(
        default=False, description="go on with a file that exists, until it has as many rows in all"
    )
    tasks_per_step: AtLeastOne = Field(default=64, description="groups in a batch")
    take_over: bool = Field(
        default=False, description="take the place of a trainer whose run has not ended"
    )
    service_timeout: float = Field(
        default=600.0, description="longest wait for the service, or for groups, in seconds"
    )

    @model_validator(mode="after")
    def _has_text_and_one_target(self) -> Self:
        if self.tokenizer is None and not self.save_messages:
            raise ValueError(
                "groups hold tokens: name the sampled model's tokenizer (--tokenizer), or pass "
                "--save-messages"
            )
        if self.resume and self.append_to_previous:
            raise ValueError(
                "--resume counts the rows in the file and --append-to-previous does not: give one"
            )
        return self


Options = TypeVar("Options", bound=CollectorOptions)
Options_contra = TypeVar("Options_contra", bound=CollectorOptions, contravariant=True)


class Select(Protocol[Options_contra]):
    """A function that makes the rows of a group. `tokenizer` is None with --save-messages."""

    def __call__(self, group: Group, tokenizer: Any, options: Options_contra) -> list[Row]: ...


class RowsFile:
    """A file of JSON lines that only grows by whole rows, and that no two processes write.

    Args:
        path: of the file.
        may_exist: go on with a file that is there; a line that is not complete is cut off.

    Raises:
        UsageError: it exists, or cannot be written; the message has the remedy.
    """

    def __init__(self, path: Path, may_exist: bool) -> None:
        self.path, self._is_new = path, not may_exist
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        if not may_exist:
            flags |= os.O_EXCL
        try:
            self._file = os.open(path, flags, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileExistsError:
            raise UsageError(
                f"{path} exists: --resume goes on until it has as many rows in all, "
                "--append-to-previous adds as many; or name another file"
            ) from None
        except BlockingIOError:
            raise UsageError(
                f"{path} is being written by another process; wait for it, or name another file"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from None
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning(
                "%s: cut off %d bytes of a row that was not complete", path, len(content) - whole
            )
            os.ftruncate(self._file, whole)
        self.rows = content.count(b"\n")
        self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self.path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def ends_with(self, rows: Sequence[bytes]) -> int:
        """Return how many of these rows, from the first one on, the file ends with."""
        size = os.fstat(self._file).st_size
        length = sum(map(len, rows))
        end = os.pread(self._file, length, max(0, size - length))
        return next(
            (count for count in range(len(rows), 0, -1) if end.endswith(b"".join(rows[:count]))), 0
        )

    def write(self, rows: Sequence[bytes]) -> None:
        """Add rows; they are on the disk when this returns.

        Raises:
            EnvironmentFailure: the disk refused; none of them was added.
        """
        size, content = os.fstat(self._file).st_size, b"".join(rows)
        try:
            append_whole(self._file, content)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            reason = cannot_write(self.path, error, len(content))
            raise EnvironmentFailure(
                f"{reason}; make room there, then go on with --resume"
            ) from None
        self.rows += len(rows)

    def close(self) -> None:
        """Let go of the file. A new one that has got no row is removed."""
        if self._is_new and not self.rows:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


class Refused(RejectedByService, EnvironmentFailure):
    """The service refused a call: the command ends with the reason."""


class Service(BlockingServiceClient):
    """A rollout service with this process as its trainer. The public one, without acknowledgement,
    will do too.
    """

    caller = "collector"
    key_remedy = f"set {SERVICE_KEY} to its key"
    start_remedy = "is it running, and is --api-url its address?"
    rejected = Refused
    uuid: int | None = None

    def optional(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call a route that the public service does not have; its answer is then empty."""
        try:
            return self.request(method, path, body)
        except Refused as refusal:
            if refusal.status != 404:
                raise
            return {}

    def register(self, name: str, options: CollectorOptions) -> None:
        """Become its trainer. The service keeps all that it holds.

        Raises:
            UsageError: another trainer's run has not ended.
        """
        project = self.request("GET", "/wandb_info")["project"]
        has_trainer = self.request("GET", "/info")["batch_size"] > 0
        run_ended = self.optional("GET", "/stats").get("run_ended")
        if has_trainer and not run_ended and project != name and not options.take_over:
            raise UsageError(
                f"{self.url} has a trainer (project {project!r}) whose run has not ended, and its "
                "groups would come here instead: start another service, or pass --take-over"
            )
        registration = {
            "wandb_group": name,
            "wandb_project": name,
            "batch_size": options.group_size * options.tasks_per_step,
            "max_token_len": options.max_token_len,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": ENDLESS,
            "ack_batches": True,
        }
        self.uuid = self.request("POST", "/register", registration).get("uuid")

    def batch(self) -> tuple[list[Group], int | None]:
        """Wait for the next batch. Its id is None from a service without acknowledgements.

        Raises:
            ServiceUnavailable: no batch was complete in time.
        """
        remedy = (
            "is an environment running, and does its group_size divide the batch (--group-size, "
            "--tasks-per-step)?"
        )
        patience = Patience("groups", self.timeout, ServiceUnavailable, logger, remedy)
        query = {}
        if self.uuid is not None:
            query = {"uuid": self.uuid}
        while True:
            answer = self.request("GET", "/batch", query=query)
            if answer.get("batch"):
                patience.done()
                return answer["batch"], answer.get("batch_id")
            why = answer.get("message") or self.optional("GET", "/stats").get("waiting_because")
            patience.wait_blocking(why or "no batch is complete yet")

    def acknowledge(self, batch_id: int | None) -> None:
        """Acknowledge a batch that is written. The sampling weights stay at version 0."""
        if batch_id is not None:
            body = {"batch_id": batch_id, "weight_version": 0, "uuid": self.uuid}
            self.request("POST", "/batch/ack", body)

    def end(self) -> None:
        """End the run, so that environments end too."""
        if self.uuid is not None:
            self.optional("POST", "/run/end", {"uuid": self.uuid})


def prompts_and_completions(group: Group, tokenizer: Any) -> list[tuple[str, str]]:
    """The text of each sequence, divided at the first token that the model sampled."""
    divided = []
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        begin = next((place for place, entry in enumerate(mask) if entry != PROMPT_MASK), len(mask))
        divided.append((tokenizer.decode(tokens[:begin]), tokenizer.decode(tokens[begin:])))
    return divided


def collect(options: Options, name: str, select: Select[Options]) -> None:
    """Take batches until the file has as many rows as were asked for.

    Args:
        options: of the command.
        name: of the command, under which it registers.
        select: makes the rows of a group.

    Raises:
        EnvironmentFailure: something is missing or wrong; the message names the remedy.
    """
    tokenizer = None
    if options.tokenizer is not None and not options.save_messages:
        # Its import takes seconds, which --save-messages does without.
        from atroposlib.inference.chat_template import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    file = RowsFile(options.filepath, options.resume or options.append_to_previous)
    target = options.num_seqs_to_save
    if options.append_to_previous:
        target += file.rows
    key = given_or_variable(None, SERVICE_KEY)
    service = Service(options.api_url, options.service_timeout, key)
    try:
        if file.rows >= target:
            logger.info("%s has %d rows already, of %d", file.path, file.rows, target)
            return
        service.register(name, options)
        rows_of = functools.partial(select, tokenizer=tokenizer, options=options)
        fill(file, target, service, rows_of, options.save_messages)
        service.end()
    finally:
        service.close()
        file.close()


def fill(
    file: RowsFile,
    target: int,
    service: Service,
    rows_of: Callable[[Group], list[Row]],
    needs_messages: bool,
) -> None:
    """Write the rows of batches to a file until it has as many as the target.

    Raises:
        EnvironmentFailure: a batch has no messages where they are needed.
    """
    may_repeat = file.rows > 0
    groups = groups_without_rows = 0
    while file.rows < target:
        batch, batch_id = service.batch()
        if needs_messages and not any(group.get("messages") for group in batch):
            raise EnvironmentFailure(
                "the environments post no messages: leave --save-messages out and name the "
                "--tokenizer"
            )
        rows_by_group = [rows_of(group) for group in batch]
        rows = [orjson.dumps(row) + b"\n" for rows in rows_by_group for row in rows]
        if may_repeat and (repeated := file.ends_with(rows)):
            logger.info("%d rows of batch %s are in %s already", repeated, batch_id, file.path)
            rows = rows[repeated:]
        file.write(rows[: target - file.rows])
        service.acknowledge(batch_id)
        may_repeat = False
        groups += len(batch)
        groups_without_rows += sum(not rows for rows in rows_by_group)
        logger.info(
            "%s: %d of %d rows, %d of %d groups gave none",
            file.path,
            file.rows,
            target,
            groups_without_rows,
            groups,
        )


def run_collector(options: Options, name: str, select: Select[Options]) -> None:
    """Collect until the file is complete or a signal stops the process.

    Raises:
        SystemExit: it was stopped, or something went wrong, which stderr names in one line.
    """
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[LogLines()],
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)

    def stop(number: int, _: object) -> None:
        print("stopped; go on with --resume", file=sys.stderr)
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        collect(options, name, select)
    except EnvironmentFailure as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
