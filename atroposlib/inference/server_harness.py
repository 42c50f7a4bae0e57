"""Answers from a table, for environments run with `--testing`: no server, no model."""

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.inference.generation import Generation
from atroposlib.inference.pool import InferenceCalls


class ServerHarness(InferenceCalls):
    """Gives back what was set for exactly the same messages or prompt; anything else is a KeyError
    that shows the request.
    """

    by_text = True
    """Managed servers send it prompts as text."""

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

    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        prompt = fields.get("prompt", "")
        keys = {
            "_chat_completion_wrapper": self.conv_to_dictkey(fields.get("messages", [])),
            "_completion_wrapper": f"prompt:{prompt}",
            "_generate_wrapper": f"tokens:{prompt}",
        }
        key = keys[method]
        if key not in self.responses:
            raise KeyError(f"no response was set for {key}")
        response = self.responses[key]
        return Generation(*response) if isinstance(response, tuple) else response
