"""A built wheel in an environment that has its dependencies and no checkout: every part starts, and
they train together.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher.starter_models import STARTER_MODEL
from tests.conftest import ROOT, Processes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(540)]

PACKAGES = ("atroposlib", "environments", "example_trainer", "vllm_patching")
STANDIN = ROOT / "tests" / "inference_standin.py"

OWN_A_SERVER = """
import shlex, sys, time
from pathlib import Path
from example_trainer.weight_bridge.owned_server import OwnedServer, Served
standin, port = sys.argv[1:]
command = f"{shlex.quote(sys.executable)} {shlex.quote(standin)} --name {{model}} --port {{port}}"
server = OwnedServer(command, "", "tiny", "localhost", int(port), Path("vllm.log"), None, None, 60.0)
server.start(Served("checkpoint", 3))
server.wait_until_ready(time.sleep)
server.close()
print("owned", server.served)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is written into the checkout, and offline."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=skipped)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """An interpreter that finds the wheel's packages and this one's dependencies, and no checkout.

    A folder that a .pth file names is searched, and the .pth files in it are not read. So a link to
    the checkout is left behind.
    """
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    interpreter = folder / "bin" / "python"
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "dependencies.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n"
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return interpreter


def environment_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_holds_every_file_of_every_package(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info/"
    listed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(about)}
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.name not in ("requirements.txt", "README.md")
    }
    assert listed == files


def test_the_checkout_is_out_of_reach(python: Path, tmp_path: Path) -> None:
    """The control: what only the checkout has cannot be imported, and what is imported is the
    wheel's.
    """
    code = "import importlib.util as u\nfor name in ('scripts', 'tests', 'bench', 'example_trainer'): print(u.find_spec(name))"
    done = subprocess.run(
        [python, "-c", code],
        cwd=tmp_path,
        env=environment_variables(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *absent, there = done.stdout.splitlines()
    assert not any(str(ROOT) in line for line in absent)
    assert absent[0] == "None"
    assert str(python.parents[1]) in there


def test_a_trainer_from_the_wheel_starts_and_ends_its_own_server(
    python: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    variables = environment_variables() | {"STANDIN_STARTS": str(tmp_path / "starts")}
    done = subprocess.run(
        [python, "-c", OWN_A_SERVER, STANDIN, str(free_port())],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "owned Served(model='checkpoint', version=3, epoch=0)" in done.stdout, done.stderr
    assert (tmp_path / "starts").read_text() == "checkpoint\n"


@pytest.mark.e2e
def test_service_server_environment_and_trainer_from_the_wheel_train(
    python: Path, processes: Processes, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    service_port, vllm_port = free_port(), free_port()
    service, vllm = f"http://localhost:{service_port}", f"http://localhost:{vllm_port}"
    variables: dict[str, str | None] = {
        "PYTHONPATH": None,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    variables |= {
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        "LOGDIR": str(tmp_path),
        "VLLM_NO_USAGE_STATS": "1",
    }

    def start(name: str, module: str, *flags: object, may_finish: bool = False) -> ManagedProcess:
        command = [str(python), "-u", "-m", module, *map(str, flags)]
        return processes.start(name, command, variables, tmp_path, may_finish=may_finish)

    start("service", "atroposlib.cli.run_api", "--port", service_port, "--store", "memory")
    start("vllm", "example_trainer.vllm_api_server", "--model", STARTER_MODEL, "--port", vllm_port, "--host", "127.0.0.1",
          "--max-model-len", 512, "--max-num-seqs", 64)  # fmt: skip
    processes.wait_for_http(f"{service}/", 180)
    processes.wait_for_http(f"{vllm}/health_generate", 240)
    start("environment", "environments.arithmetic_server", "serve", "--env.rollout_server_url", service, "--env.group_size", 8,
          "--env.max_token_length", 32, "--env.steps_per_eval", 0, "--openai.base_url", vllm, "--openai.server_type", "vllm",
          may_finish=True)  # fmt: skip
    trainer = start("trainer", "example_trainer.grpo", "--model-name", STARTER_MODEL, "--weight-bridge-mode", "shared_vllm",
                    "--single-copy", "--vllm-port", vllm_port, "--atropos-url", service, "--training-steps", 2, "--lr", "1e-4",
                    "--batch-size", 16, "--gradient-accumulation-steps", 1, "--seq-len", 512, "--checkpoint-interval", 0,
                    "--log-dir", "log", "--save-path", "checkpoints", may_finish=True)  # fmt: skip
    said = processes.finish(trainer, 240)
    assert "Step 2/2" in said
    mapped = re.search(r"\[Bridge\] Mapped (\d+)/(\d+) params", said)
    assert mapped is not None
    assert mapped[1] == mapped[2] != "0"
    assert (tmp_path / "checkpoints" / "step_2" / "model.safetensors").is_file()
