"""Questions of the reasoning-gym package by number, held-out ones apart, and its scores from a
child process.

The package makes its questions from seeds: question `i` of a data set with seed `s` is made from
`s + i`, mostly. So the numbers of one long stream are cut into chunks whose seeds follow one
another, and no seed of a stream comes twice.
"""

import dataclasses
import difflib
import functools
import json
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.errors import EnvironmentFailure, UsageError

INSTALL = (
    "the reasoning-gym package is not installed: "
    "pip install --no-deps --require-hashes -r requirements-environments.txt, or pip install "
    "'reasoning-gym==0.1.25'"
)

CHUNK = 500
"""Questions per data set; some tasks lay out all of a data set's questions when it is made."""

TRAINING_SEEDS, STREAM = 2_000, 1_000_000
"""So many seeds have streams of their own, each with so many questions."""

HELD_OUT_SEED = 3_000_000_000
"""Above every training stream and, with all that is made from it, below 2^32. Another would be
another benchmark."""

ATTEMPTS = 200
"""Questions that are tried until one is not held out."""


class TaskSettings(BaseModel):
    """Settings of one task."""

    model_config = ConfigDict(extra="forbid")

    weight: float = Field(
        default=1.0, gt=0, description="Share of the questions, relative to the other tasks'"
    )
    level: int | dict[str, int] | None = Field(
        default=None,
        description="Level of the task's curriculum: one for everything, or one for each "
        "attribute by name",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The task's own settings; they override the level's"
    )


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        task: the task's name.
        entry: what the package made: `question`, `answer`, `metadata`.
    """

    task: str
    entry: dict[str, Any]

    @property
    def text(self) -> str:
        return str(self.entry["question"])


def package() -> ModuleType:
    """The registry of tasks.

    Raises:
        EnvironmentFailure: the package is not installed.
    """
    try:
        import reasoning_gym.factory as factory
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(INSTALL) from error
    module: ModuleType = factory
    return module


def among(name: str, entries: Iterable[str]) -> str:
    """Name the known entries for an error message, with the nearest one first."""
    names, guess = sorted(entries), ""
    for near in difflib.get_close_matches(name, names, n=1):
        guess = f" (did you mean {near}?)"
    return f"{guess}; it has {', '.join(names) or 'none'}"


def make_dataset(
    task: str, level: int | dict[str, int] | None, settings: Mapping[str, Any], seed: int
) -> Any:
    """The package's data set of `CHUNK` questions from this seed.

    Raises:
        UsageError: no such task, level or setting, or the task refuses a value.
    """
    factory = package()
    if task not in factory.DATASETS or task == "composite":
        raise UsageError(
            f"--env.tasks: reasoning-gym has no task {task!r}{among(task, factory.DATASETS)}"
        )
    dataset_class, config_class = factory.DATASETS[task]
    fields = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    for name in settings:
        if name not in fields:
            raise UsageError(f"--env.tasks: {task} has no setting {name!r}{among(name, fields)}")
    try:
        config = config_class(seed=seed, size=CHUNK)
        if level is not None:
            config = curriculum_at(factory, task, level).generate_configuration(
                {"seed": seed, "size": CHUNK}
            )
        config = dataclasses.replace(config, **settings)
        return dataset_class(config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--env.tasks: {task} refuses its settings: {error or type(error).__name__}"
        ) from error


def curriculum_at(factory: ModuleType, task: str, level: int | dict[str, int]) -> Any:
    """The task's curriculum, set to a level.

    Raises:
        UsageError: the task has no curriculum, no such attribute, or not so many levels.
    """
    if not factory.has_curriculum(task):
        raise UsageError(f"--env.tasks: {task} has no curriculum, so no level; use its settings")
    curriculum = factory.create_curriculum(task)
    attributes = curriculum.attributes
    most = max((len(attribute.levels) for attribute in attributes.values()), default=1) - 1
    if isinstance(level, int):
        if not 0 <= level <= most:
            raise UsageError(f"--env.tasks: {task} has no level {level}; it has 0 to {most}")
        curriculum.set_global_level(level)  # an attribute with fewer levels stays at its last
        return curriculum
    for name, value in level.items():
        if name not in attributes:
            raise UsageError(
                f"--env.tasks: the curriculum of {task} has no {name!r}{among(name, attributes)}"
            )
        most = len(attributes[name].levels) - 1
        if not 0 <= value <= most:
            raise UsageError(
                f"--env.tasks: {name} of {task} has no level {value}; it has 0 to {most}"
            )
        curriculum.set_attr_level(name, value)
    return curriculum


class Questions:
    """Questions of several tasks, mixed by weight: the same number of the same seed is always the
    same question.
    """

    def __init__(self, tasks: Mapping[str, TaskSettings], seed: int, held_out: int) -> None:
        """Makes the held-out questions, the same for every seed, the tasks taking turns.

        Args:
            tasks: by name.
            seed: of the training questions.
            held_out: how many questions are held out.

        Raises:
            UsageError: a task or a setting does not exist.
            EnvironmentFailure: the package is not installed, or a task has too few questions to
                hold so many out.
        """
        self.tasks = dict(tasks)
        self.first_seed = seed % TRAINING_SEEDS * STREAM
        self._lock = threading.Lock()
        self._dataset = functools.lru_cache(maxsize=4 * len(self.tasks))(self._make_dataset)
        self._held_out_texts: set[tuple[str, str]] = set()
        self.held_out: list[Question] = []
        names = list(self.tasks)
        number = found_at = 0
        while len(self.held_out) < held_out:
            if number - found_at > ATTEMPTS * len(names):
                raise EnvironmentFailure(
                    f"only {len(self.held_out)} of {held_out} different questions to hold out "
                    f"were found: lower "
                    "--env.eval_size, or make the tasks harder"
                )
            question = self._question(
                names[number % len(names)], HELD_OUT_SEED, number // len(names)
            )
            number += 1
            key = (question.task, question.text)
            if key not in self._held_out_texts:
                self._held_out_texts.add(key)
                self.held_out.append(question)
                found_at = number

    def training(self, number: int) -> Question:
        """Training question `number`; never one that is held out.

        Raises:
            EnvironmentFailure: the task has hardly a question that is not held out.
        """
        choose = random.Random(f"{self.first_seed}:{number}")
        weights = [settings.weight for settings in self.tasks.values()]
        task = choose.choices(list(self.tasks), weights)[0]
        for attempt in range(ATTEMPTS):
            # Few runs reach the middle of the stream; questions that replace held-out ones are
            # taken from there on.
            question = self._question(
                task, self.first_seed, (number + attempt * (STREAM // 2 + 1)) % STREAM
            )
            if (task, question.text) not in self._held_out_texts:
                return question
        raise EnvironmentFailure(
            f"{task} has so few questions that all are held out: lower --env.eval_size, or make "
            f"the task harder"
        )

    def _question(self, task: str, first_seed: int, number: int) -> Question:
        with self._lock:  # some tasks seed a generator that the whole process shares
            dataset = self._dataset(task, first_seed + number // CHUNK * CHUNK)
            return Question(task, dataset[number % CHUNK])

    def _make_dataset(self, task: str, seed: int) -> Any:
        settings = self.tasks[task]
        return make_dataset(task, settings.level, settings.settings, seed)


class UnreadableAnswer(Exception):
    """The task's scorer fails over an answer, and not over its own one."""


@functools.lru_cache(maxsize=64)
def _scorer(task: str, config: str) -> Any:
    level, settings = json.loads(config)
    return make_dataset(task, level, settings, seed=0)


def score_in_this_process(task: str, config: str, entry: dict[str, Any], answer: str) -> float:
    """The package's score, 0 to 1. Some tasks evaluate the answer as a formula, which may take for
    ever: call it in a child.

    Args:
        task, config: the task's name, and its level and settings as JSON.
        entry: what the package made.
        answer: the model's.

    Raises:
        UnreadableAnswer: the scorer raises over this answer only.
        ValueError: the score is not a number from 0 to 1.
    """
    dataset = _scorer(task, config)
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:
        dataset.score_answer(
            entry["answer"], entry
        )  # where this raises too, the scorer or the question is at fault
        raise UnreadableAnswer(
            f"{task} cannot read an answer: {type(error).__name__}: {error}"
        ) from error
    if not 0 <= score <= 1:
        raise ValueError(
            f"reasoning-gym's task {task} gave a score of {score}, which is not within 0 to 1"
        )
    return score
