"""Logs of an environment arrive in W&B: the real package, offline, read back from the file that it
would upload.

The test runs where wandb is installed, in this environment or in a folder of its own; with
LOCKSTEP_WANDB=1 it fills that folder first. The project itself does without.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer.child_processes.processes import wait_until
from tests.atroposlib.envs.env_stack import OFFLINE, Stack

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ["wandb==0.31.0", "platformdirs"]  # and what the project has anyway
FOLDER = ROOT / "runs" / "bench" / "wandb-0.31.0"

READ = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def messages(file, block=32768, head=7):  # LevelDB's log format, after a header of its own
    content, at, parts = open(file, "rb").read(), head, []
    while at + head <= len(content):
        if block - at % block < head:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + head])
        parts.append(content[at + head : at + head + length])
        at += head + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []

found = {"run": {}, "history": []}
for data in messages(sys.argv[1]):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found["run"] = {"project": record.run.project, "group": record.run.run_group, "name": record.run.display_name,
            "config": {item.key: json.loads(item.value_json) for item in record.run.config.update}}
    elif kind == "history":
        items = record.history.item
        found["history"].append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def with_wandb() -> dict[str, str]:
    """The environment variables of a process that can import wandb."""
    if importlib.util.find_spec("wandb") is not None:
        return {}
    if not (FOLDER / "ready").exists():
        if os.environ.get("LOCKSTEP_WANDB") != "1":
            pytest.skip(
                f"wandb is installed neither here nor in {FOLDER}; set LOCKSTEP_WANDB=1 to do it"
            )
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            str(FOLDER),
            *PACKAGES,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.fail(f"LOCKSTEP_WANDB=1, but wandb could not be installed: {done.stderr[-500:]}")
        (FOLDER / "ready").touch()
    return {"PYTHONPATH": str(FOLDER)}


@pytest.mark.e2e
def test_an_environment_logs_to_wandb(
    stack: Stack, shared_inference: str, with_wandb: dict[str, str], tmp_path: Path
) -> None:
    stack.use_inference(shared_inference)
    stack.start_service()
    stack.register_trainer(num_steps=2, batch_size=8)
    command = [
        *(sys.executable, str(ROOT / "environments" / "arithmetic_server.py")),
        *(
            "--env.rollout_server_url",
            stack.service_url,
            "--openai.base_url",
            f"{stack.inference_url}/v1",
        ),
        *("--env.use_wandb", "--env.group_size", "4", "--env.wandb_name", "sums"),
        *("--env.ensure_scores_are_not_same", "false", "--env.num_rollouts_to_keep", "8"),
    ]
    # Without a login the run is kept offline by default.
    variables: dict[str, str | None] = {
        **dict.fromkeys(("NETRC", "WANDB_API_KEY", "WANDB_MODE")),
        "HOME": str(tmp_path),
    }
    variables |= {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", **with_wandb}
    environment = stack.processes.start(
        "environment", command, OFFLINE | variables, may_finish=True
    )
    stack.take_batches(2)
    stack.end_run()
    wait_until("its end", lambda: None if environment.poll() is not None else "it still runs", 120)
    assert environment.poll() == 0, environment.log_path.read_text()[-2000:]

    assert (
        f"W&B has no login (`wandb login` or WANDB_API_KEY): the run is kept offline in {tmp_path}/wandb"
        in environment.log_path.read_text()
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(file)],
        env=os.environ | with_wandb,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    run, history = found["run"], found["history"]
    assert (run["project"], run["group"], run["name"].rsplit("-", 4)[0]) == ("p", "g", "sums")
    assert run["config"]["group_size"] == 4
    logged = {key: value for entry in history for key, value in entry.items()}
    name = "sums_0"
    assert 0 <= logged[f"{name}_train/percent_correct"] <= 1
    assert sum(entry.get(f"{name}_train/items_sent_to_api", 0) for entry in history) >= 4
    assert logged[f"{name}_train/completion_lengths"] > 0
    assert logged[f"{name}_train/rollouts/_type"] == "table-file"
    assert logged[f"{name}_train/rollouts/nrows"] > 0
    assert logged["server/server_0_request_time_avg"] > 0
