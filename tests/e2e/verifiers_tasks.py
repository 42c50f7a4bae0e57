"""The verifiers package's own environment of reasoning-gym's tasks, on sums that the starter model
was made for.
"""

from typing import Any

import verifiers as vf
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment() -> Any:
    """Sums of two numbers of two digits; the answer stands in a box, as the starter model writes
    it.
    """
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    return ReasoningGymEnv(
        gym=[{"name": "chain_sum", "weight": 1.0, "config": sums}],
        num_train_examples=40,
        num_eval_examples=4,
        system_prompt="",
        parser=vf.Parser(extract_fn=vf.extract_boxed_answer),
    )
