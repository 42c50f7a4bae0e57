"""Tools that a model may call: typed functions, and what becomes of a call that goes wrong.

A function's signature and docstring describe it to the model, and its arguments are checked against
them:

def look_up(word: str, most: int = 3) -> list[str]:
    '''Find words in the dictionary.

    Args:
        word: how it begins.
        most: how many to give.
    '''

If anything goes wrong with a call, the model gets one short line as the tool's answer, and the call
records which problem it was.
"""

import asyncio
import contextvars
import inspect
import json
import logging
import re
import threading
import typing
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.responses import Call, Problem
from atroposlib.wire import as_plain

logger = logging.getLogger(__name__)

MAX_ERROR = 300
"""Characters of an error that the model gets."""
MAX_HANGING = 64
"""Threads of synchronous tools that did not come back in time, before the process ends: nothing can
end them."""

REMEDY: Mapping[str, str] = {
    "unreadable": "show it the format, or train it from a model that knows it",
    "unknown_tool": "name the tools in its prompt",
    "wrong_arguments": "describe its arguments in the tool's docstring",
    "too_many": "see --env.max_tool_calls",
    "raised": "mend the tool; where the rollout is not to count, raise RolloutFailure in it",
    "timeout": "have it answer sooner, or raise --env.tool_timeout",
    "not_text": "have it return text, or something that JSON can hold",
    "cut": "have it return less, or raise --env.max_tool_output",
}
Outcome = tuple[str, BaseException | None]
"""Text of a tool's result, and the exception that it raised, if any."""
ENDED = "ended_rollout"
"""Counter of calls whose tool ended the rollout. They are not among these problems, since no answer
follows."""


