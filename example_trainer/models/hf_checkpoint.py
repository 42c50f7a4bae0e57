"""Hugging Face checkpoints into and out of the decoder, tensor for tensor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.decoder import Decoder
from example_trainer.models.safetensors_writer import write_safetensors
from vllm_patching.weights.families import (
    FAMILIES,
    Geometry,
    Parameter,
    Part,
    UnsupportedModel,
    own_family,
    parameters,
)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Limit of one weight file; the size that Hugging Face's own checkpoints have."""
_HUB_FILES = ["*.safetensors", INDEX_FILE, "*.json", "*.txt", "*.model", "*.jinja"]
_NOT_FROM_HUB = ["consolidated*"]
"""The weights again under other names, in Mistral's repositories."""
_PACKED_DTYPES = {"I8", "U8", "F4", "F6_E2M3", "F6_E3M2"}
"""Names of safetensors."""
_COPIED_SUFFIXES = {
    ".json",
    ".txt",
    ".model",
    ".jinja",
}  # config, tokenizer, chat template, vocabulary


def find_checkpoint(name: str) -> Path:
    """The folder that holds a model, fetched from the Hugging Face hub unless `name` is a local
    folder.

    Raises:
        ModelError: there is no such folder, or the hub does not know it or cannot be reached.
    """
    if folder := local_checkpoint(name):
        return folder
    unknown = f"no folder {Path(name).expanduser().resolve()}, and the Hugging Face hub"
    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_FROM_HUB)
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name!r}: {unknown} cannot be reached, nor is the model in its local cache. "
            "Check the name and the network, or give the path of a downloaded folder"
        ) from error
    except HFValidationError as error:
        raise ModelError(
            f"model {name!r}: {unknown} takes no such name; give a folder or an id like Qwen/Qwen3-0.6B"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {name!r}: {unknown} answered: {reason}; check the name, or log in if it is gated"
        ) from error


def local_checkpoint(name: str) -> Path | None:
    """The local folder that holds a model; None if `name` can only be an id of the hub.

    Raises:
        ModelError: `name` is a path, and no folder with a model is there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model folder {path} has no config.json; give the folder that holds the Hugging Face checkpoint"
            )
        return path
    if path.is_file():
        raise ModelError(
            f"model {name} is a file; give the folder that holds config.json and the *.safetensors files"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model folder {path} does not exist (seen from {Path.cwd()}); give a folder or a hub id such as Qwen/Qwen3-0.6B"
        )
    return None


def read_geometry(folder: Path) -> tuple[Geometry, dict[str, Any]]:
    """Parse `folder/config.json`.

    Returns:
        The geometry and the config as parsed.

    Raises:
        ModelError: the file is not a JSON object, or describes a model that is not supported.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    _check_form(config, path)
    try:
        if own_family(config) is None:
            # Only here: it takes seconds to import transformers.
            from example_trainer.models.transformers_layout import transformers_geometry

            return transformers_geometry(folder), config
        return Geometry.from_config(config, where=str(path)), config
    except UnsupportedModel as error:
        raise ModelError(str(error)) from error


def _check_form(config: object, path: Path) -> None:
    """Raise ModelError unless a parsed config.json is an object whose architectures are names."""
    remedy = "take the file of a complete checkpoint"
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {config!r:.40}, not a JSON object; {remedy}")
    names = config.get("architectures")
    if not (
        names is None or (isinstance(names, list) and all(isinstance(one, str) for one in names))
    ):
        raise ModelError(f"{path}: architectures is {names!r:.80}, not a list of names; {remedy}")


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """The dtype that the checkpoint's weights are stored in, by its config (float32 where it has
    none).
    """
    _, config = read_geometry(folder)
    text = config.get("text_config") or {}
    stored = (config.get("dtype"), config.get("torch_dtype"), text.get("dtype"))
    name = str(next(filter(None, stored), "float32"))
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"{folder / 'config.json'}: dtype {name!r} is not a torch dtype")
    return dtype


def load_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    make: Callable[[Geometry, torch.dtype, torch.device], Decoder] | None = None,
) -> Decoder:
    """Make a decoder and read a checkpoint into it.

    Args:
        name: a folder or a hub id.
        dtype: that the model computes in; tensors stored in another one are converted.
        device: where the parameters live.
        make: makes the uninitialised decoder; one that is spread over ranks reads its own part. Not
            given: make_whole.

    Raises:
        ModelError: not found, not supported, or a tensor is missing, left over or of the wrong
            shape (all are named).
    """
    folder = find_checkpoint(name)
    geometry, _ = read_geometry(folder)
    model = (make or make_whole)(geometry, dtype, torch.device(device))
    model.source = folder
    read_weights(model, folder)
    model.prepare()
    return model


