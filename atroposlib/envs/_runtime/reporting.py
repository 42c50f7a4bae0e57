"""What an environment tells: metrics to the log, a file and W&B; evaluations to JSON and JSON lines."""

import importlib
import logging
import math
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
import orjson

from atroposlib.envs._runtime.core import EnvironmentCore
from atroposlib.envs._runtime.service_client import RejectedByService, RolloutServiceClient
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.groups import response_lengths
from atroposlib.inference.generation import VersionRecord, current_versions
from atroposlib.inference.server_baseline import MODEL_NOT_NAMED
from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.jsonl import JsonLinesWriter, unencodable_fields
from atroposlib.utils.keys import SERVICE_KEY, given_or_variable, open_settings
from atroposlib.utils.metrics import get_std_min_max_avg

logger = logging.getLogger(__name__)

LONGEST_NAME, MOST_METRICS = 256, 256
"""What the rollout service takes of an evaluation: characters of a name, and metrics."""
NO_SUCH_ROUTE = (404, 405)


class ReportingMixin(EnvironmentCore):
    """Metrics and evaluation records."""

    _wandb: Any = None
    _metrics_writer: JsonLinesWriter | None = None
    _service: RolloutServiceClient | None = None
    _evaluations_taken = True
    """Until it says that it does not."""

    @property
    def service(self) -> RolloutServiceClient:
        """The connection to the rollout service."""
        if self._service is None:
            config = self.config
            self._service = RolloutServiceClient(
                config.rollout_server_url,
                config.service_timeout,
                given_or_variable(config.rollout_server_api_key, SERVICE_KEY),
            )
        return self._service

    def start_wandb(self, project: str | None, group: str | None) -> None:
        """Start a W&B run, if `use_wandb` is set.

        Raises:
            UsageError: wandb is not installed.
        """
        if not self.config.use_wandb:
            return
        try:
            self._wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise UsageError(
                "--env.use_wandb is set but wandb is not installed: pip install wandb, or --env.use_wandb false"
            ) from error
        suffix = "".join(random.choices(string.ascii_lowercase, k=6))
        self._wandb.init(
            project=project,
            group=group,
            name=f"{self._label}-{datetime.now():%Y-%m-%d}-{suffix}",
            config=open_settings(self.config),
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log metrics to the log, to `metrics_path` and to W&B.

        A subclass overrides this, adds its own metrics, and calls `await super().wandb_log(metrics)`.
        """
        metrics = dict(wandb_metrics or {})
        if self.completion_lengths:
            lengths = np.asarray(self.completion_lengths)
            metrics["train/completion_lengths"] = float(lengths.mean())
            metrics["train/completion_lengths_std"] = float(lengths.std())
            metrics["train/completion_lengths_max"] = float(lengths.max())
            metrics["train/completion_lengths_min"] = float(lengths.min())
            metrics["train/completion_lengths_p95"] = float((lengths > 0.95 * self.max_token_len).mean())
        self.completion_lengths = []
        metrics.update(self.drops.metrics())
        metrics = self.perf_stats(metrics)
        server_metrics: dict[str, Any] = {}
        for index, server in enumerate(self.server.servers):
            server_metrics = await server.wandb_metrics(server_metrics, f"server_{index}")
        self._log_line(metrics)
        if self.config.metrics_path:
            self._write_metrics({"time": time.time(), "step": self.curr_step} | metrics | server_metrics)
        if self._wandb is not None:
            metrics = await self.create_rollout_table(metrics)
            if self.wandb_prepend is not None:
                metrics = {f"{self.wandb_prepend}_{key}": value for key, value in metrics.items()}
            # Servers are shared by environments, so their metrics carry no environment's name.
            self._wandb.log(metrics | server_metrics, step=self.curr_step)
        self.rollouts_for_wandb = []

    def _write_metrics(self, row: dict[str, Any]) -> None:
        """Append to `metrics_path`, without what only W&B can show, such as tables and images."""
        if self._metrics_writer is None:
            self._metrics_writer = JsonLinesWriter(self.config.metrics_path)
        wrong = unencodable_fields(row)
        for name, why in wrong.items():
            logger.warning("metric %r is left out of %s: %s", name, self.config.metrics_path, why)
        try:
            self._metrics_writer.write({name: value for name, value in row.items() if name not in wrong})
        except EnvironmentFailure as failure:
            logger.error("the metrics of step %s are lost, the rollouts go on: %s", self.curr_step, failure)

    def _log_line(self, metrics: dict[str, Any]) -> None:
        """One line with what a person watches: the environment's own metrics first, queue and drops last."""
        own = {
            key: value
            for key, value in metrics.items()
            if isinstance(value, int | float)
            and not key.startswith(("train_perf/", "train/dropped_", "train/completion_lengths_"))
        }
        shown = " ".join(f"{key}={value:.4g}" for key, value in own.items())
        queue = self.status_dict.get("queue_size", "?")
        logger.info(
            "step %s | workers %d | queue %s | %s | dropped %s", self.curr_step, len(self.workers), queue, shown, self.drops
        )

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Durations in seconds, added to the metrics; the collected values are then forgotten."""
        series: dict[str, list[Any]] = {
            "task_duration": self.task_duration,
            "succeeded_task_duration": self.succeeded_task_duration,
            "failed_task_duration": self.failed_task_duration,
            "mainloop_timings": self.mainloop_timings,
            "workers_added_per_attempt": self.workers_added_list,
        }
        if self.groups_sent:
            metrics_dict["train/items_sent_to_api"] = self.groups_sent
            self.groups_sent = 0
        if self.failed_task_duration:
            metrics_dict["train/items_rejected"] = len(self.failed_task_duration)
        for name, values in series.items():
            if values:
                get_std_min_max_avg(f"train_perf/{name}", values, metrics_dict)
                values.clear()
        return metrics_dict

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Keep some rollouts of a group for the table in W&B."""
        if self._wandb is None:
            return
        keep = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["tokens"]) if keep < 0 else min(keep, len(scored_data["tokens"]))
        self.rollouts_for_wandb.append(
            [(self.tokenizer.decode(scored_data["tokens"][i]), scored_data["scores"][i]) for i in range(count)]
        )
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as a table."""
        if self.rollouts_for_wandb and self._wandb is not None:
            table = self._wandb.Table(columns=["text", "score"])
            for group in self.rollouts_for_wandb:
                for row in group:
                    table.add_data(*row)
            wandb_metrics["train/rollouts"] = table
        return wandb_metrics

    def note_lengths(self, group: Any) -> None:
        """Keep the lengths of a group's responses, in tokens, for the next metrics."""
        self.completion_lengths.extend(response_lengths(group))

    async def _recorded_evaluation(self) -> Any:
        """An evaluation that knows which weights it met. A task of its own runs it, for the record stays set."""
        current_versions.set(VersionRecord(sampled=None))
        return await self.evaluate()

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Report an evaluation: a table in the terminal, files where a path is set, and to the rollout service, which tells the
        trainer.

        `data_dir_to_save_evals` gets `metrics.json` and `samples.jsonl`; `eval_output` gets the metrics as JSON, with the
        samples as JSON lines next to it.

        Args:
            metrics: name -> value. The service gets those that are numbers.
            start_time: Unix time in seconds, as `end_time`.
            samples: one dict per problem.
        """
        now = time.time()
        start_time, end_time = start_time or now, end_time or now
        given_name, task_name = task_name, task_name or f"{self.name or type(self).__name__}_eval"
        model_name = model_name or self._model_name()
        if verbose:
            display_metrics_table(task_name, metrics, start_time, end_time)
        record = {
            "config_general": {
                "model_name": model_name,
                "total_evaluation_time_seconds": str(end_time - start_time),
                "generation_parameters": {"max_new_tokens": self.config.max_token_length} | (generation_parameters or {}),
            },
            "results": {f"atropos|{task_name}|0": metrics, "all": metrics},
        }
        if self.config.data_dir_to_save_evals is not None:
            folder = Path(self.config.data_dir_to_save_evals)
            write_json(folder / "metrics.json", record)
            write_json_lines(folder / "samples.jsonl", samples)
        if self.config.eval_output is not None:
            output = Path(self.config.eval_output)
            write_json(output, {"environment": self.name, "model": model_name, "step": self.curr_step} | metrics)
            write_json_lines(samples_path(output), samples)
        await self._post_evaluation(given_name or self._label, metrics)

    @property
    def _label(self) -> str:
        """What the environment is called where a name is needed."""
        return self.config.wandb_name or self.name or type(self).__name__

    async def _post_evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Tell the rollout service what was measured, if the environment is registered there. That it cannot be told is
        logged, and ends nothing."""
        numbers = numbers_of(metrics)
        if self.env_id is None or not numbers or not self._evaluations_taken:
            return
        record = current_versions.get()
        oldest = None if record is None else record.oldest_weights
        body = {
            "env_id": self.env_id,
            "name": name[:LONGEST_NAME],
            "weight_version": None if oldest is None else oldest.version,
            "weight_epoch": None if oldest is None else oldest.epoch,
            "metrics": numbers,
            "idempotency_key": uuid.uuid4().hex,
        }
        try:
            await self.service.post("/evaluations", body)
        except RejectedByService as rejection:
            if rejection.status in NO_SUCH_ROUTE:
                self._evaluations_taken = False
                logger.info("the rollout service takes no results of evaluations: they stay in the log and files here")
            else:
                logger.error("the rollout service refused the result of evaluation %s: %s", name, rejection)
        except EnvironmentFailure as failure:
            logger.error("the result of evaluation %s is not posted, the rollouts go on: %s", name, failure)

    def _model_name(self) -> str | None:
        config = getattr(self.server.servers[0], "config", None)
        served = getattr(self.server.servers[0], "_served", None) or {}
        named = getattr(config, "model_name", None)
        return served.get("id") if named in MODEL_NOT_NAMED else named


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among metrics, as the rollout service takes them. The weight version goes in a field of its own."""
    numbers = {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and name != "weight_version"
    }
    taken = {name: value for name, value in numbers.items() if 0 < len(name) <= LONGEST_NAME}
    return dict(list(taken.items())[:MOST_METRICS])


def samples_path(output: Path) -> Path:
    """`result.json` -> `result.samples.jsonl`."""
    return output.with_name(f"{output.stem}.samples.jsonl")


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    logger.info("wrote %s", path)


def write_json_lines(path: Path, rows: list[dict[str, Any]] | None) -> None:
    """Replace the file's content by these rows; nothing is written when there are none."""
    if not rows:
        return
    path.unlink(missing_ok=True)
    writer = JsonLinesWriter(path)
    for row in rows:
        writer.write(row)
    writer.close()
    logger.info("wrote %d samples to %s", len(rows), path)
