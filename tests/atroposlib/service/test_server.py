"""The wire over HTTP against the real process, with the pace of environments, the order of groups, and bounds."""

from __future__ import annotations

import gzip
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from atroposlib.service.schemas import (
    AckBatch,
    BatchReport,
    EndRun,
    EnvIdentifier,
    EnvStatus,
    InvalidRequestError,
    LeaseReferences,
    PostedEvaluation,
    PublishedFleet,
    ReferencesDone,
    RegisterEnv,
    RegisterTrainer,
    ServerAddress,
    read,
)

from .conftest import Service, environment, group, marks, trainer


def test_before_anyone_registered(service: Service) -> None:
    assert service.get("/") == {"message": "AtroposLib API"}
    assert service.get("/wandb_info") == {"group": None, "project": None}
    assert service.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert service.get("/status") == {"current_step": 0, "queue_size": 0}
    answer = service.get("/batch")
    assert answer == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert service.get("/latest_example")["tokens"] == []
    assert service.post("/register-env", environment()) == {"status": "wait for trainer to start"}


def test_a_run_from_registration_to_batches(service: Service) -> None:
    assert isinstance(service.post("/register", trainer(starting_step=3))["uuid"], int)
    assert service.get("/info") == {"batch_size": 8, "max_token_len": 128}
    assert service.get("/wandb_info") == {"group": "g", "project": "p"}
    assert service.post("/register-env", environment()) == {"status": "wait for trainer to start"}
    assert service.get("/batch") == {"batch": None}
    assert service.post("/register-env", environment()) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "task_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }
    for mark in range(5):
        assert service.post("/scored_data", group(mark=mark, env_id=0)) == {"status": "received"}
    assert service.get("/status") == {"current_step": 3, "queue_size": 5}
    assert marks(service.get("/batch")["batch"]) == [0, 1]
    assert marks(service.get("/batch")["batch"]) == [2, 3]
    assert service.get("/batch") == {"batch": None}
    assert service.get("/status") == {"current_step": 5, "queue_size": 1}
    assert service.post("/disconnect-env", {"env_id": 0}) == {"status": "success"}


def test_groups_come_back_with_every_field(service: Service) -> None:
    service.begin(batch_size=4)
    sent = group(
        env_id=0,
        advantages=[[0.1, 0.2, 0.3]] * 4,
        ref_logprobs=[[0.0, -1.0, -2.0]] * 4,
        messages=[[{"role": "user", "content": "ü" * 2000}]] * 4,
        generation_params={"temperature": 1.0},
        overrides=[{"set_advantage_to_zero": True}] * 4,
        group_overrides={"x": 1},
        images=["…"],
        distill_token_ids=[[[1, 2]] * 3] * 4,
        distill_logprobs=[[[-0.1, -0.2]] * 3] * 4,
        weight_versions=[3, 4, 5, 6],
        weight_epochs=[0, 0, 9, 9],
        weight_version_spans=[[[3, 2]], [[4, 1], [5, 1]], [[5, 2]], []],
        weight_epoch_spans=[[0], [0, 9], [9], []],
        sampling_params=[{"temperature": 1.0}] * 3
        + [[{"temperature": 1, "tokens": 1}, {"temperature": 0.5, "tokens": 1}]],
        finish_reasons=["stop", "length", "stop", "abort"],
        successes=[True, False, None, True],
        routed_experts=["AAE=", None, "AAE=", None],
        unknown_to_the_service=[1],
    )
    service.post("/scored_data", sent)
    assert service.get("/latest_example") == sent
    answer = service.get("/batch")
    assert answer["batch"] == [sent]
    assert answer["environments"] == {"0": "task"}


