"""The files that may read the wall clock, with the reason.

It may jump, so nothing may be decided by it alone.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READS = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "os.path.getmtime",
}
ATTRIBUTES = {"st_mtime", "st_mtime_ns", "st_ctime"}

SHOWN = "for people: a time in a log line, a file, a table or a page"
ANSWER = "the public wire has it: when an answer was created"
ALLOWED = {
    "atroposlib/service/routes.py": SHOWN,
    "atroposlib/envs/runner/reporting.py": SHOWN,
    "atroposlib/compat/evaluation.py": SHOWN,
    "atroposlib/inference/managed_server.py": ANSWER,
    "atroposlib/inference/proxy.py": SHOWN,
    "atroposlib/inference/client.py": ANSWER,
    "atroposlib/dashboard/live/servers.py": SHOWN,
    "atroposlib/dashboard/live/monitor.py": SHOWN,
    "atroposlib/dashboard/rollouts/recorder.py": SHOWN,
    "atroposlib/dashboard/run_folders/runs.py": "the order of runs, and whether one is alive",
    "atroposlib/utils/jsonl.py": "whether a file changed",
    "atroposlib/dashboard/app.py": SHOWN,
    "atroposlib/dashboard/auth.py": "the end of a sign-in, which is a time of day",
    "atroposlib/dashboard/live/hub.py": "the end of a sign-in, which is a time of day",
    "example_trainer/batch/local_sampler.py": SHOWN,
    "example_trainer/training/assembly.py": "a weight epoch to ask for: the service and the folder make it unique",
    "example_trainer/observe/exporter.py": SHOWN,
    "example_trainer/simple_rl.py": "a weight epoch, which the folder makes unique",
    "example_trainer/training/rank_plan.py": "a weight epoch that nothing gets: whether the run is complete",
    "example_trainer/weight_bridge/fleet.py": SHOWN,
    "example_trainer/weight_bridge/fleet_updates.py": SHOWN,
    "example_trainer/launcher/__main__.py": SHOWN,
    "example_trainer/launcher/control.py": SHOWN,
    "example_trainer/launcher/status.py": SHOWN,
    "example_trainer/child_processes/guard.py": SHOWN,
    "example_trainer/launcher/rolling.py": SHOWN,
    "example_trainer/launcher/quickstart/run.py": "whether files changed",
    "vllm_patching/server/metrics.py": SHOWN,
    "vllm_patching/protocol/timeline.py": SHOWN,
    "vllm_patching/server/lora.py": SHOWN,
}
"""Reason for each file's reading of it. A deadline, an age or an order of events is measured with
`time.monotonic`.
"""


def reads_wall_clock(path: Path) -> bool:
    """Return True if a file reads the wall clock, or the times of files."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and (
            ast.unparse(node) in READS or node.attr in ATTRIBUTES
        ):
            return True
    return False


def test_no_other_file_reads_the_wall_clock() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    packages = ("atroposlib/", "environments/", "example_trainer/", "vllm_patching/")
    packages += ("scripts/", "studies/")
    reading = {
        name for name in listed if name.startswith(packages) and reads_wall_clock(ROOT / name)
    }
    assert reading == ALLOWED.keys(), (
        "measure with time.monotonic, or list the file with the reason why a jump does no harm"
    )
