"""Environments that grade what the model did with a problem: what those with one turn and those
with several have in common.

A subclass defines how one problem is attempted; this class holds the evaluation of all held-out
ones and its metrics.

**Curriculum.** If every answer to an item is right, or every one is wrong, there is nothing to
learn. There is most to learn if half of them are right. The variance of a right-or-wrong reward at
success p is p (1 - p), so the next item is taken with probability

    P(p) = floor + (1 - floor) · 4 p (1 - p)

and skipped otherwise. A `floor` above 0 keeps every item in the stream, so that an item which was
too hard comes back later. An item that was never sampled counts as p = ½ and is always taken.
"""

import asyncio
import hashlib
import logging
import random
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from inspect import isawaitable
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.runner.state import label_of
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.inference.generation import Weights
from atroposlib.inference.managed_server import SequenceNode, sequence_fields
from atroposlib.type_definitions import Item
from atroposlib.utils.files import KeptLines
from atroposlib.utils.jsonl import Row, encode_repaired, open_kept_lines, rows_of_lines
from atroposlib.utils.waiting import awaited, plain
from atroposlib.wire import ScoredDataGroup, plain_score, teaches_nothing

logger = logging.getLogger(__name__)

MEMORY = 0.5
"""Weight of earlier answers when new ones come. The model changes, so old answers become less
informative."""
PRIOR = 0.5
"""Right and wrong answers that an item begins with, so that one group of eight right answers is not
certainty."""


@dataclass(frozen=True)
class Difficulty:
    """The answers to an item so far.

    Attributes:
        right: right answers. Each new group halves the count of the earlier ones.
        answers: all answers, counted in the same way.
    """

    right: float = 0.0
    answers: float = 0.0

    @property
    def success(self) -> float:
        """Return the estimated share of right answers: ½ before the first answer."""
        return (self.right + PRIOR) / (self.answers + 2 * PRIOR)

    def after(self, right: int, answers: int) -> "Difficulty":
        """Return the difficulty after another group of answers."""
        return Difficulty(MEMORY * self.right + right, MEMORY * self.answers + answers)


def chance(success: float, floor: float) -> float:
    """Return the probability of taking an item of this success: 1 at one half, `floor` at 0 and 1.

    Args:
        success: from 0 to 1.
        floor: from 0 to 1.
    """
    return floor + (1.0 - floor) * 4.0 * success * (1.0 - success)


def item_key(item: Any) -> str:
    """Return a name for an item that is the same in every run: a hash of its `repr`.

    Raises:
        EnvironmentFailure: the `repr` holds an address, so it is another in every run.
    """
    text = repr(item)
    if " at 0x" in text:
        raise EnvironmentFailure(
            f"--env.curriculum: an item's repr has an address in memory ({text:.80}), so it is "
            "not known again after a restart. Define item_key(item), or make items of plain "
            "values or dataclasses"
        )
    return hashlib.sha256(text.encode("utf-8", errors="backslashreplace")).hexdigest()[:16]


