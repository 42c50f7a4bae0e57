r"""Word problems with one addition or subtraction, made on the fly: an environment that needs no
download.

    python environments/arithmetic_server.py  # serve a trainer
    # measure the served model
    python environments/arithmetic_server.py evaluate --env.eval_output out.json

The reward is +1 when the last \boxed{} holds the right number, else -1.

Training problems and held-out problems are disjoint by construction. A keyed hash of the *unordered
pair of operands* decides on which side a problem lies. So two numbers that appear together in a
held-out problem never appear together in training. This holds for any story, order and operation.

>>> held_out_problems(1)[0] == held_out_problems(200)[0]
True
"""

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from atroposlib.envs.base import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from atroposlib.utils.math_scoring import last_boxed, number_in
from environments.common import held_out_count

Operator = Literal["+", "-"]

HELD_OUT_SEED = 20_250_107
"""Key of the split and seed of the held-out list. Another value would be another benchmark, so it
never changes."""

HELD_OUT_ONE_IN = 10
"""One pair of operands in this many is held out."""

MAX_HELD_OUT = 1_000
"""Most held-out problems that one call gives; the easiest level alone has more distinct sums than
this."""

OPERAND_DIGITS: dict[int, tuple[int, int]] = {1: (2, 2), 2: (3, 2), 3: (3, 3)}
"""Difficulty level -> decimal digits of the larger and of the smaller operand."""

DEFAULT_DIFFICULTY: tuple[int, ...] = (1, 2)
"""An equal share of each."""

# Split from one string each, because a list would fill a page with one word per line.
NAMES = tuple(
    """Ada Amir Anna Ben Carla Chen Dana Eli Emma Femi Grace Hugo Ines Ivan Jada Kofi Lena Leo Lily Mara Max Maya Mei Mia
    Nina Noah Omar Owen Priya Rosa Ruth Sam Sara Tara Theo Tom Uma Vera Yara Zoe""".split()  # noqa: SIM905
)
ITEMS = tuple(
    """apples beads books boxes bricks buttons cakes cards chairs coins cups eggs flowers grapes keys lamps marbles nails nuts
    oranges pears pencils pens photos plants plums shells socks songs stamps stars stickers stones tickets toys""".split()  # noqa: SIM905
)
PLACES = tuple(
    [
        "bakery",
        "farm",
        "garden",
        "hall",
        "library",
        "market",
        "museum",
        "park",
        "school",
        "shop",
        "station",
        "store",
    ]
)

