"""The engine's outputs, on their way through vLLM's front end."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

from vllm_patching.compat.requests import caller_errors
from vllm_patching.compat.versions import seam


def follow_outputs(
    engine: Any, known: Callable[[str], None], before: Callable[[float], None]
) -> None:
    """Follow what the engine's front end does.

    Args:
        known: called with the id (the one its caller chose) of each request that it has begun to
            follow.
        before: called before outputs are handed to their requests, with the moment at which they
            left the engine (time.monotonic, seconds).
    """
    processor = engine.output_processor
    add, process = seam(processor, "add_request"), seam(processor, "process_outputs")

    def add_and_tell(request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = add(request, *args, **kwargs)
        known(getattr(request, "external_req_id", None) or request.request_id)
        return answer

    def tell_and_process(
        outputs: Any, moment: float | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if moment is not None:
            before(moment)
        return process(outputs, moment, *args, **kwargs)

    processor.add_request, processor.process_outputs = add_and_tell, tell_and_process


def forget_unsent(engine: Any) -> None:
    """Have the front end forget a request that could not be sent to the engine, and refuse it.

    vLLM follows a request before it encodes it. A field with half a surrogate pair would leave the
    request among the running ones for ever.
    """
    client, processor = engine.engine_core, engine.output_processor
    add, abort = seam(client, "add_request_async"), seam(processor, "abort_requests")
    refusal = caller_errors()[-1]

    async def add_or_forget(request: Any) -> None:
        try:
            await add(request)
        except Exception as error:
            state = processor.request_states.get(request.request_id)
            parent = getattr(state, "parent_req", None)
            abort([(parent or request).request_id], internal=True)
            if isinstance(error, ValueError | OverflowError | TypeError):
                raise refusal(
                    f"the engine cannot be sent this request: {' '.join(str(error).split())}"
                ) from error
            raise

    client.add_request_async = add_or_forget


class HeldOutputs:
    """Makes the engine's front end wait, when asked, before it hands the next outputs to their
    requests.
    """

    def __init__(self, engine: Any) -> None:
        """Call from within the event loop of `engine`."""
        client = engine.engine_core
        fetch = seam(client, "get_output_async")
        self._free = asyncio.Event()
        self._free.set()
        self._timer: asyncio.TimerHandle | None = None

        async def fetch_and_wait() -> Any:
            outputs = await fetch()
            await self._free.wait()
            return outputs

        client.get_output_async = fetch_and_wait

    def hold(self, seconds: float) -> None:
        """Hand nothing out until `release`, or for that long."""
        self.release()
        self._free.clear()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._free.set)

    def release(self) -> None:
        """Hand out what has come in the meantime, and whatever comes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free.set()


def output_token_counts(engine: Any) -> dict[str, int]:
    """Return the number of tokens that each running request has got so far, by the request id that
    its caller chose.
    """
    counts = {}
    for state in engine.output_processor.request_states.values():
        request_id = getattr(state, "external_req_id", None) or state.request_id
        if state.detokenizer is not None:
            counts[request_id] = state.detokenizer.num_output_tokens()
    return counts


def has_requests(engine: Any) -> bool:
    """Return whether the engine's front end follows any request."""
    return bool(engine.output_processor.request_states)


def take_logprobs_together() -> None:
    """Have vLLM's front end put the logprobs of a request's new tokens into its flat lists at once.
    It does so if the request wants neither alternatives nor text. It goes through them one by one
    otherwise.
    """
    processor = importlib.import_module("vllm.v1.engine.logprobs").LogprobsProcessor
    flat_kind = importlib.import_module("vllm.logprobs").FlatLogprobs
    one_by_one = seam(processor, "_update_sample_logprobs")

    def together(self: Any, rows: Any) -> None:
        flat = self.logprobs
        if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(flat, flat_kind):
            one_by_one(self, rows)
            return
        token_ids, logprobs, ranks = rows[:3]
        sampled, first = logprobs[:, 0].tolist(), len(flat.logprobs)
        flat.start_indices.extend(range(first, first + len(sampled)))
        flat.end_indices.extend(range(first + 1, first + 1 + len(sampled)))
        flat.token_ids.extend(token_ids[:, 0].tolist())
        flat.logprobs.extend(sampled)
        flat.ranks.extend(ranks.tolist())
        flat.decoded_tokens.extend([None] * len(sampled))
        self.cumulative_logprob += sum(sampled)

    processor._update_sample_logprobs = together
