"""A model of transformers in the place of the decoder: the second tier of models.

transformers computes the hidden states, packed. Attention, norms and gated MLPs are ours where the
class computes the same. The logprobs and the entropy are ours, in chunks, and so is everything
behind them: losses, optimizer, checkpoints. Its bits are not vLLM's.

transformers' treatment of packed sequences depends on the class, on the device and on the kernels
that are installed. So a model shows it before it is used: see `prepare`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from example_trainer.errors import ModelError
from example_trainer.models.decoder import Arithmetic, Decoder
from example_trainer.models.head import check_temperature, default_chunk, wide
from example_trainer.models.ops import choose_operations, fast_attention
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Shards, Split, Total
from example_trainer.models.transformers_attention import NAME as OWN_ATTENTION
from example_trainer.models.transformers_attention import forwarding, register
from example_trainer.models.transformers_layout import (
    TransformersGeometry,
    empty_model,
    layers_of,
    module_tensors,
    text_parameters,
)
from example_trainer.models.transformers_operations import replace_modules
from vllm_patching.weights.families import parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Way = Literal["packed", "packed for media", "one per row"]
WAYS: tuple[Way, ...] = ("packed", "packed for media", "one per row")
"""Ways to forward several sequences, the preferred ones first. The second has the four rows of
positions that some multimodal models take: of text, time, height and width."""
_PACKABLE = {
    *("full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding"),
    *("linear_attention", "mamba", "conv", "moe"),
}
"""Types of layers whose tokens may share a row with another sequence. Others cut a row into chunks or
blocks, by the place in the row and not in the sequence."""
_SHOWN = (5, 4)
"""Tokens of the two sequences with which a model shows that it keeps them apart."""


class _Outputs:
    """Hidden states, as transformers' classes take them from the model below their head."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _HandedOn(nn.Module):
    """Stands for the model below the head, and gives back the embeddings that it gets.

    Args:
        base: the model below the head. Some classes read a factor of the logits from it.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # not a module of this one: none gets a second name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__.get("_base"), name, None)
        return value if isinstance(value, int | float) else super().__getattr__(name)

    @property
    def decoder(self) -> _HandedOn:
        """The part of the model that some classes call."""
        return self

    def forward(self, *rest: Any, inputs_embeds: Tensor, **others: Any) -> _Outputs:
        return _Outputs(inputs_embeds)


class _Parts:
    """The parts of transformers' model; no module, so that none of them has two names.

    Attributes:
        base: the model below the head.
        embedding, head: the two matrices' modules.
        layers: of the text part.
        text: names of its parameters.
        attention: the attention that transformers chooses by itself.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        self.base, self.layers = whole.base_model, layers_of(whole.get_decoder())
        self.embedding, self.head = whole.get_input_embeddings(), whole.get_output_embeddings()
        self.text = text_parameters(whole)
        self.attention: str = self.base.config._attn_implementation
        arguments = inspect.signature(self.base.forward).parameters
        self.takes_any = any(one.kind is one.VAR_KEYWORD for one in arguments.values())
        self.takes = set(arguments)
        # The rest turns what the head gives into logits, as by a scale or a cap.
        path = next(name for name, module in whole.named_modules() if module is self.head)
        self._identity = nn.Identity()
        whole.set_submodule(path, self._identity)
        setattr(whole, whole.base_model_prefix, _HandedOn(self.base))
        self._whole = whole

    def logits(self, product: Tensor) -> Tensor:
        """Return logits [tokens, vocab] from the head's product."""
        self._identity.weight = self.head.weight[:0].detach()  # some classes look at its dtype
        outputs = self._whole.forward(inputs_embeds=product[None], use_cache=False)
        logits: Tensor = outputs.logits[0]
        return logits

    def factor(self, device: torch.device) -> float | None:
        """Return what `logits` multiplies with; None if it does something else.

        Raises:
            ModelError: the class changes hidden states before the head reads them.
        """
        product = torch.tensor([[-1000.0, -10.0, -1.0, 0.5, 2.0, 1000.0]], device=device)
        read: list[Tensor] = []
        hook = self._identity.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
        try:
            with torch.no_grad():
                logits = self.logits(product)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self.inseparable(" ".join(str(error).split())) from error
        finally:
            hook.remove()
        reached, logits = read[0].float(), logits.float()  # some classes choose a dtype themselves
        if not reached.shape == logits.shape == product.shape:
            raise self.inseparable("its head has other rows than the tokens")
        biased = getattr(self.head, "bias", None) is not None
        scale = 1.0 if biased else float(reached[0, -1] / product[0, -1])  # it commutes otherwise
        if not torch.allclose(reached, product * scale):
            raise self.inseparable("it changes hidden states before its head")
        factor = float(logits[0, -1] / product[0, -1])
        return factor if not biased and torch.allclose(logits, product * factor) else None

    def inseparable(self, reason: str) -> ModelError:
        """Return the error for a head that does not stand apart."""
        return ModelError(
            f"transformers' {type(self._whole).__name__} makes logits in a way that cannot be "
            f"taken apart from the rest ({reason}); use another model"
        )


