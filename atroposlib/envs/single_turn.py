"""Environments with one question and one answer: prompt, sample a group, grade each answer. And the greedy evaluation of such.

A subclass defines what differs: the problems, the messages and the grading.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.groups import PROMPT_MASK, ScoredDataGroup
from atroposlib.envs.server_handling.generation import Weights
from atroposlib.envs.server_handling.sequence_tracker import sequence_fields
from atroposlib.type_definitions import Item, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """One answer of the model.

    Attributes:
        text: what it wrote, without special tokens.
        num_tokens: sampled tokens, the end token included.
        finished: it ended by itself rather than by the limit on its length.
    """

    text: str
    num_tokens: int
    finished: bool


@dataclass(frozen=True)
class Grade:
    """What an answer is worth.

    Attributes:
        score: the reward.
        correct: whether the final answer is right, whatever the reward says about its form.
        answer: the final answer as read from the text, for the record.
    """

    score: float
    correct: bool
    answer: str | None = None


class SingleTurnEnv(BaseEnv):
    """Question in, graded answer out."""

    temperature = 1.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._correct: list[bool] = []
        self._lengths: list[int] = []
        self._pending_metrics: dict[str, float] = {}

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """The usual settings, and one vLLM server on this machine."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://localhost:9001/v1", server_type="vllm")]

    @abstractmethod
    def messages(self, problem: Any) -> list[Message]:
        """The conversation that the model answers."""

    @abstractmethod
    async def grade(self, problem: Any, response: Response) -> Grade:
        """Grade one answer."""

    @abstractmethod
    def eval_problems(self) -> Sequence[Any]:
        """The held-out problems of an evaluation, at most `eval_size` of them, the same each time."""

    def describe(self, problem: Any) -> dict[str, Any]:
        """What the record of an evaluation says of a problem, such as `question` and `gold_answer`."""
        return {"question": self.messages(problem)[-1]["content"]}

    def adjust_scores(self, grades: list[Grade], responses: list[Response]) -> list[float]:
        """The group's rewards, where they depend on the group as a whole."""
        return [grade.score for grade in grades]

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
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
        responses = [as_response(choice, node) for choice, node in zip(answer.choices, nodes, strict=True)]
        grades = await asyncio.gather(*(self.grade(item, response) for response in responses))
        self._correct.extend(grade.correct for grade in grades)
        self._lengths.extend(response.num_tokens for response in responses)
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=self.adjust_scores(list(grades), responses),
        )
        group.update(sequence_fields(nodes))  # type: ignore[typeddict-item]
        if self.config.include_messages:
            group["messages"] = [[*messages, {"role": "assistant", "content": r.text}] for r in responses]
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Greedy answers to the held-out problems; `max_eval_workers` of them in work at once."""
        problems = self.eval_problems()
        slots = asyncio.Semaphore(self.config.max_eval_workers)
        met: list[Weights] = []

        async def one(problem: Any) -> dict[str, Any]:
            async with slots, self.server.managed_server(tokenizer=self.tokenizer) as managed:
                messages = self.messages(problem)
                answer = await managed.chat_completion(
                    messages=messages, n=1, max_tokens=self.config.max_token_length, temperature=0.0, split="eval"
                )
                node = managed.get_state()["nodes"][0]
            if node.weights is not None:
                met.append(node.weights)
            response = as_response(answer.choices[0], node)
            grade = await self.grade(problem, response)
            return {
                **self.describe(problem),
                "model_parsed": grade.answer,
                "correct": grade.correct,
                "score": grade.score,
                "finish_reason": answer.choices[0].finish_reason,
                "response_tokens": response.num_tokens,
                "messages": [*messages, {"role": "assistant", "content": response.text}],
            }

        tasks = [asyncio.create_task(one(problem)) for problem in problems]
        self.eval_workers.update(tasks)
        try:
            samples = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self.eval_workers.difference_update(tasks)
        correct = sum(sample["correct"] for sample in samples)
        result = {
            "num_problems": len(samples),
            "correct": correct,
            "percent_correct": 100.0 * correct / len(samples),
            "fraction_correct": correct / len(samples),
            "mean_response_tokens": fmean(sample["response_tokens"] for sample in samples),
            "weight_version": min(met).version if met else None,
        }
        await self.evaluate_log(result, samples=list(samples), generation_parameters={"temperature": 0.0}, verbose=False)
        logger.info(
            "evaluation of %s: %d of %d correct (%.1f %%), %.1f tokens per response, weight version %s",
            self.name,
            correct,
            len(samples),
            result["percent_correct"],
            result["mean_response_tokens"],
            result["weight_version"],
        )
        # A fraction under the name that existing dashboards use.
        self._pending_metrics["eval/percent_correct"] = correct / len(samples)
        self._pending_metrics["eval/response_length"] = result["mean_response_tokens"]
        return result

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add `train/percent_correct` (a fraction), `train/response_length` (tokens) and the last evaluation."""
        metrics = dict(wandb_metrics or {})
        if self._correct:
            metrics["train/percent_correct"] = fmean(self._correct)
            metrics["train/response_length"] = fmean(self._lengths)
        metrics.update(self._pending_metrics)
        self._correct, self._lengths, self._pending_metrics = [], [], {}
        await super().wandb_log(metrics)


def as_response(choice: Any, node: Any) -> Response:
    """Read one choice of a completion and the sequence that was kept of it."""
    sampled = sum(token != PROMPT_MASK for token in node.masked_tokens)
    return Response(text=choice.message.content or "", num_tokens=sampled, finished=choice.finish_reason == "stop")