class Tool:
    """A function with its description for the model.

    Args:
        function: typed, with a docstring; it may be a coroutine function.
        context: parameters of this type are not the model's: they get the conversation that calls.

    Attributes:
        schema: as in a chat request: `{"type": "function", "function": {name, description,
            parameters}}`.

    Raises:
        UsageError: a parameter without a type, no docstring, or a type that JSON cannot describe.
    """

    def __init__(self, function: Callable[..., Any], context: type):
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.is_async = inspect.iscoroutinefunction(function)
        documented = inspect.cleandoc(function.__doc__ or "")
        if not documented:
            raise UsageError(
                f"tool {self.name!r} has no docstring: the model reads there what it does"
            )
        description, arguments = described(documented)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise UsageError(
                f"tool {self.name!r}: {error}; name types of the module, not of a function"
            ) from error
        self._context_parameters: list[str] = []
        self._parameters: list[str] = []
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if inspect.isclass(hints.get(name)) and issubclass(hints[name], context):
                self._context_parameters.append(name)
                continue
            if name not in hints or parameter.kind not in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                raise UsageError(
                    f"tool {self.name!r}: parameter {name!r} needs a type, and a name that can be passed"
                )
            default = parameter.default
            if default is parameter.empty:
                default = ...
            # By an alias, so that a parameter may be called what pydantic's own attributes are.
            about = Field(default, alias=name, description=arguments.get(name))
            fields[f"argument_{len(self._parameters)}"] = (hints[name], about)
            self._parameters.append(name)
        try:
            self._arguments: type[BaseModel] = create_model(
                self.name, __config__=ConfigDict(extra="forbid"), **fields
            )
            parameters = self._arguments.model_json_schema()
        except Exception as error:  # pydantic has many for a type that it cannot take
            raise UsageError(
                f"tool {self.name!r}: {type(error).__name__}: {error}".splitlines()[0]
            ) from error
        about_it = {
            "name": self.name,
            "description": description,
            "parameters": without_titles(parameters),
        }
        self.schema: dict[str, Any] = {"type": "function", "function": about_it}

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Checked and turned into the parameters' types.

        Raises:
            ValueError: the first few that are wrong, in one line.
        """
        try:
            read = self._arguments.model_validate(arguments)
        except ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}"
                for e in error.errors(include_url=False)[:3]
            ]
            raise ValueError("; ".join(wrong)) from None
        return {
            name: getattr(read, f"argument_{index}") for index, name in enumerate(self._parameters)
        }

    def bound(self, arguments: Mapping[str, Any], context: Any) -> Callable[[], Any]:
        """The call itself."""
        return lambda: self.function(
            **arguments, **dict.fromkeys(self._context_parameters, context)
        )


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """(what it does, parameter -> what it is) of a docstring with an `Args:` section."""
    before, _, section = docstring.partition("\nArgs:\n")
    arguments: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        if argument := re.match(r" {1,4}(\w+)(?: \([^)]*\))?: *(.*)", line):
            name = argument[1]
            arguments[name] = argument[2]
        elif name and line.strip():
            arguments[name] += f" {line.strip()}"
    return re.split(r"\n(?:Returns|Raises|Yields):", before)[0].strip(), arguments


def without_titles(schema: Any) -> Any:
    """Return a JSON schema without the titles that pydantic makes of names: they waste tokens."""
    if isinstance(schema, list):
        return [without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: part for key, part in schema.items() if not (key == "title" and isinstance(part, str))
    }
    return {key: without_titles(part) for key, part in kept.items()}


class Toolbox:
    """The tools of an environment, and a count of what went wrong.

    Args:
        functions: see `Tool`.
        context: the type of what tools are given of the conversation.
        seconds: longest time of a call.
        most_characters: of an answer.

    Raises:
        UsageError: two tools of one name, or one that cannot be one.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        context: type,
        seconds: float,
        most_characters: int,
    ):
        self.tools: dict[str, Tool] = {}
        for tool in (Tool(function, context) for function in functions):
            if tool.name in self.tools:
                raise UsageError(f"two tools are called {tool.name!r}: rename one")
            self.tools[tool.name] = tool
        self.seconds, self.most_characters = seconds, most_characters
        self.problems: Counter[str] = Counter()
        self._said: set[tuple[str, str]] = set()
        self._hanging = 0

    async def answer(self, call: Call, context: Any) -> None:
        """Run a call and fill in its answer, and its problem if there was one.

        Raises:
            RolloutFailure, EnvironmentFailure: the tool raised it: the rollout is not to count.
        """
        error: BaseException | None = None
        if call.problem is None:
            error = await self._run(call, context)
        call.answer = self._encodable(call.answer)
        if call.problem is not None:
            self._note(call, error)

    async def _run(self, call: Call, context: Any) -> BaseException | None:
        """Run a call's tool, and return the exception that it raised, if any."""
        tool = self.tools.get(call.name)
        if tool is None:
            self._refuse(
                call,
                "unknown_tool",
                f"there is no tool {call.name[:50]!r}, but {', '.join(self.tools) or 'none'}",
            )
            return None
        try:
            arguments = tool.read_arguments(call.arguments or {})
        except (ValueError, RecursionError) as wrong:
            self._refuse(call, "wrong_arguments", str(wrong))
            return None
        run = self._in_thread
        if tool.is_async:
            run = self._in_loop
        outcome = await self._within_time(run(tool, tool.bound(arguments, context)))
        if outcome is None:
            self._refuse(call, "timeout", f"no answer within {self.seconds:g} seconds")
            return None
        value, error = outcome
        if isinstance(error, RolloutFailure):
            self._note_end(tool, error)
        if isinstance(error, RolloutFailure | EnvironmentFailure):
            raise error
        if isinstance(error, NotText):
            self._refuse(call, "not_text", str(error))
        elif error is not None:
            self._refuse(call, "raised", f"{type(error).__name__}: {error}")
        elif len(value) > self.most_characters:
            call.problem = "cut"
            call.answer = f"{value[: self.most_characters]}\n[cut: the first {self.most_characters} of {len(value)} characters]"
        else:
            call.answer = value
        return error

    async def _within_time(self, call: Coroutine[Any, Any, Outcome]) -> Outcome | None:
        """Return the outcome of a call; None if there is none within `seconds`."""
        task = asyncio.create_task(call)
        try:
            await asyncio.wait({task}, timeout=self.seconds)
            if task.cancelled():
                return "", RuntimeError("the tool cancelled itself")
            if not task.done():
                return None
            return task.result()
        finally:
            # not waited for: code that swallows its cancellation must not hold up the conversation
            task.cancel()

    async def _in_loop(self, tool: Tool, function: Callable[[], Any]) -> Outcome:
        try:
            return as_text(await function()), None
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a tool raises is its answer)
            return "", error

    async def _in_thread(self, tool: Tool, function: Callable[[], Any]) -> Outcome:
        """In a daemon thread of its own: one that hangs neither takes a place in a pool nor keeps
        the process from ending.
        """
        if self._hanging >= MAX_HANGING:
            raise EnvironmentFailure(
                f"{self._hanging} calls of tools hang in threads that nothing can end, and now "
                f"{tool.name!r} is called. Give what it waits for a deadline, or make it async"
            )
        loop, inherited = asyncio.get_running_loop(), contextvars.copy_context()
        finished: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if finished.done():
                self._hanging -= 1
            else:
                finished.set_result(outcome)

        def work() -> None:
            try:
                outcome: Outcome = (inherited.run(lambda: as_text(function())), None)
            except BaseException as error:  # noqa: BLE001 (whatever a tool raises is its answer)
                outcome = "", error
            with suppress(RuntimeError):  # the loop has ended, so no caller waits
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=work, name=f"tool {tool.name}", daemon=True).start()
        try:
            return await finished
        finally:
            self._hanging += finished.cancelled()

    @staticmethod
    def _refuse(call: Call, problem: Problem, why: str) -> None:
        call.problem, call.answer = problem, f"error: {' '.join(why.split())[:MAX_ERROR]}"

    @staticmethod
    def _encodable(text: str) -> str:
        """Return text that a tokenizer can encode: without lone surrogates."""
        return text.encode("utf-8", errors="replace").decode("utf-8")

    def _note(self, call: Call, error: BaseException | None) -> None:
        assert call.problem is not None
        self.problems[call.problem] += 1
        whose = call.name if call.name in self.tools else ""
        if (call.problem, whose) in self._said:
            return
        self._said.add((call.problem, whose))
        logger.warning(
            "a tool call went wrong (%s), the model gets %r: %s. Others like it are counted as "
            "train/tool_problems_%s, and "
            "not logged",
            f"{call.problem} of {call.name:.50}" if call.name else call.problem,
            call.answer[-MAX_ERROR:],
            REMEDY[call.problem],
            call.problem,
            exc_info=error if isinstance(error, Exception) else None,
        )

    def _note_end(self, tool: Tool, error: RolloutFailure) -> None:
        self.problems[ENDED] += 1
        if (ENDED, tool.name) in self._said:
            return
        self._said.add((ENDED, tool.name))
        logger.warning(
            "a call of %s ended its rollout, which gets no score: %s: %s; mend what the tool needs "
            "(a sandbox: memory, "
            "processes). Others like it are counted as train/tool_problems_%s, and not logged here",
            tool.name, type(error).__name__, error, ENDED,
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """`train/tool_problems_<kind>` -> count since the start of the process."""
        return {
            f"train/tool_problems_{kind}": float(count)
            for kind, count in sorted(self.problems.items())
        }


class NotText(Exception):
    """A tool's result is neither text nor JSON."""


def as_text(value: Any) -> str:
    """A tool's result for the model: text as it is, anything else as JSON.

    Raises:
        NotText: JSON cannot hold it.
    """
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=as_plain)
    except Exception as error:  # of the value's own methods, too
        raise NotText(
            f"the result is a {type(value).__name__}, which is neither text nor JSON"
        ) from error
