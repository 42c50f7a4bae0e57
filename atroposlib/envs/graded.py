"""Environments that grade what the model did with a problem: what those with one turn and those
with several have in common.

A subclass defines how one problem is attempted; this class holds the evaluation of all held-out
ones and its metrics.
"""

import asyncio
import logging
import random
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.curriculum import Curriculum, item_key
from atroposlib.envs.runner.state import label_of
from atroposlib.inference.generation import Weights
from atroposlib.inference.managed_server import SequenceNode, sequence_fields
from atroposlib.type_definitions import Item
from atroposlib.wire import ScoredDataGroup, plain_score, teaches_nothing

logger = logging.getLogger(__name__)

MAX_SKIPPED = 1000
"""Items in a row that a curriculum passes over; then one is taken, whatever it is: if all are easy,
an easy one has to do."""
REQUESTS_OF_GROUP = 1_000_000
"""More than a group has: the seeds of its second making begin here."""

_attempt: ContextVar[int] = ContextVar("attempt", default=0)
"""Number of earlier attempts at the group that the present task makes."""
_successes: ContextVar[list[bool] | None] = ContextVar("successes", default=None)
"""Which answers of the group in work are right; None until `note_success` was called for it."""


@dataclass(frozen=True)
class Grade:
    """The worth of an answer.

    Attributes:
        score: the reward. A number of any type (NumPy's, PyTorch's, a bool) becomes a float.
        correct: whether the final answer is right, whatever the reward says about its form.
        answer: the final answer as read from the text, for the record.
    """

    score: float
    correct: bool
    answer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", plain_score(self.score))
        object.__setattr__(self, "correct", bool(self.correct))


@dataclass(frozen=True)
class Attempt:
    """One answer to a held-out problem.

    Attributes:
        record: its sample for the file, with `correct`, `score` and `response_tokens`.
        weights: the oldest that its tokens were sampled under, if known.
    """

    record: dict[str, Any]
    weights: Weights | None


