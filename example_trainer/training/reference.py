"""The reference's logprobs: settings that trainer and reference workers share, and the scoring of a
group.

A group's rows depend on the group alone: it is packed by itself, whatever else there is to do. So
two workers that compute the same group answer the same, and a run does not depend on which of them
had it. With the invariant operations the rows are, to the bit, what the trainer would compute in
bins of its own. With the others they are that where the trainer packs the group the same way.
Otherwise they differ by rounding: so much its own bins differ from one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from atroposlib.wire import PROMPT_LOGPROB
from example_trainer.algorithm.advantages import find_advantages
from example_trainer.batch.groups import (
    Batch,
    GroupError,
    Rules,
    SamplingRules,
    parse_batch,
    wire_row,
)
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.batch.reader import CPU_TOKENS_PER_MICROBATCH
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError, NonFiniteError
from example_trainer.models import Decoder
from example_trainer.training.step import response_logprobs
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.weights.sharding import undividable

GPU_TOKENS_PER_PASS = 16384
"""Without --tokens-per-microbatch. Nothing is kept for a backward pass, so memory is not what
bounds it."""


@dataclass(frozen=True)
class ReferenceSettings:
    """Settings that decide the reference's logprobs of a group.

    Attributes:
        model: its name, as the options have it.
        dtype: of its parameters, such as "bfloat16".
        table: of operations; see choose_table.
        vocab_size: token ids lie below it.
        temperature: of sequences without one.
        seq_len: longer sequences are not scored.
        share_prefixes: whether what a group begins with is forwarded once.
        parts: of the trainer's sum plan, see SumPlan; 1 outside deterministic mode.
    """

    model: str
    dtype: str
    table: str
    vocab_size: int
    temperature: float = 1.0
    seq_len: int = 2048
    share_prefixes: bool = True
    parts: int = 1

    @classmethod
    def of(cls, config: TrainerConfig, model: Decoder) -> ReferenceSettings:
        """Make the settings of a trainer's options.

        Args:
            model: that is trained, or the reference: their dtype, table and vocabulary are the
                same.
        """
        return cls(
            model=config.reference_model or config.model_name,
            dtype=str(model.dtype).removeprefix("torch."),
            table=model.arithmetic.ops.NAME,
            vocab_size=model.geometry.vocab_size,
            temperature=config.temperature,
            seq_len=config.seq_len,
            share_prefixes=config.shares_prefixes,
            parts=model.arithmetic.plan.parts,
        )

    def for_the_wire(self) -> dict[str, str | float | bool]:
        """As the rollout service takes it."""
        return asdict(self)

    def agreed(self, registered: Mapping[str, Any]) -> ReferenceSettings:
        """Return a worker's settings, with the trainer's where the worker can follow.

        Args:
            registered: the trainer's settings; missing ones are taken to be as here.

        Raises:
            ConfigError: the trainer's model, dtype, table or vocabulary is another one.
        """
        theirs = replace(
            self,
            **{
                one.name: told
                for one in fields(self)
                if (told := registered.get(one.name)) is not None
            },
        )
        if theirs.model != self.model:
            raise ConfigError(
                f"--model-name {self.model}, but the trainer's reference is {theirs.model}; give the same name"
            )
        if theirs.vocab_size != self.vocab_size:
            raise ConfigError(
                f"--model-name {self.model} has a vocabulary of {self.vocab_size} ids here, and "
                f"the trainer's model one of {theirs.vocab_size}. The files differ, or the models "
                "are not related. Give both the same model"
            )
        if theirs.dtype != self.dtype:
            raise ConfigError(
                f"the trainer computes in {theirs.dtype} and this worker in {self.dtype}; give it --dtype {theirs.dtype}"
            )
        if theirs.table != self.table:
            remedy = {
                "invariant": "give --deterministic",
                "fast": "start it on a GPU, without --deterministic",
            }
            what = remedy.get(
                theirs.table, "start it on such a device as the trainer's, without --deterministic"
            )
            raise ConfigError(
                f"the trainer computes with the {theirs.table} operations, this worker with the {self.table} ones, which have "
                f"other bits; {what}"
            )
        return theirs


def fitting_plan(model: Decoder, settings: ReferenceSettings) -> SumPlan:
    """Return the trainer's sum plan.

    Raises:
        ConfigError: this version has no such plan, or the model cannot be split so.
    """
    if model.arithmetic.plan.parts == settings.parts:
        return model.arithmetic.plan
    try:
        plan = SumPlan(settings.parts)
    except ValueError as error:
        raise ConfigError(
            f"the trainer follows {error}; install the same version of trainer and reference worker"
        ) from error
    if obstacles := undividable(model.geometry, plan.parts):
        raise ConfigError(
            f"the trainer's vLLM server sums {plan.parts} parts, and {', '.join(obstacles)} of "
            f"the reference {settings.model} cannot be split so. Give the trainer another "
            "reference, or start vLLM with fewer tensor-parallel ranks"
        )
    return plan


class ReferenceScorer:
    """Computes a group's `ref_logprobs` with frozen weights.

    Args:
        model: the reference.
        config: of it, the bound of a pass is used, and how logits are chunked.

    Example:
        scorer = ReferenceScorer(model, config)
        rows = scorer.rows(group, settings)
    """

    def __init__(self, model: Decoder, config: TrainerConfig) -> None:
        self._model, self._config = model, config
        device = model.output_weight.device
        default = GPU_TOKENS_PER_PASS if device.type == "cuda" else CPU_TOKENS_PER_MICROBATCH
        self._tokens_per_pass = config.tokens_per_microbatch or default

    def rows(self, group: Mapping[str, Any], settings: ReferenceSettings) -> list[list[float]]:
        """Score a group.

        Args:
            group: tokens, masks and, if there are any, sampling_params, as on the wire.

        Returns:
            [n][length], see batch.reference_logprobs.

        Raises:
            GroupError: it cannot be scored; a trainer could not train on it either.
            NonFiniteError: the model computes NaN or infinity.
            ConfigError: the model cannot follow the trainer's sum plan.
        """
        self._model.arithmetic.plan = fitting_plan(self._model, settings)
        batch = self._parsed(group, settings)
        rows = [[PROMPT_LOGPROB] * len(tokens) for tokens in group["tokens"]]
        for bin in self._bins(batch, settings):
            device = self._model.output_weight.device
            moved = bin.handed_to(device)
            with torch.no_grad():
                logprobs, _ = response_logprobs(self._model, moved, self._config)
            if not logprobs.isfinite().all():
                raise NonFiniteError(
                    f"the reference {settings.model} computes NaN or infinity for {int((~logprobs.isfinite()).sum())} of "
                    f"{len(logprobs)} tokens of a group; look at its weights, and at --dtype {settings.dtype}"
                )
            counts = bin.counts.tolist()
            for (_, i), scored, positions in zip(
                bin.orders.tolist(),
                logprobs.cpu().split(counts),
                bin.positions.split(counts),
                strict=True,
            ):
                rows[i] = wire_row(len(rows[i]), positions.numpy(), scored.numpy())
        return rows

    def _parsed(self, group: Mapping[str, Any], settings: ReferenceSettings) -> Batch:
        tokens = group.get("tokens")
        fields_read = {
            "tokens": tokens,
            "masks": group.get("masks"),
            "sampling_params": group.get("sampling_params"),
            "scores": [0.0] * (len(tokens) if isinstance(tokens, list) else 0),
        }
        # The trainer decides what may be trained on: of how a token was sampled, the
        # temperature alone counts here.
        deterministic = settings.table == "invariant"
        rules = Rules(
            find_advantages("zero"),
            sampling=SamplingRules(allow_narrowed=True, deterministic=deterministic),
            media_tokens=self._model.geometry.media_tokens,
        )
        batch = parse_batch([fields_read], settings.seq_len, self._model.geometry.vocab_size, rules)
        if batch.invalid:
            raise GroupError(batch.invalid[0].removeprefix("group 0: "))
        return batch

    def _bins(self, batch: Batch, settings: ReferenceSettings) -> Sequence[PackedBin]:
        ((bins,),) = pack_batch(
            batch,
            tokens_per_bin=self._tokens_per_pass,
            ranks=1,
            normalisation="token",
            max_tokens=settings.seq_len,
            share_prefixes=settings.share_prefixes,
            temperature=settings.temperature,
        )
        return bins