def test_evaluations_are_told_in_the_order_in_which_they_came(service: Service) -> None:
    env_id, before = (
        service.begin(),
        max([0, *(known["id"] for known in service.get("/evaluations")["evaluations"])]),
    )
    first = {
        "env_id": env_id,
        "name": "task",
        "weight_version": 3,
        "weight_epoch": 7,
        "metrics": {"accuracy": 0.5, "tokens": 12},
    }
    second = {"name": "elsewhere", "metrics": {"accuracy": 1.0}, "idempotency_key": "k"}
    ids = [service.post("/evaluations", body)["id"] for body in (first, second, second)]
    assert before < ids[0] < ids[1] == ids[2]
    one, two = service.get("/evaluations", after=before)["evaluations"]
    assert one == {"id": ids[0], "time": one["time"]} | first
    del second["idempotency_key"]
    assert (
        two
        == {
            "id": ids[1],
            "time": two["time"],
            "env_id": None,
            "weight_version": None,
            "weight_epoch": None,
        }
        | second
    )
    assert one["time"] <= two["time"] <= time.time()
    assert service.get("/evaluations", after=ids[0])["evaluations"] == [two]
    service.post("/register", trainer(model="b"))
    assert len(service.get("/evaluations", after=before)["evaluations"]) == 2, (
        "the trainer that registered named no model"
    )
    service.post("/register", trainer(model="c"))
    assert service.get("/evaluations")["evaluations"] == [], "they are of another run"


def test_absent_fields_come_back_as_null(service: Service) -> None:
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    (received,) = service.get("/batch")["batch"]
    assert received["overrides"] is None
    assert received["env_id"] is None
    assert received["distill_logprobs"] is None


def test_mis_sized_groups_and_lists(service: Service) -> None:
    service.begin()
    assert service.post("/scored_data", group(2, env_id=0)) == {
        "status": "buffered",
        "buffer_size": 2,
    }
    answer = service.post(
        "/scored_data_list", [group(4, env_id=0), group(1, env_id=0), group(1, env_id=0)]
    )
    assert answer == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 0,
    }
    assert service.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}
    assert service.get("/status")["queue_size"] == 4
    assert sum(len(entry["tokens"]) for entry in service.get("/batch")["batch"]) == 8


# ---- what the wire was weak at ----


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_score_that_is_no_number_is_refused_and_costs_no_batch(
    service: Service, number: str
) -> None:
    service.begin(batch_size=4)
    text = json.dumps(group(scores=[0.0, 0.0, 12345.0, 0.0])).replace("12345.0", number)
    answer = service.http.post("/scored_data", content=text)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "scores", 2]
    service.post("/scored_data", group(mark=1))
    assert marks(service.get("/batch")["batch"]) == [1]


@pytest.mark.parametrize("field", ["tokens", "masks", "scores", "inference_logprobs"])
def test_lengths_that_differ_are_refused(service: Service, field: str) -> None:
    service.begin()
    body = group()
    body[field] = body[field][:-1]
    answer = service.http.post("/scored_data", json=body)
    assert answer.status_code == 422
    assert "entries for" in answer.json()["detail"][0]["msg"]


def test_a_group_larger_than_a_batch_is_refused_and_blocks_nothing(service: Service) -> None:
    service.begin()
    answer = service.http.post("/scored_data", json=group(9))
    assert answer.status_code == 422
    (detail,) = answer.json()["detail"]
    assert detail["loc"] == ["body", "tokens"]
    assert "9 sequences" in detail["msg"]
    assert "batch_size is 8" in detail["msg"]
    answer = service.http.post("/scored_data_list", json=[group(8), group(9)])
    assert answer.json()["detail"][0]["loc"] == ["body", 1, "tokens"]
    assert service.get("/status")["queue_size"] == 0, (
        "of a list that is refused, nothing is accepted"
    )
    service.post("/scored_data", group(8, mark=1))
    assert marks(service.get("/batch")["batch"]) == [1]


def test_data_posted_before_the_trainer_registers_wedges_nothing(service: Service) -> None:
    service.post("/scored_data", group(99, mark=99))
    service.post("/scored_data", group(4, mark=1))
    service.post("/scored_data", group(4, mark=2, env_id=17))
    service.post("/register", trainer())
    assert marks(service.get("/batch")["batch"]) == [1, 2]
    assert service.get("/stats")["dropped"] == [
        {"reason": "larger_than_batch", "longest_up_to": 4, "groups": 1}
    ]


def test_a_second_registration_takes_effect(service: Service) -> None:
    first = service.post("/register", trainer())["uuid"]
    second = service.post("/register", trainer(batch_size=4, wandb_group="other", starting_step=9))[
        "uuid"
    ]
    assert first != second
    assert service.get("/info")["batch_size"] == 4
    assert service.get("/wandb_info")["group"] == "other"
    assert service.get("/status")["current_step"] == 9
    answer = service.http.get("/batch", params={"uuid": first})
    assert answer.status_code == 409
    assert "register again" in answer.json()["detail"]


