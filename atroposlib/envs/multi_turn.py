"""Environments with several turns: the model answers, tools and the environment answer back, until
one of them is done.

A subclass defines how a conversation begins, what follows an answer, which tools there are, and
what it was all worth.

**From rewards of turns to advantages of tokens.** With `turn_rewards` "to_go", a token is made
responsible for what comes from its own turn on. For conversation i of a group, let r_{i,t} be the
reward of its turn t, T_i the number of its turns, and γ the discount:

    G_{i,t} = Σ_{s ≥ t} γ^{s-t} r_{i,s}                         the return from turn t on
    d_{i,t} = G_{i,t} - mean of G_{j,t} over all j with t ≤ T_j  against the same turn of the others
    A_{i,t} = d_{i,t} / std of all d of the group

Turns of the same number are compared because they have as much left to win. A turn that no other
conversation came to has nothing to be compared with: its advantage is 0. One standard deviation for
all turns keeps their proportion. With one turn each, A is the trainer's `--advantages group`
(arXiv:2402.03300). The same holds where only the last turn has a reward, all have as many turns,
and γ = 1.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal

from openai.types.chat import ChatCompletion
from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.graded import Attempt, Grade, GradedEnv, checked_grade, group_of
from atroposlib.envs.tools import Toolbox
from atroposlib.errors import NoRoom
from atroposlib.inference.managed_server import ManagedServer, SequenceNode
from atroposlib.inference.responses import (
    Call,
    HermesFormat,
    ToolFormat,
    known_calls,
    read_reasoning,
    whole_response,
)
from atroposlib.type_definitions import Item
from atroposlib.utils.waiting import awaited, gather_or_cancel
from atroposlib.wire import PROMPT_MASK, ScoredDataGroup, plain_score

Ending = Literal["done", "max_turns", "max_tokens", "answer_cut"]


@dataclass
class Turn:
    """One answer of the model and what came of it.

    Attributes:
        text: what it wrote, without special tokens.
        num_tokens: sampled tokens, the end token included.
        finished: it ended by itself rather than by a limit.
        opened: the tags that its prompt opened, such as `<think>`; see `atroposlib.inference.responses`.
        calls: of tools, in their order, with their answers.
        reward: that `step` gave for it.
        spans: first, and one past the last character of each call. Tags inside of a call are text.
    """

    text: str
    num_tokens: int
    finished: bool
    calls: list[Call] = field(default_factory=list)
    reward: float = 0.0
    opened: str = ""
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def answer(self) -> str:
        """The text outside of the reasoning; empty if the reasoning never ends."""
        return read_reasoning(self.text, self.opened, known_calls(self.spans)).answer


@dataclass
class Conversation:
    """A conversation under way. `reset` makes it, tools and `step` get it, `grade` sees its end.

    Attributes:
        messages: all so far, as the chat template gets them.
        state: anything of the environment's own.
        item: what it is about.
        turns: the model's answers so far.
        ended: None while it goes on; "done"; or the limit that ended it: "max_turns", "max_tokens"
            of the whole conversation, "answer_cut" by the limit of one answer.
        transcript: all messages, with the calls in an answer and with what went wrong, for people
            to read.
    """

    messages: list[dict[str, Any]]
    state: Any = None
    item: Any = None
    turns: list[Turn] = field(default_factory=list)
    ended: Ending | None = None
    transcript: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The last answer with its reasoning; empty before the first."""
        return self.turns[-1].text if self.turns else ""

    @property
    def answer(self) -> str:
        """The last answer without its reasoning, which is what a grader looks at; empty before the
        first.
        """
        return self.turns[-1].answer if self.turns else ""

    @property
    def truncated(self) -> bool:
        """Return whether a limit ended it."""
        return self.ended not in (None, "done")

    @property
    def reward(self) -> float:
        """The sum of its turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def calls(self) -> list[Call]:
        """The calls of all turns."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def tool_use(self) -> bool:
        """Return whether at least one call got what its tool answers."""
        return any(call.problem in (None, "cut") for call in self.calls)

    @property
    def question(self) -> Any:
        """Return the first request to the model: the last message before its first answer."""
        roles = [message.get("role") for message in self.messages]
        first = roles.index("assistant") if "assistant" in roles[1:] else len(roles)
        return self.messages[max(first - 1, 0)].get("content")

    def say(self, message: Mapping[str, Any], **about: Any) -> None:
        """Add a message; `about` is for the transcript only."""
        self.messages.append(dict(message))
        self.transcript.append({**message, **about})


