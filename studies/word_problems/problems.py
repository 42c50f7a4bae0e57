"""Stories of several sentences in which one quantity is followed through many steps, among sentences that do not matter.

    Mei has 47 stamps. Omar has 12 stamps. Mei buys 38 more stamps. Kofi has 3 times as many stamps as Mei. Mei has 9 keys.
    Kofi gives away 55 stamps. How many stamps does Kofi have now?

    Mei: 47. Mei: 47 + 38 = 85. Kofi: 85 * 3 = 255. Kofi: 255 - 55 = 200. \\boxed{200}

Difficulty follows from the number of steps: each has one more sum to get right, and one more
sentence to find. Training and held-out problems are disjoint: a hash of the question decides its
side.

>>> story = next(training(0, (3,)))
>>> story.solution.endswith(f"\\\\boxed{{{story.answer}}}"), story.steps
(True, 3)
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from environments import arithmetic_server
from environments.arithmetic_server import ITEMS, NAMES
from example_trainer.batch.problems import Problem, Task

HELD_OUT_SEED = 20_261_122
"""Key of the split and seed of the held-out list. Another value would be another benchmark, so it
never changes."""
HELD_OUT_ONE_IN = 10
LARGEST = 999
"""No number of a story is larger."""
OPERAND = 99
"""Nor is one that is added or taken away."""
SUPERVISED_STEPS: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
"""Steps of the problems whose solutions the model is shown."""
REWARDED_STEPS: tuple[int, ...] = (4, 5, 6, 7, 8)
"""Steps of the problems that it is rewarded for: some have more than it was ever shown."""
EASY_STEPS: tuple[int, ...] = (1, 2)
"""Steps of the problems that a tiny model can learn on a CPU."""
DISTRACTORS = 4
"""At most so many sentences do not matter."""

GAINS = (
    "{name} buys {n} more {item}.",
    "{name} finds {n} {item}.",
    "{name} gets {n} {item} as a present.",
    "{name} makes {n} more {item}.",
)
LOSSES = (
    "{name} gives away {n} {item}.",
    "{name} loses {n} {item}.",
    "{name} sells {n} {item}.",
    "{n} of the {item} that {name} has break.",
)
GROWTHS = (
    "{name} collects until there are {n} times as many {item}.",
    "Soon {name} has {n} times as many {item} as before.",
)
MORE = (
    "{other} has {n} more {item} than {name}.",
    "{other} has as many {item} as {name} and {n} more.",
)
FEWER = ("{other} has {n} fewer {item} than {name}.", "{name} has {n} more {item} than {other}.")
TIMES = ("{other} has {n} times as many {item} as {name}.",)
ASIDES = ("{name} has {n} {item}.", "{name} buys {n} {item}.", "{name} counts {n} {item}.")
CONNECTIVES = ("", "", "Then ", "Now ", "So ")
"""With which a line of a solution may begin: a choice that does not matter, so that samples differ
from the first line on."""


@dataclass(frozen=True)
class Story:
    """A problem with its solution.

    Attributes:
        solution: every step, and the answer in a box.
        steps: sums that have to be worked out.
    """

    question: str
    answer: int
    solution: str
    steps: int

    @property
    def held_out(self) -> bool:
        """On which side of the split it lies."""
        digest = hashlib.sha256(f"{HELD_OUT_SEED} {self.question}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0

    @property
    def problem(self) -> Problem:
        """As a trainer asks it."""
        return Problem(self.question, str(self.answer))


def tell(rng: random.Random, steps: int) -> Story:
    """Make up a story of so many steps."""
    names = rng.sample(NAMES, len(NAMES))
    item, other_item = rng.sample(ITEMS, 2)
    name, value = names.pop(), rng.randint(2, OPERAND)
    sentences = [f"{name} has {value} {item}."]
    lines = [f"{name}: {value}."]
    people = [name]
    for _ in range(steps):
        symbol, operand, templates = _operation(rng, value)
        template = rng.choice(templates)
        owner = names.pop() if "{other}" in template else name
        sentences.append(template.format(name=name, other=owner, n=operand, item=item))
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[symbol]
        lines.append(f"{rng.choice(CONNECTIVES)}{owner}: {value} {symbol} {operand} = {result}.")
        name, value = owner, result
        people.append(name)
    for _ in range(rng.randint(0, DISTRACTORS)):
        # Another person's, or another thing: never a number of the story itself.
        elsewhere = rng.random() < 0.5
        whose, what = (names.pop(), item) if elsewhere else (rng.choice(people), other_item)
        aside = rng.choice(ASIDES).format(name=whose, n=rng.randint(2, OPERAND), item=what)
        sentences.insert(rng.randint(1, len(sentences)), aside)
    question = " ".join([*sentences, f"How many {item} does {name} have now?"])
    return Story(question, value, " ".join([*lines, f"\\boxed{{{value}}}"]), steps)


def _operation(rng: random.Random, value: int) -> tuple[str, int, tuple[str, ...]]:
    """A step that keeps the quantity between 1 and LARGEST: its symbol, its operand, and a sentence
    for it.
    """
    possible = {"+": value + 2 <= LARGEST, "-": value > 2, "*": value * 2 <= LARGEST}
    symbol = rng.choice([symbol for symbol, fits in possible.items() if fits])
    if symbol == "*":
        return symbol, rng.randint(2, min(5, LARGEST // value)), (*GROWTHS, *TIMES)
    if symbol == "+":
        return symbol, rng.randint(2, min(OPERAND, LARGEST - value)), (*GAINS, *MORE)
    return symbol, rng.randint(2, min(OPERAND, value - 1)), (*LOSSES, *FEWER)


def training(seed: int, steps: Sequence[int] = SUPERVISED_STEPS) -> Iterator[Story]:
    """An endless stream of stories that are not held out, the same for the same seed."""
    rng = random.Random(f"word problems {seed}")
    return (story for story in _stories(rng, steps) if not story.held_out)


def held_out(count: int, steps: Sequence[int] = REWARDED_STEPS) -> list[Story]:
    """The first of the held-out stories: the same ones whatever the count, all different, each
    number of steps in its turn.
    """
    rng = random.Random(f"held out {HELD_OUT_SEED}")
    turns = itertools.cycle(steps)
    found: dict[str, Story] = {}
    wanted = next(turns)
    while len(found) < count:
        story = tell(rng, wanted)
        if story.held_out and story.question not in found:
            found[story.question] = story
            wanted = next(turns)
    return list(found.values())


def _stories(rng: random.Random, steps: Sequence[int]) -> Iterator[Story]:
    while True:
        yield tell(rng, rng.choice(steps))


def task(steps: Sequence[int]) -> Task:
    """Stories of so many steps, as `simple_rl.py --problems` takes them."""
    return Task(
        training=lambda seed: (story.problem for story in training(seed, steps)),
        held_out=lambda count: [story.problem for story in held_out(count, steps)],
    )


REWARDED = task(REWARDED_STEPS)
STARTER = Task(
    training=lambda seed: (
        Problem(one.question, str(one.answer))
        for one in arithmetic_server.training_problems(seed, 1)
    ),
    held_out=lambda count: [
        Problem(one.question, str(one.answer))
        for one in arithmetic_server.held_out_problems(count, 1)
    ],
)
"""The starter model's task: one sum."""
