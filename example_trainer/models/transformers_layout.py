"""Sizes and checkpoint tensors of a model that has no row in the table of families.

transformers' class of the architecture is made without memory, and its conversion of saved weights
is run over its parameters once. Each checkpoint tensor comes out as a view of a parameter: where it
begins and how it steps is what is kept. So checkpoints are read and written tensor for tensor. This
holds where transformers fuses many of them into one parameter, such as the experts of a layer.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vllm_patching.weights.families import (
    Geometry,
    Parameter,
    Part,
    UnsupportedModel,
    refuse_rope,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNBOUNDED_POSITIONS = 1 << 20
"""Tokens of a sequence for a model whose config.json names no bound, as of recurrent ones."""
_MEDIA_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")


@dataclass(frozen=True)
class StridedPart(Part):
    """A checkpoint tensor that is a view of a parameter.

    Attributes:
        offset, stride: of its elements in the parameter's.
    """

    offset: int = 0
    stride: tuple[int, ...] = ()

    def view(self, whole: Tensor) -> Tensor:
        """See Part.view."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class ModuleTensor(Parameter):
    """A parameter, or a buffer that checkpoints hold, of transformers' class.

    Attributes:
        whole_shape: its shape.
        share: of its elements, how many each token is multiplied with in the layers.
    """

    whole_shape: tuple[int, ...] = ()
    share: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """See Parameter.shape."""
        return self.whole_shape

    @property
    def multiplied(self) -> int:
        """See Parameter.multiplied."""
        return int(self.size * self.share)


@dataclass(frozen=True)
class TransformersGeometry(Geometry):
    """A model of transformers.

    Attributes:
        folder: of its checkpoint.
        tensors: see Geometry.listed.
        largest_layer, all_layers: elements of their parameters.
    """

    folder: str = ""
    tensors: tuple[ModuleTensor, ...] = field(default=(), compare=False, repr=False)
    largest_layer: int = 0
    all_layers: int = 0

    def listed(self) -> Iterator[Parameter]:
        """See Geometry.listed."""
        yield from self.tensors


class _ViewsAlone(TorchFunctionMode):
    """Leaves tensors where they are when they are only to be made contiguous."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


@lru_cache
def transformers_geometry(folder: Path) -> TransformersGeometry:
    """Read the sizes and the tensors of the checkpoint in `folder`.

    Raises:
        UnsupportedModel: transformers has no such class, the checkpoint is quantised, or brings
            code of its own.
    """
    model = empty_model(folder, torch.device("meta"), torch.float32)
    config = model.config.get_text_config()
    _refuse_rope(config, folder / "config.json")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{folder / 'config.json'}: {type(model).__name__} does not continue text; "
            "give a decoder with an output head, such as a ...ForCausalLM"
        )
    heads = _size(config, "num_attention_heads", 1)
    hidden = int(embedding.weight.shape[1])
    layers = layers_of(model.get_decoder())
    return TransformersGeometry(
        architecture=type(model).__name__,
        vocab_size=min(len(embedding.weight), len(head.weight)),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", 4 * hidden),
        num_layers=_size(config, "num_hidden_layers", 1),
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", max(1, hidden // heads)),
        max_positions=_size(config, "max_position_embeddings", UNBOUNDED_POSITIONS),
        rms_norm_eps=0.0,  # transformers' modules read this and the next from the file themselves
        rope_theta=0.0,
        tie_word_embeddings=head.weight is embedding.weight,
        folder=str(folder),
        tensors=tuple(_tensors(model, folder)),
        largest_layer=max(map(_elements, layers), default=0),
        all_layers=_elements(layers),
        media_tokens=frozenset(
            token
            for key in _MEDIA_TOKENS
            if (token := getattr(model.config, key, None)) is not None
        ),
        ignored=(
            *Geometry.ignored,
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        ),
    )


def _refuse_rope(config: Any, where: Path) -> None:
    """Raise UnsupportedModel if vLLM and transformers rotate a kind of layer differently."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [one for one in rope.values() if isinstance(one, Mapping)]
    for scaling in by_layer or [rope]:
        refuse_rope(scaling.get("rope_type", "default"), str(where))


def _size(config: Any, key: str, otherwise: int) -> int:
    """Return a size from the configuration, the largest one where layers differ."""
    value: Any
    if key in (getattr(config, "per_layer_attributes", None) or ()):
        value = [getattr(layer, key) for layer in config.per_layer_config]
    else:
        value = getattr(config, key, None)
    if isinstance(value, list | tuple):
        value = max(filter(None, value), default=None)
    return int(value or otherwise)


