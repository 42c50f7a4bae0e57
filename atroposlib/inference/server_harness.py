"""Answers from a table, for environments run with `--testing`: no server, no model."""

import json
import time
import uuid
from typing import Any, Literal, get_args

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


def _spread(value: Any, n: int, what: str) -> list[Any]:
    values = value if isinstance(value, list) else [value] * n
    if len(values) != n:
        raise ValueError(f"{len(values)} {what} for {n} completions")
    return values


def create_chat_completion(
    resp: str | list[str], n: int = 1, finish_reason: FinishReason | list[FinishReason] = "stop"
) -> ChatCompletion:
    """A chat completion with the given texts; one text or reason stands for all `n`."""
    n = len(resp) if isinstance(resp, list) else n
    reasons = _spread(finish_reason, n, "finish reasons")
    if unknown := set(reasons) - set(get_args(FinishReason)):
        raise ValueError(
            f"finish reason {sorted(unknown)[0]!r}: choose one of {', '.join(get_args(FinishReason))}"
        )
    choices = [
        Choice(
            index=i,
            finish_reason=reason,
            message=ChatCompletionMessage(role="assistant", content=text),
        )
        for i, (text, reason) in enumerate(zip(_spread(resp, n, "texts"), reasons, strict=True))
    ]
    return ChatCompletion(
        id=str(uuid.uuid4()),
        choices=choices,
        created=int(time.time()),
        model="test_model",
        object="chat.completion",
    )


def create_completion(
    resp: str | list[str], n: int = 1, finish_reason: FinishReason | list[FinishReason] = "stop"
) -> Completion:
    """A text completion with the given texts; one text or reason stands for all `n`."""
    n = len(resp) if isinstance(resp, list) else n
    reasons = _spread(finish_reason, n, "finish reasons")
    choices = [
        CompletionChoice(index=i, finish_reason=reason, text=text)
        for i, (text, reason) in enumerate(zip(_spread(resp, n, "texts"), reasons, strict=True))
    ]
    return Completion(
        id=str(uuid.uuid4()),
        choices=choices,
        created=int(time.time()),
        model="test_model",
        object="text_completion",
    )


class ServerHarness:
    """Gives back what was set for exactly the same messages or prompt; anything else is a KeyError
    that shows the request.
    """

    def __init__(self) -> None:
        self.responses: dict[str, Any] = {}

    def conv_to_dictkey(self, input_message: list[dict[str, Any]]) -> str:
        return json.dumps(input_message, sort_keys=True, default=str)

    async def update_weight(self, weight: float) -> None:
        """Nothing to share out."""

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        return metrics_dict or {}

    def set_desired_response(
        self, input_message: list[dict[str, Any]], desired_response: ChatCompletion
    ) -> None:
        self.responses[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Completion) -> None:
        self.responses[f"prompt:{input_message}"] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[str],
    ) -> None:
        self.responses[f"tokens:{prompt}"] = (
            prompt_tokens,
            output_tokens_list,
            output_logprobs_list,
            finish_reasons,
        )

    def _look_up(self, key: str) -> Any:
        if key not in self.responses:
            raise KeyError(f"no response was set for {key}")
        return self.responses[key]

    async def chat_completion(self, *args: Any, **kwargs: Any) -> ChatCompletion:
        return self._look_up(self.conv_to_dictkey(kwargs.get("messages") or args[0]))

    async def completion(self, *args: Any, **kwargs: Any) -> Completion:
        return self._look_up(f"prompt:{kwargs.get('prompt') or args[0]}")

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list, list, list, list]:
        return self._look_up(f"tokens:{kwargs.get('prompt', '')}")
