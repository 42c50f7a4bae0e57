"""The script that compares a server's tokens confirms only a server whose tokens have equal bits.

vLLM has no deterministic mode on a CPU, so a server that computes with the trainer's own operations
stands in for it here. The script's verdict on the real one needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from example_trainer.deterministic.pairing import deterministic_decoder, model_provenance
from example_trainer.deterministic.parity import ParityError
from example_trainer.models import load_model
from example_trainer.models.packing import Packing
from tests.example_trainer.deterministic import determinism_check
from tests.http_server import Answer, HttpServer, Request
from vllm_patching.batch_invariant import ops

pytestmark = pytest.mark.nightly

STARTER = Path(__file__).resolve().parents[3] / "assets" / "starter_model"
CLOSING = "bitwise determinism verified"
SAMPLES, LENGTH = 16, 6


class Sampler:
    """Answers as the server does, one token after the other."""

    def __init__(self, kernels: dict[str, str] | None, spoilt: int | None) -> None:
        """
        Args:
            kernels: entries of the provenance that are other ones; None: not in deterministic mode.
            spoilt: number of the token, over all answers, whose logprob has another last bit.
        """
        model = load_model(str(STARTER), torch.float32, "cpu", deterministic_decoder)
        self.model, self.spoilt, self.count = model, spoilt, 0
        named = model_provenance(model)
        table = named.pop("rotary_table")
        self.report = (
            None if kernels is None else {"provenance": named | kernels, "rotary_table": table}
        )

    @torch.no_grad()
    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(body["seed"])
        answers: dict[str, Any] = {"token_ids": [], "logprobs": []}
        for _ in range(body["n"]):
            tokens, rows = list(body["prompt"]["prompt_token_ids"]), []
            for _ in range(body["max_tokens"]):
                hidden = self.model(torch.tensor(tokens), Packing([len(tokens)]))[-1:]
                logits = ops.linear(hidden, self.model.output_weight)
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
                logprob = ops.chosen_logprobs(
                    hidden, self.model.output_weight, torch.tensor([token])
                ).numpy()
                if self.count == self.spoilt:
                    logprob = np.nextafter(logprob, np.float32(-np.inf))
                self.count += 1
                tokens.append(token)
                rows.append({str(token): float(logprob[0])})
            answers["token_ids"].append(tokens[-body["max_tokens"] :])
            answers["logprobs"].append(rows)
        return answers


@contextmanager
def serving(sampler: Sampler) -> Iterator[str]:
    def answer(request: Request) -> Answer:
        if request.method == "POST":
            assert request.path == "/generate"
            return 200, sampler.generate(request.json)
        assert request.path == "/deterministic"
        if sampler.report is None:
            return 404, {"error": "not in deterministic mode"}
        return 200, sampler.report

    with HttpServer(answer) as server:
        yield server.url


def run_script(url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(
        determinism_check, "check_operations", lambda device: 0
    )  # tested by themselves
    sizes = ["--samples", str(SAMPLES), "--length", str(LENGTH)]
    return determinism_check.main(
        ["--device", "cpu", "--vllm-url", url, "--model", str(STARTER), *sizes]
    )


def test_equal_bits_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Sampler({}, None)) as url:
        assert run_script(url, monkeypatch) == 0
    expected = f"✓ vLLM-TorchTitan {CLOSING}: {SAMPLES * LENGTH} tokens match exactly"
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_one_bit_of_one_token_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = 8 * LENGTH + 2 * LENGTH + 4  # second prompt, third answer, fifth token
    with serving(Sampler({}, spoilt)) as url:
        assert run_script(url, monkeypatch) == 1
    said = capsys.readouterr().out
    assert f"1 of {8 * LENGTH} differ from vLLM" in said
    assert "sample 2, token 4" in said
    assert CLOSING not in said


@pytest.mark.parametrize(
    ("kernels", "said"), [({"linear": "another"}, "another"), (None, "not in deterministic mode")]
)
def test_a_server_with_other_kernels_is_not_compared(
    kernels: dict[str, str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Sampler(kernels, None)) as url, pytest.raises(ParityError, match=said):
        run_script(url, monkeypatch)
