"""Adapters in the format of PEFT: a folder with adapter_config.json and adapter_model.safetensors.

The file is written after every optimizer step. Its header does not change, and its data is one
contiguous tensor that leaves a GPU in one copy. PEFT, vLLM and safetensors read it like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder
from example_trainer.models.lora.layers import adapters_of
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.models.safetensors_writer import DTYPE_NAMES, make_header, write_file
from vllm_patching.transport.adapter_file import CONFIG_FILE, WEIGHTS_FILE, adapter_summary

_PREFIX = "base_model.model."


def peft_name(projection: str, matrix: str) -> str:
    """PEFT's name of a tensor: (`model.….q_proj`, `lora_A`) →
    `base_model.model.model.….q_proj.lora_A.weight`.
    """
    return f"{_PREFIX}{projection}.{matrix}.weight"


def peft_config(settings: LoraSettings, base_model: str) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(settings.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


@dataclass(frozen=True)
class WrittenAdapter:
    """An adapter as it was written to the disk.

    Attributes:
        checksum: over the file's header and data, as the server computes it.
        num_bytes: of the data.
    """

    checksum: str
    num_bytes: int


class AdapterWriter:
    """Writes a model's adapters again and again.

    Args:
        model: has adapters, all of one dtype and on one device.
        settings: what they were made from.
        base_model: id or folder of the base model, for programs that load the adapter.
    """

    def __init__(self, model: Decoder, settings: LoraSettings, base_model: str) -> None:
        self.config = peft_config(settings.of_model(model.geometry), base_model)
        self._sources: list[tuple[str, Tensor]] = []
        self._host: Tensor | None = None
        entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for found in adapters_of(model):
            for matrix in ("lora_A", "lora_B"):
                parameter_name = found.parameter_name(matrix)
                parameter = model.get_parameter(parameter_name)
                self._sources.append((parameter_name, parameter))
                entries[peft_name(found.projection, matrix)] = (
                    parameter.dtype,
                    tuple(parameter.shape),
                )
        self._header = make_header(entries, {"format": "pt"})
        self.num_tensors, self.num_bytes = (
            len(self._sources),
            sum(parameter.nbytes for _, parameter in self._sources),
        )

    @torch.no_grad()
    def write(self, folder: Path, values: Mapping[str, Tensor] | None = None) -> WrittenAdapter:
        """Write both files into `folder`, which is created.

        Args:
            values: take these, by the model's parameter names, instead of the parameters' own,
                rounded to their dtype.

        Raises:
            OSError: the disk is full or not writable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = [
            parameter if values is None else values[name].to(parameter.dtype)
            for name, parameter in self._sources
        ]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        checksum = adapter_summary(self._header, flat).checksum
        write_file(folder / WEIGHTS_FILE, self._header, [self._on_host(flat)])
        (folder / CONFIG_FILE).write_text(
            json.dumps(self.config, indent=2) + "\n", encoding="utf-8"
        )
        return WrittenAdapter(checksum, self.num_bytes)

    def _on_host(self, flat: Tensor) -> Tensor:
        if not flat.is_cuda:
            return flat
        if self._host is None:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._host.copy_(
            flat
        )  # waits for the device, which `flat` and its checksum were enqueued on
        return self._host


def check_same_adapter(folder: Path, settings: LoraSettings, dtype: torch.dtype) -> None:
    """Compare a saved adapter with the options of a run that is to continue it.

    Raises:
        CheckpointError: the folder holds no adapter, or one of another rank, scale, set of
            projections or dtype.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            names = list(file.keys())
            stored = file.get_slice(names[0]).get_dtype() if names else "nothing"
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the adapter in {folder}: {error}") from error
    wanted = {
        "--lora-r": (config.get("r"), settings.rank),
        "--lora-alpha": (config.get("lora_alpha"), settings.alpha),
        "--lora-target-modules": (
            sorted(config.get("target_modules") or []),
            sorted(settings.targets),
        ),
        "--dtype": (stored, DTYPE_NAMES[dtype]),
    }
    for flag, (saved, asked) in wanted.items():
        if saved != asked:
            raise CheckpointError(
                f"--resume: the adapter in {folder} was made with {flag} {_shown(saved)}, and this run has {_shown(asked)}; "
                "give the same, or start in another --save-path without --resume"
            )


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
