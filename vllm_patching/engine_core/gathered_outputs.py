"""Sampled tokens in few messages instead of many, for requests whose caller waits for the last of them anyway.

After every step vLLM's engine core sends each request's new token to the front end in an object of its own, with its logprob in
three arrays. With hundreds of requests that is most of the work of both processes. Whoever asked for the final output alone
(FINAL_ONLY) sees nothing of it before the end, so the engine core keeps such a request's tokens for some steps and sends them
as one output, as if one step had sampled them all (steps with accepted drafts look the same).

What is kept is sent before a pause begins, and while the engine is paused nothing is kept: the front end then knows every token
of the old weights by a message that left the engine before the pause was answered, on which version_spans rests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from typing import Any

import numpy as np

TOKENS_PER_MESSAGE = 16
"""From here on a message costs little beside what it carries; at 70 steps a second each request is heard of four times."""
_STEPS_BETWEEN_CLEANINGS = 64
_ALWAYS_SENT = ("request_id", "new_token_ids", "new_logprobs")
"""Fields of vLLM's EngineCoreOutput that every sampled token has. An output in which another one is set is not kept."""


class GatheredOutputs:
    """Keeps and joins outputs. Used on the engine core's main thread.

    Args:
        request_of: the scheduler's request by its id; None once it has ended.
        may_wait: whether nobody looks at this request before it ends.
        kind: vLLM's EngineCoreOutput.
    """

    def __init__(self, request_of: Callable[[str], Any], may_wait: Callable[[Any], bool], kind: type) -> None:
        others = [name for name in kind.__struct_fields__ if name not in _ALWAYS_SENT]  # type: ignore[attr-defined]
        self._request_of, self._may_wait = request_of, may_wait
        self._others = attrgetter(*others)
        self._unset = self._others(kind("", []))
        self._kept: dict[str, list[Any]] = {}
        self._clients: dict[str, int] = {}
        self._steps = 0

    def step(self, client: int, outputs: list[Any]) -> list[Any]:
        """What of a step's outputs is sent now, joined with what was kept before.

        Args:
            client: the front end that the outputs are for.
        """
        sent = []
        for output in outputs:
            request_id = output.request_id
            kept = self._kept.get(request_id)
            if self._is_plain(output) and (kept is not None or self._waits(request_id)):
                if kept is None:
                    self._kept[request_id], self._clients[request_id] = [output], client
                    continue
                kept.append(output)
                if len(kept) < TOKENS_PER_MESSAGE:
                    continue
                output = None
            sent.append(self._taken(request_id, output))
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEANINGS == 0:
            self._forget_those_gone()
        return sent

    def release(self) -> dict[int, list[Any]]:
        """All that is kept, by the front end that it is for."""
        released: dict[int, list[Any]] = {}
        for request_id in list(self._kept):
            released.setdefault(self._clients[request_id], []).append(self._taken(request_id, None))
        return released

    def _is_plain(self, output: Any) -> bool:
        return all(map(is_, self._others(output), self._unset))

    def _waits(self, request_id: str) -> bool:
        request = self._request_of(request_id)
        return request is not None and self._may_wait(request)

    def _taken(self, request_id: str, last: Any) -> Any:
        """What was kept of a request, and `last`, as one output."""
        kept = self._kept.get(request_id, [])
        whole = joined(kept if last is None else [*kept, last])  # before anything is forgotten
        self._kept.pop(request_id, None)
        self._clients.pop(request_id, None)
        return whole

    def _forget_those_gone(self) -> None:
        """Requests that their callers called off end without an output."""
        for request_id in [request_id for request_id in self._kept if self._request_of(request_id) is None]:
            del self._kept[request_id], self._clients[request_id]


def joined(outputs: list[Any]) -> Any:
    """Outputs of one request that follow each other, as one: all tokens and logprobs, and whatever else the last one says."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if logprobs:
        # A step's rows are as wide as its widest request wants them, no narrower than this one does, and what this one asked
        # for comes first in each.
        width = min(rows[0].shape[1] for rows in logprobs)
        ids, values = (np.concatenate([rows[column][:, :width] for rows in logprobs]) for column in (0, 1))
        ranks = np.concatenate([rows[2] for rows in logprobs])
        last.new_logprobs = type(logprobs[0])(ids, values, ranks, None)
    return last


def waits_for_the_end(request: Any) -> bool:
    """Whether a request's caller sees nothing of it before it ends, and nothing but the engine core can end it.

    Stop strings are found by the front end, which so must see every token at once; and of an input that comes in parts each
    part has an end.
    """
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling_params
    if sampling is None or sampling.stop or getattr(request, "resumable", False):
        return False
    if -1 in (getattr(sampling, "num_logprobs", None), getattr(sampling, "logprobs", None)):
        return False  # all of the vocabulary's, in rows of another shape
    if getattr(sampling, "logprob_token_ids", None):
        return False
    return bool(sampling.output_kind is RequestOutputKind.FINAL_ONLY)


def install(core_class: Any, process_class: Any, output_kind: type, outputs_kind: Callable[..., Any]) -> None:
    """Have vLLM's engine core gather.

    Args:
        core_class: EngineCore, whose `step` and `step_with_batch_queue` return a step's outputs by front end.
        process_class: EngineCoreProc, which sends what is put into its `output_queue` and obeys `pause_scheduler`.
        output_kind, outputs_kind: EngineCoreOutput and EngineCoreOutputs.
    """
    if hasattr(core_class, "lockstep_gathered"):
        return  # plugins are loaded more than once, and a forked process has what its parent installed

    def gathered(core: Any) -> GatheredOutputs:
        if core.lockstep_gathered is None:
            core.lockstep_gathered = GatheredOutputs(core.scheduler.requests.get, waits_for_the_end, output_kind)
        kept: GatheredOutputs = core.lockstep_gathered
        return kept

    def send_kept(core: Any) -> None:
        for client, outputs in gathered(core).release().items():
            core.output_queue.put_nowait((client, outputs_kind(outputs=outputs)))

    def gathering(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step_and_gather(core: Any) -> Any:
            outputs, executed = step(core)
            if outputs and hasattr(core, "output_queue") and not core.is_scheduler_paused():
                for client, message in outputs.items():
                    message.outputs = gathered(core).step(client, message.outputs)
                outputs = {client: message for client, message in outputs.items() if not _is_empty(message)}
            return outputs, executed

        return step_and_gather

    pause = process_class.pause_scheduler

    def send_and_pause(core: Any, *args: Any, **kwargs: Any) -> Any:
        send_kept(core)
        return pause(core, *args, **kwargs)

    core_class.lockstep_gathered = None
    for name in ("step", "step_with_batch_queue"):
        setattr(core_class, name, gathering(getattr(core_class, name)))
    process_class.pause_scheduler = send_and_pause


def _is_empty(message: Any) -> bool:
    """Whether there is nothing in a step's message to a front end that anybody would miss."""
    rest: Iterable[Any] = (getattr(message, name, None) for name in ("scheduler_stats", "finished_requests", "utility_output"))
    return not message.outputs and not any(rest)
