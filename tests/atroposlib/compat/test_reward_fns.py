"""Reward functions: their making by name, and their scores of texts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.compat.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.compat.reward_fns.registry import RewardRegistry
from atroposlib.compat.reward_fns.rewards import (
    AccuracyReward,
    CrosswordFormatReward,
    FormatReasoningReward,
    R1Reward,
    ReasoningStepsReward,
    RepetitionPenaltyReward,
    cascading_r1_math_reward,
    parse_reasoning_response,
)
from atroposlib.utils import math_scoring


class Length(RewardFunction):
    """Characters."""

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(self.get_content(completion))) for completion in completions]


class Log:
    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:
        self.entries.append(values)


def test_a_reward_is_weighted_and_logged() -> None:
    reward, log = Length(weight=2.0, unit="characters"), Log()
    reward.set_wandb_logger(log)
    assistant = {"role": "assistant", "content": "hello"}
    assert reward(["abc", assistant, [{"role": "user", "content": "?"}, assistant]]) == [
        6.0,
        10.0,
        10.0,
    ]
    assert reward.config == {"unit": "characters"}
    assert log.entries == [
        {
            "reward/length/mean_raw": 13 / 3,
            "reward/length/mean_weighted": 26 / 3,
            "reward/length/min": 3,
            "reward/length/max": 5,
        }
    ]


@pytest.mark.parametrize(
    "completion", [None, 5, [], {"role": "user", "content": "x"}, {"role": "assistant"}]
)
def test_what_has_no_text_is_an_error_and_no_score(completion: Any) -> None:
    with pytest.raises(TypeError, match="no text of an assistant"):
        Length()([completion])


@pytest.mark.parametrize(
    ("scores", "says"),
    [([1.0], "1 scores for 2"), ([1.0, float("nan")], "returned nan for completion 1")],
)
def test_wrong_scores_are_an_error(scores: list[float], says: str) -> None:
    reward = RewardRegistry()
    reward.register_function("odd", lambda completions, **_: scores)
    with pytest.raises(ValueError, match=says):
        reward.create("odd")(["a", "b"])


def test_rewards_are_made_by_name_and_by_configuration() -> None:
    for name in ("format", "format_reward"):
        assert type(registry.create(name)).__name__ == "FormatReward"
    made = registry.create(
        {"type": "format", "weight": 0.5, "params": {"preferred_tags": ["plan"]}, "name": "planned"}
    )
    assert (made.name, made.weight) == ("planned", 0.5)
    assert made(["<plan>x</plan>", "<think>x</think>"]) == [0.5, 0.0]
    assert registry.create("cascading_r1_math").name == "cascading_r1_math_reward"
    for name in registry.list_registered():
        registry.get(name)


def test_own_rewards_can_be_registered() -> None:
    mine = RewardRegistry()
    mine.register(Length)
    assert mine.register(name="characters")(Length) is Length
    mine.register_function(
        "twice", lambda completions, times=2.0, **_: [times for _ in completions]
    )
    assert isinstance(mine.create("length"), Length)
    assert mine.create("characters", weight=3)(["ab"]) == [6.0]
    assert mine.create({"type": "twice", "params": {"times": 5.0}, "weight": 2})(["ab"]) == [10.0]
    assert {"length", "characters", "twice", "accuracy"} <= set(mine.list_registered())
    with pytest.raises(TypeError, match="register_function"):
        mine.register(len)


def test_an_unknown_reward_is_named_at_the_start() -> None:
    with pytest.raises(
        ImportError, match="no reward function is called 'nope'; there are accuracy"
    ):
        registry.create("nope")
    with pytest.raises(ImportError, match="embedding model"):
        registry.create("cosine_scaled")
    with pytest.raises(KeyError, match="must name its type"):
        registry.create({"weight": 1.0})
    nested = {
        "reward_functions": [
            "format",
            {"type": "combined", "rewards": ["r1", {"type": "accuracy"}]},
        ]
    }
    assert registry.load_required_functions(nested) == {"format", "combined", "r1", "accuracy"}
    with pytest.raises(ImportError):
        registry.load_required_functions(["format", "nope"])


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("none", [14.0, 42.0, 28.0]), ("sum", [5.6, 16.8, 11.2]), ("minmax", [0.0, 2.0, 1.0])],
)
def test_combined_rewards_honour_the_weights_of_their_parts(
    normalization: str, expected: list[float]
) -> None:
    parts = [{"type": "length", "weight": 2.0}, {"type": "tenfold", "weight": 0.5}]
    registry.register(Length)
    registry.register_function(
        "tenfold", lambda completions, **_: [10.0 * len(text) for text in completions]
    )
    combined = CombinedReward(parts, normalization=normalization, weight=2.0)
    assert combined(["x", "yyy", "zz"]) == pytest.approx(expected)
    assert combined.name == "combined(length,<lambda>)"
    with pytest.raises(ValueError, match="there are none, sum, minmax"):
        CombinedReward(parts, normalization="mean")


def test_an_error_in_a_part_is_an_error_of_the_whole() -> None:
    def broken(completions: list[Any], **_: Any) -> list[float]:
        raise RuntimeError("no such thing")

    registry.register_function("broken", broken)
    with pytest.raises(RuntimeError, match="no such thing"):
        CombinedReward(["format", "broken"])(["x"])


ANSWERS = {
    r"\boxed{5}": 1.0,
    r"so \boxed{5.0}": 1.0,
    r"\boxed{\frac{10}{2}}": 1.0,
    r"<think>\boxed{4}</think> \boxed{5}": 1.0,
    r"<think>\boxed{5}</think> 6": 0.0,
    r"\boxed{5} or \boxed{5}": 1.0,
    r"\boxed{5} (put it in \boxed{})": 1.0,
    r"\boxed{4}, no: \boxed{5}": 0.0,
    "#### 5": 1.0,
    "The answer is $5$": 1.0,
    "5": 0.0,
    r"\boxed{5": 0.0,
    "": 0.0,
}


@pytest.mark.parametrize("solution", ["5", r"\boxed{5}", "First 2, then 3.\n#### 5"])
def test_accuracy(solution: str) -> None:
    assert AccuracyReward().compute(list(ANSWERS), solution=solution) == list(ANSWERS.values())
    assert AccuracyReward(tolerance=0.5).compute([r"\boxed{5.4}"], ground_truth="5") == [1.0]
    small = [r"\boxed{1.6001e-19}", r"\boxed{0}", r"\boxed{1e-7}", r"\boxed{1.7e-19}"]
    assert AccuracyReward()(small, solution="1.6e-19") == [1.0, 0.0, 0.0, 0.0]
    assert AccuracyReward()([r"\boxed{1e-16}", r"\boxed{1e-3}"], solution="0") == [1.0, 0.0]
    assert AccuracyReward(split_on_think_tag=False).compute(
        [r"<think>\boxed{5}</think> 6"], solution="5"
    ) == [1.0]


def test_accuracy_outside_the_main_thread() -> None:
    """An environment may score in a thread, where math_verify's alarm does not work."""
    compute = AccuracyReward().compute
    assert asyncio.run(
        asyncio.to_thread(compute, [r"\boxed{x+1}", r"\boxed{x}"], solution="1+x")
    ) == [1.0, 0.0]


