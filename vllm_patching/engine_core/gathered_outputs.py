"""Sampled tokens in few messages instead of many, for requests whose caller waits for the last of
them anyway.

After every step vLLM's engine core sends each request's new token to the front end in an object of
its own. Its logprob is in three arrays. With hundreds of requests that is most of the work of both
processes. A request for the final output alone (FINAL_ONLY) shows nothing of it before the end. So
the engine core keeps such a request's tokens for some steps. It sends them as one output, as if one
step had sampled them all (steps with accepted drafts look the same).

Kept outputs are sent before a pause begins, and while the engine is paused nothing is kept. So a
message that left the engine before the pause was answered has every token of the old weights. On
that version_spans rests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

STEPS_PER_MESSAGE = 64
"""From here on a message costs little beside what it carries; at 70 steps a second each request is
reported once a second."""
_STEPS_BETWEEN_CLEANINGS = 64
_ALWAYS_SENT = ("request_id", "new_token_ids", "new_logprobs")
"""Fields of vLLM's EngineCoreOutput that every sampled token has. An output in which another one is
set is not kept."""


@dataclass(slots=True)
class _Kept:
    """The kept outputs of a request: their content, not the objects. Their many small objects would
    drive others out of the processor's caches, and Python's collector of garbage would look at them
    again and again.

    Attributes:
        client: the front end that it is for.
        turn: of the steps of a message, the one after which it is sent. They are dealt out evenly.
            All requests go on together after a pause: if they were sent together, that step would
            take longer than the GPU's work that hides it.
        last: the last output.
        token_ids: of all outputs.
        ids, logprobs, ranks: bytes of the columns of vLLM's LogprobsLists.
    """

    client: int
    turn: int
    last: Any = None
    token_ids: list[int] = field(default_factory=list)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    ranks: bytearray = field(default_factory=bytearray)

    def fits(self, output: Any) -> bool:
        """Return whether an output's rows of logprobs have the form of the kept ones: a step's are
        as wide as its widest request wants them.
        """
        if self.last is None:
            return True
        rows, others = output.new_logprobs, self.last.new_logprobs
        if rows is None or others is None:
            return rows is others
        return bool(rows[0].shape[1] == others[0].shape[1])

    def add(self, output: Any) -> None:
        self.last = output
        self.token_ids += output.new_token_ids
        rows = output.new_logprobs
        if rows is not None:
            self.ids += rows[0].tobytes()
            self.logprobs += rows[1].tobytes()
            self.ranks += rows[2].tobytes()

    def whole(self) -> Any:
        """Return all as one output: all tokens and logprobs, and the other fields of the last one.

        Nothing is kept afterwards.
        """
        whole, rows = self.last, self.last.new_logprobs
        whole.new_token_ids = self.token_ids
        if rows is not None:
            columns = zip((self.ids, self.logprobs, self.ranks), rows[:3], strict=True)
            whole.new_logprobs = type(rows)(*(_column(kept, last) for kept, last in columns), None)
        self.last, self.token_ids = None, []
        self.ids, self.logprobs, self.ranks = bytearray(), bytearray(), bytearray()
        return whole


def _column(kept: bytearray, last: np.ndarray) -> np.ndarray:
    return np.frombuffer(kept, last.dtype).reshape(-1, *last.shape[1:])


class GatheredOutputs:
    """Keeps and joins outputs. Used on the engine core's main thread.

    Args:
        request_of: the scheduler's request by its id; None once it has ended.
        may_wait: whether no client sees this request before it ends.
        kind: vLLM's EngineCoreOutput.
    """

    def __init__(
        self, request_of: Callable[[str], Any], may_wait: Callable[[Any], bool], kind: type
    ) -> None:
        others = [name for name in kind.__struct_fields__ if name not in _ALWAYS_SENT]  # type: ignore[attr-defined]
        self._request_of, self._may_wait = request_of, may_wait
        self._others = attrgetter(*others)
        self._unset = self._others(kind("", []))
        self._kept: dict[str, _Kept] = {}
        self._steps, self._dealt = 0, 0

    def step(self, client: int, outputs: list[Any]) -> list[Any]:
        """Return the outputs to send now, joined with the kept ones.

        Args:
            client: the front end that the outputs are for.
        """
        sent = []
        self._steps += 1
        now = self._steps % STEPS_PER_MESSAGE
        for output in outputs:
            kept = self._kept.get(output.request_id)
            if kept is None:
                if not self._is_plain(output) or not self._waits(output.request_id):
                    sent.append(output)
                    continue
                kept = self._kept[output.request_id] = _Kept(client, self._dealt)
                self._dealt = (self._dealt + 1) % STEPS_PER_MESSAGE
            elif not kept.fits(output):
                sent.append(kept.whole())
            kept.add(output)
            if not self._is_plain(output):
                del self._kept[output.request_id]
                sent.append(kept.whole())
            elif kept.turn == now:
                sent.append(kept.whole())
        if self._steps % _STEPS_BETWEEN_CLEANINGS == 0:
            self._forget_those_gone()
        return sent

    def release(self) -> dict[int, list[Any]]:
        """Return all kept outputs, by front end."""
        released: dict[int, list[Any]] = {}
        for kept in self._kept.values():
            if kept.last is not None:
                released.setdefault(kept.client, []).append(kept.whole())
        return released

    def _is_plain(self, output: Any) -> bool:
        try:
            return bool(self._others(output) == self._unset)
        except ValueError:  # NumPy has no one answer to whether an array is None
            return False

    def _waits(self, request_id: str) -> bool:
        request = self._request_of(request_id)
        return request is not None and self._may_wait(request)

    def _forget_those_gone(self) -> None:
        """Requests that their callers called off end without an output."""
        for request_id in [
            request_id for request_id in self._kept if self._request_of(request_id) is None
        ]:
            del self._kept[request_id]


def waits_for_the_end(request: Any) -> bool:
    """Return whether a request's caller sees nothing of it before it ends, and only the engine core
    can end it.

    Stop strings are found by the front end, which so must see every token at once. An input that
    comes in parts has an end in each part.
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


def install(
    core_class: Any, process_class: Any, output_kind: type, outputs_kind: Callable[..., Any]
) -> None:
    """Have vLLM's engine core gather.

    Args:
        core_class: EngineCore, whose `step` and `step_with_batch_queue` return a step's outputs by
            front end.
        process_class: EngineCoreProc, which sends what is put into its `output_queue` and obeys
            `pause_scheduler`.
        output_kind, outputs_kind: EngineCoreOutput and EngineCoreOutputs.
    """
    if hasattr(core_class, "lockstep_gathered"):
        # plugins are loaded more than once, and a forked process has what its parent installed
        return

    def gathered(core: Any) -> GatheredOutputs:
        if core.lockstep_gathered is None:
            core.lockstep_gathered = GatheredOutputs(
                core.scheduler.requests.get, waits_for_the_end, output_kind
            )
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
                outputs = {
                    client: message for client, message in outputs.items() if not _is_empty(message)
                }
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
    """Return whether a step's message to a front end is empty."""
    rest: Iterable[Any] = (
        getattr(message, name, None)
        for name in ("scheduler_stats", "finished_requests", "utility_output")
    )
    return not message.outputs and not any(rest)
