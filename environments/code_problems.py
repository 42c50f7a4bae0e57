"""Small programming problems, made on the fly: a typed function in words, examples, and hidden
calls with what they return.

A problem is put together of parts, each of which is a phrase and the Python that it means, so the
reference solution says what the text says. Training and held-out problems are disjoint: a keyed
hash of the reference's source says on which side it lies.

>>> held_out_problems(1)[0].question == held_out_problems(50)[0].question
True
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atroposlib.utils.data_files import read_model, rows_of_file, usable_rows

HELD_OUT_SEED = 20_260_511
"""Key of the split and seed of the held-out list. Another value would be another benchmark, so it
never changes."""
HELD_OUT_ONE_IN = 8
MAX_HELD_OUT = 200
EXAMPLES, HIDDEN = 2, 8
"""Calls that the text shows, and calls that decide; no call is among both."""


@dataclass(frozen=True)
class Call:
    """Arguments, and what a right function returns for them, as JSON holds them."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class CodeProblem:
    """A question, and the hidden calls that decide.

    Attributes:
        question: the text, examples included.
        function: the name that the function must have.
        hidden: calls that decide; never shown to the model.
        reference: source of a right solution; empty where none is known.
    """

    question: str
    function: str
    hidden: tuple[Call, ...]
    reference: str = ""


# Phrase and Python. {k} is a small number that is drawn for each problem.
NUMBER_TESTS = (
    ("are even", "x % 2 == 0"),
    ("are odd", "x % 2 == 1"),
    ("are greater than {k}", "x > {k}"),
    ("are less than {k}", "x < {k}"),
    ("are not {k}", "x != {k}"),
    ("are divisible by {k}", "x % {k} == 0"),
    ("have a remainder of 1 when divided by {k}", "x % {k} == 1"),
    ("have a last digit below {k}", "abs(x) % 10 < {k}"),
)
NUMBER_CHANGES = (
    ("as they are", "x"),
    ("plus {m}", "x + {m}"),
    ("minus {m}", "x - {m}"),
    ("times {m}", "x * {m}"),
    ("squared", "x * x"),
    ("with the opposite sign", "-x"),
    ("as their distance from {m}", "abs(x - {m})"),
    ("as their remainder when divided by {m}", "x % {m}"),
)
NUMBER_ENDS = (
    ("the sum", "int", "sum(chosen)"),
    ("how many different values there are", "int", "len(set(chosen))"),
    ("the largest, or 0 if there is none", "int", "max(chosen, default=0)"),
    ("the smallest, or 0 if there is none", "int", "min(chosen, default=0)"),
    ("the list of them, sorted", "list[int]", "sorted(chosen)"),
    ("the list of them, in reverse order", "list[int]", "chosen[::-1]"),
    (
        "the list of their running sums",
        "list[int]",
        "[sum(chosen[: i + 1]) for i in range(len(chosen))]",
    ),
    (
        "the difference of the last and the first, or 0 if there is none",
        "int",
        "chosen[-1] - chosen[0] if chosen else 0",
    ),
)
WORD_TESTS = (
    ("have more than {k} letters", "len(w) > {k}"),
    ("have at most {k} letters", "len(w) <= {k}"),
    ("begin with a vowel", "w[0] in 'aeiou'"),
    ("end with a consonant", "w[-1] not in 'aeiou'"),
    ("hold the letter '{c}'", "'{c}' in w"),
    ("do not hold the letter '{c}'", "'{c}' not in w"),
    ("have two equal letters", "len(set(w)) < len(w)"),
)
WORD_CHANGES = (
    ("as they are", "w"),
    ("in capitals", "w.upper()"),
    ("backwards", "w[::-1]"),
    ("without their vowels", "''.join(c for c in w if c not in 'aeiou')"),
    ("with their first letter at the end", "w[1:] + w[:1]"),
    ("with each '{c}' replaced by '-'", "w.replace('{c}', '-')"),
)
WORD_ENDS = (
    ("them joined by '{s}'", "str", "'{s}'.join(chosen)"),
    ("how many letters and signs they have together", "int", "sum(len(w) for w in chosen)"),
    (
        "the longest, the first of equals, or '' if there is none",
        "str",
        "max(chosen, key=len, default='')",
    ),
    ("the list of them, sorted", "list[str]", "sorted(chosen)"),
    (
        "a dictionary from each of them to how often it is there",
        "dict[str, int]",
        "{{w: chosen.count(w) for w in chosen}}",
    ),
    ("the list of their lengths", "list[int]", "[len(w) for w in chosen]"),
)
PAIR_CHANGES = (
    ("the larger of the two", "max(a, b)"),
    ("the smaller of the two", "min(a, b)"),
    ("their sum", "a + b"),
    ("their product", "a * b"),
    ("the first minus {m} times the second", "a - {m} * b"),
    ("their distance from each other", "abs(a - b)"),
)
WORDS = tuple(
    """apple banana cherry onion eel pear plum fig quince melon ivy oak elm ash cedar willow tree noon level otter owl raven
    crow goose duck swan heron ibis bee ant moth wasp""".split()  # noqa: SIM905
)
NAMES = ("solve", "compute", "evaluate", "answer", "result")


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(0, 9))]


