"""Two sums in one conversation and a reward for each answer; the starter model gets some right.

python tests/e2e/sums_in_turns.py serve --env.turn_rewards to_go
"""

from collections.abc import Iterator

from atroposlib.envs.multi_turn import Conversation, MultiTurnEnv, Step
from atroposlib.utils.math_scoring import last_boxed
from environments.arithmetic_server import Problem, held_out_problems, training_problems

TURNS = 2


class SumsInTurns(MultiTurnEnv):
    """The next question follows whatever the answer was."""

    name = "sums_in_turns"

    async def setup(self) -> None:
        self.problems: Iterator[Problem] = training_problems(self.config.seed, (1,))

    async def get_next_item(self) -> tuple[Problem, ...]:
        return tuple(next(self.problems) for _ in range(TURNS))

    def eval_problems(self) -> list[tuple[Problem, ...]]:
        return [(problem,) * TURNS for problem in held_out_problems(2, (1,))]

    async def reset(self, item: tuple[Problem, ...]) -> Conversation:
        return Conversation([{"role": "user", "content": item[0].question}])

    async def step(self, talk: Conversation) -> Step:
        asked = len(talk.turns)
        reward = 1.0 if last_boxed(talk.text) == str(talk.item[asked - 1].answer) else -1.0
        if asked == TURNS:
            return Step(reward=reward, done=True)
        return Step(
            reward=reward, messages=[{"role": "user", "content": talk.item[asked].question}]
        )


if __name__ == "__main__":
    SumsInTurns.cli()
