"""The generated code problems: the reference's results are the expected ones, and the held-out side
is never trained on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.sandbox import LocalSandbox, Outcome, Program
from atroposlib.sandbox.contract import verdict
from atroposlib.utils.jsonl import BadRow, rows_of_file, usable_rows
from environments.code_server import (
    EXAMPLES,
    HIDDEN,
    MAX_HELD_OUT,
    CodeProblem,
    calls_of,
    held_out_problems,
    is_held_out,
    read_problem,
    training_problems,
)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_each_problem_is_whole_and_can_be_missed(seed: int) -> None:
    for problem in itertools.islice(training_problems(seed), 4):
        assert not is_held_out(problem.reference)
        head, _, body = problem.reference.partition("\n")
        assert head in problem.question
        assert "{" not in problem.question.partition("For example")[0], (
            "a placeholder that was not filled"
        )
        assert len(problem.hidden) == HIDDEN
        assert problem.question.count(f"{problem.function}(") == EXAMPLES + 1
        keys = [json.dumps(call.arguments) for call in problem.hidden]
        assert len(set(keys)) == HIDDEN
        values = [json.dumps(call.expected) for call in problem.hidden]
        assert max(values.count(value) for value in values) <= HIDDEN // 2 + 1, (
            "one constant would be nearly right"
        )
        names: dict[str, Any] = {}
        exec(problem.reference, names)
        for call in problem.hidden:
            assert names[problem.function](*call.arguments) == call.expected
            shown = f"{problem.function}({', '.join(map(repr, call.arguments))})"
            assert shown not in problem.question, "a hidden call that the text shows"
        assert not is_held_out(f"def other():\n{body}"), "the side depends on the name"


def test_the_held_out_list_is_the_same_in_every_process_and_distinct() -> None:
    problems = held_out_problems(MAX_HELD_OUT)
    assert held_out_problems(10) == problems[:10]
    bodies = {problem.reference.partition("\n")[2] for problem in problems}
    assert len(bodies) == MAX_HELD_OUT
    assert all(is_held_out(problem.reference) for problem in problems)
    trained = {
        problem.reference.partition("\n")[2]
        for problem in itertools.islice(training_problems(0), 1000)
    }
    assert len(trained) > 500
    assert not trained & bodies
    for bad in (0, MAX_HELD_OUT + 1):
        with pytest.raises(ValueError, match=f"n={bad}"):
            held_out_problems(bad)


def test_references_are_right_in_the_sandbox_and_others_are_not() -> None:
    problems = held_out_problems(40)

    async def run() -> list[Outcome]:
        box = LocalSandbox()
        await box.start()
        programs = [
            Program(problem.reference, problem.function, calls_of(problem)[0])
            for problem in problems
        ]
        # The next problem's solution, under this one's name.
        programs += [
            Program(
                other.reference.replace(f"def {other.function}(", f"def {problem.function}("),
                problem.function,
                calls_of(problem)[0],
            )
            for problem, other in itertools.pairwise(problems)
        ]
        outcomes = await asyncio.gather(*(box.run(program) for program in programs))
        await box.close()
        return outcomes

    outcomes = asyncio.run(run())
    judged = [
        verdict(o, calls_of(p)[1]).kind
        for o, p in zip(outcomes, [*problems, *problems[:-1]], strict=True)
    ]
    assert judged[:40] == ["right"] * 40
    assert "right" not in judged[40:]


GOOD = {"question": " q ", "function": "f", "tests": [{"args": [1], "expected": None}]}


def test_rows_that_are_no_problems_are_counted_and_named(tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ([1], "not a JSON object"),
        (GOOD | {"question": ""}, "'question': string should have at least 1"),
        (GOOD | {"function": "f()"}, "'function': not the name of a function"),
        (GOOD | {"tests": []}, "'tests': list should have at least 1"),
        (
            GOOD | {"tests": [{"args": [1], "expected": 1}, {"args": [2]}]},
            r"'tests\.1\.expected': field required",
        ),
        (GOOD | {"tests": [{"expected": 1}]}, r"'tests\.0\.args': field required"),
    ]
    for row, message in bad:
        with pytest.raises(BadRow, match=message):
            read_problem(row)
    path = tmp_path / "train.jsonl"
    path.write_text(
        "\n".join([json.dumps(GOOD), "", "{oops", *(json.dumps(row) for row, _ in bad)])
    )
    rows = usable_rows(rows_of_file(path), read_problem)
    assert rows.good == [CodeProblem("q", "f", read_problem(GOOD).hidden)]
    assert len(rows.faults) == len(bad) + 1
    assert rows.faults[0].startswith(f"{path}, line 3: not JSON")
