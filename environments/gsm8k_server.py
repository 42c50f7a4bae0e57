r"""GSM8K: grade-school word problems, graded by the final \boxed{} answer. `math_server.py` with
this dataset.

    python environments/gsm8k_server.py  # serve a trainer
    python environments/gsm8k_server.py --env.dataset_path DIR  # from train.jsonl and test.jsonl
    # measure the served model
    python environments/gsm8k_server.py evaluate --env.eval_output out.json

The reward is +1 for a right answer, else -1. See `MathConfig` for partial credit and the length
penalty.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

# The guide installs example_trainer/requirements.txt and runs this file by path: the package itself
# need not be installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from environments.math_server import MathEnv

SYSTEM_PROMPT = (
    "Solve the word problem. Think it through step by step, writing out each calculation, "
    "then give the final number, alone and without units, as \\boxed{number}."
)


class Gsm8kEnv(MathEnv):
    """GSM8K with verifiable answers."""

    name = "gsm8k"

    default_settings: ClassVar[Mapping[str, Any]] = {
        **MathEnv.default_settings,
        "dataset": "openai/gsm8k",
        "dataset_config": "main",
        "system_prompt": SYSTEM_PROMPT,
    }


if __name__ == "__main__":
    Gsm8kEnv.cli()
