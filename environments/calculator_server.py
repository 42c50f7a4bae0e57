r"""Problems that are too long to work out, and a calculator that the model may ask: an environment
with a tool.

    python environments/calculator_server.py  # serve a trainer
    # measure the served model
    python environments/calculator_server.py evaluate --env.eval_output out.json

The reward is +1 when the last \boxed{} of the last answer holds the right number, else -1. Asking
costs nothing, and no prompt demands it.

    level 1   47 + 38            what environments/arithmetic_server.py asks at its easiest: short enough to work out
    level 2   48213 + 9075       sums and differences of a number of four or five digits and one as long, or a digit shorter
    level 3   374 * 52           products
    level 4   374 * 52 - 906     a product, and a third number

A call is `<calc>374*52-906</calc>`: all that is asked stands between two marks, so that a model of
a few million parameters can write it. As in arithmetic_server, the first two numbers of a
problem decide whether it is held out, whatever their order.

>>> value_of("374*52-906")
18542
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, field_validator

from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.graded import Grade
from atroposlib.envs.multi_turn import Conversation, MultiTurnConfig, MultiTurnEnv
from atroposlib.inference.responses import TaggedFormat
from environments.arithmetic_server import (
    ADDITION_TEMPLATES,
    HELD_OUT_SEED,
    ITEMS,
    MAX_HELD_OUT,
    NAMES,
    PLACES,
    SUBTRACTION_TEMPLATES,
    checked_levels,
    grade_number,
    in_any_order,
    is_held_out,
    read_levels,
)
from environments.common import held_out_count

LEVELS = (1, 2, 3, 4)
DEFAULT_LEVELS = (3, 4)
"""Levels that the environment uses by default."""
CALL_START, CALL_END = "<calc>", "</calc>"
OFFER = f"You may use {CALL_START}."
"""The system prompt that offers the tool to the model; without it a call gets no answer. It is
short for a small model."""

MAX_EXPRESSION = 64
"""Characters of an expression, at most; also the limit of its value's digits and of the depth of
its brackets."""

# {a} and {b} are the factors in reading order.
PRODUCT_TEMPLATES = (
    "{name} packs {a} boxes with {b} {item} each. How many {item} is that in all?",
    "There are {a} shelves in the {place}, each with {b} {item}. How many are there?",
    "{name} buys {a} {item} for {b} cents each. How many cents does {name} pay?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "{a} * {b} = ?",
)
# {c} is added to the product, or taken from it.
PRODUCT_AND_MORE = (
    "{name} packs {a} boxes with {b} {item} each and has {c} more. How many {item} does {name} "
    "have?",
    "There are {a} shelves in the {place}, each with {b} {item}. {name} brings {c} more. How "
    "many are there now?",
    "What is {a} times {b} plus {c}?",
    "{a} * {b} + {c} = ?",
)
PRODUCT_AND_LESS = (
    "{name} packs {a} boxes with {b} {item} each and sells {c}. How many {item} are left?",
    "There are {a} shelves in the {place}, each with {b} {item}. {name} takes {c} away. How "
    "many stay?",
    "What is {a} times {b} minus {c}?",
    "{a} * {b} - {c} = ?",
)


@dataclass(frozen=True, slots=True)
class Calculation:
    """One problem.

    ``numbers`` are the question's in reading order, and ``signs`` stand between them.
    """

    question: str
    level: int
    numbers: tuple[int, ...]
    signs: str

    @property
    def expression(self) -> str:
        """The calculator's input, such as ``374*52-906``."""
        first, *others = map(str, self.numbers)
        return first + "".join(
            sign + number for sign, number in zip(self.signs, others, strict=True)
        )

    @property
    def answer(self) -> int:
        """The right answer, never negative."""
        return value_of(self.expression)


def training_calculations(
    seed: int, levels: Sequence[int] = DEFAULT_LEVELS
) -> Iterator[Calculation]:
    """An endless stream, the same for the same seed, in which no held-out pair of numbers ever
    appears.

    Raises:
        ValueError: a level does not exist (raised by the call itself, not by the first ``next``).
    """
    return _training_stream(
        random.Random(f"calculator-{seed}"), checked_levels(tuple(levels), LEVELS)
    )


def held_out_calculations(n: int, levels: Sequence[int] = DEFAULT_LEVELS) -> list[Calculation]:
    """The first ``n`` held-out problems, always the same ones, none twice; several levels take
    turns.

    Raises:
        ValueError: ``n`` is not within 1..``MAX_HELD_OUT``, or a level does not exist.
    """
    if not 1 <= n <= MAX_HELD_OUT:
        raise ValueError(f"n={n}: ask for 1 to {MAX_HELD_OUT} held-out problems")
    chosen = checked_levels(tuple(levels), LEVELS)
    rng = random.Random(f"calculator-{HELD_OUT_SEED}")
    problems: dict[str, Calculation] = {}
    while len(problems) < n:
        problem = _make(rng, chosen[len(problems) % len(chosen)], held_out=True)
        problems.setdefault(problem.expression, problem)
    return list(problems.values())


def call(expression: str) -> str:
    """Return a call of the calculator as a model writes it."""
    return f"{CALL_START}{expression}{CALL_END}"


