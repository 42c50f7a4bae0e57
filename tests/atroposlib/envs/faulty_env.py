"""Arithmetic whose grader breaks: at each call whose number the variable BROKEN_EVERY divides."""

import os
from typing import Any

from environments.arithmetic_server import ArithmeticEnv


class Faulty(ArithmeticEnv):
    calls = 0

    async def grade(self, problem: Any, response: Any) -> Any:
        Faulty.calls += 1
        if Faulty.calls % int(os.environ["BROKEN_EVERY"]) == 0:
            raise RuntimeError("the grader broke")
        return await super().grade(problem, response)


if __name__ == "__main__":
    Faulty.cli()