class TransformersModel(Decoder):
    """A model of transformers with the methods of a decoder, uninitialised.

    Modules and parameters have the names that they have in transformers' class. Parameters outside
    of the text part, such as a vision tower, are frozen.

    Args:
        dtype: of the parameters, unless checkpoints hold them in float32.
        computes_in: not given: that.

    Attributes:
        way: how several sequences are forwarded; chosen by `prepare`.
        logit_factor: what transformers multiplies logits with; None if it does more to them.
    """

    geometry: TransformersGeometry
    reaches_some = True

    def __init__(
        self,
        geometry: TransformersGeometry,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        computes_in: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        device = torch.device(device)
        whole = empty_model(Path(geometry.folder), device, dtype)
        self.geometry, self.split, self.shards = geometry, Split(), Shards()
        self.source: Path | None = None
        self.gradient_checkpointing = False
        self._dtype = computes_in or dtype
        self.arithmetic = Arithmetic(choose_operations(device, self._dtype))
        self.way: Way = WAYS[0]
        self._refused = ""
        for name, module in whole.named_children():
            self.add_module(name, module)
        replace_modules(whole.get_decoder(), self.arithmetic)
        self.parts = _Parts(whole)
        if inside := parameters(geometry).keys() - self.held_tensors().keys():
            raise self.parts.inseparable(f"it holds {min(inside)} inside of another module")
        self.logit_factor = self.parts.factor(device)
        self._widened: list[Tensor] = []
        for name, tensor in self.held_tensors().items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in self.parts.text)
            if parameters(geometry)[name].float32 and tensor.dtype != torch.float32:
                tensor.data = tensor.data.float()
                if name.rpartition(".")[2] in ("weight", "bias"):
                    self._widened.append(tensor)
        for layer in self.parts.layers:
            layer.forward = partial(self._recomputed, layer.forward)

    @property
    def dtype(self) -> torch.dtype:
        """See Decoder.dtype."""
        return self._dtype

    @property
    def output_weight(self) -> Tensor:
        """See Decoder.output_weight."""
        weight: Tensor = self.parts.head.weight
        return weight

    def held_tensors(self) -> dict[str, Tensor]:
        """See Decoder.held_tensors."""
        return module_tensors(self)

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """See Decoder.forward.

        Raises:
            ValueError: spans share prefixes, or the class takes the rows in another way.
        """
        self.require_positions(packing)
        if packing.shared:
            raise ValueError("transformers' models share no prefixes; pack whole sequences")
        # transformers sees one row, or one for each sequence.
        rows, seen = 1, packing
        if self.way == "one per row":
            rows = len(packing.lengths)
            seen = Packing([packing.max_length] * rows, packing.device)
        with forwarding(self.arithmetic.ops, seen, rows):
            outputs = self.parts.base(**self._inputs(tokens, packing), use_cache=False)
        hidden: Tensor = outputs.last_hidden_state.to(self.dtype)  # some classes add in float32
        if hidden.dim() != 3 or hidden.shape[:2] != (rows, seen.tokens // rows):
            raise ValueError(f"its hidden states have the shape {list(hidden.shape)}")
        return self._placed(hidden, packing)

    def chosen_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        counts: Packing | None,
        chunk: int | None = None,
        temperature: float | Tensor = 1.0,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See Decoder.chosen_logprobs."""
        if self.logit_factor is not None:
            return super().chosen_logprobs(
                hidden, targets, counts, chunk, temperature / self.logit_factor, entropy_gradient
            )
        check_temperature(temperature, targets)
        divisors = torch.as_tensor(temperature, device=hidden.device).expand(len(targets))
        chunk = chunk or default_chunk(hidden.device)
        # Without targets the head's gradient is zero, and not missing.
        rows = [torch.stack(2 * [wide(hidden[:0].sum(-1)) + 0 * self.output_weight.sum()])]
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            inputs = hidden[part], targets[part], divisors[part]
            rows.append(checkpoint(self._logprobs, *inputs, use_reentrant=False))
        logprobs, entropy = torch.cat(rows, dim=1)
        return logprobs, entropy if entropy_gradient else entropy.detach()

    def _logprobs(self, hidden: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        """Return logprobs and entropy, [2, targets]."""
        logits = wide(self.parts.logits(self.parts.head(hidden))) / temperature[:, None]
        every = logits.log_softmax(-1)
        chosen = every.gather(1, targets[:, None]).squeeze(1)
        return torch.stack((chosen, -(every.exp() * every).sum(-1)))

    def logits(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """See Decoder.logits."""
        packing = packing or Packing([tokens.shape[1]] * tokens.shape[0], tokens.device)
        hidden = self(tokens.flatten(), packing)
        return self.parts.logits(self.parts.head(hidden)).view(*tokens.shape, -1)

    def _head_total(self) -> Total | None:
        # FSDP2 reduces what autograd gives: a tied matrix has both uses there.
        return None if self.shards.spread else super()._head_total()

    def _recomputed(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a layer, and again in the backward pass if layers are not kept."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False, **options)
        return forward(*inputs, **options)

    def _inputs(self, tokens: Tensor, packing: Packing) -> dict[str, Any]:
        """Return the arguments of the model below the head."""
        positions, rows = packing.positions, packing.numbers
        if self.way == "one per row":
            ids = tokens.new_zeros(len(packing.lengths), packing.max_length)
            # Zeros stand behind a sequence: nothing in front of them sees them.
            return {"input_ids": ids.index_put((rows, positions), tokens)}
        places = positions[None]
        if self.way == "packed for media":
            places = places.expand(4, 1, -1)
        known = {
            "input_ids": tokens[None],
            "position_ids": places,
            "cu_seq_lens_q": packing.cu_seqlens,
            "cu_seq_lens_k": packing.cu_seqlens,
            "max_length_q": packing.max_length,
            "max_length_k": packing.max_length,
            "seq_idx": rows[None].to(torch.int32),
        }
        takes = self.parts.takes
        return {name: one for name, one in known.items() if self.parts.takes_any or name in takes}

    def _placed(self, values: Tensor, packing: Packing) -> Tensor:
        """Return packed values [tokens, ...] from those in the model's rows."""
        if self.way == "one per row":
            return values[packing.numbers, packing.positions]
        return values[0]

    def prepare(self) -> None:
        """Choose how several sequences are forwarded, and log it; see choose_way."""
        self.choose_way()
        self._report_way()

    def choose_way(self) -> None:
        """Choose how several sequences are forwarded: packed, if transformers keeps them apart.

        It shows that with the gradient of a sequence's hidden states, which reaches that sequence
        alone. Collective if the model is spread.

        Raises:
            ModelError: tokens see those behind them, or transformers fails.
        """
        reason = self._find_way()
        if reason and self._widened:
            # transformers itself reads a checkpoint in one dtype, so not every class takes two.
            logger.info(
                "model: the checkpoint holds %d weights in float32, and transformers' %s takes "
                "them in %s alone: they are computed in it, and saved in float32",
                len(self._widened), self.geometry.architecture, str(self.dtype).removeprefix("torch."),
            )  # fmt: skip
            for tensor in self._widened:
                tensor.data = tensor.data.to(self.dtype)
            self._widened.clear()
            reason = self._find_way()
        if reason:
            raise ModelError(
                f"transformers' {self.geometry.architecture} cannot forward two sequences: {reason}"
            )

    def _find_way(self) -> str:
        """Set `way` and the attention; return the reason if there is no way, else nothing.

        Raises:
            ModelError: tokens see those behind them.
        """
        reason, ways = "", WAYS
        types = getattr(self.parts.base.config.get_text_config(), "layer_types", None) or ()
        if not _PACKABLE.issuperset(types):
            ways = WAYS[-1:]
        for attention in self._attentions():
            self.parts.base.set_attn_implementation(attention)
            for way in ways:
                self.way = way
                try:
                    reached = self._reached()
                except Exception as error:  # noqa: BLE001 - classes and kernels raise errors of their own
                    reason = " ".join(str(error).split())
                    if attention == OWN_ATTENTION:
                        self._refused = f" (not ours: {reason})"
                    continue
                if bool(reached[-1]):
                    raise ModelError(
                        f"tokens of transformers' {self.geometry.architecture} see those behind "
                        "them: it does not continue text; use another model"
                    )
                if not bool(reached[: _SHOWN[0]].any()):
                    return ""
        return reason

    def _attentions(self) -> list[str]:
        """Return names of attention functions, the preferred ones first."""
        from transformers.utils import is_flash_attn_2_available

        base, names = self.parts.base, [self.parts.attention]
        on_gpu = self.output_weight.is_cuda and self.dtype.itemsize == 2
        if on_gpu and base._supports_flash_attn and is_flash_attn_2_available():
            names.insert(0, "flash_attention_2")
        if base._can_set_attn_implementation():
            register()
            names.insert(0, OWN_ATTENTION)
        return names

    @property
    def attention(self) -> str:
        """The name of the attention, for logs."""
        name: str = self.parts.base.config._attn_implementation
        if name != OWN_ATTENTION:
            return name + self._refused
        ops = self.arithmetic.ops
        if ops.NAME != "fast":
            return f"ours ({ops.NAME})"
        return f"ours ({fast_attention.library_name(self.output_weight.device)})"

    def _report_way(self) -> None:
        how = f"sequences are packed, attention is {self.attention}"
        if self.way == "one per row":
            how = (
                "sequences are forwarded one per row, padded to the longest of a microbatch: "
                f"transformers' {self.geometry.architecture} does not keep packed ones apart here; "
                f"attention is {self.attention}"
            )
        logger.info("model: %s", how)

    def _reached(self) -> Tensor:
        """Return which of two sequences' tokens [tokens] the hidden states of the second depend on,
        the last one left out.
        """
        packing = Packing(_SHOWN, self.output_weight.device)
        tokens = torch.arange(packing.tokens, device=packing.device)
        with torch.enable_grad(), self._embeddings() as embeddings:
            hidden = self(tokens, packing)[_SHOWN[0] : -1]
            mixed = torch.linspace(1, 2, hidden.numel(), device=hidden.device).cos()
            (hidden.float() * mixed.view_as(hidden)).sum().backward()
        for parameter in self.parameters():
            parameter.grad = None
        gradient = embeddings[0].grad
        assert gradient is not None
        return self._placed(gradient, packing).ne(0).any(-1)

    @contextmanager
    def _embeddings(self) -> Iterator[list[Tensor]]:
        """Collect embeddings, and use copies in their place."""
        collected: list[Tensor] = []

        def copied(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            collected.append(output.detach().requires_grad_())
            return collected[-1].clone()  # some classes scale embeddings in their memory

        hook = self.parts.embedding.register_forward_hook(copied)
        try:
            yield collected
        finally:
            hook.remove()
