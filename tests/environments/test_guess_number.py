"""The documentation's example of several turns: it is what the page shows, and it works."""

import json
from pathlib import Path

import pytest

from tests.atroposlib.envs.env_stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "environments" / "guess_number_server.py"


def test_the_page_shows_the_file_and_it_is_short() -> None:
    code = EXAMPLE.read_text()
    assert f"```python\n{code}```" in (ROOT / "docs" / "multi-turn.md").read_text()
    assert len(code.splitlines()) <= 46


@pytest.mark.e2e
def test_it_makes_groups(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    # A call, one of a tool that is not there, half a call, and an answer that calls none.
    call = '<tool_call>{"name": "%s", "arguments": {"guess": %d}}</tool_call>'
    stack.use_inference(
        shared_inference,
        cycle=[call % ("compare", 50), call % ("find", 3), "<tool_call>", "It is 7."],
    )
    groups = tmp_path / "groups.jsonl"
    settings = {
        "total_steps": "1",
        "group_size": "4",
        "turn_rewards": "to_go",
        "max_turns": "3",
        "data_path_to_save_groups": groups,
    }
    flags = [word for name, value in settings.items() for word in (f"--env.{name}", str(value))]
    environment = stack.start_environment(EXAMPLE, "process", *flags)
    stack.processes.finish(environment, 120)
    stack.control(cycle=None)
    (group,) = map(json.loads, groups.read_text().splitlines())
    assert all(
        len(row) == len(tokens)
        for row, tokens in zip(group["advantages"], group["tokens"], strict=True)
    )
    assert {message["role"] for message in group["messages"][0]} == {
        "system",
        "user",
        "assistant",
        "tool",
    }
    log = environment.log_path.read_text()
    assert "unknown_tool of find" in log
    assert "Traceback" not in log
