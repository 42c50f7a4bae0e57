"""What `atropos-sft-gen` and `atropos-dpo-gen` share: be the trainer of a rollout service, and
write what is worth keeping of each group to a file of JSON lines.

The rows of a batch are on the disk before the batch is acknowledged. A run that is killed in
between gets the batch again, finds its rows at the end of the file, and does not write them twice.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from atroposlib.errors import EnvironmentFailure, ServiceUnavailable, UsageError
from atroposlib.service_client import BlockingServiceClient, RejectedByService
from atroposlib.utils.log_lines import LogLines
from atroposlib.utils.waiting import Patience
from atroposlib.utils.whole_files import append_whole, cannot_write
from atroposlib.web.addresses import argument, http_address
from atroposlib.web.keys import SERVICE_KEY, given_or_variable
from atroposlib.wire.groups import PROMPT_MASK

logger = logging.getLogger(__name__)

Group = dict[str, Any]
Row = dict[str, Any]
ENDLESS = 2**31 - 1
"""Steps that are told to environments: who collects says itself when it is over."""


def collector_parser(prog: str, description: str, what: str) -> argparse.ArgumentParser:
    """The options that both commands have. `what` names a row, in the plural."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "filepath",
        nargs="?",
        type=Path,
        default=Path("sft_data.jsonl"),
        help="file of JSON lines to write",
    )
    parser.add_argument(
        "--api-url",
        type=argument(http_address),
        default="http://localhost:8000",
        help="the rollout service; its key is $ROLLOUT_API_KEY",
    )
    parser.add_argument(
        "--group-size",
        type=_at_least_one,
        default=2,
        help="sequences of a group, as environments make them",
    )
    parser.add_argument(
        "--max-token-len", type=_at_least_one, default=2048, help="tokens that a sequence may have"
    )
    parser.add_argument(
        "--tokenizer", help="folder or name of the tokenizer of the model that is sampled"
    )
    parser.add_argument(
        "--save-messages",
        action="store_true",
        help="write messages, which not every environment posts",
    )
    parser.add_argument(
        "--num-seqs-to-save", type=_at_least_one, default=100, help=f"{what} after which it ends"
    )
    parser.add_argument(
        "--allow-negative-scores",
        action="store_true",
        help="keep what has a score of 0 or below, too",
    )
    parser.add_argument(
        "--append-to-previous",
        action="store_true",
        help=f"add as many {what} to a file that exists",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with a file that exists, until it has as many in all",
    )
    parser.add_argument("--tasks-per-step", type=_at_least_one, help="groups in a batch")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the place of a trainer whose run has not ended",
    )
    parser.add_argument(
        "--service-timeout",
        type=float,
        default=600.0,
        help="seconds that it waits for the service, or for groups",
    )
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


