"""Make a mixture of experts out of a dense model (sparse upcycling, arXiv:2212.05055).

    python -m studies.starter_model.mixture --output runs/mixture

Each expert is a copy of the layer's feed-forward network with a little noise of its own. The
router is random. The weights of a token's experts add up to one, so the mixture answers nearly as
the dense model did. The conversion takes a second.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STARTER_MODEL = Path(__file__).resolve().parents[2] / "assets" / "starter_model"
_PROJECTION = re.compile(r"(.*\.mlp)\.((?:gate|up|down)_proj\.weight)")
_KEPT = ("tokenizer*.json", "generation_config.json", "chat_template*")
_DENSE, _MIXTURE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--model",
        type=Path,
        default=STARTER_MODEL,
        help="folder of the dense model (default: the starter model)",
    )
    parser.add_argument(
        "--experts", type=int, default=4, help="experts of each layer (default: %(default)s)"
    )
    parser.add_argument(
        "--experts-per-token",
        type=int,
        default=2,
        help="experts that the router chooses for a token (default: %(default)s)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.02,
        help="standard deviation of an expert's noise, as a share of that of the weights "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not 1 <= options.experts_per_token <= options.experts:
        parser.error(
            f"--experts-per-token {options.experts_per_token}: give 1 to --experts, which is "
            f"{options.experts}"
        )
    if not options.noise >= 0:
        parser.error(f"--noise {options.noise:g}: give 0 or more")
    if not list(options.model.glob("*.safetensors")):
        parser.error(f"--model {options.model}: no *.safetensors there: give a checkpoint's folder")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Write the mixture's folder."""
    options = parse_arguments(arguments)
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures") != [_DENSE]:
        sys.exit(f"--model {options.model}: it is {config.get('architectures')}, give a {_DENSE}")
    dense = {
        name: tensor
        for path in sorted(options.model.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    options.output.mkdir(parents=True, exist_ok=True)
    mixture = dict(upcycled(dense, options.experts, options.noise, options.seed))
    save_file(mixture, options.output / "model.safetensors", metadata={"format": "pt"})
    changed = config_of(config, options.experts, options.experts_per_token)
    text = json.dumps(changed, indent=2) + "\n"
    (options.output / "config.json").write_text(text, encoding="utf-8")
    for pattern in _KEPT:
        for path in options.model.glob(pattern):
            shutil.copy(path, options.output)
    count = sum(tensor.numel() for tensor in mixture.values())
    print(f"{options.output}: {options.experts} experts a layer, {count:,} parameters")


def config_of(config: Mapping[str, Any], experts: int, experts_per_token: int) -> dict[str, Any]:
    """Return the config.json of the mixture of a dense model."""
    return {key: value for key, value in config.items() if key != "layer_types"} | {
        "architectures": [_MIXTURE],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def upcycled(
    dense: Mapping[str, Tensor], experts: int, noise: float, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors of the mixture.

    Args:
        dense: the checkpoint's tensors.
        noise: standard deviation, as a share of that of a tensor's values.
        seed: of the noise and of the routers.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    for name, tensor in dense.items():
        match = _PROJECTION.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        mlp, projection = match.groups()
        scale = noise * float(tensor.float().std())
        for expert in range(experts):
            own = tensor.float() + random(tuple(tensor.shape), scale)
            yield f"{mlp}.experts.{expert}.{projection}", own.to(tensor.dtype)
        if projection.startswith("gate"):
            hidden = tensor.shape[1]
            router = random((experts, hidden), hidden**-0.5)
            yield f"{mlp}.gate.weight", router.to(tensor.dtype)


if __name__ == "__main__":
    main()