async def test_a_power_with_many_digits_takes_no_memory_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alarm of math_verify comes too late: the power takes hundreds of megabytes before."""
    monkeypatch.setattr(math_scoring, "KILL_AFTER_SECONDS", 2.0)
    before = peak_bytes(reset=True)
    assert AccuracyReward()([r"\boxed{2^{10^{10}}}"], solution="5") == [0.0]
    assert peak_bytes() - before < 100 << 20


def peak_bytes(reset: bool = False) -> int:
    """Return the most memory that this process had since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("solution", [None, ["5", "6"]])
def test_a_missing_reference_is_an_error_and_no_score(solution: Any) -> None:
    for name in ("accuracy", "r1", "accuracy_x"):
        with pytest.raises(ValueError, match=r"a reference is needed|2 entries for 1"):
            registry.create(name)([r"\boxed{5}"], solution=solution)


def test_thinking_and_response() -> None:
    texts = [
        "<think>a</think> It is 5",
        "<think>a</think>",
        "It is 5",
        "<think>x</think><think>y</think> 5",
        "<think></think>6",
    ]
    assert R1Reward()(texts, solution="5") == [1.5, 0.0, 1.0, 1.0, 0.0]
    assert FormatReasoningReward(allow_multiple_thinking=True)(texts) == [0.5, 0.0, 0.0, 0.5, 0.0]
    assert parse_reasoning_response(texts[0]) == {
        "thinking_content": "a",
        "response": "It is 5",
        "multiple_thinking": False,
    }


