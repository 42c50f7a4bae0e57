r"""Write a function; hidden calls decide. Problems are made on the fly, or come from JSON lines of
your own.

    python environments/code_server.py  # serve a trainer
    # {"question", "function", "tests"} in each line
    python environments/code_server.py --env.dataset_path my_problems.jsonl
    # measure the served model
    python environments/code_server.py evaluate --env.eval_output out.json

The reward is +1 when every hidden call returns what it should, else -1. Programs run in a sandbox:
docs/sandbox.md. Generated problems come with reference solutions. A row without `expected` is left
out and counted (`bad_rows`). Contained programs exceeded memory or output, made a refused call, or
left processes behind.

**Problems.** A problem consists of parts. Each part is a phrase and its meaning in Python, so the
reference solution matches the text. Training and held-out problems are disjoint: a keyed hash of
the reference's source decides the side.

>>> held_out_problems(1)[0].question == held_out_problems(50)[0].question
True

**The program in an answer.** Fences come in pairs, as in CommonMark. A block ends at a fence of the
same character, at least as long and without an info string. Two things that models write go beyond
it. A fence may be indented by any amount (in a list). A backtick fence without an info string, or
with Python's name, may open behind text on the same line. A tag or a brace may follow a closing
fence, and code may begin behind the opening one. Blocks inside a block of Markdown count as blocks.
"""

import asyncio
import hashlib
import importlib
import itertools
import json
import logging
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atroposlib.envs.base import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.sandbox import (
    ISOLATIONS,
    Limits,
    LocalSandbox,
    Program,
    Sandbox,
    SandboxBroken,
    SandboxUnavailable,
)
from atroposlib.sandbox.contract import Verdict, verdict
from atroposlib.type_definitions import Message
from atroposlib.utils.jsonl import read_model, train_and_test
from environments.common import held_out_count, question_messages

