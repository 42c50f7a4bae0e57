"""Make the trainer of `grpo.py` from its options, in the order in which one part needs another."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from functools import partial

import torch

from example_trainer.algorithm.objective import Objective
from example_trainer.api_keys import revealed
from example_trainer.batch.client import RolloutClient, registration
from example_trainer.batch.evaluations import EvaluationFeed
from example_trainer.batch.prefetch import Batches, make_batches
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import (
    agreed_plan,
    make_pairing,
    make_parity,
    pin_settings,
)
from example_trainer.models.hf_checkpoint import (
    find_checkpoint,
    local_checkpoint,
    read_geometry,
)
from example_trainer.observe.exporter import serve_metrics
from example_trainer.observe.metrics import MetricsLog, make_metrics
from example_trainer.observe.perf import Speed, StepProfiler, make_speed, memory_history
from example_trainer.observe.token_report import TokenReport
from example_trainer.parallel.ranks import Ranks, agreed_stop, join_ranks
from example_trainer.process import StopSignal
from example_trainer.training.checkpoints import checkpoint_prefix, load_state, make_checkpoints
from example_trainer.training.memory_choice import choose_memory
from example_trainer.training.model import (
    choose_device,
    choose_dtype,
    decoder_maker,
    fitted_to_model,
    make_model,
    make_reference,
)
from example_trainer.training.optimizer import make_optimizer
from example_trainer.training.quantised import quantisation
from example_trainer.training.rank_plan import refuse_ranks
from example_trainer.training.reference import ReferenceSettings
from example_trainer.training.runs import (
    SavedStep,
    Start,
    agreed_start,
    mark_run,
    require_no_lost_checkpoints,
)
from example_trainer.training.step import make_objective
from example_trainer.training.trainer import Trainer
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.checkpoint_sources import frozen_sources
from example_trainer.weight_bridge.factory import make_bridge
from example_trainer.weight_bridge.logprobs_mode import check_logprobs, require_fitting_logprobs
from example_trainer.weight_bridge.server import planned_shapes
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.protocol.timeline import open_timeline

logger = logging.getLogger("example_trainer.grpo")


def make_trainer(
    config: TrainerConfig, stop: StopSignal, stack: contextlib.ExitStack
) -> Trainer | None:
    """Make the trainer of a new run, or of one to continue; None if that one is complete.

    When it returns, the servers have the weights and the rollout service has the registration.

    Args:
        stack: closes the parts.
    """
    objective = begin_process(config)
    device = choose_device(config.device, config.num_threads)
    ranks = stack.enter_context(join_ranks(config.rank_timeout, device))
    refuse_ranks(config, ranks)
    observers = Observers(config, ranks, device, stack)
    start = choose_start(config, stop, ranks)
    if start is None:
        return None
    config = fitted_to_model(config, ranks.world_size)
    bridge = make_bridge(config, stop, ranks, weight_epoch=start.run.epoch, device=device)
    stack.callback(bridge.close)
    dtype, plan = agreed_arithmetic(config, bridge, ranks, device, stop)
    memory = choose_memory(config, bridge, dtype, device, ranks)
    config = memory.applied_to(config)
    models = Models(config, start, ranks, dtype, device, stop, plan)
    model, optimizer = models.model, models.optimizer
    checkpoints = make_checkpoints(config, model, start, ranks, bridge.restarts_at)
    stack.callback(checkpoints.close)
    checkpoints.prepare(optimizer)
    tokens, sessions = memory.tokens_per_microbatch, start.run.lives
    batches = make_batches(config, stop, ranks, device, model, tokens, sessions)
    stack.callback(batches.close)
    stop = agreed_stop(stop, ranks)
    join_servers(bridge, models)
    # The files of an earlier run are moved when nothing is left that could refuse this one.
    metrics = make_metrics(config, optimizer.steps, observers.exporter, ranks.is_main)
    if metrics is not None:
        stack.callback(metrics.close)
    stop.defer()  # an update of the server's weights must not be torn apart
    begin_run(config, start, ranks, models, bridge, batches)
    return Trainer(
        config=config,
        stop=stop,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        objective=objective,
        batches=batches,
        bridge=bridge,
        parity=models.parity,
        checkpoints=checkpoints,
        metrics=metrics,
        speed=models.speed(),
        profiler=observers.profiler,
        reference=models.reference,
        trained=start.batch,
        evaluations=open_evaluations(config, start, metrics, stack),
        ask_servers=partial(ask_servers, config, ranks, bridge, batches),
        timeline=observers.timeline,
        tokens=observers.tokens,
    )


def begin_process(config: TrainerConfig) -> Objective:
    """Seed and pin the process, and try the imports that options name; return what is minimised."""
    torch.manual_seed(config.seed)
    if config.optimizer == "adamw-8bit":
        quantisation()  # a missing package ends the trainer before anything is loaded
    objective = make_objective(config)
    pin_settings(config)
    return objective


class Observers:
    """The recorders of a rank's steps; the stack closes them."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        device: torch.device,
        stack: contextlib.ExitStack,
    ) -> None:
        traces = config.log_dir / "profile"
        stack.enter_context(memory_history(config.memory_snapshot, device, traces, ranks.rank))
        self.profiler = StepProfiler(config.profiled_steps, traces, ranks.rank)
        stack.callback(self.profiler.close)
        self.timeline = open_timeline("trainer", f"rank{ranks.rank}")
        stack.callback(self.timeline.close)
        self.tokens, self.exporter = TokenReport(0), None
        if ranks.is_main:
            self.tokens = TokenReport(config.report_sequences)
            self.exporter = serve_metrics(config.metrics_port, config.metrics_host)