def test_after_a_reset_everything_answers(service: Service) -> None:
    service.begin()
    service.post("/scored_data", group())
    answer = service.http.get("/reset_data")
    assert (answer.text, answer.headers["content-type"]) == (
        "Reset successful",
        "text/plain; charset=utf-8",
    )
    assert service.get("/batch")["status"] == "error"
    assert service.get("/status") == {"current_step": 0, "queue_size": 0}
    assert service.get("/latest_example")["tokens"] == []
    assert service.begin() == 0


def test_status_of_an_unknown_environment_says_so(service: Service) -> None:
    answer = service.status_env(0)
    assert answer.status_code == 404
    assert "POST /register-env" in answer.json()["detail"]
    assert service.post("/disconnect-env", {"env_id": 5})["status"] == "failure"


def test_acks(service: Service) -> None:
    assert service.http.post("/batch/ack", json={}).status_code == 409, "no trainer yet"
    service.begin(batch_size=4, ack_batches=True)
    for mark in range(2):
        service.post("/scored_data", group(mark=mark))
    first = service.get("/batch")
    assert service.get("/batch") == first, "the same batch until it is acknowledged"
    ahead = service.get("/batch", received=first["batch_id"])
    assert marks(ahead["batch"]) == [1]
    for _ in range(2):
        service.post("/batch/ack", {"batch_id": first["batch_id"], "weight_version": 1})
    assert service.get("/batch") == ahead
    assert service.http.post("/batch/ack", json={"batch_id": 77}).status_code == 404
    assert service.http.post("/batch/ack", json={"uuid": 1}).status_code == 409
    assert service.post("/batch/ack", {}) == {"status": "success", "groups": 1, "weight_version": 2}
    refused = service.http.post("/batch/report", json={"batch_id": 99})
    assert (refused.status_code, refused.json()["detail"].partition(";")[0]) == (
        404,
        "batch 99 was never handed out (the last one was 2)",
    )


def test_a_batch_that_the_trainer_cannot_learn_from_is_skipped_and_counted(
    service: Service,
) -> None:
    service.begin(batch_size=4, ack_batches=True)
    for mark in range(2):
        service.post("/scored_data", group(mark=mark))
    first = service.get("/batch")["batch_id"]
    said = {"batch_id": first, "weight_version": 0, "skipped": "out of memory at 40 sequences"}
    assert service.post("/batch/ack", said) == {
        "status": "success",
        "groups": 1,
        "weight_version": 0,
    }
    assert marks(service.get("/batch")["batch"]) == [1]
    assert service.get("/stats")["batches_skipped"] == 1
    assert "rollout_batches_skipped 1.0" in service.http.get("/metrics").text
    assert (
        f"skipped batch {first}, 1 groups: out of memory at 40 sequences" in service.log.read_text()
    )


def test_the_trainer_ends_its_run(service: Service) -> None:
    uuid = service.post("/register", trainer())["uuid"]
    assert service.http.post("/run/end", json={"uuid": uuid + 1}).status_code == 409
    assert service.get("/stats")["run_ended"] is False
    assert service.post("/run/end", {"uuid": uuid}) == {"status": "success"}
    assert service.get("/stats")["run_ended"] is True


def test_an_environment_that_registers_after_the_end_waits_for_the_next_trainer(
    service: Service,
) -> None:
    first = service.begin()
    uuid = service.post("/register", trainer(wandb_project="first"))["uuid"]
    service.get("/batch")
    service.post("/run/end", {"uuid": uuid})
    answer = service.post("/register-env", environment())
    assert answer["status"] == "wait for trainer to start", "as the public SDK knows it"
    assert answer["reason"].startswith("the last trainer's run has ended")
    assert service.get("/wandb_info") == {"group": None, "project": None}, (
        "W&B runs belong to the next trainer's project"
    )
    assert service.begin(wandb_project="second") > first
    assert service.get("/wandb_info")["project"] == "second"
    assert service.status_env(first).json()["run_ended"]
    assert not service.status_env(first + 1).json()["run_ended"]