class Curriculum:
    """The measured difficulty of items, and the file that keeps it.

    The file holds a line for each group. A line is appended as a whole: a kill loses no earlier
    line, and environments of the same name may share the file. A line that a full disk cut off is
    skipped.

    Args:
        floor: see `chance`.
        path: of the file, which is read if it exists; None to keep nothing.
    """

    def __init__(self, floor: float, path: Path | None = None):
        self.floor = floor
        self.known: dict[str, Difficulty] = {}
        self._writer: KeptLines | None = None
        if path is not None:
            unread = sum(not self._read(row.value) for row in rows_of(path))
            if self.known or unread:
                logger.info(
                    "curriculum: %d items are known from %s (%d lines could not be read)",
                    len(self.known),
                    path,
                    unread,
                )
            self._writer = open_kept_lines(path)

    def _read(self, group: Any) -> bool:
        try:
            key, right, answers = str(group["item"]), int(group["right"]), int(group["answers"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return False
        if not 0 <= right <= answers:
            return False
        self._add(key, right, answers)
        return True

    def _add(self, key: str, right: int, answers: int) -> None:
        self.known[key] = self.known.get(key, Difficulty()).after(right, answers)

    def note(self, key: str, right: int, answers: int) -> None:
        """Add a group of answers to an item."""
        self._add(key, right, answers)
        if self._writer is not None:
            self._writer.write(encode_repaired({"item": key, "right": right, "answers": answers}))

    def takes(self, key: str, drawn: float) -> bool:
        """Return whether an item that comes along is sampled.

        Args:
            drawn: at random, from 0 to 1.
        """
        return drawn < chance(self.known.get(key, Difficulty()).success, self.floor)

    def metrics(self) -> dict[str, float]:
        """Return the number of known items, and the shares that are almost always or almost never
        right.
        """
        shares = [difficulty.success for difficulty in self.known.values()]
        if not shares:
            return {}
        return {
            "train/curriculum_items": float(len(shares)),
            "train/curriculum_easy": sum(share > 0.9 for share in shares) / len(shares),
            "train/curriculum_hard": sum(share < 0.1 for share in shares) / len(shares),
        }


def rows_of(path: Path) -> Iterator[Row]:
    """Return the rows of a file; none if it does not exist.

    Raises:
        EnvironmentFailure: it cannot be read.
    """
    try:
        return rows_of_lines(path.read_bytes(), path)
    except FileNotFoundError:
        return iter(())
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot read {path}: {error.strerror}; name another path as --env.curriculum_path"
        ) from error


MAX_SKIPPED = 1000
"""Items in a row that a curriculum passes over. The next one is taken even if it is easy."""
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
        correct: whether the final answer is right; the reward may judge its form as well.
        answer: the final answer as read from the text, for the record.

    Raises:
        UsageError: `correct` is a text, or the result of a call that lacks its `await`. Python
            takes both for true, so every answer would count as right.
    """

    score: float
    correct: bool
    answer: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.correct, str) or isawaitable(self.correct):
            raise UsageError(
                f"correct of a Grade is {self.correct!r:.80}: give True or False, and `await` the "
                "call of an asynchronous function"
            )
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

        Call `note_success` with the right answers.
        """

    @abstractmethod
    def eval_problems(self) -> Sequence[Any]:
        """The held-out problems of an evaluation, at most `eval_size` of them, the same each time."""

    def describe(self, problem: Any) -> dict[str, Any]:
        """Return a problem's fields in the record of an evaluation, such as `question` and
        `gold_answer`.
        """
        return {}

    def _described(self, problem: Any) -> dict[str, Any]:
        """Return `describe`, and refuse all but fields."""
        fields = plain(self.describe(problem), "describe", self)
        if not isinstance(fields, dict):
            raise UsageError(
                f"describe of {type(self).__name__} returned {fields!r:.80}: return a dict of fields"
            )
        return fields

    @abstractmethod
    async def attempt(self, problem: Any, samples: int, temperature: float) -> list[Attempt]:
        """Answer one held-out problem `samples` times."""

    # ---- groups, and which item comes next
    # ------------------------------------------------------------------------------

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        """A group of answers to an item. If all scores are equal, it is sampled again, up to
        `resample_equal_scores` times.
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
        sampled again.
        """
        return super().sampling_seed(request + REQUESTS_OF_GROUP * _attempt.get())

    @cached_property
    def curriculum(self) -> Curriculum:
        """Results of earlier answers to each item.

        First used after the registration, whose answer names the trainer's folder.
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
            return await awaited(self.get_next_item(), "get_next_item", self)
        for _ in range(MAX_SKIPPED):
            item = await awaited(self.get_next_item(), "get_next_item", self)
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

        `what` names the warning; its number of times is counted.
        """
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s (logged once)", message)

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Greedy answers to the held-out problems, measured, reported and logged.

        Returns:
            The metrics; empty without held-out problems.
        """
        problems = plain(self.eval_problems(), "eval_problems", self)
        if not problems:
            self.say_once(
                "no held-out problems",
                f"eval_problems of {type(self).__name__} returned no problems: nothing is evaluated",
            )
            return {}
        attempts = [attempt for row in await self.measure(problems) for attempt in row]
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


def checked_grade(grade: object, author: GradedEnv) -> Grade:
    """Return what an environment's `grade` returned.

    Raises:
        UsageError: that is not a `Grade`.
    """
    if not isinstance(grade, Grade):
        raise UsageError(
            f"grade of {type(author).__name__} returned {grade!r:.80}: "
            "return Grade(score=…, correct=…)"
        )
    return grade


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
