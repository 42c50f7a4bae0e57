"""Conversations with tools against a server over HTTP: tokens, limits, rewards, retries,
evaluation.
"""

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.multi_turn import (
    Conversation,
    Grade,
    MultiTurnConfig,
    MultiTurnEnv,
    Step,
    sampled_runs,
)
from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.responses import HermesFormat, TaggedFormat
from atroposlib.sandbox import Limits, LocalSandbox, Program, SandboxBroken, local
from example_trainer.batch.groups import LengthRules, ReplayedRouters, Rules, parse_batch
from tests.atroposlib.inference.template_shapes import Shape
from vllm_patching.protocol.routed_experts import from_wire


def add(numbers: str, talk: Conversation) -> int:
    """Add numbers.

    Args:
        numbers: with plus signs between them.
    """
    talk.state.append(numbers)
    return sum(map(int, numbers.split("+")))


class Sums(MultiTurnEnv):
    """A call earns 0.5, the right sum 1."""

    name = "sums"
    tools = (add,)
    tool_format = TaggedFormat("add", "numbers", "<", ">")

    def __init__(self, url: str, tokenizer: Any, **settings: Any):
        config = MultiTurnConfig(
            **({"group_size": 2, "max_token_length": 40, "rollout_retries": 1} | settings)
        )
        super().__init__(config, [APIServerConfig(base_url=f"{url}/v1", server_type="vllm")])
        self.tokenizer = tokenizer
        self.begun: list[Conversation] = []

    async def setup(self) -> None:
        """Nothing to load."""

    async def get_next_item(self) -> str:
        return "1+2"

    def eval_problems(self) -> list[str]:
        return ["1+2", "3+4"]

    async def reset(self, item: str) -> Conversation:
        self.begun.append(Conversation([{"role": "user", "content": f"{item} = ?"}], state=[]))
        return self.begun[-1]

    async def step(self, talk: Conversation) -> Step:
        called = bool(talk.turns[-1].calls)
        return Step(reward=0.5 if called else 0.0, done=not called)

    async def grade(self, talk: Conversation) -> Grade:
        correct = talk.text == str(sum(map(int, talk.item.split("+"))))
        return Grade(float(correct), correct, answer=talk.text)


Make = Callable[..., Sums]


@pytest.fixture
async def make(shared_inference: str, tokenizer: Any) -> AsyncIterator[Make]:
    made: list[Sums] = []

    def one(*cycle: str, kind: type[Sums] = Sums, **settings: Any) -> Sums:
        control(
            shared_inference,
            version=4,
            delay=0.0,
            fail_next=0,
            text=None,
            cycle=list(cycle),
            generate_options=None,
        )
        made.append(kind(shared_inference, tokenizer, **settings))
        return made[-1]

    yield one
    control(shared_inference, cycle=None)
    for environment in made:
        await environment.server.close()


def control(url: str, **change: Any) -> int:
    """Return the number of requests so far."""
    answer = httpx.post(f"{url}/control", json=change, timeout=120).raise_for_status()
    requests: int = answer.json()["requests"]
    return requests


def requests_after(url: str, number: int) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = httpx.get(f"{url}/requests", timeout=120).json()
    return requests[number:]


def sampled(group: Any, index: int, tokenizer: Any) -> list[str]:
    """The text of each turn's sampled tokens."""
    tokens, mask = group["tokens"][index], group["masks"][index]
    return [tokenizer.decode(tokens[begin:end]) for begin, end in sampled_runs(mask)]


async def test_a_group_has_the_experts_that_each_turn_was_sampled_with(
    make: Make, shared_inference: str
) -> None:
    environment = make("<1+2>", "4", "3")
    control(shared_inference, generate_options=["token_logprobs", "routed_experts"])
    before = control(shared_inference)
    group, _ = await environment.collect_trajectories("1+2")
    control(shared_inference, generate_options=None)
    two_turns, one_turn = map(from_wire, group["routed_experts"])
    assert [len(two_turns), len(one_turn)] == [len(row) - 1 for row in group["tokens"]]
    first, second = ((before + number) % 100 for number in (1, 2))
    _, end = sampled_runs(group["masks"][0])[0]
    assert set(two_turns[: end - 1, :, 0].flat) == set(one_turn[:, :, 0].flat) == {first}
    assert set(two_turns[end - 1 :, :, 0].flat) == {second}, "the turn's last token was read then"
    routers = ReplayedRouters(layers=2, sparse=(1,), experts=200, count=2)
    batch = parse_batch([group], 512, len(environment.tokenizer), Rules(routers=routers))
    assert [row.routed.shape for row in batch.sequences if row.routed is not None] == [
        (len(tokens), 2) for tokens in group["tokens"]
    ], "the trainer takes them"


