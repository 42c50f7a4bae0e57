"""Train a language model with GRPO: fetch scored rollouts, take a step, hand the new weights to the
inference server.

python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --training-steps 100

This file makes what a training needs, in the order in which one thing needs another. The loop is
`training/loop.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path: import from the repository, and never a sibling file by a bare name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()
    from example_trainer.parallel.launched import end_with_launcher

    end_with_launcher()  # before the imports below, which take seconds

import contextlib
import logging
import time
from collections.abc import Sequence

import torch

from example_trainer.api_keys import revealed
from example_trainer.batch.client import RolloutClient
from example_trainer.batch.evaluations import EvaluationFeed
from example_trainer.batch.prefetch import make_batches
from example_trainer.batch.registration import registration
from example_trainer.command_line import parse_config
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import make_parity, pin_settings, require_pairing
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.observe.exporter import serve_metrics
from example_trainer.observe.metrics import make_metrics
from example_trainer.observe.perf import make_speed
from example_trainer.observe.profiling import StepProfiler, memory_history
from example_trainer.observe.token_report import TokenReport
from example_trainer.parallel.launch import launch
from example_trainer.parallel.ranks import Ranks, agreed_stop, join_ranks
from example_trainer.process import StopSignal, run
from example_trainer.training.adapter_checkpoints import checkpoint_prefix, make_checkpoints
from example_trainer.training.checkpoints import load_state
from example_trainer.training.device_and_dtype import choose_device, choose_dtype
from example_trainer.training.loop import Parts
from example_trainer.training.loop import train as take_steps
from example_trainer.training.memory_choice import choose_memory
from example_trainer.training.model import decoder_maker, make_model, make_reference
from example_trainer.training.optimizer import make_optimizer
from example_trainer.training.quantised import quantisation
from example_trainer.training.rank_plan import plan_ranks, refuse_ranks
from example_trainer.training.reference import ReferenceSettings
from example_trainer.training.resume import agreed_start
from example_trainer.training.runs import SavedStep, mark_run
from example_trainer.training.step import make_objective
from example_trainer.training.weight_epoch import with_given_epoch
from example_trainer.weight_bridge.factory import make_bridge
from example_trainer.weight_bridge.logprobs_mode import check_logprobs, require_fitting_logprobs
from example_trainer.weight_bridge.server import planned_shapes
from vllm_patching.protocol.timeline import open_timeline

logger = logging.getLogger("example_trainer.grpo")


def main(arguments: Sequence[str], stop: StopSignal) -> int:
    """Train in this process, or start one process for each rank and wait for all.

    Returns the exit status.
    """
    config = parse_config(arguments)
    plan = plan_ranks(config, stop)
    if plan.count == 1:
        train(plan.config, stop)
        return 0
    return launch(
        [sys.executable, "-u", str(Path(__file__).resolve()), *arguments, *plan.flags],
        plan.count,
        stop,
    )


def train(config: TrainerConfig, stop: StopSignal) -> None:
    """The whole run, from the checkpoint it starts from to the one it ends with."""
    torch.manual_seed(config.seed)
    if config.optimizer == "adamw-8bit":
        quantisation()  # a missing package ends the trainer before anything is loaded
    objective = make_objective(config)
    pin_settings(config)
    device = choose_device(config)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(config.rank_timeout, device))
        refuse_ranks(config, ranks)
        traces = config.log_dir / "profile"
        stack.enter_context(memory_history(config.memory_snapshot, device, traces, ranks.rank))
        profiler = StepProfiler(config.profiled_steps, traces, ranks.rank)
        stack.callback(profiler.close)
        timeline = open_timeline("trainer", f"rank{ranks.rank}")
        stack.callback(timeline.close)
        exporter = (
            serve_metrics(config.metrics_port, config.metrics_host) if ranks.is_main else None
        )
        prefix = checkpoint_prefix(config)
        start = agreed_start(
            ranks,
            config.resume,
            config.save_path,
            config.model_name,
            time.time_ns() // 10**6,
            prefix,
        )
        if start.saved and start.saved.step >= config.training_steps:
            finish_earlier_run(config, start.saved, stop, ranks)
            return
        start = with_given_epoch(start, config, stop, ranks)
        bridge = make_bridge(config, stop, ranks, weight_epoch=start.run.epoch, device=device)
        stack.callback(bridge.close)
        serving = bridge.serving_dtype()
        dtype = choose_dtype(config, serving, device, bridge.converts)
        bridge.require_shapes(
            planned_shapes(read_geometry(find_checkpoint(config.model_name))[0], dtype)
        )
        if serving is not None:
            check_logprobs(
                config, ranks
            )  # asked again below, of the servers that have joined by then
        memory = choose_memory(config, bridge, dtype, device, ranks)
        config = memory.applied_to(config)
        make = decoder_maker(config, ranks)
        model = make_model(config, start.checkpoint, dtype, device, make)
        parity = make_parity(config, model, stop)
        reference = make_reference(config, model, dtype, device, make)
        # The masters are copied from the checkpoint before the bridge may put the parameters onto
        # the server's memory.
        optimizer = make_optimizer(config, model)
        if start.saved:
            load_state(start.saved, optimizer)
            logger.info(
                "Resuming from %s at step %d (%s)", start.saved.path, optimizer.steps, start.run
            )
        checkpoints = make_checkpoints(config, model, start, ranks, bridge.restarts_at)
        stack.callback(checkpoints.close)
        checkpoints.prepare(optimizer)
        batches = make_batches(
            config, stop, ranks, device, model, memory.tokens_per_microbatch, start.run.lives
        )
        stack.callback(batches.close)

        stop = agreed_stop(stop, ranks)
        bridge.connect(model)
        # The files of an earlier run are moved when nothing is left that could refuse this one.
        metrics = make_metrics(config, optimizer.steps, exporter, ranks.is_main)
        stack.callback(metrics.close)
        stop.defer()  # an update of the server's weights must not be torn apart
        bridge.sync(
            optimizer.steps, optimizer.write_weights, optimizer.masters
        )  # nothing may be generated with older weights
        ranks.on_main("naming the run", lambda: mark_run(start.run, config.save_path, prefix))
        for learned in (*start.saved.unacknowledged, start.saved.batch) if start.saved else ():
            if learned is not None:
                batches.settle(learned, optimizer.steps)

        def ask_servers() -> None:
            batches.heed(check_logprobs(config, ranks, bridge.server_urls))

        bridge.require(require_fitting_logprobs(config))
        if (pairing := require_pairing(config, model)) is not None:
            bridge.require(pairing)
        ask_servers()  # before there is anything to train on
        positions = start.saved.positions if start.saved else {}
        told = (
            ReferenceSettings.of(config, model).for_the_wire()
            if config.asks_reference_workers
            else None
        )
        batches.register(
            registration(
                config, optimizer.steps, start.run.lives, positions, told, start.run.public_name
            )
        )
        evaluations = None
        if ranks.is_main:  # before the first batch is asked for, since environments are let in then
            seen, key = metrics.evaluations.seen, revealed(config.atropos_api_key)
            evaluations = EvaluationFeed(
                config.atropos_url, key, seen, start.run.begun, start.saved is None
            )
            stack.callback(evaluations.close)
        take_steps(
            Parts(
                config=config,
                stop=stop,
                ranks=ranks,
                model=model,
                optimizer=optimizer,
                objective=objective,
                batches=batches,
                bridge=bridge,
                parity=parity,
                checkpoints=checkpoints,
                metrics=metrics,
                speed=make_speed(
                    model,
                    device,
                    dtype,
                    ranks.world_size,
                    config.lora is not None,
                    reference is not None,
                ),
                profiler=profiler,
                reference=reference,
                trained=start.saved.batch if start.saved else None,
                evaluations=evaluations,
                ask_servers=ask_servers,
                timeline=timeline,
                tokens=TokenReport(config.report_sequences if ranks.is_main else 0),
            )
        )
        batches.end_run()
        logger.info(
            "Training complete: %d steps, checkpoint %s",
            optimizer.steps,
            checkpoints.path(optimizer.steps),
        )


def finish_earlier_run(
    config: TrainerConfig, saved: SavedStep, stop: StopSignal, ranks: Ranks
) -> None:
    """Say that there is nothing to do, and do what the trainer that ended the run may have been
    killed before.
    """
    logger.info(
        "Nothing to do: %s of %s has done %d of %d steps (%s); for more give a larger --training-steps, and for a new run "
        "leave --resume out or give another --save-path",
        saved.run, saved.run.model or "an unnamed model", saved.step, config.training_steps, saved.path,
    )  # fmt: skip
    if ranks.is_main and saved.batch and saved.batch.uuid is not None:
        with contextlib.closing(
            RolloutClient(
                config.atropos_url, stop, revealed(config.atropos_api_key), config.service_timeout
            )
        ) as client:
            client.end_run(saved.batch.uuid)


if __name__ == "__main__":
    sys.exit(run(lambda stop: main(sys.argv[1:], stop)))
