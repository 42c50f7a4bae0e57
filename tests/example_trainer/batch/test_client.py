"""The client against servers that misbehave."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.batch import client as rollout_client
from example_trainer.batch.client import (
    FetchedBatch,
    Interrupted,
    LastRun,
    RolloutClient,
    TrainedBatch,
)
from example_trainer.errors import RolloutServiceError
from example_trainer.process import StopRequested, StopSignal
from tests.example_trainer.batch.registration import REGISTRATION, group
from tests.example_trainer.batch.scripted import Scripted

MakeServer = Callable[[dict[str, list[Any]]], Scripted]
MakeClient = Callable[..., RolloutClient]


def test_the_original_wire_without_leases_works(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted({"/batch": [{"batch": None}, {"batch": [group(5)]}]})
    client = client_of(server.url)
    client.register(REGISTRATION)
    batch = client.next_batch()
    assert batch == FetchedBatch([group(5)], None, 0)
    client.acknowledge(batch.lease, 4)
    assert not any(path.startswith("/batch/ack") for path in server.paths())
    body = server.seen[0][1]
    assert body == {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 2,
        "max_token_len": 64,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 0,
        "starting_step": 3,
        "num_steps": 10,
        "max_staleness": None,
        "model": None,
        "weight_epoch": 0,
        "run": None,
        "lives": None,
        "positions": None,
        "replay": None,
        "ref_logprobs_from_workers": False,
        "reference": None,
        "log_dir": None,
        "inference_servers": None,
        "ack_batches": True,
    }


LAST_RUN = {"run": "before", "checkpoint_dir": "/saved", "saved_step": 4}


def test_a_weight_epoch_is_the_services_or_the_one_that_was_asked_for(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted(
        {
            "/weight-epoch": [
                {"weight_epoch": 70, "last_run": LAST_RUN},
                404,
                405,
                {"weight_epoch": 30},
                {"message": "hello"},
            ]
        }
    )
    client = client_of(server.url)
    assert client.weight_epoch(50, "a run") == (70, LastRun("before", Path("/saved"), 4))
    assert [client.weight_epoch(50, None) for _ in range(2)] == [(50, None)] * 2, (
        "the public service gives none"
    )
    assert server.seen[0] == ("/weight-epoch", {"asked": 50, "run": "a run"})
    for _ in range(2):
        with pytest.raises(RolloutServiceError, match="an epoch of at least 50 is needed"):
            client.weight_epoch(50, None)


def test_a_broken_connection_and_a_failing_server_are_tried_again(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted(
        {
            "/batch": [
                None,
                500,
                429,
                {"batch": [group(5)], "batch_id": 8},
                {"batch": [group(6)], "batch_id": 9},
            ],
            "/batch/ack": [None, {}],
        }
    )
    client = client_of(server.url)
    client.register(REGISTRATION)
    batch = client.next_batch()
    assert batch.groups == [group(5)]
    client.acknowledge(batch.lease, 4)
    assert client.next_batch().groups == [group(6)]
    polls = [path for path in server.paths() if path.startswith("/batch?")]
    assert polls == ["/batch?uuid=1"] * 4 + ["/batch?uuid=1&received=8"]
    acks = [body for path, body in server.seen if path == "/batch/ack"]
    assert acks == [{"batch_id": 8, "weight_version": 4, "uuid": 1}] * 2


def test_a_batch_that_nothing_was_learned_from_is_acknowledged_with_the_reason(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted({"/batch": [{"batch": [group(5)], "batch_id": 8}], "/batch/ack": [{}]})
    client = client_of(server.url)
    client.register(REGISTRATION)
    batch = client.next_batch()
    assert batch.lease == TrainedBatch(8, 1)
    client.acknowledge(batch.lease, 4, skipped="x" * 5000)
    assert server.seen[-1] == (
        "/batch/ack",
        {"batch_id": 8, "weight_version": 4, "uuid": 1, "skipped": "x" * 1000},
    )


def test_a_report_goes_with_the_acknowledgement_which_is_not_lost_by_it(
    scripted: MakeServer, client_of: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    report = {"weight_version": 3, "sequences": []}
    batches = [{"batch": [group(number)], "batch_id": number} for number in (8, 9)]
    server = scripted({"/batch": batches, "/batch/ack": [{}, 413, {}, {}], "/batch/report": [404]})
    client = client_of(server.url)
    client.register(REGISTRATION)
    first, second = client.next_batch().lease, client.next_batch().lease
    assert first is not None
    assert second is not None
    plain = {"batch_id": 8, "weight_version": 4, "uuid": 1}
    client.acknowledge(first, 4, report=report)
    assert server.seen[-1] == ("/batch/ack", plain | {"report": report})
    client.acknowledge(
        second, 5, report=report
    )  # a service that minds the report gets the acknowledgement alone
    assert server.seen[-1] == ("/batch/ack", {"batch_id": 9, "weight_version": 5, "uuid": 1})
    client.keep(second, 5, report)
    assert server.seen[-1][1]["report"] == report
    assert "could not be acknowledged" not in caplog.text
    client.last_report(second, report)
    assert server.seen[-1] == ("/batch/report", {"batch_id": 9, "uuid": 1, "report": report}), (
        "an old service has no such route"
    )


def test_an_earlier_trainers_batch_is_acknowledged_in_its_name_and_before_registering(
    scripted: MakeServer, client_of: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    server = scripted({"/batch/ack": [None, 500, {}, 409]})
    client = client_of(server.url)
    client.acknowledge_earlier(TrainedBatch(8, 77), 4)
    assert server.seen == [("/batch/ack", {"batch_id": 8, "weight_version": 4, "uuid": 77})] * 3
    client.acknowledge_earlier(TrainedBatch(8, 77), 4)
    assert "Batch 8 could not be acknowledged" in caplog.text
    client.acknowledge_earlier(TrainedBatch(9, None), 4)
    assert len(server.seen) == 4, "a number alone may be another service's"


def test_the_end_of_a_run_is_told_under_its_registration(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted({"/run/end": [None, {}]})
    client = client_of(server.url)
    client.register(REGISTRATION)
    client.end_run()
    assert server.seen[1:] == [("/run/end", {"uuid": 1})] * 2
    client.end_run(77)
    assert server.seen[-1] == ("/run/end", {"uuid": 77})


def test_a_finished_run_does_not_fail_for_the_services_sake(
    scripted: MakeServer,
    client_of: MakeClient,
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    client_of(scripted({"/run/end": [404]}).url).end_run()
    assert "takes no end of the run: " in caplog.text
    monkeypatch.setattr(rollout_client, "_END_SECONDS", 0.2)
    client_of(f"http://127.0.0.1:{free_port()}").end_run()
    assert "does not know that the run has ended: the rollout service at" in caplog.text
    assert "POST /run/end: ConnectError: " in caplog.text


def test_registering_again_says_how_far_training_is(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    lost = {"status": "error", "message": "Trainer not registered", "batch": []}
    server = scripted(
        {
            "/batch": [{"batch": [group(5)], "batch_id": 8}, lost, {"batch": [group(6)]}],
            "/batch/ack": [409],
        }
    )
    client = client_of(server.url)
    client.register(REGISTRATION)
    client.acknowledge(client.next_batch().lease, 7)
    assert client.next_batch().groups == [group(6)]
    assert [body["starting_step"] for path, body in server.seen if path == "/register"] == [3, 7]
    assert server.paths()[-2:] == ["/batch?uuid=1", "/status"], (
        "the old lease is not spoken of any more"
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "<html>hello</html>",
            r"GET .*/batch answered no JSON object \('<html>hello</html>'\); is this the address of a rollout service",
        ),
        ([1], "answered no JSON object"),
        ({"batch": "x"}, "answered a batch that is not a list of groups: x"),
        (403, r"refuses this trainer \(403\)"),
        (418, r"GET .*/batch 418"),
    ],
)
def test_what_is_no_batch_is_one_line(
    answer: Any, message: str, scripted: MakeServer, client_of: MakeClient
) -> None:
    client = client_of(scripted({"/batch": [answer]}).url)
    client.register(REGISTRATION)
    with pytest.raises(RolloutServiceError, match=message) as caught:
        client.next_batch()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "answer", "trouble", "told"),
    [
        (
            "/status",  # of the public server, which names no reason
            {"current_step": 1, "queue_size": 3},
            "",
            "3 groups are queued, 2 sequences make a batch.*see whether an environment is running",
        ),
        ("/stats", {"waiting_because": "no environment: start one"}, "", "no environment: start"),
        ("/stats", {"waiting_because": "0 of 2"}, "http://b:9001 (no answer)", "0 of 2"),
    ],
)
def test_a_batch_that_does_not_come_is_an_error_that_says_what_was_waited_for(
    path: str,
    answer: dict[str, Any],
    trouble: str,
    told: str,
    scripted: MakeServer,
    client_of: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rollout_client, "LOG_EVERY", 0.1)
    caplog.set_level(logging.INFO)
    server = scripted({"/batch": [{"batch": None}], path: [answer]})
    client = client_of(server.url, batch_timeout=3.0)
    client.server_trouble = lambda: trouble
    client.register(REGISTRATION)
    with pytest.raises(
        RolloutServiceError, match=rf"no batch came .* within 3 s \(--batch-timeout\): {told}"
    ):
        client.next_batch()
    assert re.search(rf"Waiting for a batch for [0-3] s: {told}", caplog.text)
    assert (f"; these vLLM servers do not serve: {trouble}" in caplog.text) == bool(trouble)


def test_a_service_that_is_not_there_is_an_error_after_the_deadline(
    free_port: Callable[[], int], client_of: MakeClient
) -> None:
    client = client_of(f"http://127.0.0.1:{free_port()}", service_timeout=0.3)
    with pytest.raises(RolloutServiceError) as caught:
        client.register(REGISTRATION)
    assert re.search(
        r"POST /register: ConnectError: .* for \d+ s, giving up; start it with "
        r"`python -m atroposlib.cli.run_api`, or raise the limit \(--service-timeout\)$",
        str(caught.value),
    )


def test_a_signal_ends_any_wait(
    scripted: MakeServer, client_of: MakeClient, free_port: Callable[[], int]
) -> None:
    stop = StopSignal()
    client = client_of(scripted({"/batch": [{"batch": None}]}).url, stop=stop)
    client.register(REGISTRATION)
    stop.request(15)
    with pytest.raises(StopRequested, match="SIGTERM"):
        client.next_batch()
    with pytest.raises(StopRequested, match="SIGTERM"):
        client_of(f"http://127.0.0.1:{free_port()}", stop=stop).register(REGISTRATION)


def test_batches_are_acknowledged_in_the_order_in_which_they_came(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted(
        {"/batch": [{"batch": [group(n)], "batch_id": n} for n in (5, 6)], "/batch/ack": [{}]},
    )
    client = client_of(server.url)
    client.register(REGISTRATION)
    first, second = client.next_batch(), client.next_batch()
    with pytest.raises(RuntimeError, match="the first comes first"):
        client.acknowledge(second.lease, 4)
    client.acknowledge(first.lease, 4)
    client.acknowledge(second.lease, 5)
    with pytest.raises(RuntimeError, match=r"what is held is \[\]"):
        client.acknowledge(second.lease, 6)
    acks = [
        (body["batch_id"], body["weight_version"])
        for path, body in server.seen
        if path == "/batch/ack"
    ]
    assert acks == [(5, 4), (6, 5)]


def test_a_batch_whose_checkpoint_is_not_complete_is_kept_by_the_service(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    server = scripted({"/batch": [{"batch": [group(5)], "batch_id": 8}], "/batch/ack": [{}]})
    client = client_of(server.url)
    client.register(REGISTRATION)
    batch = client.next_batch()
    client.keep(batch.lease, 4)
    client.acknowledge(batch.lease, 4)
    acks = [body for path, body in server.seen if path == "/batch/ack"]
    told = {"batch_id": 8, "weight_version": 4, "uuid": 1}
    assert acks == [{**told, "keep": True}, told]


def test_only_the_trainers_own_waiting_counts_against_the_deadline(
    scripted: MakeServer, client_of: MakeClient
) -> None:
    """A batch that is fetched ahead may take as long as the step does."""
    server = scripted({"/batch": [{"batch": None}]})
    client = client_of(server.url, batch_timeout=30.0)
    client.register(REGISTRATION)
    waited = iter([0.0] * 5 + [29.0, 31.0])
    with pytest.raises(RolloutServiceError, match="within 30 s"):
        client.next_batch(lambda: next(waited))
    assert next(waited, None) is None


@pytest.mark.parametrize("there", [True, False])
def test_a_wait_for_a_batch_can_be_interrupted(
    there: bool, scripted: MakeServer, client_of: MakeClient, free_port: Callable[[], int]
) -> None:
    client = client_of(scripted({"/batch": [{"batch": None}]}).url)
    client.register(REGISTRATION)
    if not there:
        client.close()
        client._service._http = httpx.Client(base_url=f"http://127.0.0.1:{free_port()}")
    ended: list[type[BaseException]] = []

    def wait() -> None:
        try:
            client.next_batch()
        except Exception as error:  # noqa: BLE001 - looked at below
            ended.append(type(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    client.interrupt()
    waiting.join(timeout=60)
    assert ended == [Interrupted]