def test_stats_say_what_keeps_the_trainer_waiting(service: Service) -> None:
    service.begin(batch_size=4)
    assert service.http.post("/scored_data", json=group(scores=[1.0])).status_code == 422
    assert service.http.post("/scored_data_list", json=[group(), group(size=8)]).status_code == 422
    body = {"env_id": 0, "trouble": "all are\ntoo long"}
    assert service.http.request("GET", "/status-env", json=body).status_code == 200
    assert service.get("/batch") == {"batch": None}
    reason = service.get("/stats")["waiting_because"]
    assert re.match(
        r"0 of 4 sequences are queued; task_0 is registered and has posted no group for \d+ s; "
        r"task_0 gives no group: all are too long; 2 posts",
        reason,
    )
    assert (
        "refused since the last batch, the last one because: tokens: the group has 8 sequences"
        in reason
    )


def test_versions_that_go_back_are_told_apart_by_their_epochs(service: Service) -> None:
    service.begin(batch_size=4, ack_batches=True, max_staleness=1, weight_epoch=1000)
    service.post("/batch/ack", {"weight_version": 17})
    service.post(
        "/register",
        trainer(
            batch_size=4, ack_batches=True, max_staleness=1, weight_epoch=2000, starting_step=10
        ),
    )
    began_before = group(
        mark=1, weight_versions=[17, 10, 10, 10], weight_epochs=[1000, 2000, 2000, 2000]
    )
    assert service.post("/scored_data", began_before) == {"status": "received"}
    batch = service.get("/batch")
    assert batch["batch"][0]["weight_versions"] == [17, 10, 10, 10]
    assert batch["batch"][0]["weight_epochs"] == [1000, 2000, 2000, 2000]
    service.post("/batch/ack", {"batch_id": batch["batch_id"], "weight_version": 11})
    late = service.post("/scored_data", began_before)
    assert late["status"] == "dropped", "its age is two steps now, although it says 17"
    assert (
        "weight version 9 (an earlier trainer's), but the trainer takes none below 10"
        in late["reason"]
    )
    assert service.get("/stats")["weight_epoch"] == 2000


def test_a_body_that_holds_no_groups_may_not_be_large(service: Service) -> None:
    answer = service.http.post("/register", json=trainer(padding="x" * (1 << 20)))
    assert answer.status_code == 413


def test_stale_groups_are_not_handed_out_and_are_counted(service: Service) -> None:
    service.begin(batch_size=4, max_staleness=1, starting_step=4)
    answer = service.post("/scored_data", group(weight_versions=[9, 2, 9, 9]))
    assert answer["status"] == "dropped"
    assert "weight version 2" in answer["reason"]
    service.post("/scored_data", group(mark=1, weight_versions=[3, 4, 4, 4]))
    assert service.status_env(0).json()["groups_wanted"] == 1
    assert marks(service.get("/batch")["batch"]) == [1]
    assert service.get("/stats")["dropped"] == [
        {"reason": "stale", "longest_up_to": 4, "groups": 1}
    ]
    stale = group(weight_versions=[2] * 4)
    listed = service.post(
        "/scored_data_list", [stale, group(mark=2, weight_versions=[4] * 4), stale]
    )
    assert (listed["groups_processed"], listed["dropped"]) == (3, 2)
    assert "weight version 2" in listed["reason"]
    assert marks(service.get("/batch")["batch"]) == [2]


