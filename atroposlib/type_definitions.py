"""Types that environments and the SDK share: chat messages, items, multi-step histories, evaluation
records.
"""

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionContentPartParam
else:  # the import takes 30 MiB, which each process that only reads groups would hold for nothing
    ChatCompletionContentPartParam = dict[str, Any]

Content = str | list[ChatCompletionContentPartParam]
"""The content of a message: plain text, or the parts of a multimodal message."""

Item = Any
"""An item as `get_next_item` returns and `collect_trajectories` takes it: any picklable value."""

number = int | float
UUID = str


class Message(TypedDict):
    """One message of a conversation, with an optional reward of its own (per-turn rewards)."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reward: NotRequired[float | None]


class AgentStep(TypedDict):
    """One step of one agent in a multi-agent episode."""

    step: int
    messages: list[Message]
    reward: float


AgentHistory = dict[str, list[AgentStep]]
"""Agent id -> its steps, in order."""


class Observation(TypedDict):
    """The game's raw state and its rendering for the prompt of an agent."""

    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict):
    """One move of a game."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


GameHistory = list[GameStep]


class EvaluationConfigGeneral(TypedDict):
    """The settings of an evaluation."""

    total_evaluation_time_seconds: str
    model_name: str | None
    generation_parameters: dict[str, Any]


class EvaluationResults(TypedDict):
    """Metric name -> value, over all tasks."""

    all: dict[str, float]


class EvaluationMetrics(TypedDict):
    """The content of `metrics.json`."""

    config_general: EvaluationConfigGeneral
    results: EvaluationResults


class EvaluationSample(TypedDict, total=False):
    """One line of an evaluation's samples file; every field may be missing."""

    messages: list[dict[str, str]] | None
    question: str | None
    gold_answer: str | None
    gold_parsed: str | None
    model_parsed: str | None
    score: int | None
    correct: bool | None
    finish_reason: str | None
    response_after_think: str | None