@given(
    thought=st.text(alphabet="ab 5\n", max_size=8),
    answer=st.sampled_from(
        ["", r"\boxed{5}", r"\boxed{4}", "1-Across: FIVE 5", "<answer>5</answer>"]
    ),
    name=st.sampled_from(
        [
            "accuracy",
            "accuracy_x",
            "r1",
            "format_reasoning",
            "format",
            "cascading_r1_math",
            "crossword_format",
        ]
    ),
)
def test_a_tag_in_the_prompt_is_worth_as_much_as_one_in_the_completion(
    thought: str, answer: str, name: str
) -> None:
    reward = registry.create(name)
    rest = f"{thought}\\boxed{{5}}</think>{answer}"
    (expected,) = reward(["<think>" + rest], solution="5")
    assert reward([rest], solution="5") == [expected]
    assert reward([rest], solution="5", opened="<think>\n") == [expected]
    assert (
        reward([rest, rest], solution="5", prompts=["<|assistant|><think>", "<|assistant|>"])
        == [expected] * 2
    )
    unended = thought + r"\boxed{5} 1-Across: FIVE <answer>5</answer>"
    assert (
        reward([unended], solution="5", opened="<think>")
        == reward([f"<think>{unended}"], solution="5")
        == [0.0]
    )


def test_what_the_prompts_opened_is_given_for_all_or_for_each() -> None:
    with pytest.raises(ValueError, match="opened has 2 entries for 1 completions"):
        registry.create("r1")(["x"], solution="x", opened=["", ""])


def test_the_format_counts_only_for_right_answers() -> None:
    think = "<think>a</think>"
    texts = [
        think + r" \boxed{5}",
        r"\boxed{5}",
        think + r" \boxed{6}",
        think + r"<answer>\boxed{5}</answer>",
    ]
    assert cascading_r1_math_reward(texts, solution="5") == [1.5, 1.0, 0.0, 1.0]


def test_crossword_answers() -> None:
    assert CrosswordFormatReward()(
        ["1-Across: HELLO", "2-down: so it is", "1. HELLO", "HELLO"]
    ) == [1.0, 1.0, 0.0, 0.0]
    assert CrosswordFormatReward(valid_chars="HEL")(["1-Across: HELLO"]) == [0.0]


def test_steps() -> None:
    words = "one two six ten red sun dog cat sky sea "
    steps = "Step 1: a. Step 2: b. "
    texts = [
        "short",
        words,
        words + steps,
        words + steps + "Step 3: c.",
        words + steps + "Step 3: c.\n1. x\n2. y\n3. z",
        words + "- a",
    ]
    assert ReasoningStepsReward()(texts) == pytest.approx([0.0, 0.1, 0.1 + 1 / 3, 0.6, 1.0, 0.1])
    assert ReasoningStepsReward()([words + "\n- a\n- b\n- c"]) == [0.5]


def test_repetition() -> None:
    varied = "Every sentence here says something new. Nobody repeats what was told before. Different words follow each other."
    parrot = "The parrot said hello again. " * 4
    some = "We add two and three. We add two and four. Then the result of that is ten. It was quite simple after all."
    none, all_of_it, part, short = RepetitionPenaltyReward()([varied, parrot, some, "Too short."])
    assert (none, all_of_it, short) == (0.0, -1.0, -0.1)
    assert all_of_it < part < none


def test_meaning_is_the_cosine_of_embeddings(tmp_path: Path) -> None:
    """With a model of two words whose embeddings are known: only its scores matter here."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    inner = Tokenizer(
        models.WordLevel({"[UNK]": 0, "[PAD]": 1, "yes": 2, "no": 3}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(tmp_path)
    torch.manual_seed(0)
    tiny = BertConfig(
        vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    BertModel(tiny).save_pretrained(tmp_path)
    reward = registry.create(
        {"type": "cosine_scaled", "params": {"model_name": str(tmp_path), "min_reward": 0.0}}
    )
    same, other = reward(["yes", "no"], solution="yes")
    assert same == pytest.approx(1.0, abs=1e-6)
    assert 0.0 <= other < same
    twice = registry.create(
        {
            "type": "cosine_scaled",
            "model_name": str(tmp_path),
            "scale_factor": 2.0,
            "min_reward": -9.0,
        }
    )
    assert twice(["no"], solution="yes")[0] == pytest.approx(
        1 - 2 * (1 - raw_cosine(reward, "no", "yes"))
    )
    with pytest.raises(ImportError, match="no embedding model 'nowhere'"):
        registry.create("cosine_scaled", model_name="nowhere")


def raw_cosine(reward: Any, *texts: str) -> float:
    from atroposlib.compat.reward_fns.rewards import cosine

    return cosine(*reward._embeddings(texts))
