"""A real service keeps rollouts and the trainer's reports, serves them as JSON, and still has them
after a kill.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.atroposlib.dashboard.rollouts.test_rollout_archive import encoded
from tests.atroposlib.service.conftest import Service, environment, group, trainer

STARTER = Path(__file__).resolve().parents[4] / "assets" / "starter_model"
WAIT = 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    running = Service(folder, "--store", str(folder / "rollouts.db")).start()
    yield running
    running.signal(signal.SIGTERM)


def rollouts(service: Service, wanted: int, **asked: Any) -> list[dict[str, Any]]:
    """The list, as soon as it has so many: the archive is written a moment after the answer to a
    post.
    """
    deadline = time.monotonic() + WAIT
    while True:
        answer = service.http.get("/ui/api/rollouts", params=asked)
        found = answer.json().get("rollouts", [])
        if len(found) >= wanted:
            return list(found)
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)


def report(*groups: int, **more: Any) -> dict[str, Any]:
    told = {
        "sequence": 1,
        "trained": 2,
        "logprobs": encoded(-0.25, -1.0),
        "entropies": encoded(0.5, 0.75),
        "advantages": -1.0,
    }
    return {
        "weight_version": 0,
        "sequences": [told | {"group": number} for number in groups],
    } | more


def test_a_rollout_is_followed_from_its_post_to_the_trainers_numbers_and_through_a_kill(
    service: Service,
) -> None:
    uuid = service.post("/register", trainer(ack_batches=True, model=str(STARTER)))["uuid"]
    service.get("/batch", uuid=uuid)
    env_id = service.post("/register-env", environment(desired_name="sums"))["env_id"]
    for mark in (7, 8, 9, 10):
        service.post("/scored_data", group(mark=mark, env_id=env_id, weight_versions=[3] * 4))
    batch = service.get("/batch", uuid=uuid)
    ack = {"batch_id": batch["batch_id"], "uuid": uuid, "weight_version": 1}
    first = {
        "group": 1,
        "sequence": 0,
        "position": 2,
        "token": 8,
        "sampled": -0.5,
        "recomputed": -0.25,
        "weight_version": 0,
    }
    parity = {
        "weight_version": 0,
        "compared": 16,
        "mismatched": 1,
        "compared_in_all": 16,
        "mismatched_in_all": 1,
        "first": first,
    }
    assert service.post("/batch/ack", ack | {"report": report(0, 1, parity=parity)})["groups"] == 2
    drifted = rollouts(service, 2, sort="drifted")
    assert {(head["rollout"], head["drift"], head["trained_version"]) for head in drifted} == {
        (1, 0.375, 0)
    }
    number = drifted[0]["group"]
    told = service.get(f"/ui/api/rollouts/{number}/1")
    assert told["columns"]["trainer"] == [None, -0.25, -1.0]
    assert told["columns"]["advantage"] == [None, -1.0, -1.0]
    assert told["columns"]["version"] == [None, 3, 3]
    shown = "".join(text for run in told["runs"] for text, _ in run["pieces"])
    assert not shown.isdigit(), "text by the tokenizer of the model that the trainer named"
    whole = service.get(f"/ui/api/rollouts/{number}")
    assert (whole["environment"], len(whole["rollouts"])) == ("sums", 4)
    assert (whole["older"], whole["newer"]) == (number - 1 or None, number + 1)
    last = service.get("/batch", uuid=uuid)
    told_at_the_end = {"batch_id": last["batch_id"], "uuid": uuid, "report": report(0)}
    assert service.post("/batch/report", told_at_the_end) == {"status": "success"}
    assert len(rollouts(service, 3, sort="drifted")) == 3
    for nonsense in (
        "text",
        [1],
        {"sequences": [{"group": "x"}]},
        {"parity": {"compared": "many"}},
    ):
        service.post("/batch/ack", {"uuid": uuid, "batch_id": last["batch_id"], "report": nonsense})
    assert service.get("/stats")["leases"] == []
    service.signal(signal.SIGKILL)
    service.start()
    assert len(rollouts(service, 16)) == 16
    assert len(rollouts(service, 3, sort="drifted")) == 3


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("rollouts/99999", 404, "group 99999 is not kept: groups 1 to 4 are"),
        ("rollouts/1/7", 404, "no rollout 7"),
        (f"rollouts/{2**63}", 404, "no group has this number"),
        (f"rollouts/{'9' * 5000}", 404, "no group has this number"),
        (f"rollouts/1/{2**63}", 404, "no rollout has this number"),
        ("rollouts/x", 404, "no group has this number"),
        ("rollouts/\u0661", 404, "no group has this number"),
        ("rollouts?sort=prettiest", 400, "prettiest"),
        ("rollouts?cursor=x", 400, "cursor"),
        (f"rollouts?text={'x' * 401}", 400, "at most 400 characters"),
        ("rollouts?limit=-3", 400, "limit"),
        ("rollouts/1/0?begin=1e3", 400, "begin"),
    ],
)
def test_what_cannot_be_told_is_refused_in_words(
    service: Service, path: str, status: int, words: str
) -> None:
    rollouts(service, 16)
    answer = service.http.get(f"/ui/api/{path}")
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_a_long_rollout_comes_by_pieces(service: Service) -> None:
    service.post("/scored_data", group(1, length=250_000, mark=8))
    found = rollouts(service, 1, sort="longest", limit=1)
    deadline = time.monotonic() + WAIT
    while found[0]["tokens"] < 250_000 and time.monotonic() < deadline:
        found = rollouts(service, 1, sort="longest", limit=1)
    assert found[0]["tokens"] == 250_000
    answer = service.http.get(
        f"/ui/api/rollouts/{found[0]['group']}/0", params={"begin": 249_000, "count": 2000}
    )
    assert (answer.json()["end"], len(answer.content) < 100_000) == (250_000, True)
