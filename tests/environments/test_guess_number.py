"""The documentation's example of several turns: it is what the page shows, and it works against a service."""

from pathlib import Path

import pytest

from tests.atroposlib.envs.env_stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "environments" / "guess_number_server.py"


@pytest.mark.e2e
def test_it_serves_a_trainer(stack: Stack, shared_inference: str) -> None:
    # A tool that is called and one that is not there, half a call, and an answer that calls none.
    call = '<tool_call>{"name": "%s", "arguments": {"guess": %d}}</tool_call>'
    stack.use_inference(shared_inference, cycle=[call % ("compare", 50), call % ("find", 3), "<tool_call>", "It is 7."])
    stack.start_service()
    stack.register_trainer(num_steps=1, batch_size=4, max_token_len=2048)
    stack.next_batch()
    environment = stack.start_environment(
        EXAMPLE, "--env.group_size", "4", "--env.turn_rewards", "to_go", "--env.max_turns", "3"
    )
    (batch,) = stack.take_batches(1)
    stack.control(cycle=None)
    (group,) = batch
    assert all(len(row) == len(tokens) for row, tokens in zip(group["advantages"], group["tokens"], strict=True))
    log = environment.log_path.read_text()
    assert "unknown_tool of find" in log
    assert "Traceback" not in log
