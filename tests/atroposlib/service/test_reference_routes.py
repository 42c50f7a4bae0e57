"""Groups that wait for reference logprobs, and the workers that take them, through a real service."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from atroposlib.service.group_reader import NO_REFERENCE, read_groups, with_reference
from atroposlib.service.pending_groups import IDLE_SECONDS
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import ValidatedGroup
from tests.atroposlib.service.trainers import registered

from .conftest import Service, group, marks, trainer

WANTED: dict[str, Any] = {
    "batch_size": 4,
    "model": "m",
    "ack_batches": True,
    "ref_logprobs_from_workers": True,
}
ROWS = [[1.0, -0.25, -0.1234567890123456]] * 4


def lease(
    service: Service,
    worker: str = "one",
    max_tokens: int = 1,
    seconds: float = 60,
    model: str = "m",
) -> Any:
    return service.post(
        "/reference/lease",
        {"worker": worker, "model": model, "max_tokens": max_tokens, "seconds": seconds},
    )


def done(service: Service, number: int, worker: str = "one", **answer: Any) -> Any:
    body = {"worker": worker, "groups": [{"id": number, **(answer or {"ref_logprobs": ROWS})}]}
    return service.post("/reference/done", body)


def test_a_worker_is_told_why_there_is_nothing_to_do(service: Service) -> None:
    assert lease(service) == {
        "groups": [],
        "waiting": 0,
        "reference": None,
        "reason": "no trainer has registered",
    }
    service.post("/register", trainer(**WANTED | {"ref_logprobs_from_workers": False}))
    assert "takes no ref_logprobs" in lease(service)["reason"]


def test_groups_go_to_workers_and_come_back_with_their_reference(service: Service) -> None:
    service.post("/register", trainer(**WANTED | {"ref_logprobs_from_workers": False}))
    said = [[{"role": "user", "content": ',"ref_logprobs":null}'}]]
    service.post("/scored_data", group(mark=1, ref_logprobs=None, messages=said))
    reference = {"model": "base", "temperature": 1.0, "table": "fast", "seq_len": 9}
    service.post("/register", trainer(**WANTED, reference=reference))
    service.post("/scored_data", group(mark=2, sampling_params=[{"temperature": 0.5}] * 4))
    service.post("/scored_data", group(mark=3, ref_logprobs=ROWS))
    assert marks(service.get("/batch")["batch"]) == [3], "who brings its own waits for nobody"
    service.post("/batch/ack", {})

    expect_another_model_refused(service)
    first = lease(service, model="base")
    assert (first["waiting"], first["reference"]) == (1, reference)
    (taken,) = first["groups"]
    assert taken["tokens"] == [[1] * 3] * 4
    assert taken["masks"] == [[-100, 1, 1]] * 4
    assert taken["sampling_params"] is None
    both = lease(service, "two", max_tokens=1000, model="base")["groups"]
    assert [entry["tokens"][0][0] for entry in both] == [2], "what another has is not lent"
    assert both[0]["sampling_params"] == [{"temperature": 0.5}] * 4
    told = service.get("/batch")
    assert told["batch"] is None
    assert (
        "2 groups wait for ref_logprobs; 1 are at worker one, 1 are at worker two" in told["reason"]
    )
    assert told["reason"] == service.get("/stats")["waiting_because"]

    assert "hand ids back" in done(service, taken["id"] ^ 1)["refused"][0]["reason"]
    assert (
        "rows of [2, 3, 3, 3]"
        in done(service, both[0]["id"], ref_logprobs=[[1.0, 0.0], *ROWS[1:]])["refused"][0][
            "reason"
        ]
    )
    assert lease(service, "three", model="base")["groups"] == [taken], (
        "a refused answer frees its group"
    )
    for worker in ("three", "one"):
        assert done(service, taken["id"], worker) == {"accepted": [taken["id"]], "refused": []}
    assert "no longer waits" in done(service, 2**52)["refused"][0]["reason"]
    (handed,) = service.get("/batch")["batch"]
    assert handed["ref_logprobs"] == ROWS
    assert handed["messages"] == said
    service.post("/batch/ack", {})
    assert done(service, both[0]["id"], "two", unusable="token 5 is none of mine")["accepted"] == [
        both[0]["id"]
    ]
    (handed,) = service.get("/batch")["batch"]
    assert (handed["tokens"][0][0], handed["ref_logprobs"]) == (2, None)

    expect_counted(service, reference)
    assert (
        service.http.post("/register", json=trainer(ref_logprobs_from_workers=True)).status_code
        == 422
    )


def test_a_worker_that_ignores_the_sum_plan_gets_no_group(service: Service) -> None:
    service.post("/register", trainer(**WANTED, reference={"model": "m", "parts": 2}))
    service.post("/scored_data", group(mark=1))
    asked: dict[str, Any] = {"worker": "old", "model": "m", "max_tokens": 1, "seconds": 60}
    for older in ({}, {"follows": ["table"]}):
        refusal = service.http.post("/reference/lease", json=asked | older)
        assert refusal.status_code == 409
        told = refusal.json()["detail"]
        for part in ("has parts 2", "computes with parts 1", "'old'", "from the trainer's version"):
            assert part in told
    assert service.post("/reference/lease", asked | {"follows": ["parts"]})["groups"]
    service.post("/register", trainer(**WANTED, reference={"model": "m", "parts": 1}))
    service.post("/scored_data", group(mark=2))
    assert service.post("/reference/lease", asked)["groups"]


def expect_another_model_refused(service: Service) -> None:
    wrong = {"worker": "one", "model": "m", "max_tokens": 1, "seconds": 60}
    refusal = service.http.post("/reference/lease", json=wrong)
    assert refusal.status_code == 409
    assert "'base'" in refusal.json()["detail"]


def expect_counted(service: Service, reference: dict[str, Any]) -> None:
    """Expect what became of the two groups, by worker and in all."""
    told = service.get("/reference")
    workers = {worker["worker"]: worker["answered"] for worker in told.pop("workers")}
    assert workers == {"one": 0, "two": 1, "three": 1}
    counts = {"waiting": 0, "leased": 0, "answered": 1, "unusable": 1, "expired": 0}
    assert told == {"wanted": True, "model": "base", "reference": reference, **counts}
    assert "rollout_references_answered_total 1.0" in service.http.get("/metrics").text


def test_nothing_is_lost_when_workers_and_service_are_killed(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", str(tmp_path / "a.db")).start()
    try:
        service.post("/register", trainer(**WANTED))
        for mark in (1, 2, 3):
            service.post("/scored_data", group(mark=mark))
        (first,) = lease(service)["groups"]
        (second,) = lease(service, "soon gone", seconds=1e-6)["groups"]
        assert lease(service, "heir")["groups"] == [second], "its time has run out"
        assert service.get("/reference")["expired"] == 1
        service.signal(signal.SIGKILL)
        service.start()
        assert done(service, first["id"])["accepted"] == [first["id"]], "of before the kill"
        assert [entry["tokens"][0][0] for entry in lease(service, max_tokens=10_000)["groups"]] == [
            2,
            3,
        ], "lent anew"
        assert done(service, second["id"], "soon gone")["accepted"] == [second["id"]]
        service.signal(signal.SIGKILL)
        service.start()
        for mark in (1, 2):
            (handed,) = service.get("/batch")["batch"]
            assert (handed["tokens"][0][0], handed["ref_logprobs"]) == (mark, ROWS)
            service.post("/batch/ack", {})
        service.post("/register", trainer(**WANTED, reference={"table": "other"}))
        (third,) = lease(service)["groups"]
        done(service, third["id"])
        service.post("/register", trainer(**WANTED, reference={"table": "another"}))
        assert lease(service, "heir")["groups"][0]["tokens"] == third["tokens"], (
            "that was of another reference"
        )
        service.post("/register", trainer(**WANTED | {"ref_logprobs_from_workers": False}))
        (handed,) = service.get("/batch")["batch"]
        assert (handed["tokens"][0][0], handed["ref_logprobs"]) == (3, None)
    finally:
        service.signal(signal.SIGKILL)


def test_a_trainer_that_waits_in_vain_is_told_that_there_is_no_worker() -> None:
    queue = RolloutQueue()
    queue.register(
        registered(1, "g", "p", 4, 128, "c", 5, 0, 100, model="m", ref_logprobs_from_workers=True)
    )
    queue.add(ValidatedGroup(b"{" + NO_REFERENCE, 4, 10, tokens=40, referenced=False), 0.0)
    said = []
    for now in (5.0, 5.0 + IDLE_SECONDS - 1, 5.0 + IDLE_SECONDS):
        assert queue.next_batch(now) is None
        said.append("no reference worker has asked" in (queue.waiting or ""))
    assert said == [False, False, True]
    queue.lend_references("one", "m", 1, 1.0, 50.0)
    assert queue.next_batch(60.0) is None
    assert "no reference worker" not in (queue.waiting or "")


def test_a_reference_takes_the_place_of_the_one_before() -> None:
    for null in ("", '"ref_logprobs": null,', '"ref_logprobs": [],'):
        body = (
            "{"
            + null
            + json.dumps(group(messages=[[{"role": "user", "content": ',"ref_logprobs":null}'}]]))[
                1:
            ]
        )
        for many in (False, True):
            (draft,) = read_groups((f"[{body}]" if many else body).encode(), many)
            assert not draft.referenced
            assert draft.tokens == 12
            once = with_reference(draft.body, b"[[1.0]]")
            assert json.loads(once) == json.loads(draft.body) | {"ref_logprobs": [[1.0]]}
            assert with_reference(with_reference(once, b"[[2.0]]")) == draft.body
