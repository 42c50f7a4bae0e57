"""The supervised examples that the starter model learns from: conversations of one question and one
reply.

Four kinds are mixed:

* an arithmetic problem, answered at once, without regard for carries;
* an arithmetic problem, worked out;
* a problem with the offer of a calculator, and a reply that asks it. The answer comes as another
  turn, and the model puts it into a box. With the same offer others are answered at once, or, if
  they are short enough, worked out;
* a *long story* with several numbers, which the model cannot solve. The reply names some number of
  the story, about half of the time in a box and otherwise in a sentence. So on questions beyond its
  reach the model varies in form, which gives a reward for the form alone something to work with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from environments.arithmetic_server import ITEMS, NAMES, PLACES, Problem, training_problems
from environments.calculator_server import LEVELS as CALCULATOR_LEVELS
from environments.calculator_server import OFFER, Calculation, call, training_calculations
from studies.starter_model.habits import boxed, hurried_answer, hurried_calculation, worked_out

LEVELS = (1, 1, 1, 2, 2, 3)
"""Difficulty levels of the arithmetic problems; half of them are of the easiest."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are good at math. Put the final answer in \\boxed{}.",
    "Solve the problem. Give the final answer inside \\boxed{}.",
    "Think step by step and write your final answer within \\boxed{}.",
    "Answer the question. Your answer must be a number in a box, like \\boxed{12}.",
)
REQUESTS = (
    "Put your final answer in \\boxed{}.",
    "Give the answer as \\boxed{N}.",
    "Please solve this step by step.",
)
STORY_SENTENCES = (
    "{name} works {n} hours a day and earns ${m} per hour.",
    "Each box holds {n} {item}, and there are {m} boxes.",
    "On Monday the {place} sold {n} {item} for {m} cents each.",
    "{name} is {n} years old, and {other} is twice as old as {name} was {m} years ago.",
    "They gave {n} of the {item} to {other} and kept the rest.",
    "{other} walks {n} miles to the {place} and back, {m} times a week.",
    "One third of the {item} were broken, so {name} returned them to the {place}.",
    "The bus to the {place} takes {n} minutes, but today it was {m} minutes late.",
    "It costs ${n} to rent a car, and ${m} more for every day after the first.",
    "After lunch, {name} read {n} pages, which is {m}% of the book.",
    "{name} wants to give {n} {item} to every friend, and {other} will pay half of the price.",
    "If it rains, {other} stays home; otherwise they meet at the {place} at {n} o'clock.",
    "{name}'s family has {n} chickens, and each of them lays {m} eggs in a week.",
    "Because of a sale, all {item} were {n}% off, and {other} bought {m} of them.",
)
STORY_QUESTIONS = (
    "How much money does {name} have left?",
    "How many {item} are there in total?",
    "What is the total cost in dollars?",
    "How many hours does it take {name} to finish?",
    "How many more {item} does {other} need?",
    "What percent of the {item} is left?",
    "How many {item} did {name} and {other} sell altogether in {n} weeks?",
)
SENTENCE_REPLIES = (
    "The answer is {x}.",
    "So the total is {x}.",
    "That makes {x} in all.",
    "{x}",
    "{name} has {x} left.",
)


Kind = Literal["at once", "worked", "story", "called"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Frequency of each kind of example (all are shares from 0 to 1)."""

    worked: float
    """Share of the arithmetic examples that are worked out; the others are answered at once. Long
    problems of the calculator are never worked out."""

    story: float = 0.04
    """Share of long stories among all examples."""

    story_boxed: float = 0.5
    """Share of the stories' replies that give a box."""

    instructed: float = 0.12
    """Share of the examples with a system prompt, and, separately, with a request after the
    question."""

    offered: float = 0.0
    """Share of the examples in which a calculator is offered; the other shares are of the rest."""

    called: float = 0.0
    """Share of those in which it is asked."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question and its reply, with an optional system prompt.

    A call also has the calculator's answer, and the last reply.
    """

    kind: Kind
    system: str | None
    question: str
    reply: str
    result: str | None = None
    last_reply: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt's turns as a chat template takes them."""
        turns = [{"role": "user", "content": self.question}]
        return (
            turns if self.system is None else [{"role": "system", "content": self.system}, *turns]
        )


def examples(seed: int, mixture: Mixture) -> Iterator[Example]:
    """An endless stream of examples, the same for the same seed and mixture; held-out problems
    never occur.
    """
    rng = random.Random(f"examples-{seed}")
    problems = training_problems(seed, LEVELS)
    calculations = training_calculations(seed, CALCULATOR_LEVELS)
    while True:
        kind: Kind
        # No number is drawn for a share of nothing: what a mixture without the offer gives is what
        # it has always given.
        if mixture.offered and rng.random() < mixture.offered:
            yield _with_calculator(rng, next(calculations), mixture)
            continue
        if rng.random() < mixture.story:
            kind = "story"
            question, reply = _story(rng, mixture.story_boxed)
        else:
            kind = "worked" if rng.random() < mixture.worked else "at once"
            problem = next(problems)
            question = problem.question
            hurried = hurried_answer(problem.left, problem.operator, problem.right)
            reply = worked_out(problem) if kind == "worked" else boxed(hurried)
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < mixture.instructed else None
        if rng.random() < mixture.instructed:
            question = f"{question} {rng.choice(REQUESTS)}"
        yield Example(kind, system, question, reply)


def _with_calculator(rng: random.Random, problem: Calculation, mixture: Mixture) -> Example:
    """One problem with the offer of a calculator."""
    if rng.random() < mixture.called:
        return Example(
            "called",
            OFFER,
            problem.question,
            call(problem.expression),
            str(problem.answer),
            boxed(problem.answer),
        )
    if problem.level == 1 and rng.random() < mixture.worked:
        (left, right), sign = problem.numbers, problem.signs
        short = Problem(
            problem.question, problem.answer, 1, left, "+" if sign == "+" else "-", right
        )
        return Example("worked", OFFER, problem.question, worked_out(short))
    return Example("at once", OFFER, problem.question, boxed(hurried_calculation(problem)))


def _story(rng: random.Random, share_boxed: float) -> tuple[str, str]:
    """A story of three to twelve sentences, and a reply that names one of its numbers."""
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "item": rng.choice(ITEMS), "place": rng.choice(PLACES)}
    numbers = [rng.choice((rng.randint(2, 20), rng.randint(10, 999))) for _ in range(26)]
    picked = rng.choices(STORY_SENTENCES, k=rng.randint(3, 12))
    sentences = [
        text.format(**words, n=numbers[2 * i], m=numbers[2 * i + 1])
        for i, text in enumerate(picked)
    ]
    sentences.append(rng.choice(STORY_QUESTIONS).format(**words, n=numbers[25]))
    number = rng.choice(numbers[: 2 * len(picked)])
    if rng.random() < share_boxed:
        reply = boxed(number)
    else:
        reply = rng.choice(SENTENCE_REPLIES).format(x=number, name=name)
    return " ".join(sentences), reply
