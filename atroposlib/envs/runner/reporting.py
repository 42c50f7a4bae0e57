"""An environment's reports: metrics to the log, a file and W&B; evaluations to JSON and JSON
lines."""

import importlib
import logging
import os
import random
import string
import time
import uuid
from collections.abc import Mapping
from datetime import datetime
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from atroposlib.envs.runner.state import Author, Connections, RunState, label_of
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.inference.client import MODEL_NOT_NAMED
from atroposlib.inference.generation import VersionRecord, current_versions
from atroposlib.service_client import RejectedByService
from atroposlib.utils.files import KeptLines
from atroposlib.utils.jsonl import (
    encode_repaired,
    open_kept_lines,
    replace_file,
    unencodable_fields,
)
from atroposlib.utils.metrics import display_metrics_table, get_std_min_max_avg, offline_mode
from atroposlib.web.keys import open_settings
from atroposlib.wire import LARGEST_FLOAT32

logger = logging.getLogger(__name__)

MAX_NAME_LENGTH, MAX_METRICS = 256, 256
"""Limits of the rollout service for an evaluation: characters of a name, and number of metrics."""
NO_SUCH_ROUTE = (404, 405)


class Reports:
    """Metrics and evaluation records. The numbers come from the run's state."""

    def __init__(self, state: RunState, connections: Connections, author: Author):
        self.state, self.connections, self.author = state, connections, author
        self.evaluations_taken = True
        """False once the rollout service has no route for evaluations."""
        self.wandb: Any = None
        """The module, once there is a W&B run."""
        self._metrics_writer: KeptLines | None = None

    @property
    def label(self) -> str:
        """Return the environment's name."""
        return label_of(self.author, self.state.config)

    def start_wandb(self, project: str | None, group: str | None) -> None:
        """Start a W&B run, if `use_wandb` is set.

        Raises:
            UsageError: wandb is not installed.
        """
        if not self.state.config.use_wandb:
            return
        try:
            self.wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise UsageError(
                "--env.use_wandb is set but wandb is not installed: pip install wandb, or --env.use_wandb false"
            ) from error
        folder = os.environ.get("WANDB_DIR") or "."
        mode, notice = offline_mode(folder)
        if notice:
            logger.info("%s", notice)
        suffix = "".join(random.choices(string.ascii_lowercase, k=6))
        self.wandb.init(
            project=project,
            group=group,
            name=f"{self.label}-{datetime.now():%Y-%m-%d}-{suffix}",
            config=open_settings(self.state.config),
            **mode,
        )

    async def log(self, metrics: dict[str, Any]) -> None:
        """See `BaseEnv.wandb_log`."""
        if self.state.completion_lengths:
            lengths = np.asarray(self.state.completion_lengths)
            metrics["train/completion_lengths"] = float(lengths.mean())
            metrics["train/completion_lengths_std"] = float(lengths.std())
            metrics["train/completion_lengths_max"] = float(lengths.max())
            metrics["train/completion_lengths_min"] = float(lengths.min())
            metrics["train/completion_lengths_p95"] = float(
                (lengths > 0.95 * self.state.max_token_len).mean()
            )
        self.state.completion_lengths = []
        metrics.update(self.state.drops.metrics())
        metrics = self.author.perf_stats(metrics)
        server_metrics: dict[str, Any] = {}
        for index, server in enumerate(self.connections.server.servers):
            server_metrics = await server.wandb_metrics(server_metrics, f"server_{index}")
        self._log_line(metrics)
        if self.state.config.metrics_path:
            self._write_metrics(
                {"time": time.time(), "step": self.state.curr_step} | metrics | server_metrics
            )
        if self.wandb is not None:
            metrics = await self.author.create_rollout_table(metrics)
            if self.state.wandb_prepend is not None:
                metrics = {
                    f"{self.state.wandb_prepend}_{key}": value for key, value in metrics.items()
                }
            # Servers are shared by environments, so their metrics carry no environment's name.
            self.wandb.log(metrics | server_metrics, step=self.state.curr_step)
        self.state.rollouts_for_wandb = []

    def _write_metrics(self, row: dict[str, Any]) -> None:
        """Append to `metrics_path`, without what only W&B can show, such as tables and images."""
        if self._metrics_writer is None:
            self._metrics_writer = open_kept_lines(Path(self.state.config.metrics_path or ""))
        wrong = unencodable_fields(row)
        for name, why in wrong.items():
            logger.warning(
                "metric %r is left out of %s: %s", name, self.state.config.metrics_path, why
            )
        self._metrics_writer.write(
            encode_repaired({name: value for name, value in row.items() if name not in wrong})
        )

    def _log_line(self, metrics: dict[str, Any]) -> None:
        """One line with what a person watches: the environment's own metrics first, queue and drops
        last.
        """
        own = {
            key: value
            for key, value in metrics.items()
            if isinstance(value, int | float)
            and not key.startswith(("train_perf/", "train/dropped_", "train/completion_lengths_"))
        }
        shown = " ".join(f"{key}={value:.4g}" for key, value in own.items())
        queue = self.state.status_dict.get("queue_size", "?")
        logger.info(
            "step %s | workers %d | queue %s | %s | dropped %s",
            self.state.curr_step,
            len(self.state.workers),
            queue,
            shown,
            self.state.drops,
        )

    def add_durations(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """See `BaseEnv.perf_stats`."""
        if self.state.groups_sent:
            metrics["train/items_sent_to_api"] = self.state.groups_sent
            self.state.groups_sent = 0
        if rejected := len(self.state.timings["failed_task_duration"]):
            metrics["train/items_rejected"] = rejected
        for name, values in self.state.timings.items():
            if values:
                get_std_min_max_avg(f"train_perf/{name}", values, metrics)
        self.state.timings.clear()
        return metrics

    def keep_rollouts(self, scored_data: Any) -> None:
        """Keep some rollouts of a group for the table in W&B."""
        rows = list(zip(scored_data["tokens"], scored_data["scores"], strict=False))
        keep = self.state.config.num_rollouts_per_group_for_logging
        if keep >= 0:
            rows = rows[:keep]
        decode = self.author.tokenizer.decode
        self.state.rollouts_for_wandb.append([(decode(tokens), score) for tokens, score in rows])
        del self.state.rollouts_for_wandb[: -self.state.config.num_rollouts_to_keep or None]

    def add_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as a table."""
        if self.state.rollouts_for_wandb and self.wandb is not None:
            table = self.wandb.Table(columns=["text", "score"])
            for group in self.state.rollouts_for_wandb:
                for row in group:
                    table.add_data(*row)
            wandb_metrics["train/rollouts"] = table
        return wandb_metrics

    async def recorded_evaluation(self) -> Any:
        """An evaluation that knows which weights it met.

        A task of its own runs it, for the record stays set.
        """
        current_versions.set(VersionRecord(sampled=None))
        return await self.author.evaluate()

    async def evaluation(
        self,
        metrics: dict[str, Any],
        task_name: str | None,
        model_name: str | None,
        start_time: float | None,
        end_time: float | None,
        generation_parameters: dict[str, Any] | None,
        samples: list[dict[str, Any]] | None,
        verbose: bool,
    ) -> None:
        """See `BaseEnv.evaluate_log`."""
        now = time.time()
        start_time, end_time = start_time or now, end_time or now
        given_name, task_name = (
            task_name,
            task_name or f"{self.author.name or type(self.author).__name__}_eval",
        )
        model_name = model_name or self._model_name()
        if verbose:
            display_metrics_table(task_name, metrics, start_time, end_time)
        record = {
            "config_general": {
                "model_name": model_name,
                "total_evaluation_time_seconds": str(end_time - start_time),
                "generation_parameters": {"max_new_tokens": self.state.config.max_token_length}
                | (generation_parameters or {}),
            },
            "results": {f"atropos|{task_name}|0": metrics, "all": metrics},
        }
        try:
            self._keep_evaluation(
                record, {"environment": self.author.name, "model": model_name} | metrics, samples
            )
        except EnvironmentFailure as failure:
            if self.state.env_id is None:  # the files are all that is wanted
                raise
            logger.error("an evaluation is posted but not kept: %s", failure)
        await self._post_evaluation(given_name or self.label, metrics)

    def _keep_evaluation(
        self, record: dict[str, Any], metrics: dict[str, Any], samples: list[dict[str, Any]] | None
    ) -> None:
        """Write the files that the options name.

        Raises:
            EnvironmentFailure: one of them cannot be written; the earlier one is kept.
        """
        if self.state.config.data_dir_to_save_evals is not None:
            folder = Path(self.state.config.data_dir_to_save_evals)
            write_evaluation(folder / "metrics.json", record, folder / "samples.jsonl", samples)
        if self.state.config.eval_output is not None:
            output = Path(self.state.config.eval_output)
            beside = output.with_name(f"{output.stem}.samples.jsonl")
            write_evaluation(output, {"step": self.state.curr_step} | metrics, beside, samples)

    async def _post_evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Post a measurement to the rollout service, if the environment is registered there. A
        failure to post it is logged, and ends nothing."""
        numbers = numbers_of(metrics)
        if self.state.env_id is None or not numbers or not self.evaluations_taken:
            return
        oldest = getattr(current_versions.get(), "oldest_weights", None)
        body = {
            "env_id": self.state.env_id,
            "name": name.encode("utf-8", errors="backslashreplace").decode()[:MAX_NAME_LENGTH],
            "weight_version": getattr(oldest, "version", None),
            "weight_epoch": getattr(oldest, "epoch", None),
            "metrics": numbers,
            "idempotency_key": uuid.uuid4().hex,
        }
        try:
            await self.connections.service.post("/evaluations", body)
        except RejectedByService as rejection:
            if rejection.status in NO_SUCH_ROUTE:
                self.evaluations_taken = False
                logger.info(
                    "the rollout service takes no results of evaluations: they stay in the log and files here"
                )
            else:
                logger.error(
                    "the rollout service refused the result of evaluation %s: %s", name, rejection
                )
        except EnvironmentFailure as failure:
            logger.error(
                "the result of evaluation %s is not posted, the rollouts go on: %s", name, failure
            )

    def _model_name(self) -> str | None:
        config = getattr(self.connections.server.servers[0], "config", None)
        served = getattr(self.connections.server.servers[0], "_served", None) or {}
        named = getattr(config, "model_name", None)
        return served.get("id") if named in MODEL_NOT_NAMED else named

    def close(self) -> None:
        """End the W&B run, and close the files."""
        for writer in (self.state.jsonl_writer, self._metrics_writer):
            if writer is not None:
                writer.close()
        if self.wandb is not None:
            self.wandb.finish()


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among metrics that the rollout service takes.

    The weight version goes in a field of its own.
    """
    numbers = {
        str(name).encode("utf-8", errors="backslashreplace").decode(): number
        for name, value in metrics.items()
        if name != "weight_version" and (number := _number_of(value)) is not None
    }
    taken = {name: value for name, value in numbers.items() if 0 < len(name) <= MAX_NAME_LENGTH}
    return dict(list(taken.items())[:MAX_METRICS])


def _number_of(value: Any) -> float | None:
    """A metric as the rollout service takes it; None for all else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer that is too large
        return None
    if abs(number) <= LARGEST_FLOAT32:
        return number
    return None


def write_evaluation(
    path: Path, content: Any, samples_path: Path, samples: list[dict[str, Any]] | None
) -> None:
    """Replace the file of an evaluation's metrics, and that of its samples if there are any.

    Raises:
        EnvironmentFailure: one of them cannot be written; the earlier one is kept.
        UsageError: a sample has a value that JSON cannot hold.
    """
    replace_file(path, encode_repaired(content, indent=True) + b"\n")
    logger.info("wrote %s", path)
    if samples:
        try:
            lines = [encode_repaired(row) + b"\n" for row in samples]
        except TypeError as error:
            raise UsageError(
                f"a sample of the evaluation cannot be written to {samples_path}: "
                f"{error.__cause__ or error}; use text, numbers and lists in its fields"
            ) from error
        replace_file(samples_path, b"".join(lines))
        logger.info("wrote %d samples to %s", len(samples), samples_path)