def empty_model(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Make transformers' class of a checkpoint; parameters have no values, buffers have theirs.

    Raises:
        UnsupportedModel: see transformers_geometry.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.initialization import no_init_weights

    where = folder / "config.json"
    parsed = json.loads(where.read_text(encoding="utf-8"))
    kind = _class_of(parsed, where)
    try:
        config = kind.config_class.from_pretrained(str(folder), local_files_only=True)
        with no_init_weights(), torch.device(device):
            model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    except (
        AttributeError,
        ImportError,
        KeyError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError) or not reason:
            reason = f"{type(error).__name__} {reason}".strip()
        raise UnsupportedModel(
            f"{where}: transformers' {kind.__name__} refuses it: {reason}; correct the file, or "
            "use another model"
        ) from error
    model.tie_weights()
    return model.eval()


def _class_of(config: Mapping[str, Any], where: Path) -> type[PreTrainedModel]:
    """Return transformers' class of a config.json."""
    import transformers

    if config.get("quantization_config"):
        raise UnsupportedModel(
            f"{where}: a quantised checkpoint cannot be trained; use the unquantised one of the "
            "same model"
        )
    named = config.get("architectures") or []
    for name in (*named, *map(_in_another_case, named)):
        kind = getattr(transformers, name, None)
        if inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    if not named:
        raise UnsupportedModel(
            f"{where} has no 'architectures', which names the class (model_type "
            f"{config.get('model_type')!r}); take the file of a complete checkpoint"
        )
    names = ", ".join(map(str, named))
    if config.get("auto_map"):
        raise UnsupportedModel(
            f"{where}: the class of architecture {names} comes with the checkpoint (auto_map), "
            "and code of checkpoints is never run; use a model whose class transformers has"
        )
    raise UnsupportedModel(
        f"{where}: architecture {names} is not in transformers {transformers.__version__}; "
        "use a newer transformers, or another model"
    )


def _in_another_case(architecture: str) -> str:
    """Return transformers' spelling of an architecture. Published checkpoints of some have MoE where
    transformers' class has Moe or moe.
    """
    import transformers

    same = (name for name in dir(transformers) if name.lower() == architecture.lower())
    return next(same, architecture)


def module_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, a tied one once, and the buffers that checkpoints hold."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def text_parameters(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that a text without images goes through."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    used = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in used}


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers of a model: the list of modules with the most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=_elements, default=nn.ModuleList())


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _tensors(model: PreTrainedModel, folder: Path) -> Iterator[ModuleTensor]:
    from transformers.core_model_loading import revert_weight_conversion

    tensors, text = module_tensors(model), text_parameters(model)
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    parts: dict[str, list[Part]] = {name: [] for name in tensors}
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    with _ViewsAlone():
        converted = revert_weight_conversion(model, detached)
    dtypes, prefix = _stored_dtypes(folder), f"{model.base_model_prefix}."
    for name, tensor in converted.items():
        owner = names.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise UnsupportedModel(
                f"{folder / 'config.json'}: checkpoint tensor {name} is not a part of one "
                f"parameter of transformers' {type(model).__name__}; use another model"
            )
        place = tensor.storage_offset(), tensor.stride()
        if name not in dtypes and name.removeprefix(prefix) in dtypes:
            name = name.removeprefix(prefix)  # saved without a head, as GPT-2 is on the hub
        parts[owner].append(StridedPart(name, 0, tuple(tensor.shape), "whole", *place))
    wide, shares = _wide(dtypes), _multiplied_shares(model)
    for name, tensor in tensors.items():
        held = sum(math.prod(part.shape) for part in parts[name])
        if held != tensor.numel():
            raise UnsupportedModel(
                f"{folder / 'config.json'}: checkpoints hold {held} of {tensor.numel()} elements "
                f"of {name}; use another model"
            )
        yield ModuleTensor(
            name,
            tuple(parts[name]),
            whole_shape=tuple(tensor.shape),
            share=shares.get(name, 0.0),
            float32=any(part.name in wide for part in parts[name]),
            integer=not tensor.is_floating_point(),
            frozen=name not in text,
        )


def _multiplied_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return for each matrix of the layers the share that a token is multiplied with: the experts
    that it goes to, among all of them.
    """
    config = model.config.get_text_config()
    experts = _first_size(config, "num_experts", "num_local_experts", "n_routed_experts")
    chosen = _first_size(config, "num_experts_per_tok", "moe_topk", "top_k_experts")
    inside = {id(one) for one in layers_of(model.get_decoder()).parameters() if one.dim() > 1}
    return {
        name: chosen / experts if parameter.dim() == 3 and len(parameter) == experts else 1.0
        for name, parameter in model.named_parameters()
        if id(parameter) in inside
    }


def _first_size(config: Any, *keys: str) -> int:
    return next((size for key in keys if (size := _size(config, key, 0))), 1)


def _stored_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtypes of a checkpoint's tensors, as safetensors names them, by tensor."""
    from safetensors import SafetensorError, safe_open

    dtypes: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                dtypes |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(
                f"cannot read the weights in {file}: {error}; is the download complete?"
            ) from error
    return dtypes


def _wide(dtypes: Mapping[str, str]) -> set[str]:
    """Return the tensors that a 16-bit checkpoint holds in float32."""
    if not {"BF16", "F16"} & set(dtypes.values()):
        return set()
    return {name for name, dtype in dtypes.items() if dtype == "F32"}
