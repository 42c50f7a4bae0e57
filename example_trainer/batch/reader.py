"""From the groups of a batch to its bins: parsing, packing, and warnings about what is left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from atroposlib.wire import TrainerSession
from example_trainer.algorithm.advantages import find_advantages
from example_trainer.algorithm.objective import untaught_share
from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.groups import (
    BIAS,
    LENGTH,
    MUST_BE_SAID,
    TAKEN_ON_TRUST,
    Batch,
    LengthRules,
    ReplayedRouters,
    Rules,
    SamplerLogprobs,
    SamplingRules,
    TrainedSequence,
    parse_batch,
)
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError
from vllm_patching.weights.families import Geometry

# Names of environments as keys of figures. Pure.

_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)


def safe_name(name: str) -> str:
    """The name with letters, digits, `_`, `.` and `-` alone, which every log, file and dashboard
    takes; never empty.
    """
    return _UNSAFE.sub("_", name) or "_"


def safe_names(ids: Iterable[int], names: Mapping[str, Any]) -> dict[int, str]:
    """A safe name for each environment. Processes with one name are one environment in several
    processes; others differ.

    Args:
        ids: of the environments, as the rollout service numbers them.
        names: names by id, from `/batch`; environments without one are called by their id.

    Example:
        safe_names([3, 4, 5, 6], {"3": "math easy", "4": "math_easy", "5": "math easy"})
        # {3: "math_easy", 4: "math_easy_2", 5: "math_easy", 6: "environment_6"}
    """
    said = {number: str(names.get(str(number)) or f"environment_{number}") for number in ids}
    safe: dict[str, str] = {}
    for name in sorted(set(said.values())):
        plain, count = safe_name(name), 1
        while (candidate := plain if count == 1 else f"{plain}_{count}") in safe.values():
            count += 1
        safe[name] = candidate
    return {number: safe[name] for number, name in said.items()}


# A batch in numbers: what stands of it in the trainer's log before anything is computed.
#
# Pure: no I/O, no state.


@dataclass(frozen=True)
class BatchFigures:
    """A batch in numbers, as they stand in the trainer's log. Several ranks have the whole batch's.

    Attributes:
        reward_mean, reward_std: of the rollouts' scores, as the environments gave them.
        success_rate: share of solved items among the rollouts that have a success; None if none has
            one.
        tokens: trained ones, forwarded or not.
        sequences: rollouts.
        response_length_mean, response_length_p50, response_length_p95, response_length_max: sampled
            tokens of a rollout.
        truncated_share: share of the rollouts with a finish reason that ran into
            their limit; None if none has one.
        sequences_too_long: how many were longer than the length limit, and so not trained on.
        zero_advantage_share: of the rollouts that are trained on, those whose advantages are all 0.
        groups_invalid: groups that were left out.
        age_mean, age_max: weight versions since the rollouts were begun; None if no environment
            sends them.
        uses_mean: batches in which a group of the batch had been trained on before; None if each is
            used once.
        forwarded_tokens: tokens of all bins.
        forwarded_targets: trained tokens of all bins; tokens of advantage 0 are missing
            where these are not forwarded.
        targets_with_logprobs: number of them with a sampler's logprob.
        targets_with_reference: number of them with a logprob under the reference, if
            one is wanted.
        sequence_tokens: tokens of all rollouts in bins; shared ones count for each.
        attended_pairs: pairs of a forwarded token and one that it attends to.
        bins: forward and backward passes with work in them, over all ranks.
        rewards: mean score of each environment's rollouts, by a name that is safe as a key; none of
            an environment that the rollouts do not name.
        success_rates: success_rate of each environment, by the same names.
    """

    reward_mean: float
    reward_std: float
    tokens: int
    sequences: int
    response_length_mean: float
    response_length_p50: float
    response_length_p95: float
    response_length_max: int
    truncated_share: float | None
    sequences_too_long: int
    zero_advantage_share: float
    groups_invalid: int
    age_mean: float | None
    age_max: int | None
    forwarded_tokens: int
    forwarded_targets: int
    targets_with_logprobs: int
    targets_with_reference: int
    sequence_tokens: int
    attended_pairs: int
    bins: int
    rewards: dict[str, float] = field(default_factory=dict)
    uses_mean: float | None = None
    success_rate: float | None = None
    success_rates: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The figures by name; an environment's own as `reward/<its name>` and `success/<its
        name>`.
        """
        figures = dict(vars(self))
        rewards, successes = figures.pop("rewards"), figures.pop("success_rates")
        by_environment = {f"reward/{name}": value for name, value in rewards.items()}
        return (
            figures
            | by_environment
            | {f"success/{name}": value for name, value in successes.items()}
        )


