"""The training loop: next batch → gradients → step → publish weights → record → save → acknowledge."""

from __future__ import annotations

import time

from example_trainer.deterministic.parity import ParityError
from example_trainer.errors import BatchError
from example_trainer.process import StopRequested
from example_trainer.training.trainer import TakenStep, Trainer
from example_trainer.weight_bridge.base import SyncReport


def train(trainer: Trainer) -> None:
    """Take optimizer steps until --training-steps. Collective.

    However it ends, by an error, a signal or the last step, what was learned is saved if that is
    possible.

    Raises:
        BatchError: more batches in a row than the options allow could not be trained on.
        StopRequested: a signal came.
        TrainerError: see its message.
    """
    try:
        trainer.begin()
        while trainer.steps < trainer.config.training_steps:
            version = trainer.steps
            try:
                step, report = take_step(trainer)
            except BatchError as error:
                trainer.skip(error, version)
                continue
            trainer.record(step, report)
            trainer.record_evaluations()
            trainer.save_if_due()
            # Last, so that no batch is gone from the service before the checkpoint that is due
            # holds what was learned.
            trainer.acknowledge()
            trainer.ask_restarted_servers()
            trainer.stop.check()
        trainer.finish()
    except Exception as error:
        report_of_tokens = None
        if isinstance(error, ParityError):
            report_of_tokens = trainer.report()
        trainer.failures.report(error, trainer.trained, report_of_tokens)
        trainer.save_after(error)
        raise
    except StopRequested as request:
        trainer.failures.report(request, trainer.trained)
        if trainer.optimizer.sound and trainer.steps:
            trainer.save()
        raise


def take_step(trainer: Trainer) -> tuple[TakenStep, SyncReport]:
    """Learn from the next batch, and publish the new weights.

    Raises:
        BatchError: the batch cannot be trained on.
    """
    bridge, optimizer = trainer.bridge, trainer.optimizer
    trainer.profiler.begin(trainer.steps + 1)
    begun = time.perf_counter()
    batch = trainer.next_batch()
    waited = time.perf_counter()
    with bridge.turn(optimizer.write_weights):
        step = trainer.learn(batch, begun, waited)
        if bridge.restarts_at(trainer.steps):
            trainer.save_for_restart()
        report = bridge.sync(trainer.steps, optimizer.write_weights, optimizer.masters)
    step.handed = time.perf_counter()
    return step, report