# ---- encodings and errors ----
def test_gzip_both_ways(service: Service) -> None:
    service.begin(batch_size=4)
    sent = group(length=500)
    packed = gzip.compress(json.dumps(sent).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert service.http.post("/scored_data", content=packed, headers=headers).json() == {
        "status": "received"
    }
    answer = service.http.get("/latest_example", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json()["tokens"] == sent["tokens"]
    assert (
        "content-encoding"
        not in service.http.get("/status", headers={"accept-encoding": "gzip"}).headers
    )
    answer = service.http.get("/batch", headers={"accept-encoding": "gzip;q=0, identity"})
    assert "content-encoding" not in answer.headers
    service.post("/scored_data", sent)
    answer = service.http.get("/batch", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json()["batch"][0]["tokens"] == sent["tokens"]
    for broken in (b"xx", packed[:-20], packed[:10], packed + b"xx", packed + packed[:-20]):
        answer = service.http.post("/scored_data", content=broken, headers=headers)
        assert (answer.status_code, answer.text) == (400, "Invalid gzip payload")
    text = json.dumps(sent).encode()
    members = [gzip.compress(text[start : start + 700]) for start in range(0, len(text), 700)]
    answer = service.http.post(
        "/scored_data", content=b"".join(members) + bytes(16), headers=headers
    )
    assert (answer.status_code, service.get("/batch")["batch"][0]["tokens"]) == (
        200,
        sent["tokens"],
    )
    answer = service.http.post("/scored_data", content=packed, headers={"content-encoding": "br"})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/register", {}, "wandb_group"),
        ("/register", trainer(batch_size=0), "batch_size"),
        ("/register-env", environment(weight=-2), "weight"),
        ("/register-env", environment(min_batch_allocation=1.5), "min_batch_allocation"),
        ("/disconnect-env", {}, "env_id"),
        ("/scored_data", {"tokens": [[1]], "masks": [[1]]}, "scores"),
        ("/evaluations", {"metrics": {"accuracy": 1.0}}, "name"),
        ("/evaluations", {"name": "task", "metrics": {}}, "metrics"),
        ("/evaluations", {"name": "task", "metrics": {"accuracy": "all"}}, "metrics"),
        ("/evaluations", {"name": "task", "metrics": {"x" * 257: 1.0}}, "metrics"),
        (
            "/evaluations",
            {"name": "task", "metrics": {"accuracy": 1}, "weight_version": -1},
            "weight_version",
        ),
    ],
)
def test_bodies_that_do_not_validate(
    service: Service, path: str, body: dict[str, Any], field: str
) -> None:
    answer = service.http.post(path, json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][:2] == ["body", field]


def test_a_rule_of_several_fields_is_named_without_the_body(service: Service) -> None:
    answer = service.http.post("/register", json=trainer(replay={"policy": "recent"}))
    assert answer.json()["detail"][0]["msg"].startswith("replay 'recent' needs max_staleness")
    answer = service.http.post("/register-env", json=environment(weight=-2))
    assert answer.json()["detail"][0]["msg"].startswith("weight is -2: a weight is at least 0")


def test_masks_of_0_and_1_are_refused(service: Service) -> None:
    """A 0 would be trained on, where its client means the opposite."""
    service.post("/register", trainer(batch_size=2))
    group = {"tokens": [[5, 6, 7]] * 2, "masks": [[-100, 6, 7], [0, 1, 1]], "scores": [1, 0]}
    answer = service.http.post("/scored_data", json=group)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["msg"].startswith("masks[1] has only 0 and 1: write -100")
    group |= {"tokens": [[5, 6, 7], [0, 1, 1]]}
    assert service.post("/scored_data", group) == {"status": "received"}, "ids of the tokens"


def test_a_group_size_above_the_batch_size_is_named(service: Service) -> None:
    service.post("/register", trainer(batch_size=4))
    service.get("/batch")
    service.post("/register-env", environment(group_size=8))
    assert "its group_size 8 is above the trainer's batch_size 4" in service.log.read_text()


def test_likely_mistakes_in_posts_are_taken_with_one_line_each(service: Service) -> None:
    written = service.log.stat().st_size
    env_id = service.begin()
    longer = {"length": 129, "env_id": env_id, "advantage": [[0.5]] * 4, "an_own_field": 1}
    for _ in range(2):
        service.post("/scored_data", group(env_id=env_id))
        service.post("/scored_data", group(**longer))
        service.post("/scored_data_list", [group(env_id=77)])
    lines = [
        line.partition("atroposlib.service.service: ")[2]
        for line in service.log.read_text()[written:].splitlines()
        if " WARNING " in line
    ]
    fields = "which the service does not know. The trainer gets it unread"
    assert lines == [
        f"task_0 posts the field `advantage`, {fields}: rename it if `advantages` is meant",
        f"task_0 posts the field `an_own_field`, {fields}",
        "task_0 posts a sequence of 129 tokens, above the trainer's limit of 128 (max_token_len). "
        "A trainer leaves such a sequence out: lower the environment's max_token_length, or raise "
        "the trainer's --seq-len",
        "a group names env_id 77, which is not registered here. It is accepted, without the weight "
        "and share of an environment. Post with the env_id of POST /register-env, and register "
        "again after a reset of this service",
    ]


def test_other_mistakes(service: Service) -> None:
    assert service.http.post("/scored_data", content=b"{bad").status_code == 422
    assert service.http.get("/nope").status_code == 404
    assert service.http.get("/register").status_code == 405
    assert service.http.get("/batch", params={"received": "x"}).status_code == 422
    assert service.http.get("/evaluations", params={"after": "x"}).status_code == 422
    without = service.http.get("/status-env").json()["detail"][0]
    assert (without["loc"], without["msg"][:18]) == (["body", "env_id"], "env_id is missing:")
    large = service.http.get("/status-env", params={"env_id": 2**60}).json()["detail"][0]
    assert large["msg"].endswith("it must be an integer below 2**53 in magnitude")


def test_metrics_and_openapi(service: Service) -> None:
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    text = service.http.get("/metrics").text
    assert "rollout_queue_groups 1.0" in text
    assert 'rollout_groups_posted_total{status="received"}' in text
    assert 'rollout_requests_total{method="POST",route="/scored_data",status="200"}' in text
    schema = service.get("/openapi.json")
    described = schema["components"]["schemas"]
    for reference in re.findall(r"#/components/schemas/(\w+)", json.dumps(schema)):
        assert reference in described
    assert "tokens" in described["ScoredData"]["properties"]


def test_status_env(service: Service) -> None:
    env_id = service.begin()
    service.post("/register-env", environment(weight=3.0, min_batch_allocation=0.25))
    service.post("/scored_data", group(env_id=env_id))
    answer = service.status_env(env_id).json()
    expected = {
        "current_step": 0,
        "queue_size": 1,
        "unallocated_fraction": 0.75,
        "self_queue_size": 1,
        "max_group_size": 4,
        "env_weight": 0.25,
    }
    assert expected.items() <= answer.items()
    assert service.get("/status-env", env_id=env_id) == answer


def test_status_env_can_wait_for_the_trainer(service: Service) -> None:
    env_id = service.begin(max_staleness=0, ack_batches=True)
    told = service.status_env(env_id).json()

    def after(act: Callable[[], Any]) -> dict[str, Any]:
        """The status of an environment that waits, beside other work."""
        asked = {"env_id": env_id, "moves": told["moves"], "wait": 30}
        url = service.http.base_url.join("/status-env")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: httpx.request("GET", url, json=asked, timeout=60))
            act()
            found: dict[str, Any] = answer.result(20).json()  # sooner than it would be without
        assert found["moves"] == told["moves"] + 1
        return found

    service.post("/scored_data_list", [group(env_id=env_id)] * 2)
    assert service.status_env(env_id).json()["moves"] == told["moves"], (
        "what environments do is no move"
    )
    batches: list[dict[str, Any]] = []
    told = after(lambda: batches.append(service.get("/batch")))
    assert (told["groups_wanted"], told["current_step"]) == (0, 1)
    told = after(
        lambda: service.post(
            "/batch/ack", {"batch_id": batches[0]["batch_id"], "weight_version": 1}
        )
    )
    assert told["groups_wanted"] == 2
    uuids: list[int] = []
    told = after(lambda: uuids.append(service.post("/register", trainer())["uuid"]))
    assert after(lambda: service.post("/run/end", {"uuid": uuids[0]}))["run_ended"]