def figures_of(
    batch: Batch,
    minibatches: Sequence[Sequence[Sequence[PackedBin]]],
    version: int,
    lives: Sequence[TrainerSession] = (),
    environments: Mapping[str, Any] | None = None,
    uses: Sequence[int] = (),
) -> BatchFigures:
    """The figures of a batch.

    Args:
        minibatches: its bins, by minibatch and rank.
        version: the trainer's when it trains on the batch.
        lives: of its run; see ages.
        environments: their names by id, from `/batch`.
        uses: how often each group was trained on before; empty where each is used once.
    """
    bins = [one for shares in minibatches for share in shares for one in share if not one.empty]
    forwarded = {(group, number) for one in bins for group, number in one.orders.tolist()}
    scores = np.array([sequence.score for sequence in batch.sequences])
    lengths = np.array([sequence.response_length for sequence in batch.sequences])
    reasons = [
        sequence.finish_reason for sequence in batch.sequences if sequence.finish_reason is not None
    ]
    trained = [sequence for sequence in batch.sequences if len(sequence.positions)]
    successes = [sequence.success for sequence in batch.sequences if sequence.success is not None]
    ages = batch.ages(version, lives)
    return BatchFigures(
        reward_mean=float(scores.mean()),
        reward_std=float(scores.std()),
        tokens=batch.trained_tokens,
        sequences=len(batch.sequences),
        response_length_mean=float(lengths.mean()),
        response_length_p50=float(np.percentile(lengths, 50)),
        response_length_p95=float(np.percentile(lengths, 95)),
        response_length_max=int(lengths.max()),
        truncated_share=_mean([reason == LENGTH for reason in reasons]),
        sequences_too_long=batch.too_long,
        zero_advantage_share=sum(not sequence["advantages"].any() for sequence in trained)
        / len(trained),
        groups_invalid=len(batch.invalid),
        age_mean=_mean(ages),
        age_max=max(ages, default=None),
        forwarded_tokens=sum(len(one.tokens) for one in bins),
        forwarded_targets=sum(len(one.targets) for one in bins),
        targets_with_logprobs=sum(int(one["rollout_logprobs"].isfinite().sum()) for one in bins),
        targets_with_reference=sum(int(one["reference_logprobs"].isfinite().sum()) for one in bins),
        sequence_tokens=sum(len(s.tokens) for s in batch.sequences if s.order in forwarded),
        attended_pairs=sum(one.packing.attended_pairs for one in bins),
        bins=len(bins),
        rewards=_means(batch, environments or {}, lambda sequence: sequence.score),
        uses_mean=_mean(uses),
        success_rate=_mean(successes),
        success_rates=_means(batch, environments or {}, lambda sequence: sequence.success),
    )


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return float(np.mean(values))


def _means(
    batch: Batch, environments: Mapping[str, Any], figure: Callable[[TrainedSequence], float | None]
) -> dict[str, float]:
    """The mean of a figure over each environment's rollouts, without those for which it is None."""
    names = safe_names({s.env_id for s in batch.sequences if s.env_id is not None}, environments)
    by_name: dict[str, list[float]] = {}
    for sequence in batch.sequences:
        value = figure(sequence)
        if sequence.env_id is not None and value is not None:
            by_name.setdefault(names[sequence.env_id], []).append(float(value))
    return {name: float(np.mean(of_name)) for name, of_name in by_name.items()}


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
        environments: their names by id, from `/batch`.
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


def replayed_routers(config: TrainerConfig, geometry: Geometry) -> ReplayedRouters | None:
    """Return the routers whose choices are read from groups; None without --router-replay."""
    if not config.router_replay:
        return None
    return ReplayedRouters(
        geometry.num_layers,
        geometry.sparse_layers,
        geometry.num_experts,
        geometry.experts_per_token,
    )


class BatchReader:
    """Reads the batches of a run. A warning that holds for a whole run is logged once.

    Args:
        config: what is trained on, how advantages and weights are made, whether beginnings are
            shared.
        vocab_size: token ids lie below it.
        tokens_per_bin: see pack_batch.
        data_ranks: ranks that work on bins of their own. Ranks that split each layer between them
            all work on the same ones, and count as one.
        lives: of the trainer's run; see ages.
        media_tokens, routers: see Rules.

    Raises:
        ConfigError: --advantages does not exist.
    """

    def __init__(
        self,
        config: TrainerConfig,
        vocab_size: int,
        tokens_per_bin: int,
        data_ranks: int = 1,
        lives: Sequence[TrainerSession] = (),
        media_tokens: frozenset[int] = frozenset(),
        routers: ReplayedRouters | None = None,
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
            media_tokens=media_tokens,
            routers=routers,
        )
        self._said: set[str] = set()

    def use_server_modes(self, servers: SamplerLogprobs) -> None:
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
        """Parse and pack a batch. Log what is left out.

        Args:
            groups: as `/batch` returns them.
            version: the highest that the trainer can have when it trains on the batch.
            environments: names by id, from `/batch`.
            uses: how often each group was trained on before, from `/batch`.

        Raises:
            BatchError: nothing in the batch can be trained on, or a teacher is to be learned from
                and scored nothing.
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
                "%d sequences do not record which weights sampled which token, and count as "
                "sampled by their oldest; first: %s",
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
                f"inference_logprobs above 0 at {batch.no_logprobs} sampled tokens of a batch are "
                "placeholders, no logprobs. Such tokens count as sent without "
                "(missing_rollout_logprobs). Let the environment send the server's logprobs",
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
                f"{silent} of {len(batch.sequences)} sequences do not record at which temperature "
                "they were sampled; such are "
                f"taken to be of --temperature {self.config.temperature:g}{advice}",
            )
        endless = sum(sequence.finish_reason is None for sequence in batch.sequences)
        if endless and self.config.truncated_answers == "mask":
            self._say_once(
                "endless",
                f"{endless} of {len(batch.sequences)} sequences do not record why their sampling "
                "ended, so "
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
                f"{len(tempered)} of {len(batch.sequences)} sequences were sampled at another "
                f"temperature than 1, such as {tempered[0][tempered[0] != 1.0][0]:g}: the policy "
                "at that temperature learns from the teacher at 1. At 1 it is another than the "
                "teacher. Sample at temperature 1",
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
