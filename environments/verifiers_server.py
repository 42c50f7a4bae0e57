r"""Environments of the verifiers package, by the name of their module: their rollouts and rewards,
our tokens.

    python3 -m venv runs/verifiers && runs/verifiers/bin/pip install -e '.[verifiers]'
    runs/verifiers/bin/pip install YOUR-ENVIRONMENT
    runs/verifiers/bin/python environments/verifiers_server.py --env.environment YOUR-ENVIRONMENT

The package wants other releases than vLLM does, so it has a virtual environment of its own.
`load_environment` of the module is called with `--env.environment_args`; a path to a Python file
will do, too. A managed server in this process answers the package's OpenAI client, so tokens are
kept over turns and tools. The rubric scores each group as a whole. The package's evaluation set is
held out. To test with the package, name its interpreter in LOCKSTEP_VERIFIERS_PYTHON and run
tests/environments/test_verifiers_env.py and tests/e2e/test_trainings.py (which needs
`verifiers[rg]`).
"""

import asyncio
import contextlib
import contextvars
import copy
import importlib.util
import inspect
import logging
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.graded import Attempt, group_of
from atroposlib.errors import EnvironmentFailure, NoRoom, RolloutFailure, UsageError
from atroposlib.inference.managed_client import ManagedTransport, managed_client
from atroposlib.inference.managed_server import SequenceNode
from atroposlib.wire import PROMPT_MASK, ScoredDataGroup
from environments.common import NumberedItems

logger = logging.getLogger(__name__)

INSTALL = (
    "the verifiers package is not installed in this interpreter: "
    "python3 -m venv runs/verifiers && runs/verifiers/bin/pip install -e '.[verifiers]', "
    "and run this with runs/verifiers/bin/python"
)

reward_errors: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "reward_errors", default=None
)
"""Where the errors of reward functions go that the package turns into a reward of 0."""


class VerifiersConfig(BaseEnvConfig):
    """Settings of this environment."""

    environment: str = Field(
        default="",
        description="Name of an installed environment, or path of a file with `load_environment`",
    )
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of its `load_environment`"
    )
    solved_from: float = Field(
        default=1.0, description="A reward from here on counts as correct in evaluations"
    )
    eval_size: int = Field(
        default=100, ge=1, description="Rows per evaluation, the first of its evaluation set"
    )


@dataclass
class Rollout:
    """One rollout of theirs.

    Attributes:
        state: theirs.
        node: the sequence that holds it.
    """

    state: Any
    node: SequenceNode


