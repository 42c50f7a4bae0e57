"""The generation server of TRL (`trl vllm-serve`): text in, token ids out, no logprobs."""

import time
import uuid
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from atroposlib.inference.messages import checked_messages
from atroposlib.inference.openai_client import OpenAIRoutes


class TrlVllmServer(OpenAIRoutes):
    """Prompts are rendered here, with `tokenizer`, because the server knows no chat."""

    tokenizer: Any = None
    """Renders messages and decodes completions; set by the environment."""

    async def probe(self) -> str | None:
        return await self._fault_of("/health/", good=range(200, 201))

    async def model(self) -> str:
        return self.config.model_name

    async def _texts(self, prompt: str, kwargs: dict[str, Any]) -> list[str]:
        if self.tokenizer is None:
            raise ValueError(
                "a TRL server answers token ids: set `server.tokenizer` to decode them"
            )
        body = {
            "prompts": [prompt],
            "n": kwargs.get("n", 1),
            "temperature": kwargs.get("temperature", 1.0),
            "top_p": kwargs.get("top_p", 1.0),
            "max_tokens": kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or 1024,
        }
        response = await self.http.post("/generate/", json=body)
        response.raise_for_status()
        return [
            self.tokenizer.decode(ids, skip_special_tokens=True)
            for ids in response.json()["completion_ids"]
        ]

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        messages = checked_messages(kwargs["messages"])
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        choices = [
            Choice(
                index=i,
                finish_reason="stop",
                message=ChatCompletionMessage(role="assistant", content=text),
            )
            for i, text in enumerate(await self._texts(prompt, kwargs))
        ]
        return ChatCompletion(
            id=str(uuid.uuid4()),
            choices=choices,
            created=int(time.time()),
            model=kwargs["model"],
            object="chat.completion",
        )

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        choices = [
            CompletionChoice(index=i, finish_reason="stop", text=text)
            for i, text in enumerate(await self._texts(kwargs["prompt"], kwargs))
        ]
        return Completion(
            id=str(uuid.uuid4()),
            choices=choices,
            created=int(time.time()),
            model=kwargs["model"],
            object="text_completion",
        )