class GradedEnv(BaseEnv):
    """Problems in, graded answers out.

    Attributes:
        temperature: of the training answers.
        default_settings: the environment's own defaults of its settings.
    """

    temperature = 1.0
    default_settings: ClassVar[Mapping[str, Any]] = {}
    sends_chats: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._noted: dict[str, list[float]] = defaultdict(list)
        self._said: set[str] = set()
        self._pending_metrics: dict[str, float] = {}
        self._rng = random.Random(f"{self.config.seed} curriculum")
        self._passed_over = 0

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Return `default_settings`, and one vLLM server on this machine."""
        return cls.env_config_cls(**cls.default_settings), [
            APIServerConfig(base_url="http://localhost:9001/v1", server_type="vllm")
        ]

    @abstractmethod
    async def collect_group(self, item: Item) -> ScoredDataGroup:
        """Answer an item `group_size` times, and score the answers.

        Call `note_success` with those that are right.
        """

    @abstractmethod
    def eval_problems(self) -> Sequence[Any]:
        """The held-out problems of an evaluation, at most `eval_size` of them, the same each time."""

    def describe(self, problem: Any) -> dict[str, Any]:
        """Return a problem's fields in the record of an evaluation, such as `question` and
        `gold_answer`.
        """
        return {}

    @abstractmethod
    async def attempt(self, problem: Any, samples: int, temperature: float) -> list[Attempt]:
        """Answer one held-out problem `samples` times."""

    # ---- groups, and which item comes next
    # ------------------------------------------------------------------------------

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        """A group of answers to an item; made anew, up to `resample_equal_scores` times, where all
        scores are equal.
        """
        again = 0
        if self.config.ensure_scores_are_not_same and self.config.teacher_url is None:
            again = self.config.resample_equal_scores
        for attempt in range(again + 1):
            _attempt.set(attempt)
            _successes.set(None)
            group = await self.collect_group(item)
            if attempt == again or len(group["scores"]) == 1 or not teaches_nothing(group):
                break
            self.drops.add("equal_scores_resampled")
        right = _successes.get()
        if right is not None and len(right) == len(group["scores"]):
            group.setdefault("successes", list(right))
        return group, []

    def sampling_seed(self, request: int = 0) -> int | None:
        """The `seed` of a request for the item in work; another one each time that its group is
        made anew.
        """
        return super().sampling_seed(request + REQUESTS_OF_GROUP * _attempt.get())

    @cached_property
    def curriculum(self) -> Curriculum:
        """Results of earlier answers to each item.

        First used after the registration, which says where the trainer's folder is.
        """
        path: Path | None = None
        if self.config.curriculum_path is not None:
            path = Path(self.config.curriculum_path)
        elif self.checkpoint_dir:
            name = re.sub("[^-.0-9A-Za-z]", "_", label_of(self, self.config))
            path = Path(self.checkpoint_dir) / "env_checkpoints" / f"{name}.curriculum.jsonl"
        return Curriculum(self.config.curriculum_floor, path)

    def item_key(self, item: Item) -> str:
        """A name for an item, the same in every run: a hash of its `repr`, unless you know a better
        one.
        """
        return item_key(item)

    def note_success(self, item: Item, right: Sequence[bool]) -> None:
        """Note which answers of a group are right, for the curriculum and for the group's
        `successes`.

        Call it in the task that runs `collect_group`.
        """
        _successes.set([bool(one) for one in right])
        if self.config.curriculum:
            self.curriculum.note(self.item_key(item), sum(right), len(right))

    async def next_item(self) -> Item:
        """The next item; with `curriculum`, the next that is worth sampling."""
        if not self.config.curriculum:
            return await self.get_next_item()
        for _ in range(MAX_SKIPPED):
            item = await self.get_next_item()
            if item is None or self.curriculum.takes(self.item_key(item), self._rng.random()):
                return item
            self._passed_over += 1
        return item

    # ---- evaluation and metrics
    # -----------------------------------------------------------------------------------------

    def note(self, numbers: Mapping[str, float]) -> None:
        """Keep numbers of one rollout: the next metrics have the mean of each name, as
        `train/<name>`.
        """
        for name, number in numbers.items():
            self._noted[name].append(number)

    def say_once(self, what: str, message: str) -> None:
        """Warn of something the first time that it happens.

        `what` tells it from others; how often it does is counted.
        """
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s (said once)", message)

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Greedy answers to the held-out problems, measured, reported and logged."""
        attempts = [attempt for row in await self.measure(self.eval_problems()) for attempt in row]
        samples = [attempt.record for attempt in attempts]
        result = self.summary(samples) | {"weight_version": oldest_version(attempts)}
        await self.evaluate_log(
            result, samples=samples, generation_parameters={"temperature": 0.0}, verbose=False
        )
        logger.info(
            "evaluation of %s: %d of %d correct (%.1f %%), %.1f tokens per response, weight version %s",
            self.name,
            result["correct"],
            len(samples),
            result["percent_correct"],
            result["mean_response_tokens"],
            result["weight_version"],
        )
        # A fraction under the name that existing dashboards use.
        self._pending_metrics["eval/percent_correct"] = result["fraction_correct"]
        self._pending_metrics["eval/response_length"] = result["mean_response_tokens"]
        return result

    async def measure(
        self, problems: Sequence[Any], samples: int = 1, temperature: float = 0.0
    ) -> list[list[Attempt]]:
        """Answer problems; `max_eval_workers` of them are in work at once.

        Returns:
            `samples` attempts for each problem, in the problems' order.
        """
        slots = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(problem: Any) -> list[Attempt]:
            async with slots:
                return await self.attempt(problem, samples, temperature)

        tasks = [asyncio.create_task(one(problem)) for problem in problems]
        self._runner.state.eval_workers.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            self._runner.state.eval_workers.difference_update(tasks)

    def summary(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The metrics of an evaluation, of the samples of all its problems."""
        correct = sum(sample["correct"] for sample in samples)
        return {
            "num_problems": len(samples),
            "correct": correct,
            "percent_correct": 100.0 * correct / len(samples),
            "fraction_correct": correct / len(samples),
            "mean_response_tokens": fmean(sample["response_tokens"] for sample in samples),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the means of what was noted, such as `train/percent_correct` (a fraction) and
        `train/response_length` (tokens), and the last evaluation."""
        metrics = dict(wandb_metrics or {})
        metrics.update({f"train/{name}": fmean(numbers) for name, numbers in self._noted.items()})
        metrics.update(self._pending_metrics)
        if self.config.curriculum:
            metrics.update(
                self.curriculum.metrics()
                | {"train/curriculum_passed_over": float(self._passed_over)}
            )
        self._noted.clear()
        self._pending_metrics = {}
        await super().wandb_log(metrics)


def group_of(nodes: Sequence[SequenceNode], scores: Sequence[float]) -> ScoredDataGroup:
    """Return a group of sampled sequences, tokens untouched."""
    group = ScoredDataGroup(
        tokens=[node.tokens for node in nodes],
        masks=[node.masked_tokens for node in nodes],
        inference_logprobs=[node.logprobs for node in nodes],
        scores=list(scores),
    )
    group.update(sequence_fields(nodes))  # type: ignore[typeddict-item]
    return group


def oldest_version(attempts: Iterable[Attempt]) -> int | None:
    """Return the version of the oldest weights that attempts met, if known."""
    met = [attempt.weights for attempt in attempts if attempt.weights is not None]
    return min(met).version if met else None
