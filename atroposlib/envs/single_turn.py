"""Environments with one question and one answer: prompt, sample a group, grade each answer.

A subclass defines what differs: the problems, the messages and the grading.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.graded import Attempt, Grade, GradedEnv, checked_grade, group_of
from atroposlib.errors import UsageError
from atroposlib.inference.managed_server import SequenceNode
from atroposlib.inference.responses import answer_part, whole_response
from atroposlib.type_definitions import Item, Message
from atroposlib.utils.waiting import awaited, plain
from atroposlib.wire import PROMPT_MASK, ScoredDataGroup

__all__ = ["Grade", "Response", "SingleTurnEnv", "as_response"]


@dataclass(frozen=True)
class Response:
    """One answer of the model.

    Attributes:
        text: what it wrote, without special tokens.
        num_tokens: sampled tokens, the end token included.
        finished: it ended by itself rather than by the limit on its length.
        opened: what the prompt opened, such as `<think>`; see `atroposlib.inference.responses`.
    """

    text: str
    num_tokens: int
    finished: bool
    opened: str = ""

    @property
    def answer(self) -> str:
        """The text outside of the reasoning, which is all that a grader looks at; empty if the
        reasoning never ends.
        """
        return answer_part(self.text, self.opened)

    @property
    def whole(self) -> str:
        """The text with the tag that the prompt opened, for records that lack the prompt's end."""
        return whole_response(self.text, self.opened)


@dataclass(frozen=True)
class Answer:
    """A response, its sequence, its grade, and the reason for which it ended."""

    response: Response
    node: SequenceNode
    grade: Grade
    finish_reason: str


class SingleTurnEnv(GradedEnv):
    """Question in, graded answer out."""

    @abstractmethod
    def messages(self, problem: Any) -> list[Message]:
        """The conversation that the model answers."""

    @abstractmethod
    async def grade(self, problem: Any, response: Response) -> Grade:
        """Grade one answer."""

    def _messages(self, problem: Any) -> list[Message]:
        """Return `messages`, and refuse one that is written as `async def`."""
        return plain(self.messages(problem), "messages", self)

    def describe(self, problem: Any) -> dict[str, Any]:
        """Return a problem's fields in the record of an evaluation, such as `question` and
        `gold_answer`.
        """
        return {"question": self._messages(problem)[-1]["content"]}

    def adjust_scores(self, grades: list[Grade], responses: list[Response]) -> list[float]:
        """The group's rewards, where they depend on the group as a whole."""
        return [grade.score for grade in grades]

    async def collect_group(self, item: Item) -> ScoredDataGroup:
        """Return a group of `group_size` sampled answers, tokens untouched."""
        fields: dict[str, Any] = {"temperature": self.temperature}
        if (seed := self.sampling_seed()) is not None:
            fields["seed"] = seed
        messages, answers = await self._answers(item, self.config.group_size, **fields)
        self.note_success(item, [answer.grade.correct for answer in answers])
        for answer in answers:
            length = answer.response.num_tokens
            self.note({"percent_correct": answer.grade.correct, "response_length": length})
        grades, responses = ([a.grade for a in answers], [a.response for a in answers])
        scores = plain(self.adjust_scores(grades, responses), "adjust_scores", self)
        if not isinstance(scores, Iterable):
            raise UsageError(
                f"adjust_scores of {type(self).__name__} returned {scores!r:.80}: return a list with "
                "one score for each answer"
            )
        group = group_of([answer.node for answer in answers], scores)
        if self.config.include_messages:
            group["messages"] = [[*messages, assistant(response)] for response in responses]
        return group

    async def attempt(self, problem: Any, samples: int, temperature: float) -> list[Attempt]:
        """Return answers to a held-out problem, from one request."""
        messages, answers = await self._answers(
            problem, samples, temperature=temperature, split="eval"
        )
        return [
            Attempt(
                {
                    **self._described(problem),
                    "model_parsed": answer.grade.answer,
                    "correct": answer.grade.correct,
                    "score": answer.grade.score,
                    "finish_reason": answer.finish_reason,
                    "response_tokens": answer.response.num_tokens,
                    "messages": [*messages, assistant(answer.response)],
                },
                answer.node.weights,
            )
            for answer in answers
        ]

    async def _answers(
        self, problem: Any, count: int, **fields: Any
    ) -> tuple[list[Message], list[Answer]]:
        """Sample answers by one request with these fields, and grade them.

        Returns:
            The request's messages, and the answers.
        """
        messages = self._messages(problem)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages, n=count, max_tokens=self.config.max_token_length, **fields
            )
            nodes = managed.get_state()["nodes"]
        choices = completion.choices
        responses = [as_response(choice, node) for choice, node in zip(choices, nodes, strict=True)]
        returned = await asyncio.gather(
            *(awaited(self.grade(problem, response), "grade", self) for response in responses)
        )
        grades = [checked_grade(grade, self) for grade in returned]
        return messages, [
            Answer(response, node, grade, choice.finish_reason)
            for response, node, grade, choice in zip(responses, nodes, grades, choices, strict=True)
        ]


def assistant(response: Response) -> Message:
    """Return an answer as a message."""
    return {"role": "assistant", "content": response.whole}


def as_response(choice: Any, node: Any) -> Response:
    """Read one choice of a completion and the sequence that was kept of it."""
    sampled = sum(token != PROMPT_MASK for token in node.masked_tokens)
    return Response(
        text=choice.message.content or "",
        num_tokens=sampled,
        finished=choice.finish_reason == "stop",
        opened=(node.metadata or {}).get("opened", ""),
    )