def test_status_env_counts_in_groups_of_the_environments_own_size(service: Service) -> None:
    small = service.begin(environment(group_size=2))
    large = service.post("/register-env", environment(group_size=6))["env_id"]
    for _ in range(4):
        service.post("/scored_data", group(2, env_id=small))
    sizes = [
        (answer["queue_size"], answer["self_queue_size"])
        for answer in (service.status_env(env_id).json() for env_id in (small, large))
    ]
    assert sizes == [(4, 4), (1, 0)]


CLIENTS, GROUPS = 16, 20


def broken_promises(posts: dict[int, Sequence[float]], handed_out: Sequence[int]) -> int:
    """Pairs (a, b) with b handed out before a although a was answered before b was sent.

    Args:
        posts: id to [first byte sent, last byte sent, answered], in seconds of one clock.
        handed_out: ids in the order in which they were handed out.
    """
    count = 0
    for place, later in enumerate(handed_out):
        answered = posts[later][2]
        count += sum(answered < posts[earlier][0] for earlier in handed_out[:place])
    return count


def test_a_broken_promise_is_counted() -> None:
    posts = {1: [0.0, 0.1, 0.2], 2: [0.3, 0.4, 0.5], 3: [0.1, 0.2, 0.6]}
    assert broken_promises(posts, [1, 2, 3]) == broken_promises(posts, [3, 1, 2]) == 0, (
        "3 was under way with both"
    )
    assert broken_promises(posts, [2, 3, 1]) == 1
    assert broken_promises(posts, [2, 1]) == 1


