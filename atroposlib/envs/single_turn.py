"""Environments with one question and one answer: prompt, sample a group, grade each answer.

A subclass defines what differs: the problems, the messages and the grading.
"""

import asyncio
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.graded import Attempt, Grade, GradedEnv
from atroposlib.inference.sequence_tracker import sequence_fields
from atroposlib.type_definitions import Item, Message
from atroposlib.utils.thinking import answer_part, whole_response
from atroposlib.wire.groups import PROMPT_MASK, ScoredDataGroup

__all__ = ["Grade", "Response", "SingleTurnEnv", "as_response"]


@dataclass(frozen=True)
class Response:
    """One answer of the model.

    Attributes:
        text: what it wrote, without special tokens.
        num_tokens: sampled tokens, the end token included.
        finished: it ended by itself rather than by the limit on its length.
        opened: what the prompt opened, such as `<think>`; see `atroposlib.utils.thinking`.
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


class SingleTurnEnv(GradedEnv):
    """Question in, graded answer out."""

    @abstractmethod
    def messages(self, problem: Any) -> list[Message]:
        """The conversation that the model answers."""

    @abstractmethod
    async def grade(self, problem: Any, response: Response) -> Grade:
        """Grade one answer."""

    def describe(self, problem: Any) -> dict[str, Any]:
        """Return a problem's fields in the record of an evaluation, such as `question` and
        `gold_answer`.
        """
        return {"question": self.messages(problem)[-1]["content"]}

    def adjust_scores(self, grades: list[Grade], responses: list[Response]) -> list[float]:
        """The group's rewards, where they depend on the group as a whole."""
        return [grade.score for grade in grades]

    async def collect_group(self, item: Item) -> ScoredDataGroup:
        """A group of `group_size` sampled answers, tokens untouched."""
        messages = self.messages(item)
        seed = self.sampling_seed()
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=self.temperature,
                **({} if seed is None else {"seed": seed}),
            )
            nodes = managed.get_state()["nodes"]
        responses = [
            as_response(choice, node) for choice, node in zip(answer.choices, nodes, strict=True)
        ]
        grades = await asyncio.gather(*(self.grade(item, response) for response in responses))
        self.note_success(item, [grade.correct for grade in grades])
        for grade, response in zip(grades, responses, strict=True):
            self.note({"percent_correct": grade.correct, "response_length": response.num_tokens})
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=self.adjust_scores(list(grades), responses),
        )
        group.update(sequence_fields(nodes))  # type: ignore[typeddict-item]
        if self.config.include_messages:
            group["messages"] = [
                [*messages, {"role": "assistant", "content": r.whole}] for r in responses
            ]
        return group

    async def attempt(self, problem: Any, samples: int, temperature: float) -> list[Attempt]:
        """Answers to a held-out problem, by one request."""
        messages = self.messages(problem)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=messages,
                n=samples,
                max_tokens=self.config.max_token_length,
                temperature=temperature,
                split="eval",
            )
            nodes = managed.get_state()["nodes"]
        responses = [
            as_response(choice, node) for choice, node in zip(answer.choices, nodes, strict=True)
        ]
        grades = await asyncio.gather(*(self.grade(problem, response) for response in responses))
        return [
            Attempt(
                {
                    **self.describe(problem),
                    "model_parsed": grade.answer,
                    "correct": grade.correct,
                    "score": grade.score,
                    "finish_reason": choice.finish_reason,
                    "response_tokens": response.num_tokens,
                    "messages": [*messages, {"role": "assistant", "content": response.whole}],
                },
                node.weights,
            )
            for choice, node, response, grade in zip(
                answer.choices, nodes, responses, grades, strict=True
            )
        ]


def as_response(choice: Any, node: Any) -> Response:
    """Read one choice of a completion and the sequence that was kept of it."""
    sampled = sum(token != PROMPT_MASK for token in node.masked_tokens)
    return Response(
        text=choice.message.content or "",
        num_tokens=sampled,
        finished=choice.finish_reason == "stop",
        opened=(node.metadata or {}).get("opened", ""),
    )
