"""Requests that can never succeed end with one line before they are sent."""

import asyncio
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.inference.chat_template import require_chat_template
from atroposlib.inference.client import APIServerConfig, OpenAIServer, SGLangServer, VLLMServer
from atroposlib.inference.managed_server import ManagedServer
from tests.atroposlib.inference.template_shapes import STARTER, Sampler

CONFIG = APIServerConfig(base_url="http://127.0.0.1:9", model_name="m", health_check=False)


@pytest.mark.parametrize("kind", [VLLMServer, OpenAIServer])
@pytest.mark.parametrize("temperature", [2.01, 1e9, -0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("call", ["generate", "chat_completion", "completion"])
def test_a_temperature_that_no_server_takes(kind: Any, temperature: float, call: str) -> None:
    server = kind(CONFIG)
    with pytest.raises(UsageError, match="is outside what the inference server at"):
        asyncio.run(getattr(server, call)(prompt="a", messages=[], temperature=temperature))


def test_servers_without_a_limit() -> None:
    assert SGLangServer(CONFIG).highest_temperature is None


class OwnWay(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer that renders chats without a template."""

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return "a"


@pytest.mark.parametrize("template", [None, ""])
def test_a_tokenizer_without_a_chat_template(template: str | None) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(STARTER)
    require_chat_template(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(
        EnvironmentFailure, match="has no chat template, like a base model's"
    ) as caught:
        require_chat_template(tokenizer)
    assert "\n" not in str(caught.value)
    managed = ManagedServer(Sampler(tokenizer), tokenizer=tokenizer)
    with pytest.raises(EnvironmentFailure, match="has no chat template"):
        managed.render([{"role": "user", "content": "a"}])
    own_way = OwnWay.from_pretrained(STARTER)
    own_way.chat_template = template
    require_chat_template(own_way)
