"""Parts that several environments share: items by number, rows of files, and prompts."""

from collections.abc import Sequence
from typing import Any

from atroposlib.envs.graded import GradedEnv
from atroposlib.envs.single_turn import SingleTurnEnv
from atroposlib.type_definitions import Message


class NumberedItems(GradedEnv):
    """Items in the order of their numbers. A subclass defines `item_at`."""

    position = 0

    async def get_next_item(self) -> Any:
        self.position += 1
        return await self.item_at(self.position - 1)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Resume at the item after the last one, instead of at the first."""
        super().save_checkpoint(step, {"position": self.position} | (data or {}))


class RowsEnv(NumberedItems, SingleTurnEnv):
    """One question for each row. `setup` sets `train`, whose rows come again and again, and `test`."""

    train: Sequence[Any] = ()
    test: Sequence[Any] = ()

    async def item_at(self, number: int) -> Any:
        """Return a row by its number, which the service knows with `exact_resume`."""
        return self.train[number % len(self.train)]

    def eval_problems(self) -> Sequence[Any]:
        size = self.config.eval_size
        if size < 0:
            return self.test
        return self.test[:size]


def held_out_count(size: int, most: int) -> int:
    """Return how many held-out problems an evaluation has, given `eval_size`: 0 or less for all."""
    if size <= 0:
        return most
    return min(size, most)


def question_messages(system_prompt: str, question: str) -> list[Message]:
    """Return a conversation with one question. An empty system prompt is left out."""
    messages: list[Message] = [{"role": "user", "content": question}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
