"""The public Atropos server and ours get the same requests, and must give the same answers, except
where `INTENDED` has a reason.

The public server is the released package, in a process and a virtual environment of its own. The
test runs where that environment exists (`python bench/public_server.py` makes it) and, with
LOCKSTEP_DIFFERENTIAL=1, makes it first.
"""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import public_server

from .conftest import Service
from .wire_scripts import RESTART, SCRIPTS, Step

COMPRESS_FROM = 1000

INTENDED = {
    # Weaknesses of the public server.
    "crash": "all its state is in memory, so a crash loses everything",
    "newest first": "it hands out the newest groups first",
    "steps ahead": "/batch forms all batches that it can at once and counts them as steps before anyone has them",
    "not a number": "it accepts NaN, whose batch then is a 500 and lost",
    "lengths": "it compares no lengths, and accepts empty groups and sequences",
    "oversize": "one group larger than a batch blocks the queue for ever",
    "early data": "data posted before /register hides the trainer that registers afterwards",
    "second trainer": "a second /register is ignored",
    "half a reset": "a reset leaves the trainer half registered: /batch is a 500, an environment is told to start",
    "unknown environment": "/status-env is a 500 for an environment that is not there, and for the last one's id -1 succeeds",
    "pages": "any web page may call it, and wipe a run; ours answers none without a key",
    "nothing to learn": "it takes groups in which no token is trained on, and ids that no token has",
    "no bound": "its queue has no bound",
    "dead trainer": "a batch that a trainer fetched before it died is gone",
    "no weight": "an environment's weight does nothing",
    "packing": "it finds no batch although whole groups add up to one",
    "stuck buffer": "a buffer gives groups up only for exactly group_size, so larger groups stay in it for ever",
    "truncated gzip": "a gzip body that was cut off is a 500",
    "messages": "messages that are no list are a 500",
    # Where we answer in another way, and mean to.
    "wording": "the error text of an unknown environment is an exception's; ours says what to do",
    "mixed sizes": "in a queue of mixed sizes, /status-env counts more groups of a size than the sequences make",
    "unknown fields": "it drops fields that it does not know; ours hands out what was posted",
    "any content type": "it wants a JSON content type; ours takes a JSON body under any",
    "unknown encoding": "it reads a body whose encoding it does not know as if it had none; ours says 415",
    "broken text": "text that is not UTF-8 is a 400; ours a 422, as is every other body that is no JSON",
}
"""Every way in which the two are meant to differ. The original's SDK, whose environments never
register again, is not asked here: this is about the wire."""


ADDED_FIELDS = (
    "weight_versions",
    "weight_epochs",
    "weight_version_spans",
    "weight_epoch_spans",
    "sampling_params",
    "finish_reasons",
    "successes",
)
"""Fields of a group that the public server does not know."""


class PublicService(Service):
    """The public server."""

    def command(self) -> list[str]:
        """In isolated mode, so that neither the working directory nor PYTHONPATH brings in our
        package of the same name.
        """
        python = public_server.FOLDER / "bin" / "python"
        return [str(python), "-I", "-m", "atroposlib.cli.run_api", "--port", str(self.port)]


@pytest.fixture(scope="module")
def public_package() -> None:
    """The virtual environment of the public server."""
    if public_server.is_ready():
        return
    if os.environ.get("LOCKSTEP_DIFFERENTIAL") != "1":
        pytest.skip(
            f"{public_server.PUBLIC} is not installed in {public_server.FOLDER}; set LOCKSTEP_DIFFERENTIAL=1 to do it"
        )
    try:
        public_server.public_python()
    except subprocess.SubprocessError as error:
        pytest.fail(
            f"LOCKSTEP_DIFFERENTIAL=1, but {public_server.PUBLIC} could not be installed: {error}"
        )


def ask(service: Service, step: Step) -> httpx.Response:
    """One request on a connection of its own: the public server closes those on which it has
    failed.
    """
    headers = {
        "connection": "close",
        "accept-encoding": "gzip",
        **{k.replace("_", "-"): v for k, v in step.headers.items()},
    }
    return service.http.request(step.method, step.path, content=step.content, headers=headers)