# {a} and {b} are the operands in reading order, and the answer is a + b or a - b.
ADDITION_TEMPLATES = (
    "{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?",
    "{name} has {a} {item}. {other} has {b} {item}. How many do they have together?",
    "There are {a} {item} in the {place}. {name} brings {b} more. How many are there now?",
    "{name} made {a} {item} on Monday and {b} on Tuesday. How many is that in all?",
    "The {place} sold {a} {item} in the morning and {b} in the evening. How many in total?",
    "{name} found {a} {item}, then {other} gave {name} {b} more. How many now?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
)
SUBTRACTION_TEMPLATES = (
    "{name} has {a} {item} and gives {b} to {other}. How many {item} does {name} keep?",
    "{name} had {a} {item} but lost {b}. How many are left?",
    "There are {a} {item} in the {place}. {name} takes {b} away. How many stay?",
    "The {place} had {a} {item} and sold {b} of them. How many are left?",
    "{name} needs {a} {item} and has {b}. How many more does {name} need?",
    "{name} has {a} {item}. {other} has {b} fewer. How many does {other} have?",
    "What is {a} minus {b}?",
    "{a} take away {b} is how much?",
    "{a} - {b} = ?",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem; ``answer`` is ``left + right`` or ``left - right``, and never negative."""

    question: str
    answer: int
    difficulty: int
    left: int
    operator: Operator
    right: int


def is_held_out(left: int, right: int) -> bool:
    """Return whether problems over these two operands belong to the held-out side; the order of the
    two does not matter.
    """
    key = f"{HELD_OUT_SEED}:{min(left, right)}:{max(left, right)}".encode()
    return (
        int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % HELD_OUT_ONE_IN == 0
    )


def held_out_problems(
    n: int, difficulty: int | Sequence[int] = DEFAULT_DIFFICULTY
) -> list[Problem]:
    """The first ``n`` held-out problems, always the same ones, no sum twice.

    Several levels take turns, so that each has an equal share of the list.

    Raises:
        ValueError: ``n`` is not within 1..``MAX_HELD_OUT``, or a level does not exist.
    """
    if not 1 <= n <= MAX_HELD_OUT:
        raise ValueError(f"n={n}: ask for 1 to {MAX_HELD_OUT} held-out problems")
    levels = _levels(difficulty)
    rng = random.Random(HELD_OUT_SEED)
    problems: list[Problem] = []
    seen: set[tuple[int, str, int]] = set()
    while len(problems) < n:
        problem = _make_problem(rng, levels[len(problems) % len(levels)], held_out=True)
        exercise = (problem.left, problem.operator, problem.right)
        if exercise not in seen:
            seen.add(exercise)
            problems.append(problem)
    return problems


def training_problems(
    seed: int, difficulty: int | Sequence[int] = DEFAULT_DIFFICULTY
) -> Iterator[Problem]:
    """An endless stream of problems, the same for the same seed, in which no held-out pair of
    operands ever appears.

    Raises:
        ValueError: a level does not exist (raised by the call itself, not by the first ``next``).
    """
    return _training_stream(random.Random(seed), _levels(difficulty))


def _training_stream(rng: random.Random, levels: tuple[int, ...]) -> Iterator[Problem]:
    while True:
        yield _make_problem(rng, rng.choice(levels), held_out=False)


def _levels(difficulty: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(difficulty, int):
        difficulty = (difficulty,)
    return checked_levels(tuple(difficulty))


def _make_problem(rng: random.Random, difficulty: int, *, held_out: bool) -> Problem:
    operator: Operator = rng.choice(("+", "-"))
    left, right = _draw_operands(rng, difficulty, operator, held_out=held_out)
    templates, answer = ADDITION_TEMPLATES, left + right
    if operator == "-":
        templates, answer = SUBTRACTION_TEMPLATES, left - right
    name, other = rng.sample(NAMES, 2)
    question = rng.choice(templates).format(
        a=left, b=right, name=name, other=other, item=rng.choice(ITEMS), place=rng.choice(PLACES)
    )
    return Problem(question, answer, difficulty, left, operator, right)


def _draw_operands(
    rng: random.Random, difficulty: int, operator: Operator, *, held_out: bool
) -> tuple[int, int]:
    """Operands in reading order.

    One pair in ten is held out, so either side is hit after about ten draws at most.
    """
    while True:
        large, small = (
            rng.randrange(10 ** (digits - 1), 10**digits) for digits in OPERAND_DIGITS[difficulty]
        )
        if is_held_out(large, small) is not held_out:
            continue
        if operator == "+":
            return in_any_order(rng, large, small)
        if large > small:
            return large, small


def in_any_order(rng: random.Random, first: int, second: int) -> tuple[int, int]:
    """Return both numbers, in either order with the same probability."""
    if rng.random() < 0.5:
        return first, second
    return second, first


def read_levels(value: object) -> object:
    """Read a flag's levels, `2` or `1,2`, as a tuple. Other values are returned unchanged."""
    if isinstance(value, int):
        return (value,)
    if isinstance(value, str):
        return tuple(value.strip("[]() ").split(","))
    return value


def checked_levels(
    levels: tuple[int, ...], allowed: Collection[int] = OPERAND_DIGITS
) -> tuple[int, ...]:
    """Return the levels.

    Raises:
        ValueError: there is none, or one that does not exist.
    """
    if not levels or not set(levels) <= set(allowed):
        raise ValueError(f"levels {levels!r}: choose one or more of {sorted(allowed)}")
    return levels


def grade_number(text: str, number: int) -> Grade:
    r"""Grade a text by its last \boxed{}: 1 for the right number, else -1."""
    answer = last_boxed(text)
    if answer is not None and number_in(answer) == number:
        return Grade(score=1.0, correct=True, answer=answer)
    return Grade(score=-1.0, correct=False, answer=answer)


class ArithmeticConfig(BaseEnvConfig):
    """Settings of the arithmetic environment."""

    difficulty: tuple[int, ...] = Field(
        default=DEFAULT_DIFFICULTY,
        description=f"Levels to draw from, one or more of {sorted(OPERAND_DIGITS)}, such as 1,2",
    )

    _read_levels = field_validator("difficulty", mode="before")(read_levels)
    _check_levels = field_validator("difficulty")(partial(checked_levels, allowed=OPERAND_DIGITS))


class ArithmeticEnv(SingleTurnEnv):
    """Generated sums and differences, two or three digits; the held-out problems never appear in
    training.
    """

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    config: ArithmeticConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 16,
        "max_token_length": 128,
        "max_num_workers_per_node": 16,
        "max_eval_workers": 64,
        "steps_per_eval": 0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }

    async def setup(self) -> None:
        self.problems: Iterator[Problem] = training_problems(
            self.config.seed, self.config.difficulty
        )

    async def get_next_item(self) -> Problem:
        return next(self.problems)

    def messages(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    async def grade(self, problem: Problem, response: Response) -> Grade:
        return grade_number(response.answer, problem.answer)

    def eval_problems(self) -> list[Problem]:
        return held_out_problems(
            held_out_count(self.config.eval_size, MAX_HELD_OUT), self.config.difficulty
        )

    def describe(self, problem: Problem) -> dict[str, object]:
        return {
            "question": problem.question,
            "gold_answer": str(problem.answer),
            "difficulty": problem.difficulty,
        }


if __name__ == "__main__":
    ArithmeticEnv.cli()
