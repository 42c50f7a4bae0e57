"""SGLang's native `/generate`: token ids in, token ids and logprobs out."""

from typing import Any

from atroposlib.inference.client import APIServer as APIServer
from atroposlib.inference.client import APIServerConfig as APIServerConfig
from atroposlib.inference.client import ReasoningConfig as ReasoningConfig
from atroposlib.inference.generation import Generation
from atroposlib.inference.openai_client import resolve_openai_configs
from atroposlib.inference.sampling_record import sampling_of
from atroposlib.inference.vllm_client import MAX_TOKENS_NAMES, VLLMServer

__all__ = ["SGLangServer", "resolve_openai_configs"]


class SGLangServer(VLLMServer):
    """An SGLang server. It says nothing about weight versions."""

    key_variable = None
    highest_temperature = None
    tells_weights = False

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        prompt_tokens = self._prompt_tokens(kwargs)
        kwargs.pop("model", None)
        max_tokens = next((kwargs.pop(name) for name in MAX_TOKENS_NAMES if name in kwargs), None)
        room = await self._room_for(prompt_tokens, max_tokens)
        sampling = kwargs | {"max_new_tokens": room}
        answer = await self._post(
            {"input_ids": prompt_tokens, "sampling_params": sampling, "return_logprob": True}
        )
        completions: list[dict[str, Any]] = answer if isinstance(answer, list) else [answer]
        # Each entry of output_token_logprobs is (logprob, token id, text or None).
        rows = [completion["meta_info"]["output_token_logprobs"] for completion in completions]
        return Generation(
            prompt_tokens=prompt_tokens,
            output_tokens=[[int(token) for _, token, *_ in row] for row in rows],
            output_logprobs=[[float(logprob) for logprob, *_ in row] for row in rows],
            finish_reasons=[
                completion["meta_info"]["finish_reason"]["type"] for completion in completions
            ],
            texts=[completion.get("text", "") for completion in completions],
            # A server may have sampling parameters of its own for requests that name none.
            sampling=sampling_of({**kwargs, "max_tokens": room}, len(rows)),
        )

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("SGLangServer cannot give the logprobs of a prompt")