class Models:
    """The model to train, what it is compared with, and its optimizer, at the start of a run."""

    def __init__(
        self,
        config: TrainerConfig,
        start: Start,
        ranks: Ranks,
        dtype: torch.dtype,
        device: torch.device,
        stop: StopSignal,
        plan: SumPlan,
    ) -> None:
        self._config, self._ranks, self._dtype, self._device = config, ranks, dtype, device
        make = decoder_maker(config, ranks, plan=plan)
        self.model = make_model(config, start.checkpoint, dtype, device, make)
        self.pairing = make_pairing(config, self.model, stop, ranks)
        same_tokens = self.model.split.size > 1
        self.parity = make_parity(config, self.pairing, ranks, same_tokens)
        frozen = decoder_maker(config, ranks, trained=False, plan=plan)
        self.reference = make_reference(config, self.model, dtype, device, frozen)
        # The masters are copied from the checkpoint before the bridge may put the parameters onto
        # the server's memory.
        self.optimizer = make_optimizer(config, self.model)
        if start.saved:
            load_state(start.saved, self.optimizer)
            change = start.saved.layout_change(self.optimizer.shards.layout)
            if config.deterministic and change:
                logger.warning("%s", change)
            logger.info(
                "Resuming from %s at step %d (%s)",
                start.saved.path,
                self.optimizer.steps,
                start.run,
            )

    def speed(self) -> Speed:
        """Return the rate that the time of a step is compared with."""
        adapters, reference = self._config.lora is not None, self.reference is not None
        ranks = self._ranks.world_size
        return make_speed(self.model, self._device, self._dtype, ranks, adapters, reference)


def agreed_arithmetic(
    config: TrainerConfig,
    bridge: WeightBridge,
    ranks: Ranks,
    device: torch.device,
    stop: StopSignal,
) -> tuple[torch.dtype, SumPlan]:
    """Choose the type and the sum plan to compute with, and check that the servers' parameters and
    logprobs fit. Collective.
    """
    serving = bridge.serving_dtype()
    dtype = choose_dtype(config, serving, device, bridge.converts)
    geometry = read_geometry(find_checkpoint(config.model_name))[0]
    bridge.may_lack = frozen_sources(geometry)
    bridge.require_shapes(planned_shapes(geometry, dtype))
    if serving is not None:
        check_logprobs(config, ranks)  # repeated when all servers have joined
    return dtype, agreed_plan(config, geometry, ranks, stop)


def join_servers(bridge: WeightBridge, models: Models) -> None:
    """Join the servers. From the first join on, servers with other kernels are refused."""
    if models.pairing is not None:
        bridge.require_kernels(models.pairing.kernels, models.pairing)
    bridge.connect(models.model)


