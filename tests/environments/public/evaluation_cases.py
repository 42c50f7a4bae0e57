"""The cases that need no trainer: `evaluate`, whose metrics and samples are compared, and
`process`, whose groups are.
"""

from __future__ import annotations

from tests.environments.public.case import Case, Rows, numbered
from tests.environments.public.serving_cases import BOXED, GSM8K

MCQ_ANSWERS = [
    "<think>It is the first.</think> <answer>A</answer>",
    "<think>It is the second.</think> <answer>B</answer>",
    "<think>It is the third.</think> <answer>The answer is C</answer>",
    "I would not know.",
]
MMLU: Rows = {
    "lighteval/mmlu": {
        part: numbered(
            4,
            lambda n: {
                "question": f"Question {n}?",
                "choices": ["one", "two", "three", "four"],
                "answer": n % 4,
                "subject": "x",
            },
        )
        for part in ("test", "dev")
    }
}
GPQA: Rows = {
    "Idavidrein/gpqa": {
        "train": numbered(
            6,
            lambda n: {
                "Question": f"Question {n}?",
                "Correct Answer": "one",
                "Incorrect Answer 1": "two",
                "Incorrect Answer 2": "three",
                "Incorrect Answer 3": "four",
                "Subdomain": "Physics",
            },
        )
    }
}
NO_SPANS = {"number": ["4"], "date": [{"day": "", "month": "", "year": ""}], "spans": [["4"]]}
DROP: Rows = {
    "lighteval/drop_harness": {
        "validation": numbered(
            6,
            lambda n: {
                "passage": f"In game {n} two and two met.",
                "question": "How many were there?",
                "answer": {
                    "number": "4",
                    "date": {"day": "", "month": "", "year": ""},
                    "spans": [],
                },
                "validated_answers": NO_SPANS,
            },
        )
    }
}
OPENAI_GSM8K: Rows = {"openai/gsm8k": GSM8K["gsm8k"]}
FOLDER = "eval_environments"
THINKING = {"custom_thinking_prompt": "Think between <think> and </think> first."}

EVALUATING: tuple[Case, ...] = (
    Case(
        "gsm8k_server_evaluate",
        "gsm8k_server.py",
        "evaluation",
        BOXED,
        GSM8K,
        command="evaluate",
        servers=2,
    ),
    Case(
        "gsm8k_server_process",
        "gsm8k_server.py",
        "`process`",
        BOXED,
        GSM8K,
        command="process",
        servers=2,
    ),
    Case(
        "mmlu_eval",
        f"{FOLDER}/mmlu_eval.py",
        "evaluation, 57 subjects",
        rules=[
            {"when": f"Question {n}", "answers": [MCQ_ANSWERS[n]]} for n in range(4)
        ],  # all subjects ask the same
        rows=MMLU,
        command="evaluate",
        server_type="openai",
        env=THINKING,
    ),
    Case(
        "gpqa_eval",
        f"{FOLDER}/gpqa_eval.py",
        "evaluation",
        MCQ_ANSWERS,
        GPQA,
        command="evaluate",
        server_type="openai",
        env=THINKING,
    ),
    Case(
        "drop_eval",
        f"{FOLDER}/drop_eval.py",
        "evaluation",
        ["<think>Two and two.</think> <answer>4</answer>", "<think>Hm.</think> <answer>5</answer>"],
        DROP,
        command="evaluate",
        server_type="openai",
        env=THINKING,
    ),
    Case(
        "gsm8k_eval",
        f"{FOLDER}/gsm8k_eval.py",
        "evaluation",
        BOXED,
        OPENAI_GSM8K,
        command="evaluate",
        server_type="openai",
    ),
)
