"""From the groups of a batch to its bins: parsing, what had to be left out said aloud, packing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from atroposlib.wire import TrainerSession
from example_trainer.algorithm.advantages import find_advantages
from example_trainer.algorithm.distillation import untaught_share
from example_trainer.batch.bins import PackedBin
from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.figures import BatchFigures, figures_of
from example_trainer.batch.groups import Batch, Rules, TrainedSequence, parse_batch
from example_trainer.batch.lengths import LENGTH, LengthRules
from example_trainer.batch.packing import pack_batch
from example_trainer.batch.sampling import (
    BIAS,
    MUST_BE_SAID,
    TAKEN_ON_TRUST,
    SamplerLogprobs,
    SamplingRules,
)
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError

logger = logging.getLogger(__name__)

CPU_TOKENS_PER_MICROBATCH = 4096
"""Without a GPU whose memory decides: enough for products to be large, few enough for a laptop's
memory."""


@dataclass(frozen=True)
class PackedBatch:
    """A batch in bins, on the host.

    Attributes:
        minibatches: of each, the bins of each data-parallel rank.
        lives: of the run; see ages.
        environments: their names by id, as `/batch` says them.
        uses: how often each group was trained on before; empty if that is not known.
    """

    batch: Batch
    minibatches: list[list[list[PackedBin]]]
    lives: Sequence[TrainerSession]
    environments: Mapping[str, Any]
    uses: Sequence[int] = ()

    def figures(self, version: int) -> BatchFigures:
        """Its figures when it is trained on at `version`."""
        return figures_of(
            self.batch, self.minibatches, version, self.lives, self.environments, self.uses
        )


@dataclass(frozen=True)
class ReadyBatch:
    """A batch that can be trained on at once.

    Attributes:
        minibatches: of each, this rank's bins, on its device.
        figures: of the whole batch.
        lease: what the service calls it; None on other ranks than 0, and for a service that leases
            none.
        queue_size: groups that the service held for later batches when it handed this one out.
    """

    minibatches: Sequence[Sequence[PackedBin]]
    figures: BatchFigures
    lease: TrainedBatch | None
    queue_size: int


class BatchReader:
    """Reads the batches of a run. What holds for a whole run, and may be a mistake, is said once.

    Args:
        config: what is trained on, how advantages and weights are made, whether beginnings are
            shared.
        vocab_size: token ids lie below it.
        tokens_per_bin: see pack_batch.
        data_ranks: ranks that work on bins of their own. Ranks that split each layer between them
            all work on the same ones, and count as one.
        lives: of the trainer's run; see ages.

    Raises:
        ConfigError: there are no such --advantages.
    """

    def __init__(
        self,
        config: TrainerConfig,
        vocab_size: int,
        tokens_per_bin: int,
        data_ranks: int = 1,
        lives: Sequence[TrainerSession] = (),
    ) -> None:
        self.config, self.lives = config, lives
        self._vocab_size, self._tokens_per_bin, self._data_ranks = (
            vocab_size,
            tokens_per_bin,
            data_ranks,
        )
        self._rules = Rules(
            advantages=find_advantages(
                config.method.advantages, config.method.advantage_std, config.advantage_beta
            ),
            lengths=LengthRules(
                config.truncated_answers,
                config.overlong_buffer,
                config.overlong_penalty,
                config.too_long,
            ),
            sampling=SamplingRules(config.allow_truncated_sampling, config.deterministic),
            teacher=config.distill_coef > 0,
            reference=_wanted_reference(config),
        )
        self._said: set[str] = set()

    def heed(self, servers: SamplerLogprobs) -> None:
        """Refuse from now on what these servers' logprobs are not good for.

        Another thread may be reading a batch.
        """
        self._rules = replace(self._rules, sampling=replace(self._rules.sampling, servers=servers))

    def read(
        self,
        groups: Sequence[Mapping[str, Any]],
        version: int,
        environments: Mapping[str, Any] | None = None,
        uses: Sequence[int] = (),
    ) -> PackedBatch:
        """Parse and pack a batch. Says what it had to leave out.

        Args:
            groups: as `/batch` returns them.
            version: the highest that the trainer can have when it trains on the batch.
            environments: names by id, as `/batch` says them.
            uses: how often each group was trained on before, as `/batch` says it.

        Raises:
            BatchError: nothing in the batch can be trained on, or a teacher is to be learned from
                and said nothing.
            ConfigError: the function for advantages is the user's, and fails.
        """
        config = self.config
        batch = parse_batch(
            groups, config.seq_len, self._vocab_size, self._rules, version, self.lives
        )
        self._log_left_out(batch)
        self._note_mistakes(batch)
        self._note_sampling(batch)
        if not batch.trained_tokens:
            raise BatchError(
                f"the batch from {config.atropos_url} holds nothing to train on: {self._why_empty(batch)}; "
                "look at the environment"
            )
        if config.distill_coef:
            self._require_teacher(batch)
        minibatches = pack_batch(
            batch,
            tokens_per_bin=self._tokens_per_bin,
            ranks=self._data_ranks,
            normalisation=config.method.loss_normalisation,
            max_tokens=config.seq_len,
            share_prefixes=config.shares_prefixes,
            minibatches=config.minibatches,
            temperature=config.temperature,
            forward_zero_advantages=config.forwards_zero_advantages,
        )
        return PackedBatch(batch, minibatches, self.lives, environments or {}, uses)

    def _log_left_out(self, batch: Batch) -> None:
        """Log what this batch lost, each time."""
        for problem in batch.invalid:
            logger.warning("Left out of the batch: %s", problem)
        if batch.too_long:
            how = "are dropped"
            if self.config.too_long == "mask":
                how = "are masked: in the baseline, and not trained on"
            logger.warning(
                "%d sequences are longer than --seq-len %d and %s",
                batch.too_long,
                self.config.seq_len,
                how,
            )
        if batch.ignored_overrides:
            logger.warning(
                "Overrides that this trainer does not know: %s",
                ", ".join(sorted(batch.ignored_overrides)),
            )
        if batch.unusable_spans:
            logger.warning(
                "%d sequences do not say which weights sampled which token, and count as sampled by their oldest; first: %s",
                len(batch.unusable_spans),
                batch.unusable_spans[0],
            )

    def _note_mistakes(self, batch: Batch) -> None:
        """Log once in a run what groups and options have that may be a mistake."""
        if batch.narrowed:
            self._say_once(
                "narrowed",
                f"Training on sequences that were sampled with {', '.join(sorted(batch.narrowed))} "
                f"(--allow-truncated-sampling) is biased: {BIAS}",
            )
        if batch.no_logprobs:
            self._say_once(
                "no_logprobs",
                f"inference_logprobs above 0 at {batch.no_logprobs} sampled tokens of a batch are placeholders, no logprobs: "
                "such tokens count as sent without (missing_rollout_logprobs); let the environment send what the server said",
            )
        if batch.least_limit < self.config.overlong_buffer:
            self._say_once(
                "buffer",
                f"Answers may be {batch.least_limit} tokens long, and --overlong-buffer is {self.config.overlong_buffer}: they "
                "are penalised from their first token on; give a smaller buffer",
            )
        if batch.unpenalised:
            self._say_once(
                "unpenalised",
                f"{batch.unpenalised} of a batch's groups bring advantages of their own, which --truncated-answers penalise "
                "leaves as they are",
            )

    def _note_sampling(self, batch: Batch) -> None:
        """Log once in a run what is unknown of how sequences were sampled."""
        servers = self._rules.sampling.servers
        silent = sum("temperatures" not in sequence.fields for sequence in batch.sequences)
        if silent:
            advice = "".join(MUST_BE_SAID % url for url in servers.processed[:1])
            self._say_once(
                "silent",
                f"{silent} of {len(batch.sequences)} sequences do not say at which temperature they were sampled; such are "
                f"taken to be of --temperature {self.config.temperature:g}{advice}",
            )
        endless = sum(sequence.finish_reason is None for sequence in batch.sequences)
        if endless and self.config.truncated_answers == "mask":
            self._say_once(
                "endless",
                f"{endless} of {len(batch.sequences)} sequences do not say why their sampling ended, so "
                "--truncated-answers mask takes them for whole",
            )
        if servers.unknown:
            rows = [sequence["temperatures"] for sequence in batch.sequences]
            if other := [float(row[row != 1.0][0]) for row in rows if (row != 1.0).any()]:
                self._say_once("unknown", TAKEN_ON_TRUST % (servers.unknown[0], other[0]))

    def _require_teacher(self, batch: Batch) -> None:
        share = untaught_share(batch.taught_tokens, batch.trained_tokens)
        if share:
            self._say_once(
                "untaught",
                f"{share:.1%} of the trained tokens of a batch have no teacher's logprob, and count as if the teacher agreed",
            )
        tempered = [row for row in map(self._temperatures, batch.sequences) if (row != 1.0).any()]
        if tempered:
            self._say_once(
                "tempered",
                f"{len(tempered)} of {len(batch.sequences)} sequences were sampled at another temperature than 1, such as "
                f"{tempered[0][tempered[0] != 1.0][0]:g}: the policy at that temperature learns from the teacher at 1, and is "
                "another at 1 than the teacher; sample at temperature 1",
            )

    def _temperatures(self, sequence: TrainedSequence) -> npt.NDArray[np.float32]:
        """Return the temperature of each trained token that a teacher scored."""
        every = np.full(len(sequence.positions), self.config.temperature, dtype=np.float32)
        temperatures = sequence.fields.get("temperatures", every)
        return temperatures[np.isfinite(sequence["teacher_logprobs"])]

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s", message)

    def _why_empty(self, batch: Batch) -> str:
        if batch.invalid:
            return batch.invalid[0]
        config = self.config
        if batch.too_long:
            return f"{batch.too_long} sequences are longer than --seq-len {config.seq_len} (--too-long {config.too_long})"
        if config.truncated_answers == "mask" and any(
            sequence.finish_reason == LENGTH for sequence in batch.sequences
        ):
            return "every answer ran into its limit (--truncated-answers mask)"
        return "every token is masked with -100"


def _wanted_reference(config: TrainerConfig) -> Literal["unused", "optional", "required"]:
    if not config.kl_coef:
        return "unused"
    return "optional" if config.loads_reference or config.has_base_model else "required"