def begin_run(
    config: TrainerConfig,
    start: Start,
    ranks: Ranks,
    models: Models,
    bridge: WeightBridge,
    batches: Batches,
) -> None:
    """Hand the first weights over, name the run in its folder, check the servers, and register
    with the rollout service. Nothing may be generated with older weights afterwards.
    """
    optimizer = models.optimizer
    bridge.sync(optimizer.steps, optimizer.write_weights, optimizer.masters)
    prefix = checkpoint_prefix(config)
    ranks.on_main("naming the run", lambda: mark_run(start.run, config.save_path, prefix))
    for batch in start.learned:
        batches.acknowledge_earlier(batch, optimizer.steps)
    bridge.require(require_fitting_logprobs(config))
    ask_servers(config, ranks, bridge, batches)  # before there is anything to train on
    reference = None
    if config.asks_reference_workers:
        reference = ReferenceSettings.of(config, models.model).for_the_wire()
    run = start.run
    batches.register(
        registration(config, optimizer.steps, run.lives, start.positions, reference, run.name)
    )


def ask_servers(
    config: TrainerConfig, ranks: Ranks, bridge: WeightBridge, batches: Batches
) -> None:
    """Check the logprobs of the servers that have joined, and read batches accordingly.

    Collective.
    """
    batches.use_server_modes(check_logprobs(config, ranks, bridge.server_urls))


def open_evaluations(
    config: TrainerConfig,
    start: Start,
    metrics: MetricsLog | None,
    stack: contextlib.ExitStack,
) -> EvaluationFeed | None:
    """Follow the evaluations of environments, on rank 0; before the first batch is asked for, since
    the service lets environments in then.
    """
    if metrics is None:
        return None
    seen, key = metrics.evaluations.seen, revealed(config.atropos_api_key)
    feed = EvaluationFeed(config.atropos_url, key, seen, start.run.begun, start.saved is None)
    stack.callback(feed.close)
    return feed


def choose_start(config: TrainerConfig, stop: StopSignal, ranks: Ranks) -> Start | None:
    """Choose the run to begin or to continue, and get the epoch of its weights; None if it has
    taken all its steps. Collective.
    """
    prefix, now_ms = checkpoint_prefix(config), time.time_ns() // 10**6
    start = agreed_start(ranks, config.resume, config.save_path, config.model_name, now_ms, prefix)
    if start.saved and start.saved.step >= config.training_steps:
        finish_earlier_run(config, start.saved, stop, ranks)
        return None
    local_checkpoint(config.model_name)  # a wrong path ends the trainer before it waits for others

    def ask() -> int:
        with service_client(config, stop) as client:
            epoch, last_run = client.weight_epoch(start.run.epoch, start.run.name)
        if config.resume and start.saved is None and last_run is not None:
            require_no_lost_checkpoints(last_run, config.save_path)
        return epoch

    # The service gives it, so that clocks need not agree. No server has weights of this trainer yet.
    epoch = ranks.on_main("asking for a weight epoch", ask, config.service_timeout + ranks.timeout)
    return replace(start, run=start.run.with_epoch(epoch))


def finish_earlier_run(
    config: TrainerConfig, saved: SavedStep, stop: StopSignal, ranks: Ranks
) -> None:
    """Report that the run is complete, and end it at the rollout service, in case the trainer that
    completed it was killed before that.
    """
    logger.info(
        "Nothing to do: %s of %s has done %d of %d steps (%s). For more give a larger "
        "--training-steps. For a new run leave --resume out or give another --save-path",
        saved.run, saved.run.model or "an unnamed model", saved.step, config.training_steps, saved.path,
    )  # fmt: skip
    if ranks.is_main and saved.batch and saved.batch.uuid is not None:
        with service_client(config, stop) as client:
            client.end_run(saved.batch.uuid)


def service_client(
    config: TrainerConfig, stop: StopSignal
) -> contextlib.AbstractContextManager[RolloutClient]:
    """Connect to the rollout service for one call."""
    key = revealed(config.atropos_api_key)
    return contextlib.closing(RolloutClient(config.atropos_url, stop, key, config.service_timeout))
