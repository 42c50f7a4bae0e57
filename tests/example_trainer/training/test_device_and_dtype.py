"""The device to train on, and the dtype: the server's, else that of --dtype, else the checkpoint's;
never float16.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.models.head import chosen_logprobs
from example_trainer.training.model import choose_device, choose_dtype

ROOT = Path(__file__).resolve().parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def options(dtype: str = "auto", model: str = "any") -> TrainerConfig:
    return TrainerConfig.model_validate({"model_name": model, "dtype": dtype})


@pytest.mark.parametrize(
    ("device", "fault", "told"),
    [
        ("gpu0", "", "is not a device; give auto, cpu, cuda or cuda:N"),
        ("mps", "", "is not supported"),
        ("cuda:3", "", "this process sees 1 GPUs; look at CUDA_VISIBLE_DEVICES"),
        (
            "cuda",
            "CUDA error: out of memory\nSearch for it",
            r"--device cuda .* other programs have all of its memory.*nvidia-smi",
        ),
        (
            "cuda",
            "CUDA error: unknown error\nmore",
            r"--device cuda cannot be used: CUDA error: unknown error; see whether",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, device: str, fault: str, told: str
) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError(fault)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(ConfigError, match=told) as refused:
        choose_device(device, num_threads=None)
    assert "\n" not in str(refused.value)


def test_the_servers_comes_first() -> None:
    assert choose_dtype(options(), torch.bfloat16, CPU) is torch.bfloat16
    assert choose_dtype(options("float32"), torch.float32, CPU) is torch.float32
    assert choose_dtype(options("bfloat16"), None, CPU) is torch.bfloat16
    assert choose_dtype(options(), None, CPU) is torch.float32
    with pytest.raises(ConfigError, match="--dtype float32, but the vLLM server holds bfloat16"):
        choose_dtype(options("float32"), torch.bfloat16, CPU)


def test_a_bridge_that_rounds_lets_the_trainer_be_float32_beside_any_server() -> None:
    assert choose_dtype(options("float32"), torch.bfloat16, CPU, converts=True) is torch.float32
    assert choose_dtype(options(), torch.bfloat16, CPU, converts=True) is torch.bfloat16
    with pytest.raises(ConfigError, match="--dtype bfloat16, but the vLLM server holds float32"):
        choose_dtype(options("bfloat16"), torch.float32, CPU, converts=True)


def float16_checkpoint(folder: Path) -> str:
    config = json.loads((ROOT / "assets" / "starter_model" / "config.json").read_text()) | {
        "dtype": "float16"
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_beside_a_float16_server_the_trainer_computes_in_bfloat16(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert choose_dtype(options(), torch.float16, GPU, converts=True) is torch.bfloat16
    assert choose_dtype(options(), torch.float16, CPU, converts=True) is torch.float32
    assert choose_dtype(options("float32"), torch.float16, GPU, converts=True) is torch.float32
    assert choose_dtype(options("bfloat16"), torch.float16, CPU, converts=True) is torch.bfloat16
    assert (
        "The vLLM server holds float16 weights: training in bfloat16, and rounding what it gets"
        in caplog.text
    )


def test_float16_is_refused_where_both_have_one_memory_or_the_same_bits(tmp_path: Path) -> None:
    single = r"holds float16 .* trains in its memory: start the server with --dtype bfloat16, or train with --use-shared-memory"
    with pytest.raises(ConfigError, match=single):
        choose_dtype(options(), torch.float16, GPU)
    exact = {"model_name": "any", "deterministic": True, "weight_bridge_mode": "shared_vllm"}
    with pytest.raises(
        ConfigError, match=r"--deterministic compares .*: start the server with --dtype bfloat16$"
    ):
        choose_dtype(TrainerConfig.model_validate(exact), torch.float16, GPU, converts=True)
    with pytest.raises(ConfigError, match=r"--dtype float16: .* Give --dtype bfloat16 or float32"):
        choose_dtype(options("float16"), None, CPU)


def test_a_float16_checkpoint_is_trained_in_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = float16_checkpoint(tmp_path)
    assert choose_dtype(options(model=model), None, GPU) is torch.bfloat16
    assert f"--model-name {model} holds float16 weights: training them in bfloat16" in caplog.text
    assert choose_dtype(options(model=model), None, CPU) is torch.float32
    assert choose_dtype(options("float32", model), None, GPU) is torch.float32


def cosine_to_float32(dtype: torch.dtype, tokens: int) -> float:
    """Return the output matrix's gradient, with weights as in a batch of so many tokens."""
    torch.manual_seed(0)
    hidden, weight, targets = (
        torch.randn(256, 32),
        0.1 * torch.randn(5000, 32),
        torch.randint(0, 5000, (256,)),
    )

    def gradient(kind: torch.dtype) -> torch.Tensor:
        matrix = weight.to(kind).requires_grad_()
        logprobs, _ = chosen_logprobs(hidden.to(kind), matrix, targets)
        (logprobs / tokens).sum().backward()
        assert matrix.grad is not None
        return matrix.grad.double().flatten()

    return float(torch.cosine_similarity(gradient(dtype), gradient(torch.float32), dim=0))


def test_why_float16_is_refused() -> None:
    """A token's share of the gradient falls below the least float16; bfloat16 has float32's range."""
    assert cosine_to_float32(torch.float16, 1) > 0.999
    assert cosine_to_float32(torch.float16, 100_000_000) < 0.9
    assert cosine_to_float32(torch.bfloat16, 100_000_000) > 0.999
