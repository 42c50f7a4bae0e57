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
"""

import asyncio
import importlib
import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

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
from atroposlib.sandbox.verdict import Verdict, verdict
from atroposlib.type_definitions import Message
from atroposlib.utils.data_files import train_and_test
from environments.code_blocks import program_in
from environments.code_problems import (
    MAX_HELD_OUT,
    CodeProblem,
    calls_of,
    held_out_problems,
    read_problem,
    training_problems,
)
from environments.common import held_out_count, question_messages

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
            train, self.test = await asyncio.to_thread(self.load, path)
            random.Random(self.config.seed).shuffle(train)
            self.problems = itertools.cycle(train)

    def load(self, path: Path) -> tuple[list[CodeProblem], list[CodeProblem]]:
        """Return problems to train on and to evaluate with. Other rows are counted and left out.

        Raises:
            UsageError: a file cannot be read, or has no problem.
        """
        return train_and_test(path, read_problem, "problems", self.drops.add)

    async def get_next_item(self) -> CodeProblem:
        return next(self.problems)

    def messages(self, problem: CodeProblem) -> list[Message]:
        return question_messages(self.config.system_prompt, problem.question)

    async def grade(self, problem: CodeProblem, response: Response) -> Grade:
        """Run the answer's program.

        That it could not be run says nothing of the answer, and is no score.
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