def _numbers_family(
    rng: random.Random, function: str
) -> tuple[str, str, Callable[[random.Random], tuple[Any, ...]]]:
    test, change, end = (
        rng.choice(NUMBER_TESTS),
        rng.choice(NUMBER_CHANGES),
        rng.choice(NUMBER_ENDS),
    )
    values = {"k": rng.randint(2, 9), "m": rng.randint(2, 9)}
    text = f"Take the numbers that {test[0]}, {change[0]}, and return {end[0]}.".format(**values)
    source = f"def {function}(numbers: list[int]) -> {end[1]}:\n    chosen = [{change[1]} for x in numbers if {test[1]}]\n"
    return (
        text,
        (source + f"    return {end[2]}\n").format(**values),
        lambda draw: (_numbers(draw),),
    )


def _words_family(
    rng: random.Random, function: str
) -> tuple[str, str, Callable[[random.Random], tuple[Any, ...]]]:
    test, change, end = rng.choice(WORD_TESTS), rng.choice(WORD_CHANGES), rng.choice(WORD_ENDS)
    values = {"k": rng.randint(3, 5), "c": rng.choice("aenor"), "s": rng.choice("-+ ,")}
    text = "The text holds words of small letters with single spaces between them. "
    text += f"Take the words that {test[0]}, {change[0]}, and return {end[0]}.".format(**values)
    source = f"def {function}(text: str) -> {end[1]}:\n    chosen = [{change[1]} for w in text.split() if {test[1]}]\n"
    source = (source + f"    return {end[2]}\n").format(**values)
    return text, source, lambda draw: (" ".join(draw.choices(WORDS, k=draw.randint(0, 8))),)


def _pairs_family(
    rng: random.Random, function: str
) -> tuple[str, str, Callable[[random.Random], tuple[Any, ...]]]:
    change, end = rng.choice(PAIR_CHANGES), rng.choice(NUMBER_ENDS)
    values = {"m": rng.randint(2, 9)}
    text = "Put together the numbers of both lists that have the same place, as far as the shorter one goes: "
    text += f"{change[0]}. Of these values, return {end[0]}.".format(**values)
    head = f"def {function}(first: list[int], second: list[int]) -> {end[1]}:\n"
    source = f"    chosen = [{change[1]} for a, b in zip(first, second)]\n    return {end[2]}\n"
    return text, head + source.format(**values), lambda draw: (_numbers(draw), _numbers(draw))


def _digits_family(
    rng: random.Random, function: str
) -> tuple[str, str, Callable[[random.Random], tuple[Any, ...]]]:
    test, end = rng.choice(NUMBER_TESTS), rng.choice(NUMBER_ENDS)
    values = {"k": rng.randint(2, 6)}
    text = f"Take the decimal digits of n, from left to right, that {test[0]}, and return {end[0]}.".format(
        **values
    )
    head = f"def {function}(n: int) -> {end[1]}:\n"
    source = f"    chosen = [x for x in map(int, str(n)) if {test[1]}]\n    return {end[2]}\n"
    return (
        text,
        head + source.format(**values),
        lambda draw: (draw.randrange(10 ** draw.randint(1, 8)),),
    )


FAMILIES = (_numbers_family, _words_family, _pairs_family, _digits_family)


