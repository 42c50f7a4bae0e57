"""The cases that serve a trainer.

Rows have the columns that the file reads and nothing of the real data sets. Where the answers
decide the scores, every row has the same solution under another question. So answers handed out in
turn give groups with unequal scores.
"""

from __future__ import annotations

import json
from typing import Any

from tests.environments.public.case import Case, Rows, call, numbered, said

BOXED = [
    "<think>Two and two.</think> The answer is \\boxed{4}",
    "<think>Perhaps more.</think> The answer is \\boxed{5}",
    "<think>I am sure of it.</think> So it is \\boxed{4}",
    "<think>I do not know at all.</think> Let me say \\boxed{17}",
]
ANSWER_TAGS = [
    "two and two </think> <answer> \\boxed{4} </answer>",
    "one more </think> <answer> \\boxed{5} </answer>",
    "it must be this </think> <answer> \\boxed{4} </answer>",
    "I cannot say, and I never could.",
]

GSM8K: Rows = {
    "gsm8k": {
        "train": numbered(
            40,
            lambda n: {"question": f"Task {n}: what is two and two?", "answer": "Add them. #### 4"},
        ),
        "test": numbered(
            6,
            lambda n: {"question": f"Test {n}: what is two and two?", "answer": "Add them. #### 4"},
        ),
    }
}
MATH: Rows = {
    "zwhe99/DeepMath-103K": {
        "train": numbered(
            40, lambda n: {"question": f"Task {n}: what is two and two?", "final_answer": "4"}
        )
    },
    "HuggingFaceH4/aime_2024": {
        "train": numbered(3, lambda n: {"problem": f"AIME {n}", "answer": "4"})
    },
    "HuggingFaceH4/math-500": {
        "test": numbered(3, lambda n: {"problem": f"MATH {n}", "answer": "4"})
    },
    "math-ai/amc23": {"test": numbered(3, lambda n: {"question": f"AMC {n}", "answer": "4"})},
    "math-ai/minervamath": {
        "test": numbered(3, lambda n: {"question": f"Minerva {n}", "answer": "4"})
    },
    "math-ai/olympiadbench": {
        "test": numbered(3, lambda n: {"question": f"Olympiad {n}", "final_answer": ["4"]})
    },
}


WEATHER = call("weather", city="Berlin")
TOOLS_SYSTEM = (
    'You have tools: <tools>[{"name": "weather", "parameters": {"city": "string"}}]</tools>'
)


def tool_talk(number: int) -> dict[str, Any]:
    """A conversation in which two questions are answered with a call and a summary each."""
    return {
        "conversations": said(
            ("system", TOOLS_SYSTEM),
            ("human", f"Question {number}: what is the weather in Berlin?"),
            ("gpt", f"<think>I look it up.</think>\n{WEATHER}"),
            ("tool", '<tool_response>{"weather": "sunny"}</tool_response>'),
            ("gpt", "<think>Good.</think> It is sunny."),
            ("human", "And once more, please?"),
            ("gpt", f"<think>I look it up again.</think>\n{WEATHER}"),
            ("tool", '<tool_response>{"weather": "rainy"}</tool_response>'),
            ("gpt", "<think>Oh.</think> It rains now."),
        )
    }


RIGHT_CALL, OTHER_CALL = (
    f"<think>I look it up.</think>\n{WEATHER}",
    "<think>No need.</think>\n" + call("weather", city="Rome"),
)
TOOL_TURNS = [
    {
        "when": r"<\|im_start\|>tool\n(?:(?!<\|im_start\|>).)*<\|im_start\|>assistant\n$",
        "answers": ["<think>Fine.</think> It is sunny there."],
    },
    {
        "when": r"once more, please\?<\|im_end\|>\n<\|im_start\|>assistant\n$",
        "answers": [RIGHT_CALL],
    },
    {
        "when": "",
        "answers": [RIGHT_CALL, OTHER_CALL, RIGHT_CALL, "I would not know, and I do not ask."],
    },
]