def places(errors: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The fields that validation errors are about.

    Ours stops at a field's first wrong value, so no further than that.
    """
    found = set()
    for error in errors:
        loc = error["loc"] if error["type"] != "json_invalid" else ["body"]
        ends = next((i + 1 for i, part in enumerate(loc) if isinstance(part, str) and i), len(loc))
        found.add(tuple(loc[:ends]))
    return sorted(found, key=str)


def content(response: httpx.Response) -> Any:
    """An answer's body, without what differs from run to run."""
    if response.headers.get("content-type", "").split(";")[0] != "application/json":
        return response.text
    found = response.json()
    if response.status_code == 422:
        return places(found["detail"])
    if isinstance(found, dict) and "uuid" in found:
        assert isinstance(found["uuid"], int)
        found["uuid"] = "an integer"
    return found


def without_additions(step: Step, found: Any) -> Any:
    """Take out of our answer what it has more than the public server's. All of it must be there."""
    if step.path == "/status-env" and "queue_size" in found:
        del found["groups_wanted"], found["max_staleness"], found["run_ended"], found["moves"]
    if step.path == "/batch" and isinstance(found, dict) and found.get("batch"):
        del found["batch_id"], found["environments"]
        for entry in found["batch"]:
            without_added_fields(entry)
    if step.path == "/latest_example" and found["tokens"]:
        without_added_fields(found)
    return found


def without_added_fields(group: dict[str, Any]) -> None:
    for name in ADDED_FIELDS:
        del group[name]


def brief(step: Step, expected: Any, found: Any) -> Any:
    """An answer as the scripts write it."""
    if not isinstance(found, dict):
        return found
    if step.path == "/batch" and found.get("batch"):
        return {**found, "batch": [entry["tokens"][0][0] for entry in found["batch"]]}
    if step.path == "/latest_example":
        known = {"example": found["tokens"][0][0] if found["tokens"] else None}
        return {**known, **{key: found[key] for key in ("later_field",) if key in found}}
    if step.path == "/status-env" and "queue_size" in found:
        return {key: found[key] for key in ("queue_size", "self_queue_size")}
    if isinstance(expected, dict) and isinstance(found.get("detail"), str):
        return {"detail": found["detail"][: len(expected["detail"])]}
    return found


def check_headers(response: httpx.Response, step: Step) -> None:
    """Long answers are compressed for clients that accept it."""
    if response.status_code == 200 and step.method != "OPTIONS":
        accepted = step.headers.get("accept_encoding") != "identity"
        packed = response.headers.get("content-encoding") == "gzip"
        assert packed == (accepted and len(response.content) > COMPRESS_FROM), step.path


@pytest.mark.usefixtures("public_package")
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_servers_answer_alike(name: str, tmp_path: Path) -> None:
    flags = [
        "--store",
        str(tmp_path / "rollouts.db"),
        *(["--max-queue-groups", "6"] if name == "bound" else []),
    ]
    services = (PublicService(tmp_path), Service(tmp_path, *flags))
    services[0].cwd = tmp_path
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Service.start, services))
        for number, step in enumerate(SCRIPTS[name]):
            if step is RESTART:
                for service in services:
                    service.signal(signal.SIGKILL)
                    service.start()
                continue
            answers = [ask(service, step) for service in services]
            for answer in answers:
                check_headers(answer, step)
            public, ours = content(answers[0]), without_additions(step, content(answers[1]))
            where = f"step {number}, {step.method} {step.path} {(step.content or b'')[:200]!r}"
            if step.differs is None:
                assert (answers[1].status_code, ours) == (answers[0].status_code, public), where
                continue
            for answer, found, expected, who in (
                (answers[0], public, step.differs.public, "public"),
                (answers[1], ours, step.differs.ours, "ours"),
            ):
                assert (answer.status_code, brief(step, expected[1], found)) == expected, (
                    f"{where}: {who}, {step.differs.why}"
                )
    finally:
        for service in services:
            if service.process is not None:
                service.signal(signal.SIGKILL)
                service.http.close()


def test_every_intended_difference_is_shown() -> None:
    shown = {step.differs.why for script in SCRIPTS.values() for step in script if step.differs}
    assert shown == set(INTENDED)
    assert all(
        step.differs.public != step.differs.ours
        for script in SCRIPTS.values()
        for step in script
        if step.differs
    )