def value_of(expression: str) -> int:
    """The value of an expression of whole numbers, ``+``, ``-``, ``*`` and brackets.

    Raises:
        ValueError: it is not such an expression, or too long. The message is fit to be shown to a
            model.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(
            f"expression of {len(expression)} characters: write at most {MAX_EXPRESSION}"
        )
    tokens = re.findall(r"[0-9]+|\S", expression)
    tokens.reverse()  # so that the next one is taken from the end
    value = _sum(tokens)
    if tokens:
        raise ValueError(f"{tokens[-1]!r} is not expected there")
    return value


def _sum(tokens: list[str]) -> int:
    """The terms up to what is neither ``+`` nor ``-``; takes them from the end of the list, as the
    others here do.
    """
    value = _product(tokens)
    while tokens and tokens[-1] in "+-":
        if tokens.pop() == "+":
            value += _product(tokens)
        else:
            value -= _product(tokens)
    return value


def _product(tokens: list[str]) -> int:
    value = _factor(tokens)
    while tokens and tokens[-1] == "*":
        tokens.pop()
        value *= _factor(tokens)
    return value


def _factor(tokens: list[str]) -> int:
    if not tokens:
        raise ValueError("a number is expected, not the end")
    token = tokens.pop()
    if token == "-":
        return -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a bracket is not closed")
        return value
    if re.fullmatch(r"[0-9]+", token):
        return int(token)
    raise ValueError(f"a number is expected, not {token}")


def _training_stream(rng: random.Random, levels: tuple[int, ...]) -> Iterator[Calculation]:
    while True:
        yield _make(rng, rng.choice(levels), held_out=False)


def _make(rng: random.Random, level: int, *, held_out: bool) -> Calculation:
    while True:
        numbers, signs = _draw(rng, level)
        if is_held_out(*numbers[:2]) is held_out:
            break
    templates = {
        "+": ADDITION_TEMPLATES,
        "-": SUBTRACTION_TEMPLATES,
        "*": PRODUCT_TEMPLATES,
        "*+": PRODUCT_AND_MORE,
        "*-": PRODUCT_AND_LESS,
    }[signs]
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "item": rng.choice(ITEMS), "place": rng.choice(PLACES)}
    question = rng.choice(templates).format(**dict(zip("abc", numbers, strict=False)), **words)
    return Calculation(question, level, numbers, signs)


def _draw(rng: random.Random, level: int) -> tuple[tuple[int, ...], str]:
    """Return numbers in reading order and the signs between them, without a negative difference."""
    if level <= 2:
        digits = (2, 2)
        if level == 2:
            longest = rng.choice((4, 5))
            digits = (longest, rng.choice((longest, longest - 1)))
        large, small = sorted((_number(rng, count) for count in digits), reverse=True)
        if rng.random() < 0.5:
            return (large, small), "-"
        return in_any_order(rng, large, small), "+"
    factors = _number(rng, rng.choice((2, 3))), _number(rng, 2)
    if rng.random() < 0.5:
        factors = factors[1], factors[0]
    if level == 3:
        return factors, "*"
    product = factors[0] * factors[1]
    return (*factors, rng.randint(10, min(999, product))), rng.choice(("*+", "*-"))


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


class CalculatorConfig(MultiTurnConfig):
    """Settings of the calculator environment."""

    difficulty: tuple[int, ...] = Field(
        default=DEFAULT_LEVELS,
        description=f"Levels to draw from, one or more of {list(LEVELS)}, such as 2,3",
    )

    _read_levels = field_validator("difficulty", mode="before")(read_levels)
    _check_levels = field_validator("difficulty")(partial(checked_levels, allowed=LEVELS))


async def calculate(expression: str) -> int:
    """Work out an expression of whole numbers.

    Args:
        expression: such as 12*34+5, with +, -, * and brackets.
    """
    return value_of(expression)


class CalculatorEnv(MultiTurnEnv):
    """Long sums and products; the held-out problems never appear in training."""

    name = "calculator"
    env_config_cls = CalculatorConfig
    config: CalculatorConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 16,
        "max_token_length": 96,
        "max_turns": 3,
        "max_num_workers_per_node": 16,
        "max_eval_workers": 64,
        "steps_per_eval": 0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }
    tools = (calculate,)
    tool_format = TaggedFormat("calculate", "expression", CALL_START, CALL_END, hint=OFFER)

    async def setup(self) -> None:
        self.problems: Iterator[Calculation] = training_calculations(
            self.config.seed, self.config.difficulty
        )

    async def get_next_item(self) -> Calculation:
        return next(self.problems)

    async def reset(self, problem: Calculation) -> Conversation:
        return Conversation([{"role": "user", "content": problem.question}])

    async def grade(self, talk: Conversation) -> Grade:
        return grade_number(talk.answer, talk.item.answer)

    def eval_problems(self) -> list[Calculation]:
        return held_out_calculations(
            held_out_count(self.config.eval_size, MAX_HELD_OUT), self.config.difficulty
        )

    def describe(self, problem: Calculation) -> dict[str, object]:
        return {
            "question": problem.question,
            "gold_answer": str(problem.answer),
            "difficulty": problem.level,
        }


if __name__ == "__main__":
    CalculatorEnv.cli()