def make_whole(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Make the uninitialised model of one process: a decoder, or a model of transformers."""
    if geometry.architecture in FAMILIES:
        return Decoder(geometry, dtype, device)
    from example_trainer.models.transformers_layout import TransformersGeometry
    from example_trainer.models.transformers_model import TransformersModel

    assert isinstance(geometry, TransformersGeometry)
    return TransformersModel(geometry, dtype, device)


def read_weights(model: Decoder, folder: Path) -> None:
    """Fill every parameter of `model` from the safetensors files in `folder`.

    Raises:
        ModelError: a tensor is missing, left over or of the wrong shape. The model must not be used
            then.
    """
    own = model.held_tensors()
    plan = parameters(model.geometry)
    with ExitStack() as stack, torch.no_grad():
        try:
            where = _open_tensors(folder, stack)
            _refuse_quantised(plan.values(), where, folder)
            _compare_names(
                plan_names=[part.name for planned in plan.values() for part in planned.tensors],
                where=where,
                model=model,
                folder=folder,
            )
            for planned in plan.values():
                _fill(model, own[planned.name], planned, partial(_tensor, where, folder))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"cannot read the weights in {folder}: {error}; is the download complete?"
            ) from error


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open every weight file of a checkpoint.

    Returns for each tensor's name the open file that holds it.
    """
    files = _weight_files(folder)
    where: dict[str, Any] = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"cannot read the weights in {file}: {error}; is the download complete?"
            ) from error
        for name in handle.keys():  # noqa: SIM118 - a safetensors file is not a mapping
            where[name] = handle
    return where


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        try:
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"cannot read {folder / INDEX_FILE}: {type(error).__name__}: {error}; "
                "is the download complete?"
            ) from error
    elif (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    else:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        advice = (
            "convert its *.bin files to safetensors" if pickled else "is the download complete?"
        )
        raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; {advice}")
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(
            f"{folder / INDEX_FILE} names files that are not there: {_some(absent)}; is the download complete?"
        )
    return files


def _refuse_quantised(plan: Iterable[Parameter], where: dict[str, Any], folder: Path) -> None:
    """Raise ModelError if a tensor is stored in a dtype of quantised weights."""
    for part in (part for planned in plan for part in planned.tensors if part.name in where):
        dtype = where[part.name].get_slice(part.name).get_dtype()
        if dtype.startswith("F8") or dtype in _PACKED_DTYPES:
            raise ModelError(
                f"{folder}: {part.name} is stored in {dtype}: a quantised checkpoint cannot be "
                "trained; use the unquantised one of the same model"
            )


def _compare_names(
    plan_names: list[str], where: dict[str, Any], model: Decoder, folder: Path
) -> None:
    ignored, planned = model.geometry.ignored, set(plan_names)
    found = {
        name
        for name in where
        if name in planned or not any(re.search(one, name) for one in ignored)
    }
    if model.geometry.tie_word_embeddings and "lm_head.weight" in found:
        head = where["lm_head.weight"].get_tensor("lm_head.weight")
        if "model.embed_tokens.weight" in found:
            embedding = where["model.embed_tokens.weight"].get_tensor("model.embed_tokens.weight")
            if not torch.equal(head, embedding):
                raise ModelError(
                    f"{folder}: config.json ties lm_head to the embedding, but the stored lm_head.weight differs from it"
                )
        found.discard("lm_head.weight")
    missing, unexpected = sorted(set(plan_names) - found), sorted(found - set(plan_names))
    if missing or unexpected:
        says = [f"missing {_some(missing)}"] if missing else []
        says += [f"not expected {_some(unexpected)}"] if unexpected else []
        raise ModelError(
            f"{folder} does not hold what {model.geometry.architecture} needs: {'; '.join(says)}"
        )


def _fill(
    model: Decoder, parameter: Tensor, planned: Parameter, read: Callable[[Part], Tensor]
) -> None:
    """Fill what this rank holds of a parameter.

    A rank that holds rows reads these alone. They go to the device as they are stored, since a
    copy that converts them would do so on the host.
    """
    shards, dtype = model.shards, stored_dtype(planned, model.dtype)
    if planned.frozen or not shards.spread:
        for part in planned.tensors:
            part.view(parameter).copy_(read(part))
        return
    local, rows = shards.local(parameter), shards.rows(planned.name)
    if rows is None or not all(type(part) is Part for part in planned.tensors):
        whole = torch.empty(planned.shape, dtype=dtype)
        for part in planned.tensors:
            part.view(whole).copy_(read(part))
        local.copy_(shards.take(planned.name, whole).to(local.device))
        return
    for part in planned.tensors:
        values = read(part)
        # A row of stacked matrices is a matrix, and a part counts the rows in it.
        deep = math.prod(planned.shape[1:]) // math.prod(part.shape[1:])
        first, last = rows.start * deep, rows.stop * deep
        begin, end = max(part.start, first), min(part.stop, last)
        if begin < end:
            held = local.flatten(0, local.dim() - len(part.shape))[begin - first : end - first]
            mine = values[begin - part.start : end - part.start]
            held.copy_(mine.to(local.device).to(dtype))


def _tensor(where: Mapping[str, Any], folder: Path, part: Part) -> Tensor:
    """The tensor of a checkpoint that fills a part. It is mapped: only rows that are used are read."""
    tensor: Tensor = where[part.name].get_tensor(part.name)
    if tuple(tensor.shape) != part.shape:
        raise ModelError(
            f"{folder}: {part.name} has shape {list(tensor.shape)}, config.json implies {list(part.shape)}"
        )
    return tensor


def _some(names: list[str], shown: int = 4) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def stored_dtype(planned: Parameter, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in checkpoints, and in memory, of a model in `dtype`."""
    if planned.integer:
        return torch.int64
    return torch.float32 if planned.float32 else dtype


def hf_tensors(
    geometry: Geometry, dtype: torch.dtype, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, from whole parameters in the order of the layout."""
    plan = parameters(geometry)
    for name, weight in weights:
        for part in plan[name].tensors:
            tensor = part.view(weight.detach()).to(stored_dtype(plan[name], dtype))
            yield part.name, tensor.contiguous()


def save_model(model: Decoder, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a Hugging Face checkpoint: weights in the model's dtype, config, tokenizer files.
    See write_checkpoint.
    """
    values = model.held_tensors()
    named = ((name, values[name]) for name in parameters(model.geometry))
    write_checkpoint(folder, model.geometry, model.dtype, named, companions(model), max_shard_bytes)


def write_checkpoint(
    folder: Path,
    geometry: Geometry,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, Tensor]],
    files: Mapping[str, bytes],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Write a Hugging Face checkpoint, of whose weights one is in memory at a time.

    The folder is created. Weights go to one file, or to several with an index when they exceed
    `max_shard_bytes`. Loading a checkpoint in its own dtype and saving it again gives equal
    tensors, byte for byte, and a copy of its config.json.

    Args:
        dtype: of the tensors that are written.
        weights: every parameter of the layout, whole, in its order.
        files: what else belongs to it, see companions.
        moved: called again and again while there is progress.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: the weights do not fit the layout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = total = 0
    plan = parameters(geometry).values()
    for stored, part in [(stored_dtype(one, dtype), part) for one in plan for part in one.tensors]:
        nbytes = math.prod(part.shape) * stored.itemsize
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][part.name] = (stored, part.shape)
        size += nbytes
        total += nbytes
    tensors = hf_tensors(geometry, dtype, weights)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        weight_map |= dict.fromkeys(shard, file)
        write_safetensors(
            folder / file, shard, islice(tensors, len(shard)), {"format": "pt"}, moved
        )
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    for name, content in files.items():
        (folder / name).write_bytes(content)


def companions(model: Decoder) -> dict[str, bytes]:
    """Config and tokenizer files of the checkpoint that a model was read from, by name, the config
    with the model's dtype.
    """
    source, dtype = model.source, model.dtype
    if source is None:
        return {}
    found = [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix in _COPIED_SUFFIXES
    ]
    files = {file.name: file.read_bytes() for file in found if file.name != INDEX_FILE}
    if checkpoint_dtype(source) != dtype:
        config = json.loads(files["config.json"])
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix(
            "torch."
        )
        files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return files