def test_groups_of_many_clients_are_handed_out_in_the_order_of_their_acceptance(
    tmp_path: Path,
) -> None:
    """Short and long bodies at once, to the durable service, while a trainer drains it."""
    service = Service(tmp_path, "--store", str(tmp_path / "run.db")).start()
    service.begin(batch_size=16)
    posts: dict[int, list[float]] = {}
    wrong: list[str] = []

    def post(client: int) -> None:
        with httpx.Client(base_url=service.http.base_url, timeout=60) as http:
            for number in range(GROUPS):
                mark = 1000 * (client + 1) + number
                body = json.dumps(group(mark=mark, length=(3, 200, 4000)[mark % 3], env_id=0))
                sent = time.monotonic()
                answer = http.post("/scored_data", content=body)
                posts[mark] = [sent, sent, time.monotonic()]
                if answer.status_code != 200:
                    wrong.append(answer.text)

    clients = [
        threading.Thread(target=post, args=(client,), daemon=True) for client in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    handed_out: list[int] = []
    deadline = time.monotonic() + 120
    while len(handed_out) < CLIENTS * GROUPS and time.monotonic() < deadline:
        batch = service.get("/batch")["batch"]
        handed_out += marks(batch or [])
        if batch is None:
            time.sleep(0.005)
    for client in clients:
        client.join(60)
    assert not wrong
    assert sorted(handed_out) == sorted(posts)
    assert len(posts) == CLIENTS * GROUPS
    assert broken_promises(posts, handed_out) == 0
    service.signal(signal.SIGTERM)


MODELS: list[type[BaseModel]] = [
    *(
        RegisterTrainer,
        RegisterEnv,
        EnvIdentifier,
        EnvStatus,
        AckBatch,
        BatchReport,
        EndRun,
        PostedEvaluation,
    ),
    *(ServerAddress, PublishedFleet, LeaseReferences, ReferencesDone),
]


ODD = [
    b"9" * 400,
    b"-" + b"9" * 5000,
    b"1e39",
    b"1e400",
    b"NaN",
    b"-Infinity",
    b"18446744073709551616",
    b'"\\ud800"',
    b'"\xff"',
]


ODD += [
    b"[" * 300 + b"]" * 300,
    b'{"a":1e39}',
    b"[[1e39]]",
    b"null",
    b"true",
    b'"x"',
    b"{}",
    b"-1",
    b"0.5",
]


@pytest.mark.parametrize(
    ("model", "body", "says"),
    [
        (PostedEvaluation, b'{"name":"x","metrics":{"a":1e39}}', "metrics.a is "),
        (PostedEvaluation, b'{"name":"x","metrics":{"a":' + b"9" * 400 + b"}}", "metrics.a is "),
        (
            ReferencesDone,
            b'{"worker":"w","groups":[{"id":1,"ref_logprobs":[[0,-1e39]]}]}',
            "groups[0].ref_logprobs[0][1] is ",
        ),
        (
            PublishedFleet,
            b'{"servers":[{"url":"http://a:1","standing":"good","since":1e300}]}',
            "servers[0].since is ",
        ),
        (EndRun, b'{"uuid":' + b"9" * 400 + b"}", "uuid is 'an integer of 1329 bits'"),
    ],
)
def test_a_number_beyond_its_bound_is_named(model: type[BaseModel], body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(model, body)
    assert says in str(caught.value)
    assert "less than or equal to" in str(caught.value) or "greater than or equal to" in str(
        caught.value
    )


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_what_is_refused_can_be_answered_and_what_is_taken_can_be_stored(
    model: type[BaseModel], data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(list(model.model_fields)), unique=True))
    fields = [orjson.dumps(name) + b":" + data.draw(st.sampled_from(ODD)) for name in names]
    try:
        taken: Any = read(model, b"{" + b",".join(fields) + b"}")
    except InvalidRequestError as refusal:
        orjson.dumps(refusal.errors)
        return
    orjson.dumps(taken.model_dump(exclude={"report"}))