async def test_a_group_keeps_every_sampled_token_and_adds_up_rewards(
    make: Make, tokenizer: Any
) -> None:
    environment = make("<1+2>", "4", "3", include_messages=True)
    group, backlog = await environment.collect_trajectories("1+2")
    assert backlog == []
    assert group["scores"] == [1.5, 0.0]
    assert sampled(group, 0, tokenizer) == ["<1+2><|im_end|>", "3<|im_end|>"]
    assert sampled(group, 1, tokenizer) == ["4<|im_end|>"]
    assert tokenizer.decode(group["tokens"][0]) == (
        "<|im_start|>user\n1+2 = ?<|im_end|>\n<|im_start|>assistant\n<1+2><|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>"
    )
    assert group["finish_reasons"] == ["stop", "stop"]
    assert group["weight_versions"] == [4, 4]
    assert "advantages" not in group
    call = {"type": "function", "function": {"name": "add", "arguments": '{"numbers": "1+2"}'}}
    assert group["messages"][0] == [
        {"role": "user", "content": "1+2 = ?"},
        {"role": "assistant", "content": "<1+2>", "tool_calls": [call], "reward": 0.5},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3", "reward": 0.0},
    ]


class ReasonedSums(Sums):
    """The same with other marks, and graded by what stands outside of the reasoning."""

    tool_format = TaggedFormat("add", "numbers", "{", "}")

    async def grade(self, talk: Conversation) -> Grade:
        return Grade(
            float(talk.answer.strip() == "3"), talk.answer.strip() == "3", answer=talk.answer
        )


@pytest.mark.parametrize(
    "history", ["as it is", "reasoning removed", "reasoning rebuilt", "reasoning must be in tags"]
)
async def test_no_turn_is_lost_where_the_template_opens_the_reasoning(
    make: Make, tokenizer: Any, history: str
) -> None:
    environment = make(
        "I add\n</think>\n\n{1+2}",
        "3",
        "3\n</think>\n\n3",
        kind=ReasonedSums,
        include_messages=True,
    )
    environment.tokenizer = copy.deepcopy(tokenizer)
    environment.tokenizer.chat_template = Shape("<think>\n", history).template
    group, _ = await environment.collect_trajectories("1+2")
    assert sampled(group, 0, tokenizer) == [
        "I add\n</think>\n\n{1+2}<|im_end|>",
        "3\n</think>\n\n3<|im_end|>",
    ]
    assert group["scores"] == [1.5, 0.0], "a number in reasoning that never ends is not the answer"
    assert tokenizer.decode(group["tokens"][0]) == (
        "<|im_start|>user\n1+2 = ?<|im_end|>\n<|im_start|>assistant\n<think>\nI add\n</think>\n\n{1+2}<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n<think>\n3\n</think>\n\n3<|im_end|>"
    )
    assert group["messages"][0][1]["content"] == "<think>\nI add\n</think>\n\n{1+2}", (
        "a record is whole"
    )


async def test_rewards_to_go_become_advantages_of_the_turns_tokens(make: Make) -> None:
    group, _ = await make("<1+2>", "4", "3", turn_rewards="to_go").collect_trajectories("1+2")
    # Returns [1.5, 1] and [0]: means 0.75 and 1, differences [0.75, 0] and [-0.75], their standard
    # deviation 0.75 sqrt(2/3).
    expected = [[1.5**0.5, 0.0], [-(1.5**0.5)]]
    for mask, row, of_turns in zip(group["masks"], group["advantages"], expected, strict=True):
        assert len(row) == len(mask)
        runs = sampled_runs(mask)
        assert [row[begin] for begin, _ in runs] == pytest.approx(of_turns)
        assert sum(value != 0 for value in row) == sum(
            e - b for (b, e), v in zip(runs, of_turns, strict=True) if v
        )


async def test_the_trainer_takes_advantages_of_turns_and_masks_what_a_limit_ended(
    make: Make, tokenizer: Any
) -> None:
    environment = make("<1+2>", "4", "3", turn_rewards="to_go", max_turns=2)
    group, _ = await environment.collect_trajectories("1+2")
    cut, _ = await make("<1+2>", "4", "<1+2>", max_turns=2).collect_trajectories("1+2")
    rules = Rules(lengths=LengthRules(truncated_answers="mask"))
    batch = parse_batch([group, cut], max_tokens=512, vocab_size=len(tokenizer), rules=rules)
    assert batch.invalid == []
    first, second, limited, whole = batch.sequences
    for sequence, row in zip((first, second), group["advantages"], strict=True):
        assert sequence["advantages"].tolist() == pytest.approx(
            [row[place] for place in sequence.positions]
        )
    assert (limited.finish_reason, len(limited.positions)) == ("length", 0), (
        "with max_turns it is as if an answer was cut off"
    )
    assert (whole.finish_reason, float(whole["advantages"][0])) == ("stop", pytest.approx(-1.0)), (
        "it is in the baseline of the others"
    )


