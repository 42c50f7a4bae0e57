"""How often does a letter occur in a word? A whole environment, explained in docs/environments.md."""

import random
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # run by path: import from the repository

from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from atroposlib.utils.boxed import last_boxed

WORDS = ["strawberry", "banana", "bookkeeper", "mississippi", "committee", "balloon"]
HELD_OUT = ["parallel", "address", "coffee", "success"]


class LetterCount(SingleTurnEnv):
    name = "letter_count"

    async def setup(self) -> None:
        self.rng = random.Random(self.config.seed)

    async def get_next_item(self) -> tuple[str, str]:
        word = self.rng.choice(WORDS)
        return word, self.rng.choice(word)

    def eval_problems(self) -> list[tuple[str, str]]:
        return [(word, letter) for word in HELD_OUT for letter in sorted(set(word))]

    def messages(self, problem: tuple[str, str]) -> list[Message]:
        return [{"role": "user", "content": "How often is {1} in {0}? Give \\boxed{{number}}.".format(*problem)}]

    async def grade(self, problem: tuple[str, str], response: Response) -> Grade:
        word, letter = problem
        correct = last_boxed(response.answer) == str(word.count(letter))
        return Grade(score=1.0 if correct else -1.0, correct=correct)


if __name__ == "__main__":
    LetterCount.cli()