@dataclass(frozen=True)
class Step:
    """The consequences of an answer of the model.

    Attributes:
        messages: what comes next. The answers of tools stand before them and need not be repeated.
        reward: of the turn. A number of any type becomes a float.
        done: the conversation is over.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", plain_score(self.reward))


def as_openai(call: Call) -> dict[str, Any]:
    """A call as it stands in a message of OpenAI's."""
    return {
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
    }


SMALLEST_SPREAD = 1e-9
"""Below it, relative to the returns, differences are rounding."""


def returns_to_go(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """The return from each turn on, of the rewards of one conversation's turns."""
    return list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later))[
        ::-1
    ]


def turn_advantages(rewards: Sequence[Sequence[float]], discount: float = 1.0) -> list[list[float]]:
    """Compare each turn of each conversation with the same turn of the others.

    Args:
        rewards: of the turns of each conversation of a group.
        discount: γ, from 0 to 1.

    Returns:
        A number for each turn, in the same shape; all 0 where nothing differs.
    """
    returns = [returns_to_go(row, discount) for row in rewards]
    turns = max(map(len, returns), default=0)
    means = [fmean(row[turn] for row in returns if turn < len(row)) for turn in range(turns)]
    centred = [[value - mean for value, mean in zip(row, means, strict=False)] for row in returns]
    every = [value for row in centred for value in row]
    spread = pstdev(every) if every else 0.0
    if spread <= SMALLEST_SPREAD * max(
        (abs(value) for row in returns for value in row), default=0.0
    ):
        return [[0.0] * len(row) for row in rewards]
    return [[value / spread for value in row] for row in centred]


def sampled_runs(mask: Iterable[int]) -> list[tuple[int, int]]:
    """(first, one past the last) place of each run of sampled tokens: the turns of a sequence."""
    runs = []
    for is_prompt, run in groupby(enumerate(mask), key=lambda place: place[1] == PROMPT_MASK):
        if not is_prompt:
            places = [place for place, _ in run]
            runs.append((places[0], places[-1] + 1))
    return runs


def spread_over_tokens(mask: Sequence[int], of_turns: Sequence[float]) -> list[float]:
    """A number for each token of a sequence: that of its turn where it was sampled, 0 where it was
    given.

    Args:
        mask: of the sequence, -100 where a token was given.
        of_turns: of all turns of the conversation. A sequence whose history was rewritten holds the
            last of them only.
    """
    runs = sampled_runs(mask)
    numbers = [0.0] * len(mask)
    if runs:
        for (begin, end), number in zip(runs, of_turns[-len(runs) :], strict=True):
            numbers[begin:end] = [number] * (end - begin)
    return numbers


__all__ = ["Conversation", "Grade", "MultiTurnConfig", "MultiTurnEnv", "Step", "Turn"]

LIMITS: Mapping[str, str] = {
    "max_turns": "raise --env.max_turns",
    "max_tokens": "raise --env.max_conversation_tokens, or what trainer and server take",
    "answer_cut": "raise --env.max_token_length",
}
"""Limits that end a conversation, and what to do where they should not."""


class MultiTurnConfig(BaseEnvConfig):
    """Settings of an environment with several turns."""

    max_turns: int = Field(
        default=8, ge=1, description="Most answers of the model in one conversation"
    )
    max_conversation_tokens: int = Field(
        default=-1,
        description="Most tokens of a whole conversation; -1: what the model and the trainer take",
    )
    tool_timeout: float = Field(
        default=30.0, gt=0, description="Longest time for one call of a tool"
    )
    max_tool_output: int = Field(
        default=4000, ge=1, description="Most characters of a tool's answer; the rest is cut off"
    )
    max_tool_calls: int = Field(
        default=16, ge=1, description="Most calls in one answer; the rest get an error"
    )
    turn_rewards: Literal["sum", "to_go"] = Field(
        default="sum",
        description="Use of the rewards of single turns. Either their sum is the score of the "
        "conversation, or each turn's tokens get the rewards from that turn on (advantages "
        "for each token)",
    )
    discount: float = Field(
        default=1.0, ge=0, le=1, description="With to_go: what a reward counts one turn earlier"
    )