async def test_a_call_that_goes_wrong_is_answered_and_scores_nothing_by_itself(
    make: Make, tokenizer: Any
) -> None:
    environment = make("<one>", "<1+2", "3", "3")
    group, _ = await environment.collect_trajectories("1+2")
    text = [tokenizer.decode(tokens) for tokens in group["tokens"]]
    assert (
        "tool\nerror: ValueError: invalid literal for int() with base 10: 'one'<|im_end|>"
        in text[0]
    )
    assert "tool\nerror: '>' is missing<|im_end|>" in text[1]
    assert group["scores"] == [1.5, 1.5]
    assert environment.toolbox.metrics() == {
        "train/tool_problems_raised": 1.0,
        "train/tool_problems_unreadable": 1.0,
    }


@pytest.mark.parametrize(
    ("limits", "ended", "turns"),
    [
        ({"max_turns": 2}, "max_turns", 2),
        ({"max_conversation_tokens": 64}, "max_tokens", 2),
        ({"max_token_length": 3}, "answer_cut", 1),
    ],
)
async def test_a_limit_in_the_middle_ends_the_conversation_and_the_reward_is_asked_for(
    make: Make, limits: dict[str, int], ended: str, turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    environment = make("<1+2>", **limits)
    group, _ = await environment.collect_trajectories("1+2")
    assert [(talk.ended, talk.truncated, len(talk.turns)) for talk in environment.begun] == [
        (ended, True, turns)
    ] * 2
    assert group["finish_reasons"] == ["length", "length"], (
        "as an answer that was cut off, which --truncated-answers is about"
    )
    assert group["scores"] == [0.5 * turns * (ended != "answer_cut")] * 2
    assert max(map(len, group["tokens"])) <= limits.get("max_conversation_tokens", 1000)
    assert (
        caplog.text.count("a limit ended a conversation")
        == caplog.text.count(f"({ended}). It is graded as it stands")
        == 1
    )
    assert environment._noted[f"ended_{ended}"] == [1, 1]
    assert [len(sampled_runs(mask)) for mask in group["masks"]] == [turns, turns]


async def test_no_room_for_a_first_answer_gives_no_group(make: Make) -> None:
    environment = make("3", max_conversation_tokens=5)
    with pytest.raises(
        RolloutFailure, match=r"leave no room for an answer within --env.max_conversation_tokens 5"
    ):
        await environment._runner.rollouts.work_on("1+2", send=False)
    assert str(environment.drops) == "no_room=1"


class Hermes(Sums):
    """Tools by the chat template, called in JSON."""

    tool_format = HermesFormat()


async def test_a_template_that_knows_tools_tells_the_model_of_them(
    make: Make, tokenizer: Any
) -> None:
    knowing = copy.deepcopy(tokenizer)
    knowing.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        + tokenizer.chat_template
    )
    call = 'So <tool_call>{"name": "add", "arguments": {"numbers": "1+2"}}</tool_call>'
    environment = make(call, "3", kind=Hermes, group_size=1, max_token_length=100)
    environment.tokenizer = knowing
    group, _ = await environment.collect_trajectories("1+2")
    assert tokenizer.decode(group["tokens"][0]) == (
        "[add]<|im_start|>user\n1+2 = ?<|im_end|>\n<|im_start|>assistant\nSo <tool_call>"
        '{"name": "add", "arguments": {"numbers": "1+2"}}</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>\n'
        "<|im_start|>assistant\n3<|im_end|>"
    )
    assert len(sampled(group, 0, tokenizer)) == 2
    assert group["scores"] == [1.5]


class Programs(Sums):
    """Its tool runs programs."""

    tool_format = TaggedFormat("run_code", "code", "<", ">")

    async def setup(self) -> None:
        self.box = LocalSandbox(Limits(seconds=60))
        await self.box.start()
        self.tools = [self.run_code]

    async def run_code(self, code: str) -> str:
        """Run a program.

        Args:
            code: Python.
        """
        return (await self.box.run(Program(code))).output