_FENCE = re.compile(
    r"(?P<before>[ \t]*|[^`\n]*[^`\n \t][ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)"
)
_INLINE = re.compile(r"```(?:python3?|py)?[ \t]+(.+?)```|```(.+?)```", re.IGNORECASE)
_LANGUAGE = re.compile(r"[\s{.]*([a-z+#_-]*)")
_LIST_MARKER = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+")
_PYTHON_NAME = re.compile(r"(?:\{[^}\s]*\}\s*)?\S*?(?<![a-z])(?:i?python|py|sage)(?![a-z_]|-[a-z])")
"""Python's name in the first word of an info string: `python3`, `text/x-python`, `inc.py`,
`{code-cell} python`."""
_CODE_AS_INFO = re.compile(
    r"(?:\s*(?:python3?|py)\s)?\s*((?:(?:async\s+)?def|class)\s+\w+\s*[(:\[].*|import\s.*|from\s+\S+\s+import\s.*)"
)
_NO_LANGUAGE = frozenset(("code", "tool_code", "solution", "program", "answer"))
_MARKDOWN = frozenset(("markdown", "md"))
_CLOSED_BEHIND_CODE = re.compile(r"(`{3,}|~{3,})[ \t]*$", re.MULTILINE)
_PYTHON = "python"


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block.

    Attributes:
        language: `python`, or the first word of another info string in lower case, without a
            version; "" without one.
        code: the lines between the fences, without the fence's own indentation.
    """

    language: str
    code: str

    @property
    def is_python(self) -> bool:
        """Return whether the info string names Python."""
        return self.language == _PYTHON


def code_blocks(text: str, inside_markdown: bool = False) -> tuple[list[CodeBlock], str]:
    """Return the fenced blocks of a text in order, and the text outside them.

    A block whose fence is never closed ends with the text, or behind code on its own last line.

    Args:
        text: of an answer.
        inside_markdown: the text is a block of Markdown itself, so that such a block in it is one
            block.
    """
    blocks: list[CodeBlock] = []
    outside: list[str] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        opening = _opening(lines[number])
        number += 1
        if opening is None:
            outside.append(lines[number - 1])
            continue
        indent = len(opening["before"])
        if opening["before"].strip():
            outside.append(opening["before"])
            indent = len(opening["before"]) if _LIST_MARKER.fullmatch(opening["before"]) else 0
        end = _closing(lines, number, indent, opening["fence"])
        rest: str | None = None
        code = "\n".join(
            _without_indent(line, indent)
            for line in lines[number : len(lines) if end is None else end]
        )
        if end is None:
            code, rest = _cut(code)
        language = _language(opening["info"])
        if first := _CODE_AS_INFO.fullmatch(opening["info"].rstrip("\r")):
            language, code = _PYTHON, f"{first[1]}\n{code}"
        is_nested = language in _MARKDOWN and not inside_markdown
        blocks.extend(
            code_blocks(code, inside_markdown=True)[0] if is_nested else [CodeBlock(language, code)]
        )
        if rest:
            outside.append(rest)
        number = len(lines) if end is None else end + 1
    return blocks, "\n".join(outside)


def program_in(text: str, function: str | None = None) -> str:
    """Return the Python program in an answer.

    It is the last block that defines the function and is Python or names no language. If
    none does, it is the last block that is marked as Python, else the last one that names no
    language. An answer without such a block is a program itself, as far as it is not in a block of
    another language.

    Args:
        text: the answer, without the reasoning before it.
        function: the name that the program must define; None for any function.
    """
    blocks, outside = code_blocks(text)
    candidates = [block for block in blocks if block.is_python or not block.language]
    name = r"\w+" if function is None else re.escape(function)
    for pattern in (
        rf"^(?:async[ \t]+def|def|class)[ \t]+{name}\b",
        rf"^{name}[ \t]*(?::[^=\n]*)?=(?!=)",
        rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{name}\b",
    ):
        defining = re.compile(pattern, re.MULTILINE)
        if defining_blocks := [block.code for block in candidates if defining.search(block.code)]:
            return defining_blocks[-1]
    if candidates:
        return ([block.code for block in candidates if block.is_python] or [candidates[-1].code])[
            -1
        ]
    if not blocks and (inline := _INLINE.findall(outside)):
        return str(inline[-1][0] or inline[-1][1])
    return textwrap.dedent(outside)


def _opening(line: str) -> re.Match[str] | None:
    if "```" not in line and "~~~" not in line:
        return None
    match = _FENCE.fullmatch(line)
    if match is not None and match["before"].strip():
        opens = match["fence"][0] == "`" and (
            not match["info"].strip() or _language(match["info"]) == _PYTHON
        )
        return match if opens else None  # "put it between ``` and ```" opens nothing
    return match


def _closing(lines: list[str], start: int, indent: int, fence: str) -> int | None:
    """Return the line with the closing fence.

    More indentation than the opening one's and three spaces makes it code.
    """
    closing = re.compile(
        rf"[ \t]{{0,{indent + 3}}}{fence[0]}{{{len(fence)},}}[ \t]*(?:[<}}][^`\n]*)?\r?"
    )
    return next(
        (number for number in range(start, len(lines)) if closing.fullmatch(lines[number])), None
    )


def _cut(code: str) -> tuple[str, str | None]:
    """Split a block that no line closes at a fence behind code, as in `return n```."""
    match = _CLOSED_BEHIND_CODE.search(code)
    return (code, None) if match is None else (code[: match.start()], code[match.end() :])


def _without_indent(line: str, indent: int) -> str:
    blank = len(line) - len(line.lstrip(" \t"))
    return line[min(indent, blank) :]


def _language(info: str) -> str:
    info = info.lower().strip()
    if _PYTHON_NAME.match(info):
        return _PYTHON
    named = _LANGUAGE.match(info)
    return named[1] if named and named[1] not in _NO_LANGUAGE else ""


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
    """Yield problems without end, the same for the same seed, and none that is held out."""
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


def calls_of(problem: CodeProblem) -> tuple[Sequence[Sequence[Any]], list[Any]]:
    """Arguments and expected values of the calls that decide."""
    return [call.arguments for call in problem.hidden], [call.expected for call in problem.hidden]


logger = logging.getLogger(__name__)

SYSTEM_PROMPT = (
    "You write Python. Think first if you like, then give the whole program in one ```python block."
)
KINDS = ("timeout", "contained", "crash", "wrong")
REMEDIES = {
    "timeout": "if right programs need longer, raise --env.sandbox_seconds",
    "contained": "if right programs need more memory, raise --env.sandbox_memory_mib; docs/sandbox.md lists refused calls",
}
"""Remedies, logged with the first program that ends in such a way."""


class CodeConfig(BaseEnvConfig):
    """Settings of the code environment."""

    dataset_path: str | None = Field(
        default=None,
        description="Folder with train.jsonl and test.jsonl, or one such file; by default "
        "problems are made on the fly",
    )
    system_prompt: str = Field(default=SYSTEM_PROMPT, description="System prompt; empty for none")
    partial_credit: float = Field(
        default=0.0,
        ge=0,
        lt=2,
        description="Credit that a wrong program has for its share of right calls, added to the -1",
    )
    format_reward: float = Field(
        default=0.0,
        ge=0,
        lt=2,
        description="Credit of a wrong answer, added to the -1: half for defining the function, "
        "half for finishing",
    )
    sandbox: str = Field(
        default="local",
        description="`local`, or `package.module:factory`, called with limits and "
        "allow_missing, of your own",
    )
    sandbox_allow_missing: tuple[str, ...] = Field(
        default=(),
        description=f"Isolations that may be missing where the host cannot give them, of "
        f"{', '.join(ISOLATIONS)}; any other "
        "that is missing ends the environment",
    )
    sandbox_seconds: float = Field(
        default=10.0, gt=0, description="Longest time for a program, over all hidden calls"
    )
    sandbox_memory_mib: int = Field(
        default=512, ge=32, description="Most memory of a program, in MiB"
    )

    @field_validator("sandbox_allow_missing", mode="before")
    @classmethod
    def _read_names(cls, value: object) -> object:
        """Accept `disk,network` from a flag."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("sandbox_allow_missing")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not set(value) <= ISOLATIONS.keys():
            raise ValueError(f"choose of {', '.join(ISOLATIONS)}")
        return value


