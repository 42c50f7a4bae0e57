"""Environments written for the verifiers package, as test_verifiers_env.py serves them."""

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(1, 41)]


def exact(completion: Any, answer: str, **_: Any) -> float:
    last = completion[-1]
    text = last["content"] if isinstance(last, dict) else last.content
    return 1.0 if str(text).strip() == answer else 0.0


def broken(completion: Any, **_: Any) -> float:
    raise KeyError("no such thing")


def double(number: int) -> str:
    """Twice a number.

    Args:
        number: what is doubled.
    """
    return str(2 * number)


class AsksAgain(vf.MultiTurnEnv):
    """Asks whether the model is sure, once."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "Are you sure?"}]


def load_environment(kind: str = "single") -> Any:
    """One question to train on, one plus one, and ten others to evaluate on."""
    data = {"dataset": Dataset.from_list(ROWS[:1]), "eval_dataset": Dataset.from_list(ROWS[30:])}
    rubric = vf.Rubric(funcs=[broken if kind == "broken" else exact])
    if kind == "again":
        return AsksAgain(max_turns=2, rubric=rubric, **data)
    if kind == "tool":
        return vf.ToolEnv(tools=[double], max_turns=2, rubric=rubric, **data)
    return vf.SingleTurnEnv(rubric=rubric, system_prompt="Give the number alone.", **data)