async def test_a_sandbox_that_breaks_under_a_tool_is_counted_and_never_scored(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its keeper is killed between two calls, unnoticed; under every program; and cannot be started
    any more.
    """
    environment = make("<print(3)>", kind=Programs, group_size=1, max_token_length=100, max_turns=1)
    assert isinstance(environment, Programs)
    await environment.setup()
    box = environment.box
    run_once = box._run_once

    def kill_the_keeper() -> None:
        assert box._keeper is not None
        keeper = psutil.Process(box._keeper.pid)
        for process in (*keeper.children(recursive=True), keeper):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        box._keeper.wait(60)

    async def dies_under_it(request: bytes, calls: int) -> Any:
        if b"print(3)" in request:  # and not the trial of a keeper after its restart
            kill_the_keeper()
        return await run_once(request, calls)

    try:
        for keeper_dies in (False, True):
            if keeper_dies:
                kill_the_keeper()
            group, _ = await environment.collect_trajectories("1+2")
            assert [message["content"] for message in environment.begun[-1].transcript][2] == "3\n"
            assert group["scores"] == [0.5]
        monkeypatch.setattr(box, "_run_once", dies_under_it)
        for _ in range(2):
            with pytest.raises(SandboxBroken):
                await environment.collect_trajectories("1+2")
        assert environment.toolbox.metrics() == {"train/tool_problems_ended_rollout": 2.0}
        assert (
            caplog.text.count(
                "a call of run_code ended its rollout, which gets no score: SandboxBroken: "
            )
            == 1
        )
        monkeypatch.setattr(local, "KEEPER", Path("/there/is/no/keeper.py"))
        with pytest.raises(EnvironmentFailure, match="the sandbox's keeper did not start: "):
            await environment.collect_trajectories("1+2")
    finally:
        await box.close()


class Unsteady(Sums):
    """Fails in the second turn of the first conversation, once."""

    failed = False

    async def step(self, talk: Conversation) -> Step:
        if len(talk.turns) == 2 and not Unsteady.failed:
            Unsteady.failed = True
            raise OSError("the disk is full")
        return await super().step(talk)


async def test_one_conversation_is_tried_again_from_its_beginning(
    make: Make, tokenizer: Any
) -> None:
    environment = make("<1+2>", "<1+2>", "3", kind=Unsteady, group_size=1)
    group, _ = await environment.collect_trajectories("1+2")
    assert str(environment.drops) == "errors_retried=1"
    assert sampled(group, 0, tokenizer)[0] == "<1+2><|im_end|>"
    assert len(environment.begun) == 2
    assert group["scores"] == [1.5]


async def test_each_request_has_a_seed_of_its_own(make: Make, shared_inference: str) -> None:
    environment = make("<1+2>", "<1+2>", "3", "3", seed_rollouts=True)
    before = control(shared_inference)
    await environment._runner.rollouts.roll_out("1+2")
    asked = requests_after(shared_inference, before)
    assert [request.get("n", 1) for request in asked] == [2, 1, 1]
    assert len({request["seed"] for request in asked}) == 3


async def test_an_evaluation_says_turns_and_tools(make: Make) -> None:
    environment = make("<1+2>", "3", max_eval_workers=1)
    result = await environment.evaluate()
    assert (result["num_problems"], result["weight_version"]) == (2, 4)
    assert (result["mean_turns"], result["mean_tool_calls"], result["tool_use"]) == (2.0, 1.0, 1.0)
    attempts = await environment.measure(["1+2"], samples=3, temperature=1.0)
    assert [len(row) for row in attempts] == [3]
    assert attempts[0][0].record["question"] == "1+2 = ?"
    assert attempts[0][0].record["ended"] in ("done", "max_turns")


class Careless(Sums):
    """Has no held-out problems, and returns a bare number in place of a grade."""

    def eval_problems(self) -> list[str]:
        return []

    async def grade(self, talk: Conversation) -> Grade:
        return 1.0  # type: ignore[return-value]


async def test_an_evaluation_without_problems_is_left_out(
    make: Make, shared_inference: str, caplog: pytest.LogCaptureFixture
) -> None:
    environment = make("3", kind=Careless)
    before = control(shared_inference)
    assert [await environment.evaluate() for _ in range(2)] == [{}, {}]
    assert control(shared_inference) == before
    assert caplog.text.count("eval_problems of Careless returned no problems") == 1


async def test_a_number_in_place_of_a_grade_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match=r"grade of Careless returned 1\.0: return Grade\("):
        await make("3", kind=Careless).collect_trajectories("1+2")


async def test_metrics_of_rollouts(make: Make) -> None:
    environment = make("<1+2>", "4", "3")
    await environment.collect_trajectories("1+2")
    told: dict[str, Any] = {}
    environment._runner.reports._log_line = told.update  # type: ignore[method-assign]
    await environment.wandb_log()
    expected = {
        "percent_correct": 0.5,
        "turns": 1.5,
        "tool_calls": 0.5,
        "tool_use": 0.5,
        "truncated_share": 0.0,
    }
    assert {name: told[f"train/{name}"] for name in expected} == expected
