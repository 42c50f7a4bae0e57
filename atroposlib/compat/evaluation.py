"""Evaluations that are not environments: a set of items, each run against the servers, and their
mean metrics.
"""

import asyncio
import logging
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from atroposlib.command_line import parse_options
from atroposlib.envs.runner.reporting import write_evaluation
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from atroposlib.utils import metrics as statistics
from atroposlib.utils.metrics import display_metrics_table
from atroposlib.web.addresses import HttpAddress

logger = logging.getLogger(__name__)


def pass_at_k(m: int, c: int, k: int) -> float:
    """Return the unbiased chance that at least one of `k` samples is right, given `c` right ones of
    `m`.

    Atropos accepts a `k` above the number of wrong samples, even above `m`: the chance is 1.
    """
    return 1.0 if m - c < k else statistics.pass_at_k(m, c, k)


def evaluate_log(
    metrics: dict[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: dict[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
    verbose: bool = True,
) -> None:
    """Show metrics, and write `metrics.json` and `samples.jsonl` to `eval_dir` if one is given.

    Times are Unix times.
    """
    now = time.time()
    start_time, end_time, task_name = start_time or now, end_time or now, task_name or "eval"
    if verbose:
        display_metrics_table(task_name, metrics, start_time, end_time)
    if eval_dir is None:
        logger.warning("no eval_dir: the evaluation's results are not written to a file")
        return
    record = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(end_time - start_time),
            "generation_parameters": generation_parameters or {},
        },
        "results": {f"atropos|{task_name}|0": metrics, "all": metrics},
    }
    folder = Path(eval_dir)
    write_evaluation(folder / "metrics.json", record, folder / "samples.jsonl", samples)


class EvalBase(ABC):
    """Define `setup_data` and `run_item`; call the object with a `ServerManager`.

    Keyword arguments become attributes; `temperature`, `top_p`, `max_tokens`, `eval_dir` and
    `verbose` have a meaning here.
    """

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any):
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    def get_generation_params(self) -> dict[str, Any]:
        """Sampling parameters; a negative `max_tokens` leaves the limit to the server."""
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n_samples, self.pass_at_n),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": getattr(self, "max_tokens", -1),
        }

    async def chat_completion(self, server: ServerManager, messages: list[Any]) -> ChatCompletion:
        parameters = self.get_generation_params()
        if parameters["max_tokens"] < 0:
            del parameters["max_tokens"]
        return await server.chat_completion(messages=messages, split="eval", **parameters)

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """The items."""

    @abstractmethod
    async def run_item(
        self, server: ServerManager, data_item: dict[str, Any]
    ) -> tuple[dict[str, float], Any]:
        """(metrics of the item, its sample for the record)."""

    async def __call__(self, server_manager: ServerManager) -> dict[str, float]:
        """Run every item and return the mean of each metric."""
        start, begun = time.time(), time.monotonic()
        results = await asyncio.gather(*(self.run_item(server_manager, item) for item in self.data))
        metrics = {
            name: float(np.mean([metrics[name] for metrics, _ in results]))
            for name in results[0][0]
        }
        task = f"{type(self).__name__}@{self.pass_at_n}"
        if self.pass_at_n_samples != self.pass_at_n:
            task += f":{self.pass_at_n_samples}"
        evaluate_log(
            metrics,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=task,
            model_name=getattr(
                getattr(server_manager.servers[0], "config", None), "model_name", None
            ),
            start_time=start,
            end_time=start + time.monotonic() - begun,
            generation_parameters=self.get_generation_params(),
            samples=[sample for _, sample in results],
            verbose=getattr(self, "verbose", False),
        )
        return metrics


class RunnerOptions(BaseModel):
    """The options of an evaluation that runs as a program."""

    server_url: HttpAddress = Field(
        default="http://localhost:9001/v1", description="OpenAI-compatible endpoint"
    )
    model_name: str = Field(
        default="default", description="model to ask for; by default the served one"
    )


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Run an evaluation as a program: `--server-url`, `--model-name`."""
    options = parse_options(RunnerOptions, None, Path(sys.argv[0]).name, "Run an evaluation.")
    server = APIServerConfig(
        api_key="x", base_url=options.server_url, model_name=options.model_name
    )
    manager = ServerManager([server])
    try:
        return await eval_env(manager)
    finally:
        await manager.close()
