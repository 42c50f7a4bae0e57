"""Every environment with a final answer reads it outside of the reasoning, whether prompt or model
opened that.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from atroposlib.envs.multi_turn import Conversation, Turn
from atroposlib.envs.single_turn import Response, as_response
from atroposlib.inference.managed_server import ManagedServer, SequenceNode
from atroposlib.utils.math_scoring import MathScorer
from environments.arithmetic_server import ArithmeticEnv, Problem, held_out_problems
from environments.calculator_server import CalculatorEnv, held_out_calculations
from environments.math_server import MathEnv, Question
from example_trainer.batch.problems import Problem as TrainerProblem
from tests.atroposlib.inference.template_shapes import END, STARTER, Sampler, Shape

THINK = "<think>\n"
Graded = Callable[[str, str], bool]
"""From a response and what its prompt opened to whether the answer is right."""


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    made = MathScorer()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["arithmetic", "math", "calculator", "simple_rl"])
def graded(request: pytest.FixtureRequest, tokenizer_dir: Path, scorer: MathScorer) -> Any:
    """A grader, the right answer of its problem and a wrong one."""
    if request.param == "simple_rl":
        return (lambda text, opened: TrainerProblem("q", "7").score(text, opened) > 0), "7", "8"
    kinds: dict[str, Any] = {"arithmetic": ArithmeticEnv, "math": MathEnv}
    kind = kinds.get(request.param, CalculatorEnv)
    config, servers = kind.config_init()
    config.tokenizer_name = str(tokenizer_dir)
    env = kind(config, servers)
    if kind is CalculatorEnv:
        (calculation,) = held_out_calculations(1)

        def of_talk(text: str, opened: str) -> bool:
            talk = Conversation([], item=calculation, turns=[Turn(text, 5, True, opened=opened)])
            return bool(asyncio.run(env.grade(talk)).correct)

        return of_talk, str(calculation.answer), str(calculation.answer + 1)
    problem: Any = Question("q", "18") if kind is MathEnv else held_out_problems(1)[0]
    right = "18" if kind is MathEnv else str(problem.answer)
    if kind is MathEnv:
        env.scorer = scorer

    def of_answer(text: str, opened: str) -> bool:
        return bool(asyncio.run(env.grade(problem, Response(text, 5, True, opened))).correct)

    return of_answer, right, str(int(right) + 1)


@given(data=st.data())
def test_the_reasoning_is_never_the_answer(
    graded: tuple[Graded, str, str], data: st.DataObject
) -> None:
    grade, right, wrong = graded
    inside = data.draw(st.sampled_from([right, wrong]))
    box = f"So \\boxed{{{inside}}}."
    assert not grade(box, THINK), "reasoning that never ends holds no answer"
    assert not grade(f"<think>{box}", "")
    assert not grade(f"{box}</think>I do not know.", data.draw(st.sampled_from([THINK, ""])))
    for answer in (right, wrong):
        for text, opened in [
            (f"{box}</think>", THINK),
            (f"{box}</think>", ""),
            (f"<think>{box}</think>", ""),
        ]:
            assert grade(f"{text}\\boxed{{{answer}}}", opened) == (answer == right)
    assert grade(f"\\boxed{{{right}}}", "<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("text", "score"), [("so \\boxed{3}", -1.0), ("so\n</think>\n\n\\boxed{3}", 1.0)]
)
def test_what_the_template_opened_comes_to_the_grader(text: str, score: float) -> None:
    """From the prompt of the request, over the sequence that is kept, to the score of the group."""
    sampler = Sampler(PreTrainedTokenizerFast.from_pretrained(STARTER))
    sampler.tokenizer.chat_template = Shape(THINK).template
    sampler.next = [
        (sampler.tokenizer.encode(f"{text}{END}", add_special_tokens=False), "stop")
    ] * 4
    config, servers = ArithmeticEnv.config_init()
    config.tokenizer_name, config.group_size, config.include_messages = str(STARTER), 2, True
    env = ArithmeticEnv(config, servers)
    problem = Problem("What is 1 plus 2?", 3, difficulty=1, left=1, operator="+", right=2)

    class Server:
        @contextlib.asynccontextmanager
        async def managed_server(self, tokenizer: Any) -> Any:
            yield ManagedServer(sampler, tokenizer=sampler.tokenizer)

    env.tokenizer = sampler.tokenizer
    env.server = Server()  # type: ignore[assignment]
    group = asyncio.run(env.collect_group(problem))
    assert group["scores"] == [score] * 2
    assert group["messages"][0][-1]["content"] == THINK + text  # type: ignore[index]
    (attempt, _) = asyncio.run(env.attempt(problem, 2, 1.0))
    assert attempt.record["correct"] == (score > 0)


def test_a_response_knows_what_its_prompt_opened() -> None:
    class Choice:
        class message:
            content = "5</think>4"

        finish_reason = "stop"

    def of(metadata: Any) -> Response:
        return as_response(
            Choice,
            SequenceNode(
                full_text="", tokens=[1], masked_tokens=[1], logprobs=[0.0], metadata=metadata
            ),
        )

    assert of({"opened": THINK}).opened == THINK
    assert of({"opened": THINK}).whole == "<think>\n5</think>4", "records hold the tag"
    assert of({"opened": "<think></think>"}).whole == of(None).whole == "5</think>4"
    assert of(None).answer == of({}).answer == "4"
