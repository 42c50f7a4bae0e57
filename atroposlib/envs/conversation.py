"""A conversation between a model, its tools and an environment, as the environment sees it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from atroposlib.inference.responses import Call, known_calls, read_reasoning
from atroposlib.wire import plain_score

Ending = Literal["done", "max_turns", "max_tokens", "answer_cut"]


@dataclass
class Turn:
    """One answer of the model and what came of it.

    Attributes:
        text: what it wrote, without special tokens.
        num_tokens: sampled tokens, the end token included.
        finished: it ended by itself rather than by a limit.
        opened: the tags that its prompt opened, such as `<think>`; see `atroposlib.inference.responses`.
        calls: of tools, in their order, with their answers.
        reward: that `step` gave for it.
        spans: first, and one past the last character of each call. Tags inside of a call are text.
    """

    text: str
    num_tokens: int
    finished: bool
    calls: list[Call] = field(default_factory=list)
    reward: float = 0.0
    opened: str = ""
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def answer(self) -> str:
        """The text outside of the reasoning; empty if the reasoning never ends."""
        return read_reasoning(self.text, self.opened, known_calls(self.spans)).answer


@dataclass
class Conversation:
    """A conversation under way. `reset` makes it, tools and `step` get it, `grade` sees its end.

    Attributes:
        messages: all so far, as the chat template gets them.
        state: anything of the environment's own.
        item: what it is about.
        turns: the model's answers so far.
        ended: None while it goes on; "done"; or the limit that ended it: "max_turns", "max_tokens"
            of the whole conversation, "answer_cut" by the limit of one answer.
        transcript: all messages, with the calls in an answer and with what went wrong, for people
            to read.
    """

    messages: list[dict[str, Any]]
    state: Any = None
    item: Any = None
    turns: list[Turn] = field(default_factory=list)
    ended: Ending | None = None
    transcript: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The last answer with its reasoning; empty before the first."""
        return self.turns[-1].text if self.turns else ""

    @property
    def answer(self) -> str:
        """The last answer without its reasoning, which is what a grader looks at; empty before the
        first.
        """
        return self.turns[-1].answer if self.turns else ""

    @property
    def truncated(self) -> bool:
        """Return whether a limit ended it."""
        return self.ended not in (None, "done")

    @property
    def reward(self) -> float:
        """The sum of its turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def calls(self) -> list[Call]:
        """The calls of all turns."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def tool_use(self) -> bool:
        """Return whether at least one call got what its tool answers."""
        return any(call.problem in (None, "cut") for call in self.calls)

    @property
    def question(self) -> Any:
        """Return the first request to the model: the last message before its first answer."""
        roles = [message.get("role") for message in self.messages]
        first = roles.index("assistant") if "assistant" in roles[1:] else len(roles)
        return self.messages[max(first - 1, 0)].get("content")

    def say(self, message: Mapping[str, Any], **about: Any) -> None:
        """Add a message; `about` is for the transcript only."""
        self.messages.append(dict(message))
        self.transcript.append({**message, **about})


@dataclass(frozen=True)
class Step:
    """The consequences of an answer of the model.

    Attributes:
        messages: what comes next. The answers of tools stand before them and need not be repeated.
        reward: of the turn. A number of any type becomes a float.
        done: the conversation is over.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", plain_score(self.reward))


def as_openai(call: Call) -> dict[str, Any]:
    """A call as it stands in a message of OpenAI's."""
    return {
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
    }
