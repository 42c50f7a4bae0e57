"""Each class whose methods a server calls by name has the methods of its protocol."""

from __future__ import annotations

import inspect

import pytest

from example_trainer.parameter_server.held import HeldWeights
from tests.vllm_patching.server.fake_engine import FakeRank
from vllm_patching.protocol.messages import BridgeWorker, LoraWorker, TurnsWorker
from vllm_patching.worker.extension import LockstepWorkerExtension
from vllm_patching.worker.lora import LoraWorkerExtension

PREFIXES = ("lockstep_", "lora_")
OWN = {"lockstep_open"}
"""Methods that no server calls."""


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name.startswith(PREFIXES) and name not in OWN
    }


def parameters(signature: inspect.Signature) -> list[str]:
    return list(signature.parameters)


@pytest.mark.parametrize(
    ("worker", "protocols"),
    [
        (LockstepWorkerExtension, (BridgeWorker, TurnsWorker)),
        (LoraWorkerExtension, (LoraWorker,)),
        (HeldWeights, (BridgeWorker,)),
    ],
)
def test_a_worker_has_the_methods_that_its_server_calls_and_no_others(
    worker: type, protocols: tuple[type, ...]
) -> None:
    expected = {name: s for protocol in protocols for name, s in methods(protocol).items()}
    here = methods(worker)
    assert here.keys() == expected.keys()
    for name, signature in expected.items():
        assert parameters(here[name]) == parameters(signature), name
        assert here[name].return_annotation == signature.return_annotation, name


def test_the_stand_in_for_a_rank_takes_the_same_arguments() -> None:
    expected = methods(BridgeWorker) | methods(TurnsWorker)
    here = methods(FakeRank)
    assert here.keys() == expected.keys()
    for name, signature in expected.items():
        assert len(parameters(here[name])) == len(parameters(signature)), name
