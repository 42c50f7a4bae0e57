"""An asynchronous run whose processes are forked where they can be (tests/forked_commands.py), and
noted.

    python tests/e2e/async_roles.py drive --config FILE        the driver, with the real service and the roles below
    python tests/e2e/async_roles.py drive-real --config FILE   the driver, all of whose roles are real
    python tests/e2e/async_roles.py ROLE FOLDER PORT SERVICE   a role that weighs nothing

Each group that an environment sends has a number of its own. The environment writes it to `sent`
before the post and to `accepted` after the answer. The trainer writes the numbers of trained groups
to `trained`, with the batch's id, and each batch to `steps`, before it acknowledges. Both go on
where an earlier life ended. A trainer that is asked to end saves for a while, and writes its
process id to `saved`. A trainer that finds an earlier one alive writes that process id to
`overlaps`. With a file `enough` in the folder environments send no more, and the trainer ends when
it has trained on all that was accepted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import importlib
import os
import random
import signal
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from example_trainer.async_grpo.actor import PYTHON, Address, Launch, RoleProcess
from example_trainer.child_processes.processes import ManagedProcess
from tests.forked_commands import start_guard

PAUSE = 0.3
SAVE_SECONDS = 3.0
"""Longer than the next actor takes to come, on a machine that is not busy."""


def numbers(file: Path) -> list[int]:
    """The first number of each whole line."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [int(line.split()[0]) for line in lines]


def note(file: Path, *values: int) -> None:
    """Append a line, on the disk when this returns."""
    with file.open("a") as opened:
        opened.write(" ".join(map(str, values)) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def generator(port: int) -> None:
    """Answers everything with 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def environment(folder: Path, name: str, client: httpx.Client) -> None:
    """Sends groups until there are enough."""
    sent, accepted = folder / f"sent-{name}", folder / f"accepted-{name}"
    while True:
        open_ones = [number for number in numbers(sent) if number not in set(numbers(accepted))]
        if not open_ones:
            if (folder / "enough").exists():
                time.sleep(PAUSE)
                continue
            open_ones = [random.getrandbits(30)]
            note(sent, open_ones[0])
        for number in open_ones:
            tokens = [[1, 2, number], [1, 3, number]]
            group = {
                "tokens": tokens,
                "masks": [[-100, 2, number], [-100, 3, number]],
                "scores": [0.0, 1.0],
            }
            try:
                answer = client.post(
                    "/scored_data", json=group | {"idempotency_key": f"{name}-{number}"}
                )
            except httpx.HTTPError as error:
                print(f"{error!r}; trying again", flush=True)
            else:
                if answer.status_code == 200:
                    note(accepted, number)
                else:
                    print(answer.text, flush=True)
            time.sleep(2 * PAUSE)


def have_a_life(folder: Path) -> None:
    """See the module on `saved` and `overlaps`."""

    def save(*_: object) -> None:
        time.sleep(SAVE_SECONDS)
        note(folder / "saved", os.getpid())
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, save)
    for earlier in numbers(folder / "lives"):
        if Path(f"/proc/{earlier}/exe").exists():  # no zombie has one
            note(folder / "overlaps", earlier)
    note(folder / "lives", os.getpid())


def trainer(folder: Path, client: httpx.Client) -> None:
    """Takes batches of one group until all that was accepted is trained on."""
    have_a_life(folder)
    body = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 2,
        "max_token_len": 64,
        "checkpoint_dir": str(folder),
    }
    body |= {
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10**6,
        "ack_batches": True,
    }
    uuid, trained, steps = None, folder / "trained", folder / "steps"
    while True:
        try:
            if uuid is None:
                # Another run would have the samples after it; so no step is left out that the
                # service may have counted.
                body["starting_step"] = len(numbers(steps))
                uuid = client.post("/register", json=body).raise_for_status().json()["uuid"]
            got = client.get("/batch", params={"uuid": uuid}).raise_for_status().json()
            if got["batch"] is None:
                accepted = {
                    number for file in folder.glob("accepted-*") for number in numbers(file)
                }
                if (folder / "enough").exists() and accepted <= set(numbers(trained)):
                    return
                time.sleep(PAUSE)
                continue
            for group in got["batch"]:
                number = group["tokens"][0][2]
                if number not in set(numbers(trained)):  # else only the acknowledgement was lost
                    note(trained, number, got["batch_id"])
            note(steps, got["batch_id"])
            client.post(
                "/batch/ack", json={"batch_id": got["batch_id"], "uuid": uuid}
            ).raise_for_status()
        except httpx.HTTPError as error:
            print(f"{error!r}; trying again", flush=True)
            time.sleep(PAUSE)


def be(name: str, folder: Path, port: int, service: str) -> None:
    """One role."""
    headers = {"Authorization": f"Bearer {os.environ.get('ROLLOUT_API_KEY', '')}"}
    with httpx.Client(base_url=service, headers=headers, timeout=60, trust_env=False) as client:
        if name.startswith("generator"):
            generator(port)
        elif name.startswith("environment"):
            environment(folder, name, client)
        elif name.startswith("reference"):
            signal.pause()
        else:
            trainer(folder, client)


class NotedProcess(RoleProcess):
    """Writes the process ids of a role's guard and of its actor to `pids-ROLE`, a line for each
    life.
    """

    def start(self, launch: Launch, grace: float, may_finish: bool) -> int:
        ManagedProcess.start_guard = start_guard  # type: ignore[method-assign]
        guard = super().start(launch, grace, may_finish)
        note(self._folder / f"pids-{self._name}", guard, os.getpid())
        return guard


def light_commands(*kinds: str) -> Any:
    """The project's own commands, except for light stand-ins of these kinds of roles."""
    from example_trainer.async_grpo.roles import Commands, Role

    class LightCommands(Commands):
        """See above."""

        def _light(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
            port = places[role.name].ports[0] if places[role.name].ports else 0
            service = (
                places["service"].url if "service" in places else ""
            )  # a generator is started beside it
            words = [
                PYTHON,
                "-u",
                __file__,
                role.name,
                str(self._settings.folder),
                str(port),
                service,
            ]
            return {"arguments": words}

    for kind in kinds:
        setattr(LightCommands, f"_{kind}", LightCommands._light)
    return LightCommands


def drive(light: bool, arguments: list[str]) -> int:
    """The driver."""
    from example_trainer.async_grpo import cluster
    from example_trainer.async_grpo.__main__ import main

    # By the name under which an actor imports it, which this program has not.
    cluster.RoleProcess = importlib.import_module("tests.e2e.async_roles").NotedProcess  # type: ignore[misc]
    return main(
        arguments,
        light_commands(*(("generator", "environment", "reference", "trainer") if light else ())),
    )


if __name__ == "__main__":
    if sys.argv[1].startswith("drive"):
        sys.exit(drive(sys.argv[1] == "drive", sys.argv[2:]))
    be(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
