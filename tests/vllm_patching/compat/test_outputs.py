"""A request that cannot be put into a message leaves nothing behind, by vLLM's own front end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_patching.compat.outputs import follow_outputs, forget_unsent
from vllm_patching.compat.requests import caller_errors
from vllm_patching.compat.versions import SUPPORTED, UnsupportedVllm


def front_end() -> Any:
    """An engine's client that encodes requests as vLLM's does, and sends them nowhere."""

    async def add_request_async(request: Any) -> None:
        MsgpackEncoder().encode(request)

    return SimpleNamespace(
        output_processor=OutputProcessor(None, log_stats=False),
        engine_core=SimpleNamespace(add_request_async=add_request_async),
    )


def add(engine: Any, parent: bool = False, **fields: Any) -> None:
    """Follow a request and send it, in the order of AsyncLLM."""
    request = EngineCoreRequest(
        request_id="one-1",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **fields),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="one",
    )
    of_both = ParentRequest(request) if parent else None
    if of_both is not None:
        request.request_id, request.sampling_params = of_both.get_child_info(0)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "one-1")
    engine.output_processor.add_request(request, None, of_both, 0, queue)
    asyncio.run(engine.engine_core.add_request_async(request))


@pytest.mark.parametrize("fields", [{}, {"n": 2, "parent": True}])
def test_a_request_that_cannot_be_sent_is_forgotten_and_the_caller_is_refused(
    fields: dict[str, Any],
) -> None:
    engine = front_end()
    forget_unsent(engine)
    with pytest.raises(caller_errors(), match="the engine cannot be sent this request: "):
        add(engine, bad_words=["\ud800"], **fields)
    processor = engine.output_processor
    assert not processor.request_states
    assert not processor.parent_requests
    assert not processor.external_req_ids
    add(engine)
    assert list(processor.request_states) == ["one-1"]


def test_a_missing_name_is_told_with_the_version_and_the_remedy() -> None:
    engine = front_end()
    del engine.engine_core.add_request_async
    with pytest.raises(UnsupportedVllm, match=rf"does not have .*add_request_async; .*{SUPPORTED}"):
        forget_unsent(engine)
    engine.output_processor = SimpleNamespace(add_request=None)
    with pytest.raises(UnsupportedVllm, match="process_outputs"):
        follow_outputs(engine, lambda name: None, lambda moment: None)
