"""gathered_outputs.py: every token arrives once, in order and with its logprob, and nothing of old
weights after a pause.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.engine_core import gathered_outputs
from vllm_patching.engine_core.gathered_outputs import STEPS_PER_MESSAGE, GatheredOutputs


class Logprobs(NamedTuple):
    """vLLM's LogprobsLists."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    cumulative: list[int] | None = None


class Output(msgspec.Struct):
    """vLLM's EngineCoreOutput, as far as it matters."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None = None
    finish_reason: str | None = None
    events: list[str] | None = None
    num_nans_in_logits: int = 0
    routed_experts: np.ndarray | None = None


class Outputs(msgspec.Struct):
    """vLLM's EngineCoreOutputs."""

    outputs: list[Output] = []
    scheduler_stats: Any = None
    finished_requests: set[str] | None = None


def sampled(
    request_id: str, tokens: Sequence[int], finish: str | None = None, width: int = 1, **more: Any
) -> Output:
    """
    Args:
        width: of the rows of logprobs: what the widest request of the step has asked for, and one.
    """
    ids = np.array(tokens, dtype=np.int64).reshape(-1, 1) + 1000 * np.arange(width)
    return Output(
        request_id, list(tokens), Logprobs(ids, -ids / 8.0, ids[:, 0] + 1), finish, **more
    )


class Requests:
    """A scheduler's requests, by id: whether each is of a caller who waits for the end."""

    def __init__(self) -> None:
        self.running: dict[str, bool] = {}
        self.asked = lambda request_id: (
            SimpleNamespace(waits=self.running[request_id]) if request_id in self.running else None
        )

    def gathering(self) -> GatheredOutputs:
        return GatheredOutputs(self.asked, lambda request: request.waits, Output)


STEP = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.integers(1, 3),
        st.sampled_from(["", "", "", "", "event", "finish", "abort"]),
        st.sampled_from([1, 1, 1, 2, 21]),
    ),
    max_size=4,
    unique_by=lambda entry: entry[0],
)


