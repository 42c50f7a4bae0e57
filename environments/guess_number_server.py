"""Find a number by comparing: several turns and a tool, explained in docs/multi-turn.md."""

import random

from atroposlib.envs.multi_turn import Conversation, Grade, MultiTurnEnv, Step


def compare(guess: int, talk: Conversation) -> str:
    """Compare a guess with the number.

    Args:
        guess: from 1 to 100.
    """
    talk.state["found"] = guess == talk.item
    if guess == talk.item:
        return "equal"
    return "too small" if guess < talk.item else "too large"


class GuessNumber(MultiTurnEnv):
    name, tools = "guess_number", (compare,)

    async def setup(self) -> None:
        self.rng = random.Random(self.config.seed)

    async def get_next_item(self) -> int:
        return self.rng.randint(1, 100)

    def eval_problems(self) -> list[int]:
        return [3, 14, 15, 92, 65]

    async def reset(self, item: int) -> Conversation:
        return Conversation(
            [{"role": "user", "content": "Find my number, from 1 to 100."}], state={"found": False}
        )

    async def step(self, talk: Conversation) -> Step:
        found = talk.state["found"]
        return Step(reward=1.0 if found else -0.1, done=found or not talk.turns[-1].calls)

    async def grade(self, talk: Conversation) -> Grade:
        return Grade(score=0.0 if talk.state["found"] else -1.0, correct=talk.state["found"])


if __name__ == "__main__":
    GuessNumber.cli()