class RewardErrors(logging.Handler):
    """Collect errors of reward functions, which the package only logs before it scores 0."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Error calling") and (errors := reward_errors.get()) is not None:
            errors.append(text)


class VerifiersEnv(NumberedItems):
    """An environment of the verifiers package."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    config: VerifiersConfig

    async def setup(self) -> None:
        if not self.config.environment:
            raise UsageError(
                "--env.environment: name an installed environment, or a file with "
                "`load_environment`"
            )
        # Not in a thread: the package puts handlers of signals, which only the main thread may.
        self.theirs = load(self.config.environment, self.config.environment_args)
        for name in ("verifiers", "verifiers.legacy"):
            logging.getLogger(name).addHandler(RewardErrors())
        self.held_out = self.theirs.get_eval_dataset(n=self.config.eval_size).to_list()
        try:
            rows = self.theirs.get_dataset().to_list()
        except ValueError:
            rows = []  # it has an evaluation set alone
        held_out_keys = {row_key(row) for row in self.held_out}
        self.rows = [row for row in rows if row_key(row) not in held_out_keys]
        if rows and not self.rows:
            logger.warning(
                "%s has rows for its evaluation only: it trains on the rows that measure it",
                self.config.environment,
            )
            self.rows = rows
        random.Random(self.config.seed).shuffle(self.rows)

    async def item_at(self, number: int) -> dict[str, Any]:
        if not self.rows:
            raise UsageError(
                f"{self.config.environment} has no training set: it can be evaluated only"
            )
        return self.rows[number % len(self.rows)]

    async def collect_group(self, item: dict[str, Any]) -> ScoredDataGroup:
        """`group_size` rollouts of one row, scored by their rubric together."""
        rollouts = await self.rollouts(
            item, self.config.group_size, {"temperature": self.temperature}
        )
        for rollout in rollouts:
            metrics = rollout.state.get("metrics") or {}
            numbers = {
                name: value for name, value in metrics.items() if isinstance(value, int | float)
            }
            self.note(
                {
                    **numbers,
                    "reward": rollout.state["reward"],
                    "turns": len(rollout.state["trajectory"]),
                }
            )
        scores = [float(rollout.state["reward"]) for rollout in rollouts]
        group = group_of([rollout.node for rollout in rollouts], scores)
        if self.config.include_messages:
            group["messages"] = [conversation(rollout.state) for rollout in rollouts]
        self.note_success(item, [score >= self.config.solved_from for score in group["scores"]])
        return group

    async def rollouts(
        self, row: dict[str, Any], count: int, fields: dict[str, Any]
    ) -> list[Rollout]:
        """Make `count` rollouts of a row, with their rewards in their states.

        Raises:
            RolloutFailure: one of them failed, or a reward function did: neither is a score.
        """
        results = await asyncio.gather(
            *(self.rollout(row, number, count, fields) for number in range(count))
        )
        states = [rollout.state for rollout in results]
        rubric = self.theirs.rubric
        errors: list[str] = []
        before = reward_errors.set(errors)
        try:
            limit = (
                [contextlib.nullcontext()]
                if "score_sem" in inspect.signature(rubric.score_group).parameters
                else []
            )
            await rubric.score_group(states, *limit)
        finally:
            reward_errors.reset(before)
            if hasattr(rubric, "cleanup"):
                for state in states:
                    await rubric.cleanup(state)
        if errors:
            raise RolloutFailure(f"{self.config.environment}: {errors[0]}")
        return list(results)

    async def rollout(
        self, row: dict[str, Any], number: int, count: int, fields: dict[str, Any]
    ) -> Rollout:
        """One rollout, unscored, whose requests go through a managed server of its own."""

        def request_fields(turn: int) -> dict[str, Any]:
            seed = self.sampling_seed(number + count * turn)
            return fields if seed is None else {**fields, "seed": seed}

        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            transport = ManagedTransport(managed, request_fields)
            client = self.client_for(managed_client(managed, transport))
            sampling = {
                **(self.theirs.sampling_args or {}),
                "n": 1,
                "max_tokens": self.config.max_token_length,
            }
            state = await self.theirs.rollout(copy.deepcopy(row), client, "policy", sampling)
            nodes = managed.get_state()["nodes"]
        if transport.failure is not None and not isinstance(transport.failure, NoRoom):
            raise transport.failure
        if state.get("error") is not None:
            error = state["error"]
            raise RolloutFailure(
                f"{self.config.environment}: {type(error).__name__}: {error.__cause__ or error}"
            )
        if not nodes:
            raise RolloutFailure(
                f"{self.config.environment}: the model was asked nothing, or its prompt is too long"
            )
        if len(nodes) > 1:
            self.say_once(
                "sequences",
                f"{self.config.environment} changes the history of a conversation, or holds "
                f"several at once: of each rollout "
                f"only the last of its {len(nodes)} sequences is trained on",
            )
        return Rollout(state, nodes[-1])

    def client_for(self, client: Any) -> Any:
        """The client as this release of the package wants it: OpenAI's own, or wrapped."""
        chat = getattr(self.theirs, "message_type", "chat") == "chat"
        try:
            from verifiers import clients
        except ImportError:  # before 0.1.10
            return client
        return (clients.OpenAIChatCompletionsClient if chat else clients.OpenAICompletionsClient)(
            client
        )

    def eval_problems(self) -> Sequence[dict[str, Any]]:
        return self.held_out

    async def attempt(
        self, problem: dict[str, Any], samples: int, temperature: float
    ) -> list[Attempt]:
        rollouts = await self.rollouts(
            problem, samples, {"temperature": temperature, "split": "eval"}
        )
        return [
            Attempt(
                {
                    "question": text_of(problem.get("prompt")),
                    "gold_answer": str(problem.get("answer", "")),
                    "correct": rollout.state["reward"] >= self.config.solved_from,
                    "score": float(rollout.state["reward"]),
                    "stop_condition": rollout.state.get("stop_condition"),
                    "response_tokens": sum(
                        token != PROMPT_MASK for token in rollout.node.masked_tokens
                    ),
                    "messages": conversation(rollout.state),
                },
                rollout.node.weights,
            )
            for rollout in rollouts
        ]


def load(name: str, arguments: dict[str, Any]) -> Any:
    """The environment, as the package loads it.

    Raises:
        EnvironmentFailure: the package is not installed, or its release has no such environments
            any more.
        UsageError: the environment is not installed, or refuses its arguments.
    """
    try:
        import verifiers
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(INSTALL) from error
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "this release")
        raise EnvironmentFailure(
            f"verifiers {version} has no load_environment: install a release from 0.1.9 to 0.3.1"
        )
    with handlers_of_signals_kept():
        try:
            if name.endswith(".py"):
                return module_at(Path(name)).load_environment(**arguments)
            return verifiers.load_environment(name, **arguments)
        except Exception as error:
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise UsageError(
                f"--env.environment {name} with {arguments}: {type(error).__name__}: {reason}"
            ) from error


@contextlib.contextmanager
def handlers_of_signals_kept() -> Iterator[None]:
    """Restore the handlers of signals, which environments of the package replace by their own.

    The package's handlers would end this process before it has deregistered.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def module_at(path: Path) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no Python file at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def row_key(row: dict[str, Any]) -> tuple[str, str]:
    return str(row.get("prompt")), str(row.get("answer"))


def as_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of theirs, which are tables, models or one text, as tables."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [
        message if isinstance(message, dict) else message.model_dump(exclude_none=True)
        for message in messages or []
    ]


def conversation(state: Any) -> list[dict[str, Any]]:
    return [*as_messages(state["prompt"]), *as_messages(state.get("completion"))]


def text_of(prompt: Any) -> str:
    """The last message's text."""
    messages = as_messages(prompt)
    return str(messages[-1].get("content", "")) if messages else ""


if __name__ == "__main__":
    VerifiersEnv.cli()