class CodeEnv(SingleTurnEnv):
    """Small functions in Python, decided by hidden calls."""

    name = "code"
    env_config_cls = CodeConfig
    config: CodeConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 8,
        "max_token_length": 1024,
        "max_eval_workers": 64,
        "eval_size": 100,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }
    box: Sandbox | None = None

    async def setup(self) -> None:
        self.box = self.box or make_sandbox(self.config)
        try:
            await self.box.start()
        except SandboxUnavailable as error:
            raise EnvironmentFailure(f"{error}{allowing(error)}") from error
        self.problems: Iterator[CodeProblem] = training_problems(self.config.seed)
        self.test: list[CodeProblem] = []
        if self.config.dataset_path:
            path = Path(self.config.dataset_path)
            train, self.test = await asyncio.to_thread(
                train_and_test, path, read_problem, "problems", self.drops.add
            )
            random.Random(self.config.seed).shuffle(train)
            self.problems = itertools.cycle(train)

    async def get_next_item(self) -> CodeProblem:
        return next(self.problems)

    def messages(self, problem: CodeProblem) -> list[Message]:
        return question_messages(self.config.system_prompt, problem.question)

    async def grade(self, problem: CodeProblem, response: Response) -> Grade:
        """Run the answer's program.

        An answer whose program could not be run gets no score.
        """
        assert self.box is not None, "setup makes it"
        calls, expected = calls_of(problem)
        try:
            program = Program(
                program_in(response.answer, problem.function), problem.function, calls
            )
            outcome = await self.box.run(program)
        except SandboxBroken as error:
            self.drops.add("sandbox_broken")
            self.say_once(
                "broken",
                f"a program could not be run: {error}; is the machine short of memory or "
                f"processes?",
            )
            raise RolloutFailure(f"the sandbox could not run a program: {error}") from error
        except SandboxUnavailable as error:
            raise EnvironmentFailure(f"{error}{allowing(error)}") from error
        judged = verdict(outcome, expected)
        if judged.kind in REMEDIES:
            self.say_once(
                judged.kind,
                f"a program is counted as {judged.kind}: {judged.why}; {REMEDIES[judged.kind]}",
            )
        defined = outcome.problem is None and judged.kind != "contained" and bool(outcome.results)
        return Grade(
            score=self.score(judged, len(expected), defined, response.finished),
            correct=judged.kind == "right",
            answer=f"{judged.kind}: {judged.why}",
        )

    def score(self, judged: Verdict, calls: int, defined: bool, finished: bool) -> float:
        """The reward of one program.

        Args:
            judged: what became of it.
            calls: how many there were.
            defined: it defines the function.
            finished: the answer ended by itself.
        """
        if judged.kind == "right":
            return 1.0
        form = self.config.format_reward * (defined + finished) / 2
        return -1.0 + form + self.config.partial_credit * judged.passed / calls

    def adjust_scores(self, grades: list[Grade], responses: list[Response]) -> list[float]:
        """Note how the programs of a group ended; their rewards stay."""
        for grade in grades:
            kind = (grade.answer or "").partition(":")[0]
            self.note({f"code_{name}": float(kind == name) for name in KINDS})
        return super().adjust_scores(grades, responses)

    def eval_problems(self) -> list[CodeProblem]:
        size = self.config.eval_size
        if not self.test:
            return held_out_problems(held_out_count(size, MAX_HELD_OUT))
        return self.test[: held_out_count(size, len(self.test))]

    def describe(self, problem: CodeProblem) -> dict[str, object]:
        return {"question": problem.question, "gold_answer": problem.reference}


def make_sandbox(config: CodeConfig) -> Sandbox:
    """The sandbox that the settings ask for.

    Raises:
        UsageError: `sandbox` names nothing that can be called.
    """
    limits = Limits(seconds=config.sandbox_seconds, memory=config.sandbox_memory_mib << 20)
    if config.sandbox == "local":
        return LocalSandbox(limits, config.sandbox_allow_missing)
    module, _, name = config.sandbox.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--env.sandbox {config.sandbox}: neither `local` nor package.module:factory ({error})"
        ) from error
    box: Sandbox = factory(limits=limits, allow_missing=config.sandbox_allow_missing)
    return box


def allowing(error: SandboxUnavailable) -> str:
    """Return the flag that would allow the missing isolations."""
    if not error.missing:
        return ""
    return f" (--env.sandbox_allow_missing {','.join(error.missing)})"


if __name__ == "__main__":
    CodeEnv.cli()