LETTERS = [
    "<think>It is the first.</think> The best answer is A",
    "<think>It is the second.</think> The best answer is B",
    "<think>Without doubt.</think> The best answer is A",
    "The best answer is a riddle to me",
]
MCQA: Rows = {
    "NousResearch/AcademicMCQA": {
        "train": numbered(
            100,
            lambda n: {
                "prompt": f"Question {n}: which letter comes first? A) one B) two",
                "answer": 0,
                "ground_truth": "A",
                "options": ["one", "two", "three", "four"],
            },
        )
    }
}

SERVING: tuple[Case, ...] = (
    Case("gsm8k_server", "gsm8k_server.py", "single turn, chat", BOXED, GSM8K, servers=2),
    Case(
        "gsm8k_server_axolotl",
        "gsm8k_server_axolotl.py",
        "single turn, text tokenised afterwards",
        BOXED,
        GSM8K,
        server_type="openai",
    ),
    Case(
        "math_server",
        "math_server.py",
        "single turn and judge, several groups for an item",
        rules=[
            {
                "when": "Solution 1|solution1|correct or incorrect|judge",
                "answers": ["<think>Hm.</think> \\boxed{1}", "<think>No.</think> \\boxed{2}"],
            },
            {"when": "", "answers": BOXED},
        ],
        rows=MATH,
        env={"run_evaluation": "False"},
    ),
    Case(
        "math_server_zero",
        "math_server_zero.py",
        "raw text completion with stop words",
        ANSWER_TAGS,
        MATH,
        servers=2,
    ),
    Case(
        "mcqa_thinking_env", "mcqa_thinking_env.py", "single turn, rendered prompt", LETTERS, MCQA
    ),
    Case(
        "mcqa_thinking_env_yaml",
        "mcqa_thinking_env.py",
        "settings of `configs/example.yaml`",
        LETTERS,
        MCQA,
        yaml="configs/example.yaml",
    ),
    Case(
        "rlaif_server",
        "rlaif_server.py",
        "judge: the served model compares two answers",
        rules=[
            {"when": r"\[Response A\]\s*A first", "answers": ["I think \\boxed{A}"]},
            {
                "when": r"\[Response A\]",
                "answers": ["I think \\boxed{B}", "I think \\boxed{B}", "I think \\boxed{A}"],
            },
            {
                "when": "",
                "answers": [
                    "A first answer of some length.",
                    "A second answer, longer than the first one was.",
                ],
            },
        ],
        rows={
            "allenai/WildChat": {
                "train": numbered(
                    40,
                    lambda n: {
                        "conversation": [
                            {"role": "user", "content": f"Tell me something, number {n}."},
                            {"role": "assistant", "content": "Something."},
                        ]
                    },
                )
            }
        },
        group_size=2,
        batch_size=2,
    ),
    Case(
        "tool_calling_server",
        "tool_calling_server.py",
        "tools written as text",
        [RIGHT_CALL, OTHER_CALL, RIGHT_CALL, "I would not know, and I do not ask."],
        {"NousResearch/XLAM-Atropos": {"train": numbered(140, tool_talk)}},
    ),
    Case(
        "tool_use_multiturn_server",
        "tool_use_multiturn_server.py",
        "multi-turn with tools",
        rows={
            "interstellarninja/toolace_hermes_sequential_tool_use": {
                "train": numbered(40, tool_talk)
            }
        },
        rules=TOOL_TURNS,
    ),
    Case(
        "tool_use_turnlevel_advantage_server",
        "tool_use_turnlevel_advantage_server.py",
        "multi-turn with tools, an advantage for each token",
        rows={"interstellarninja/hermes_reasoning_tool_use": {"train": numbered(60, tool_talk)}},
        rules=TOOL_TURNS,
    ),
    Case(
        "tool_use_interleaved_thinking",
        "tool_use_interleaved_thinking.py",
        "tools called in the middle of thinking",
        rows={
            "nvidia/AceReason-Math": {
                "train": numbered(60, lambda n: {"problem": "What is two and two?", "answer": "4"})
            }
        },
        rules=[
            {
                "when": "tool_response>",
                "answers": ["so it is. </think> \\boxed{4}", "but no. </think> \\boxed{5}"],
            },
            {
                "when": "",
                "answers": [
                    "<think> " + call("calculator", expr="2+2"),
                    "<think> I know. </think> \\boxed{4}",
                ],
            },
        ],
    ),
    Case(
        "fundamental_prediction_environment",
        "fundamental_prediction_environment.py",
        "single turn, two groups of scores",
        [
            "<think>Up.</think> The EPS will be: raised and the magnitude will be: 5%",
            "<think>Down.</think> The EPS will be: reduced and the magnitude will be: 5%",
            "<think>Up.</think> The EPS will be: raised and the magnitude will be: 9%",
            "<think>I do not know.</think> The EPS is nobody's business",
        ],
        {
            "NousResearch/company-fundamentals-prediction-lite": {
                "train": numbered(
                    60,
                    lambda n: {
                        "context": f"Company {n} sold more.",
                        "answer": "raised",
                        "magnitude": "5",
                        "fundamental_metric": "EPS",
                    },
                )
            }
        },
    ),
    Case(
        "text_reversal_environment",
        "text_reversal_environment.py",
        "single turn, an endpoint of text",
        [
            "<think>Backwards.</think> <reversed_text>oh</reversed_text>",
            "<think>Forwards.</think> <reversed_text>ho</reversed_text>",
            "<think>Once more.</think> <reversed_text>oh</reversed_text>",
            "I would rather not say anything.",
        ],
        {
            "NousResearch/TextReversalDataset": {
                "train": numbered(40, lambda n: {"text": "ho", "level": n}),
                "test": numbered(5, lambda n: {"text": "ho", "level": n}),
            }
        },
        server_type="openai",
    ),
    Case(
        "gym_taxi",
        "game_environments/gymnasium/gym_taxi.py",
        "multi-turn game",
        rules=[
            {
                "when": "Previous Taxi.*Previous Taxi",
                "answers": ["I say 9", "I say 9", "I say 9", "I say 9"],
            },
            {"when": "", "answers": ["I go 0", "I go 1", "I go 2", "I go 3"]},
        ],
    ),
    Case(
        "blackjack_env_no_thinking",
        "game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py",
        "multi-turn game with tools",
        [call("take_action", action="hit"), call("take_action", action="stick")] * 2,
        server_type="openai",
        env={"eval_episodes": 1},
    ),
    Case(
        "regex_env",
        "community/regex_generation/regex_env.py",
        "single turn, answers are run",
        [
            "<think>Digits.</think> <answer>[0-9]+</answer>",
            "<think>Anything.</think> <answer>.*</answer>",
            "<think>Letters.</think> <answer>[a-z]{3}</answer>",
            "<think>Nothing.</think> <answer>(</answer>",
        ],
    ),
    Case(
        "sql_query_env",
        "community/sql_query_env/sql_query_env.py",
        "single turn, answers are run",
        [
            "<think>One column.</think> \\boxed{SELECT name FROM data WHERE age = 7}",
            "<think>All of it.</think> \\boxed{SELECT * FROM data}",
            "<think>One column.</think> \\boxed{SELECT name FROM data WHERE age = 7}",
            "<think>Hm.</think> \\boxed{SELECT nothing}",
        ],
        files={
            f".cache/wikisql/data/{split}{kind}": text
            for split in ("train", "dev", "test")
            for kind, text in (
                (
                    ".jsonl",
                    "\n".join(
                        json.dumps(
                            {
                                "question": f"Question {n}: who is 7?",
                                "table_id": "t",
                                "sql": {"sel": 0, "agg": 0, "conds": [[1, 0, 7]]},
                            }
                        )
                        for n in range(20)
                    ),
                ),
                (
                    ".tables.jsonl",
                    json.dumps(
                        {
                            "id": "t",
                            "header": ["name", "age"],
                            "rows": [["Ann", 7], ["Bob", 8]],
                            "types": ["text", "real"],
                        }
                    ),
                ),
                (".db", ""),
            )
        },
    ),
    Case(
        "humor_env",
        "community/humor_generation/humor_env.py",
        "judge: a rubric for each answer",
        rules=[
            {"when": "Score: X.*cat", "answers": ["Score: 2\nScore: 3"]},
            {"when": "Score: X.*", "answers": ["Score: 1\nScore: 0"]},
            {
                "when": "",
                "answers": [
                    "A cat walks in.",
                    "A dog walks in.",
                    "Two cats walk in.",
                    "Nobody walks in.",
                ],
            },
        ],
        files={
            "data/humor_dataset.jsonl": "\n".join(
                json.dumps(
                    {"question": f"Joke {n}?", "format": "one-liner", "comedian": "Anonymous"}
                )
                for n in range(20)
            )
        },
        env={"data_path": "data/humor_dataset.jsonl"},
        server_type="openai",
    ),
    Case(
        "ocr_vqa",
        "multimodal_dpo/ocr_vqa.py",
        "images",
        [
            "I read it: <answer>one</answer>",
            "I read it: <answer>two</answer>",
            "It says so: <answer>one</answer>",
            "I cannot read that at all.",
        ],
        {
            "howard-hou/OCR-VQA": {
                "train": numbered(
                    20,
                    lambda n: {
                        "questions": [f"What is written in {n}?"],
                        "answers": ["one"],
                        "image": "PICTURE",
                    },
                )
            }
        },
        server_type="openai",
    ),
    Case(
        "reasoning_gym_environment",
        "reasoning_gym_environment/reasoning_gym_environment.py",
        "generated tasks with a scorer each",
        [
            "<think>Perhaps.</think> <answer>4</answer>",
            "<think>Rather.</think> <answer>0 1 0 1</answer>",
            "<think>Or else.</think> <answer>A</answer>",
            "I would not know.",
        ],
        groups=2,
    ),
    Case(
        "t1_env",
        "t1_tool_planning/t1_env.py",
        "multi-turn with tools, all in one managed server; `configs/default.yaml`",
        rules=[
            {
                "when": "Rome, please",
                "answers": [
                    "Nothing to look up.",
                    "<think>Hm.</think> I look.\n" + call("search_hotels", city="Rome"),
                ],
            },
            {
                "when": "",
                "answers": [
                    "What city?",
                    call("search_hotels", city="Paris"),
                    "I see.",
                    "Which one?",
                ],
            },
        ],
        hub={
            f"{domain}/train/one.csv": "ID,Filled_Template,Filled_Plan\n"
            + "".join(
                f"{n},assistant: Hello {n}.,\n{n},user: I want a hotel in {domain} {n}.,\n"
                f'{n},"user: Rome, please.","hotels = search_hotels(city=[""Rome""])"\n'
                for n in range(6)
            )
            for domain in ("hotel", "flight", "restaurant", "attraction")
        },
        yaml="t1_tool_planning/configs/default.yaml",
        groups=2,
        seconds=45,
        expected="differs",
        why="without vLLM beside it the public SDK reads no calls, so that all its scores are equal and nothing is posted",
    ),
    Case(
        "gsm8k_server_teacher_distill",
        "gsm8k_server_teacher_distill.py",
        "a teacher's logprobs",
        BOXED,
        GSM8K,
        servers=2,
        flags=(("--teacher.base_url", "{model}"), ("--teacher.tokenizer_name", "{tokenizer}")),
        expected="differs",
        why="the public package 0.4.0 lacks the module that it imports, and in the repository the constructor takes no teacher",
    ),
)