class Arrivals:
    """The tokens that arrived, by request, and the requests that ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def take(self, outputs: list[Output]) -> None:
        """Add outputs; the figures of each token are made of its number."""
        for output in outputs:
            assert output.request_id not in self.ended, "something came after the end"
            logprobs, tokens = output.new_logprobs, output.new_token_ids
            assert logprobs is not None
            assert logprobs.token_ids[:, 0].tolist() == tokens
            assert logprobs.logprobs[:, 0].tolist() == [-token / 8.0 for token in tokens]
            assert logprobs.ranks.tolist() == [token + 1 for token in tokens]
            self.tokens.setdefault(output.request_id, []).extend(tokens)
            if output.finish_reason is not None:
                self.ended.add(output.request_id)


@given(
    st.lists(STEP | st.just("pause"), max_size=120),
    st.fixed_dictionaries({name: st.booleans() for name in "abcd"}),
)
def test_every_token_arrives_once_and_in_order(steps: list[Any], waits: dict[str, bool]) -> None:
    requests = Requests()
    gathering = requests.gathering()
    sent: dict[str, list[int]] = {}
    arrivals = Arrivals()
    arrived, ended, arrive = arrivals.tokens, arrivals.ended, arrivals.take
    life = dict.fromkeys("abcd", 0)
    token = 0

    for step in steps:
        if step == "pause":
            for client, outputs in gathering.release().items():
                assert client == 3
                arrive(outputs)
            assert {name: arrived.get(name, []) for name in requests.running} == {
                name: sent.get(name, []) for name in requests.running
            }, "the front end does not know all tokens when a pause begins"
            continue
        outputs = []
        for letter, count, what, width in step:
            name = f"{letter}{life[letter]}"
            requests.running[name] = waits[letter]
            if what == "abort":
                del requests.running[name]
                life[letter] += 1
                continue
            tokens = list(range(token, token + count))
            token += count
            sent.setdefault(name, []).extend(tokens)
            finish = "stop" if what == "finish" else None
            outputs.append(
                sampled(
                    name, tokens, finish, width, events=["preempted"] if what == "event" else None
                )
            )
            if finish:
                del requests.running[name]
                life[letter] += 1
        by_name = {output.request_id: output for output in outputs}
        now = gathering.step(3, outputs)
        arrive(now)
        for name, output in by_name.items():
            if not waits[name[0]] or output.finish_reason or output.events:
                assert arrived[name] == sent[name], "kept although somebody looks at it now"
            assert len(sent[name]) - len(arrived.get(name, [])) < 3 * STEPS_PER_MESSAGE
    for name in ended:
        assert arrived[name] == sent[name]


def test_a_request_is_heard_of_after_so_many_steps() -> None:
    requests = Requests()
    requests.running["a"] = True
    gathering = requests.gathering()
    steps = range(2 * STEPS_PER_MESSAGE)
    lengths = [
        [len(output.new_token_ids) for output in gathering.step(0, [sampled("a", [7])])]
        for _ in steps
    ]
    assert lengths == ([[]] * (STEPS_PER_MESSAGE - 1) + [[STEPS_PER_MESSAGE]]) * 2


def test_requests_that_go_on_together_take_turns() -> None:
    requests = Requests()
    requests.running = {f"r{number}": True for number in range(2 * STEPS_PER_MESSAGE)}
    gathering = requests.gathering()
    for _ in range(3):
        sent = [
            len(gathering.step(0, [sampled(name, [1]) for name in requests.running]))
            for _ in range(STEPS_PER_MESSAGE)
        ]
        assert sent == [2] * STEPS_PER_MESSAGE
        gathering.release()


def test_what_holds_an_array_is_sent_at_once() -> None:
    requests = Requests()
    requests.running["a"] = True
    gathering = requests.gathering()
    gathering.step(0, [sampled("a", [1])])
    sent = gathering.step(0, [sampled("a", [2], routed_experts=np.zeros((3, 2)))])
    assert [output.new_token_ids for output in sent] == [[1, 2]]


def test_what_was_called_off_is_forgotten() -> None:
    requests = Requests()
    gathering = requests.gathering()
    for number in range(1000):
        requests.running = {f"r{number}": True}
        gathering.step(0, [sampled(f"r{number}", [1])])
    assert sum(map(len, gathering.release().values())) <= 64


class Scheduler:
    def __init__(self) -> None:
        sampling = SimpleNamespace(output_kind="final only", stop=[])
        self.requests = {"a": SimpleNamespace(sampling_params=sampling)}


def make_core() -> Any:
    """vLLM's engine core, one token of request `a` a step."""

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler, self.paused, self.stats = Scheduler(), False, None

        def is_scheduler_paused(self) -> bool:
            return self.paused

        def step(self) -> tuple[dict[int, Outputs], bool]:
            return {2: Outputs([sampled("a", [5])], self.stats)}, True

        def step_with_batch_queue(self) -> tuple[dict[int, Outputs] | None, bool]:
            return None, True

    class EngineCoreProc(EngineCore):
        def __init__(self) -> None:
            super().__init__()
            self.output_queue: queue.Queue[tuple[int, Outputs]] = queue.Queue()

        def pause_scheduler(self, mode: str, clear_cache: bool) -> str:
            self.paused = True
            return f"{mode} {clear_cache} {self.output_queue.qsize()}"

    return EngineCore, EngineCoreProc


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(gathered_outputs, "waits_for_the_end", lambda request: True)
    core_class, process_class = make_core()
    for _ in range(2):  # the second time changes nothing
        gathered_outputs.install(core_class, process_class, Output, Outputs)
    return process_class()


def test_a_pause_begins_with_all_that_was_kept(core: Any) -> None:
    for _ in range(3):
        assert core.step() == ({}, True)
    assert core.pause_scheduler("keep", clear_cache=True) == "keep True 1"
    client, message = core.output_queue.get_nowait()
    assert (client, [output.new_token_ids for output in message.outputs]) == (2, [[5, 5, 5]])
    outputs, _ = core.step()  # it was in flight when the pause began
    assert [output.new_token_ids for output in outputs[2].outputs] == [[5]]
    assert core.step_with_batch_queue() == (None, True)


def test_a_message_with_statistics_goes_out_without_tokens(core: Any) -> None:
    core.stats = {"running": 1}
    outputs, _ = core.step()
    assert outputs == {2: Outputs([], {"running": 1})}


def test_each_engine_keeps_its_own(core: Any) -> None:
    other = type(core)()
    core.step()
    other.pause_scheduler("keep", clear_cache=False)
    assert other.output_queue.empty()