class RowsFile:
    """A file of JSON lines that only grows by whole rows, and that no two processes write.

    Args:
        path: of the file.
        may_exist: go on with a file that is there; a line that is not complete is cut off.

    Raises:
        UsageError: it exists, or cannot be written; the message says what to do.
    """

    def __init__(self, path: Path, may_exist: bool) -> None:
        self.path, self._is_new = path, not may_exist
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | (0 if may_exist else os.O_EXCL), 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileExistsError:
            raise UsageError(
                f"{path} exists: --resume goes on until it has as many rows in all, --append-to-previous adds as many; "
                "or name another file"
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
        """How many of these rows, from the first one on, the file ends with."""
        size = os.fstat(self._file).st_size
        wanted = sum(map(len, rows))
        end = os.pread(self._file, wanted, max(0, size - wanted))
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
    """A rollout service, of which this process is the trainer. The public one, without
    acknowledgement, will do too.
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

    def register(self, name: str, batch_size: int, max_token_len: int, take_over: bool) -> None:
        """Become its trainer. Nothing that it holds is thrown away.

        Raises:
            UsageError: another trainer's run has not ended.
        """
        project = self.request("GET", "/wandb_info")["project"]
        registered = self.request("GET", "/info")["batch_size"] > 0
        busy = registered and not self.optional("GET", "/stats").get("run_ended")
        if busy and project != name and not take_over:
            raise UsageError(
                f"{self.url} has a trainer (project {project!r}) whose run has not ended, and its groups would come "
                "here instead: start another service, or pass --take-over"
            )
        registration = {
            "wandb_group": name,
            "wandb_project": name,
            "batch_size": batch_size,
            "max_token_len": max_token_len,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": ENDLESS,
            "ack_batches": True,
        }
        self.uuid = self.request("POST", "/register", registration).get("uuid")

    def batch(self) -> tuple[list[Group], int | None]:
        """The next batch, when there is one, and its id; None from a service that has none.

        Raises:
            ServiceUnavailable: there was none in time.
        """
        remedy = "is an environment running, and does its group_size divide the batch (--group-size, --tasks-per-step)?"
        patience = Patience("groups", self.timeout, ServiceUnavailable, logger, remedy)
        query = None if self.uuid is None else {"uuid": self.uuid}
        while True:
            answer = self.request("GET", "/batch", query=query)
            if answer.get("batch"):
                patience.done()
                return answer["batch"], answer.get("batch_id")
            why = answer.get("message") or self.optional("GET", "/stats").get("waiting_because")
            patience.wait_blocking(why or "no batch is complete yet")

    def done(self, batch_id: int | None) -> None:
        """A batch is written. The weights that sample are as they were: no version passes."""
        if batch_id is not None:
            body = {"batch_id": batch_id, "weight_version": 0, "uuid": self.uuid}
            self.request("POST", "/batch/ack", body)

    def end(self) -> None:
        """Nothing more is wanted: environments end, too."""
        if self.uuid is not None:
            self.optional("POST", "/run/end", {"uuid": self.uuid})


def prompts_and_completions(group: Group, tokenizer: Any) -> list[tuple[str, str]]:
    """The text of each sequence, divided at the first token that the model sampled."""
    divided = []
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        begin = next((place for place, entry in enumerate(mask) if entry != PROMPT_MASK), len(mask))
        divided.append((tokenizer.decode(tokens[:begin]), tokenizer.decode(tokens[begin:])))
    return divided


def collect(
    arguments: argparse.Namespace,
    name: str,
    tasks_per_step: int,
    select: Callable[[Group, Any], list[Row]],
) -> None:
    """Take batches until the file has as many rows as were asked for.

    Args:
        arguments: of `collector_parser`.
        name: of the command, under which it registers.
        tasks_per_step: groups in a batch, where none are given.
        select: the rows of a group, given the tokenizer: None with --save-messages.

    Raises:
        EnvironmentFailure: something is missing or wrong; the message says what to do.
    """
    if arguments.tokenizer is None and not arguments.save_messages:
        raise UsageError(
            "groups hold tokens: name the sampled model's tokenizer (--tokenizer), or pass --save-messages"
        )
    if arguments.resume and arguments.append_to_previous:
        raise UsageError(
            "--resume counts the rows that are there and --append-to-previous does not: give one of them"
        )
    tokenizer = None
    if not arguments.save_messages:
        from atroposlib.inference.tokenizers import (
            load_tokenizer,
        )  # seconds, which nobody waits for who writes messages

        tokenizer = load_tokenizer(arguments.tokenizer)
    file = RowsFile(arguments.filepath, arguments.resume or arguments.append_to_previous)
    wanted = arguments.num_seqs_to_save + (file.rows if arguments.append_to_previous else 0)
    before, groups, groups_without_rows = file.rows, 0, 0
    try:
        if file.rows >= wanted:
            logger.info("%s has %d rows already, %d are wanted", file.path, file.rows, wanted)
            return
        key = given_or_variable(None, SERVICE_KEY)
        service = Service(arguments.api_url, arguments.service_timeout, key)
        batch_size = arguments.group_size * (arguments.tasks_per_step or tasks_per_step)
        service.register(name, batch_size, arguments.max_token_len, arguments.take_over)
        first = before > 0
        while file.rows < wanted:
            batch, batch_id = service.batch()
            if arguments.save_messages and not any(group.get("messages") for group in batch):
                raise EnvironmentFailure(
                    "the environments post no messages: leave --save-messages out and name the --tokenizer"
                )
            found = [select(group, tokenizer) for group in batch]
            rows = [orjson.dumps(row) + b"\n" for rows in found for row in rows]
            there = file.ends_with(rows) if first else 0
            if there:
                logger.info("%d rows of batch %s are in %s already", there, batch_id, file.path)
            file.write(rows[there:][: wanted - file.rows])
            service.done(batch_id)
            first = False
            groups += len(batch)
            groups_without_rows += sum(not rows for rows in found)
            logger.info(
                "%s: %d of %d rows, %d of %d groups gave none",
                file.path,
                file.rows,
                wanted,
                groups_without_rows,
                groups,
            )
        service.end()
    finally:
        file.close()


def run_collector(call: Callable[[], None]) -> None:
    """Run a command until it is done, or is told to stop; what goes wrong is one line.

    Raises:
        SystemExit: it was stopped, or something went wrong.
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
        call()
    except EnvironmentFailure as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
