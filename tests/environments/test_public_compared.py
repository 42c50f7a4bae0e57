"""Equality of two SDKs' posts of the same answers."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.environments.public.compare import asked_differently, differences
from tests.environments.public.recorder import Recorder
from tests.inference_standin import logprob, prompt_table, up_to_stop


def group(**more: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2], [3, 4]],
        "masks": [[-100, 2], [-100, 4]],
        "scores": [1.0, 0.0],
    } | more


def test_order_and_what_says_nothing_do_not_count() -> None:
    turned = {name: list(reversed(rows)) for name, rows in group().items()}
    assert (
        differences(
            [group(advantages=[], env_id=0)],
            [turned | {"ref_logprobs": None, "idempotency_key": "k"}],
        )
        == []
    )
    assert differences([group(), turned], [turned]) == []


def test_a_number_that_differs_is_named_with_its_place() -> None:
    told = differences([group()], [group(scores=[1.0, 0.5])])
    assert told[1:] == ["sequences[1].scores: public 0.0, ours 0.5"]
    assert (
        differences([group()], [])[0]
        == "1 of 1 groups of the public SDK are not among the 0 of ours"
    )
    moved = group(scores=[0.0, 1.0])  # the rewards on the wrong tokens
    assert len(differences([group()], [moved])) > 1


def test_an_integer_and_a_float_of_the_same_value_are_one_number() -> None:
    assert differences([group(scores=[1, 0])], [group(scores=[1.0, 0.0])]) == []
    assert differences([group(scores=[1, 0])], [group(scores=[1.0, 0.5])])
    assert differences([group(finished=[1, 0])], [group(finished=[True, False])])


def test_a_post_that_was_cut_off_does_not_reach_the_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(1.0)
        with Recorder(service.getsockname()[1]) as recorder:
            with socket.create_connection(
                recorder.server.server_address[:2], timeout=120
            ) as client:
                client.sendall(b"POST /scored_data HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b"", "the connection is closed without an answer"
            with pytest.raises(TimeoutError):
                service.accept()
        assert recorder.refused == []


def test_requests_are_compared_where_both_asked() -> None:
    public = [{"prompt": "a", "temperature": 1.0}, {"prompt": "b", "n": 4}]
    assert asked_differently(public, [{"prompt": "a", "temperature": 0.5}]) == [
        "temperature: public 1.0, ours 0.5"
    ]
    assert asked_differently(public, public[:1]) == []


def test_the_stand_in_answers_alike_in_every_process() -> None:
    assert (logprob(5, 0), logprob(5, 1)) == (-0.59, -0.66)
    assert list(prompt_table(7, 2, 2)) == ["7", "26", "27"]
    assert up_to_stop("one. two. three", [". t", 5]) == "one. t"
    assert up_to_stop("one", None) == "one"