def is_held_out(reference: str) -> bool:
    """Return whether a problem with this reference lies on the held-out side; the function's name
    does not matter.
    """
    body = reference.partition("\n")[2]
    digest = hashlib.blake2b(f"{HELD_OUT_SEED}:{body}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def held_out_problems(n: int) -> list[CodeProblem]:
    """The first `n` held-out problems, always the same ones, none twice.

    Raises:
        ValueError: `n` is not within 1..MAX_HELD_OUT.
    """
    if not 1 <= n <= MAX_HELD_OUT:
        raise ValueError(f"n={n}: ask for 1 to {MAX_HELD_OUT} held-out problems")
    problems: dict[str, CodeProblem] = {}
    stream = _stream(random.Random(HELD_OUT_SEED), held_out=True)
    while len(problems) < n:
        problem = next(stream)
        problems.setdefault(problem.reference.partition("\n")[2], problem)
    return list(problems.values())


def training_problems(seed: int) -> Iterator[CodeProblem]:
    """An endless stream of problems, the same for the same seed, none of which is held out."""
    return _stream(random.Random(seed), held_out=False)


def _stream(rng: random.Random, *, held_out: bool) -> Iterator[CodeProblem]:
    while True:
        function = rng.choice(NAMES)
        text, reference, draw = rng.choice(FAMILIES)(rng, function)
        if is_held_out(reference) is not held_out:
            continue
        names: dict[str, Any] = {}
        exec(compile(reference, "reference.py", "exec"), names)
        calls = _distinct_calls(names[function], draw, rng)
        # Otherwise a function that always returns the same would be right.
        if (
            calls is None
            or len({json.dumps(call.expected) for call in calls[EXAMPLES:]}) < HIDDEN // 2
        ):
            continue
        head = reference.partition("\n")[0]
        shown = "\n".join(shown_call(function, call) for call in calls[:EXAMPLES])
        question = f"Write a Python function\n\n{head}\n\n{text}\n\nFor example:\n{shown}"
        yield CodeProblem(question, function, tuple(calls[EXAMPLES:]), reference)


def shown_call(function: str, call: Call) -> str:
    """`f(1, 2) == 3`."""
    return f"{function}({', '.join(map(repr, call.arguments))}) == {call.expected!r}"


def _distinct_calls(
    function: Callable[..., Any],
    draw: Callable[[random.Random], tuple[Any, ...]],
    rng: random.Random,
) -> list[Call] | None:
    """As many calls as a problem has, no two with the same arguments; None where these are not to
    be had.
    """
    calls: dict[str, Call] = {}
    for _ in range(20 * (EXAMPLES + HIDDEN)):
        arguments = draw(rng)
        calls.setdefault(json.dumps(arguments), Call(arguments, function(*arguments)))
        if len(calls) == EXAMPLES + HIDDEN:
            return list(calls.values())
    return None


class CallRow(BaseModel):
    """A test of a row."""

    args: list[Any]
    expected: Any


class ProblemRow(BaseModel):
    """A row of a data set."""

    model_config = ConfigDict(str_strip_whitespace=True)

    question: str = Field(min_length=1)
    function: str
    tests: list[CallRow] = Field(min_length=1)
    reference: str = ""

    @field_validator("function")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value.isidentifier():
            raise ValueError("not the name of a function")
        return value


def read_problem(row: Any) -> CodeProblem:
    """Return the problem of a row `{"question": …, "function": …, "tests": [{"args": […],
    "expected": …}, …]}`.

    Raises:
        BadRow: a field is missing or wrong; the message names it.
    """
    read = read_model(ProblemRow, row)
    calls = tuple(Call(tuple(test.args), test.expected) for test in read.tests)
    return CodeProblem(read.question, read.function, calls, read.reference)


def read_rows(path: Path) -> tuple[list[CodeProblem], list[str]]:
    """Return the problems of a file, and place and fault of each row that is not one.

    Raises:
        UsageError: the file cannot be read.
    """
    rows = usable_rows(rows_of_file(path), read_problem)
    return rows.good, rows.faults


def calls_of(problem: CodeProblem) -> tuple[Sequence[Sequence[Any]], list[Any]]:
    """Arguments and expected values of the calls that decide."""
    return [call.arguments for call in problem.hidden], [call.expected for call in problem.hidden]