class MultiTurnEnv(GradedEnv):
    """Conversations, each token kept as it was sampled.

    Attributes:
        tools: functions that the model may call, see `atroposlib.envs.tools`; a parameter of type
            `Conversation` gets the calling one. `setup` may set `self.tools`, to methods for
            instance.
        tool_format: how they are called.
        request_fields: more of each request, such as `{"stop": [...]}`.
    """

    env_config_cls = MultiTurnConfig
    tools: Sequence[Callable[..., Any]] = ()
    tool_format: ToolFormat = HermesFormat()
    request_fields: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    async def reset(self, item: Item) -> Conversation:
        """Begin one conversation about an item: its opening messages, and its state.

        Asked `group_size` times for an item.
        """

    async def step(self, talk: Conversation) -> Step:
        """Decide how the conversation goes on after the last answer and its calls.

        By default an answer that calls no tool is the last.
        """
        return Step(done=not talk.turns[-1].calls)

    async def grade(self, talk: Conversation) -> Grade:
        """Return the score of a conversation, to which the rewards of its turns are added.

        A conversation that a limit ended is graded too.
        """
        return Grade(score=0.0, correct=talk.reward > 0)

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools as of the first use, which is after `setup`."""
        config = self.config
        return Toolbox(self.tools, Conversation, config.tool_timeout, config.max_tool_output)

    async def collect_group(self, item: Item) -> ScoredDataGroup:
        """A group of `group_size` conversations about an item."""
        played = await self.converse(
            item, self.config.group_size, self.sampling_seed, temperature=self.temperature
        )
        grades = await self._grades(played)
        self.note_success(item, [grade.correct for grade in grades])
        for (talk, _), grade in zip(played, grades, strict=True):
            self.note(self._numbers(talk, grade))
        nodes = [node for _, node in played]
        scores = [
            talk.reward + grade.score for (talk, _), grade in zip(played, grades, strict=True)
        ]
        group = group_of(nodes, scores)
        if self.config.turn_rewards == "to_go":
            rewards = [
                [*(turn.reward for turn in talk.turns[:-1]), talk.turns[-1].reward + grade.score]
                for (talk, _), grade in zip(played, grades, strict=True)
            ]
            advantages = turn_advantages(rewards, self.config.discount)
            group["advantages"] = [
                spread_over_tokens(n.masked_tokens, row)
                for n, row in zip(nodes, advantages, strict=True)
            ]
        if self.config.include_messages or self._runner.state.jsonl_writer is not None:
            group["messages"] = [talk.transcript for talk, _ in played]
        return group

    async def _grades(self, played: Sequence[tuple[Conversation, SequenceNode]]) -> list[Grade]:
        returned = await gather_or_cancel(
            [awaited(self.grade(talk), "grade", self) for talk, _ in played]
        )
        return [checked_grade(grade, self) for grade in returned]

    async def attempt(self, problem: Any, samples: int, temperature: float) -> list[Attempt]:
        """Conversations about a held-out problem."""
        played = await self.converse(problem, samples, temperature=temperature, split="eval")
        grades = await self._grades(played)
        return [
            Attempt(
                {"question": talk.question}
                | self._described(problem)
                | {
                    "model_parsed": grade.answer,
                    "correct": grade.correct,
                    "score": talk.reward + grade.score,
                    "finish_reason": "length" if talk.truncated else "stop",
                    "ended": talk.ended,
                    "response_tokens": talk.num_tokens,
                    "turns": len(talk.turns),
                    "tool_calls": len(talk.calls),
                    "tool_use": talk.tool_use,
                    "messages": talk.transcript,
                },
                node.weights,
            )
            for (talk, node), grade in zip(played, grades, strict=True)
        ]

    def summary(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the means of turns and tool calls, and the share of conversations in which a tool
        answered.
        """
        means = {"mean_turns": "turns", "mean_tool_calls": "tool_calls", "tool_use": "tool_use"}
        return super().summary(samples) | {
            mean: fmean(s[name] for s in samples) for mean, name in means.items()
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add how often which call went wrong."""
        metrics = dict(wandb_metrics or {})
        if "toolbox" in self.__dict__:
            metrics |= self.toolbox.metrics()
        await super().wandb_log(metrics)

    # ---- one conversation
    # -----------------------------------------------------------------------------------------------

    async def converse(
        self,
        item: Item,
        count: int = 1,
        seed: Callable[[int], int | None] = lambda _: None,
        **request: Any,
    ) -> list[tuple[Conversation, SequenceNode]]:
        """Conversations about an item, from beginning to end. One that fails is tried again by
        itself.

        Args:
            item: what they are about.
            count: how many. If they begin alike, one request asks for all first answers.
            seed: from the number of a request to its seed.
            request: fields of each request.

        Returns:
            Each, and its tokens. If the chat template rewrites answers in the history of later
            turns, these are the tokens of the last turn and of its prompt.

        Raises:
            RolloutFailure: one failed every time, or has not even room for an answer.
        """
        request = dict(self.request_fields) | request
        begun = await gather_or_cancel([self._begin(item, request) for _ in range(count)])
        opening = [dict(message) for message in begun[0].messages]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            first: ChatCompletion | None = None
            if all(talk.messages == opening for talk in begun):
                first = await self._ask(managed, begun[0], request | with_seed(seed(0)), count)
            first_nodes = [managed.node_of(first, index) for index in range(count if first else 0)]
            waiting = dict(enumerate(begun))

            async def play(member: int) -> tuple[Conversation, SequenceNode]:
                talk = waiting.pop(member, None) or await self._begin(item, request)
                node: SequenceNode | None = None
                if first is not None and talk.ended is None and talk.messages == opening:
                    node = first_nodes[member]
                    await self._take(talk, first.choices[member], node)
                begin = 1 + member * self.config.max_turns
                return talk, await self._play_on(managed, talk, node, seed, begin, request)

            calls = [lambda member=member: play(member) for member in range(count)]
            played = await gather_or_cancel(
                [self.retried("a conversation", call) for call in calls]
            )
        for talk, node in played:
            self._note_limit(talk, node)
        return played

    async def _play_on(
        self,
        managed: Any,
        talk: Conversation,
        node: SequenceNode | None,
        seed: Callable[[int], int | None],
        begin: int,
        request: Mapping[str, Any],
    ) -> SequenceNode:
        """Ask for answers until the conversation has ended.

        Args:
            node: the tokens of the last answer, or None before the first.
            begin: the number of the request for the conversation's first answer.

        Returns:
            The tokens of the last answer and of its prompt.
        """
        while talk.ended is None:
            fields = {**request, **with_seed(seed(begin + len(talk.turns)))}
            try:
                answer = await self._ask(managed, talk, fields)
            except NoRoom:
                if node is None:
                    raise
                talk.ended = "max_tokens"
                break
            node = managed.node_of(answer)
            await self._take(talk, answer.choices[0], node)
        assert node is not None
        return node

    def _note_limit(self, talk: Conversation, node: SequenceNode) -> None:
        """Mark a conversation that a limit ended as truncated, as the trainer marks an answer."""
        if talk.ended is None or talk.ended not in LIMITS:
            return
        self.say_once(
            talk.ended,
            f"a limit ended a conversation after {len(talk.turns)} answers ({talk.ended}). It is graded as it stands, "
            "and the trainer's --truncated-answers decides what becomes of it. To have fewer "
            f"(train/ended_{talk.ended} "
            f"is their share): {LIMITS[talk.ended]}",
        )
        node.metadata = {**(node.metadata or {}), "finish_reason": "length"}

    async def _begin(self, item: Item, request: dict[str, Any]) -> Conversation:
        """`reset`, and the tools where the model learns of them.

        They go into the requests, `request`, for the template.
        """
        talk = await self.reset(item)
        if not isinstance(talk, Conversation) or not talk.messages:
            raise TypeError(
                f"{type(self).__name__}.reset must return a Conversation with messages, not {talk!r:.80}"
            )
        talk.item = item
        tools = list(self.toolbox.tools.values())
        if (
            tools
            and self.tool_format.in_template
            and "tools" in str(getattr(self.tokenizer, "chat_template", ""))
        ):
            # The calls are read here: the managed server is to hand out the text as it is.
            request.update(tools=[tool.schema for tool in tools], tool_choice="none")
        elif tools and (description := self.tool_format.describe(tools)):
            rest = talk.messages
            if rest[0].get("role") == "system":
                description = f"{rest[0]['content']}\n\n{description}"
                rest = rest[1:]
            talk.messages = [{"role": "system", "content": description}, *rest]
        talk.transcript = [dict(message) for message in talk.messages]
        return talk

    async def _ask(
        self, managed: Any, talk: Conversation, request: Mapping[str, Any], count: int = 1
    ) -> ChatCompletion:
        """The model's next answer, or `count` of them.

        Raises:
            NoRoom: the conversation is as long as it may be.
        """
        room, limit = self.config.max_token_length, self.config.max_conversation_tokens
        if limit > 0 and isinstance(managed, ManagedServer):
            taken = len(
                managed.prompt_tokens(
                    talk.messages, request.get("tools"), request.get("chat_template_kwargs")
                )
            )
            room = min(room, limit - taken)
            if room < 1:
                raise NoRoom(
                    f"{taken} tokens leave no room for an answer within --env.max_conversation_tokens {limit}"
                )
        answer: ChatCompletion = await managed.chat_completion(
            messages=talk.messages, n=count, max_tokens=room, **request
        )
        return answer

    async def _take(self, talk: Conversation, choice: Any, node: SequenceNode) -> None:
        """An answer: run its calls, and ask what follows.

        If a limit cut it off, neither is done.
        """
        text, cut = choice.message.content or "", choice.finish_reason == "length"
        opened = (node.metadata or {}).get("opened", "")
        whole = whole_response(text, opened)
        tools = list(self.toolbox.tools.values())
        calls = [] if cut or not tools else self.tool_format.read_with(whole, tools)
        begin, end = (sampled_runs(node.masked_tokens) or [(0, 0)])[-1]
        turn = Turn(text, end - begin, choice.finish_reason == "stop", calls, opened=opened)
        added = len(whole) - len(text)
        turn.spans = tuple(
            (call.span[0] - added, call.span[1] - added) for call in calls if call.span is not None
        )
        talk.turns.append(turn)
        talk.say(
            {"role": "assistant", "content": text},
            **({"tool_calls": list(map(as_openai, calls))} if calls else {}),
        )
        reply = talk.transcript[-1]
        reply["content"] = whole
        if cut:
            talk.ended = (
                "answer_cut" if turn.num_tokens >= self.config.max_token_length else "max_tokens"
            )
            return
        for number, call in enumerate(calls):
            if number >= self.config.max_tool_calls and call.problem is None:
                call.problem, call.answer = (
                    "too_many",
                    f"error: more than {self.config.max_tool_calls} calls in one answer",
                )
            await self.toolbox.answer(call, talk)
            talk.say(
                self.tool_format.answer(call), **({"problem": call.problem} if call.problem else {})
            )
        step = await self.step(talk)
        if not isinstance(step, Step):
            raise TypeError(f"{type(self).__name__}.step must return a Step, not {step!r:.80}")
        turn.reward = reply["reward"] = step.reward
        for message in step.messages:
            talk.say(message)
        if step.done:
            talk.ended = "done"
        elif len(talk.turns) >= self.config.max_turns:
            talk.ended = "max_turns"
        elif talk.messages[-1].get("role") == "assistant":
            raise ValueError(
                f"{type(self).__name__}.step neither ends the conversation nor adds a message to "
                "answer"
            )

    @staticmethod
    def _numbers(talk: Conversation, grade: Grade) -> dict[str, float]:
        return {
            "percent_correct": grade.correct,
            "response_length": talk.num_tokens,
            "turns": len(talk.turns),
            "tool_calls": len(talk.calls),
            "tool_use": talk.tool_use,
            "truncated_share": talk.truncated,
            **{f"ended_{limit}": talk.ended == limit for limit in LIMITS},
        }


def with_seed(seed: int | None) -> dict[str, int]:
    """The field of a request, where there is a seed."""
    return {} if seed is None else {"seed": seed}
