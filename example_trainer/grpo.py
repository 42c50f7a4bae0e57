"""Train a language model with GRPO: fetch scored rollouts, take a step, hand the new weights to the inference server.

python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --training-steps 100
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path: import from the repository, and never a sibling file by a bare name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from example_trainer.batch.client import RolloutClient, Upkeep
from example_trainer.batch.groups import Batch, parse_batch
from example_trainer.batch.shared_client import SharedRollouts, agreed_stop
from example_trainer.command_line import parse_config
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import make_parity, pin_settings
from example_trainer.errors import BatchError, CheckpointError, OutOfMemoryError, RankError, TrainerError
from example_trainer.observe.exporter import serve_metrics
from example_trainer.observe.metrics import import_wandb, step_line, step_row
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.process import StopRequested, StopSignal, run
from example_trainer.training.checkpoints import load_state
from example_trainer.training.guarded_step import guarded_step
from example_trainer.training.memory_plan import check_memory
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.resume import agreed_start
from example_trainer.training.runs import SavedStep, mark_run
from example_trainer.training.setup import (
    checkpoint_prefix,
    choose_device,
    choose_dtype,
    decoder_maker,
    make_checkpoints,
    make_client,
    make_metrics,
    make_model,
    make_optimizer,
    make_reference,
    refuse_ranks,
    registration,
)
from example_trainer.training.skipping import SkippedBatches
from example_trainer.weight_bridge.base import BridgeError
from example_trainer.weight_bridge.factory import make_bridge
from example_trainer.weight_bridge.logprobs_mode import check_logprobs

logger = logging.getLogger("example_trainer.grpo")


def train(config: TrainerConfig, stop: StopSignal) -> None:
    """The whole run, from the checkpoint it starts from to the one it ends with."""
    torch.manual_seed(config.seed)
    if config.use_wandb:
        import_wandb()  # told now rather than after minutes of loading
    pin_settings(config)
    device = choose_device(config)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(config.rank_timeout, device))
        refuse_ranks(config, ranks)
        exporter = serve_metrics(config.metrics_port, config.metrics_host) if ranks.is_main else None
        prefix = checkpoint_prefix(config)
        start = agreed_start(ranks, config.resume, config.save_path, config.model_name, time.time_ns() // 10**6, prefix)
        if start.saved and start.saved.step >= config.training_steps:
            finish_earlier_run(config, start.saved, make_client(config, stop, ranks))
            return
        bridge = make_bridge(config, stop, ranks, weight_epoch=start.run.epoch)
        stack.callback(bridge.close)
        dtype = choose_dtype(config, bridge.serving_dtype(), device)
        check_memory(config, bridge, dtype, device)
        make = decoder_maker(config, ranks)
        model = make_model(config, start.checkpoint, dtype, device, make)
        parity = make_parity(config, model, stop)
        reference = make_reference(config, model, dtype, device, make)
        # The masters are copied from the checkpoint before the bridge may put the parameters onto the server's memory.
        optimizer = make_optimizer(config, model)
        if start.saved:
            load_state(start.saved, optimizer)
            logger.info("Resuming from %s at step %d (%s)", start.saved.path, optimizer.steps, start.run)
        checkpoints = make_checkpoints(config, model, start, ranks)
        metrics = make_metrics(config, optimizer.steps, exporter, ranks)
        stack.callback(metrics.close)
        client = make_client(config, stop, ranks)
        stack.callback(client.close)

        stop = agreed_stop(stop, ranks)
        bridge.connect(model)
        stop.defer()  # an update of the server's weights must not be torn apart
        bridge.sync(optimizer.steps, optimizer.write_weights, optimizer.masters)  # nothing may be generated with older weights
        ranks.on_main("naming the run", lambda: mark_run(start.run, config.save_path, prefix))
        if start.saved and start.saved.batch:
            client.settle(start.saved.batch, optimizer.steps)
        check_logprobs(config, ranks)  # before there is anything to train on
        client.register(registration(config, optimizer.steps, start.run.epoch))
        upkeep = Upkeep(bridge.server_restarted, lambda: bridge.keep_serving(optimizer.write_weights))
        trained = start.saved.batch if start.saved else None
        skipped = SkippedBatches(config)

        def save() -> None:
            if checkpoints.last != optimizer.steps:
                checkpoints.save(model, optimizer, config.shareable, trained)

        try:
            while optimizer.steps < config.training_steps:
                begun = time.perf_counter()
                try:
                    batch = read_batch(client, config, model.geometry.vocab_size, upkeep)
                    waited = time.perf_counter()
                    sums, step = guarded_step(model, optimizer, batch, config, stop, reference, parity, ranks)
                except BatchError as error:
                    if not optimizer.sound:
                        raise
                    skipped.skip(error)
                    client.acknowledge(optimizer.steps, skipped=str(error))
                    if ranks.world_size > 1 and isinstance(error, OutOfMemoryError):  # FSDP2 stands in the middle of a layer
                        raise OutOfMemoryError(
                            f"{error}; several ranks cannot go on from here: start again with --resume auto, which goes on "
                            "behind this batch"
                        ) from error
                    continue
                trained = client.lease
                computed = time.perf_counter()
                if config.restarts_vllm_at(optimizer.steps):
                    save()  # what the bridge starts vLLM on
                report = bridge.sync(optimizer.steps, optimizer.write_weights, optimizer.masters)
                synced = time.perf_counter()
                seconds = (waited - begun, computed - waited, synced - computed)
                row = step_row(
                    batch, sums, step, report, bridge, client.queue_size(), seconds, optimizer.steps, start.run.lives
                )
                row |= parity.row(optimizer) | {"batches_skipped": skipped.stepped()}
                metrics.write(optimizer.steps, row)
                logger.info("%s", step_line(optimizer.steps, config.training_steps, row))
                if config.saves_at(optimizer.steps):
                    save()
                # Last, so that no batch is gone from the service before the checkpoint that is due holds what was learned.
                client.acknowledge(optimizer.steps)
                stop.check()
        except Exception as error:
            keep_what_was_learned(error, save, optimizer, ranks)
            raise
        except StopRequested:
            if optimizer.sound and optimizer.steps:
                save()
            raise
        client.end_run()
        logger.info("Training complete: %d steps, checkpoint %s", optimizer.steps, checkpoints.path(optimizer.steps))


def keep_what_was_learned(error: Exception, save: Callable[[], None], optimizer: MasterAdamW, ranks: Ranks) -> None:
    """Save the last sound step before an error ends the trainer, if that is possible.

    With several ranks it takes all of them, so only an error that is known to have come to all of them will do.
    """
    agreed = ranks.world_size == 1 or isinstance(error, TrainerError | BridgeError)
    if not optimizer.sound or not optimizer.steps or not agreed or isinstance(error, CheckpointError | RankError):
        return
    try:
        save()
    except Exception as failure:  # noqa: BLE001 - logged, and the error that led here is raised
        told = " ".join(str(failure).split())
        logger.error("What was learned since the last checkpoint could not be saved: %s", told)


def finish_earlier_run(config: TrainerConfig, saved: SavedStep, client: RolloutClient | SharedRollouts) -> None:
    """Say that there is nothing to do, and do what the trainer that ended the run may have been killed before."""
    logger.info(
        "Nothing to do: %s of %s has done %d of %d steps (%s); for more give a larger --training-steps, and for a new run "
        "leave --resume out or give another --save-path",
        saved.run, saved.run.model or "an unnamed model", saved.step, config.training_steps, saved.path,
    )  # fmt: skip
    with contextlib.closing(client):
        if saved.batch and saved.batch.uuid is not None:
            client.end_run(saved.batch.uuid)


def read_batch(
    client: RolloutClient | SharedRollouts,
    config: TrainerConfig,
    vocab_size: int,
    upkeep: Upkeep | None = None,
) -> Batch:
    """Wait for a batch and check it. Says what it had to leave out or cut.

    Raises:
        BatchError: nothing in the batch can be trained on.
    """
    batch = parse_batch(client.next_batch(upkeep), config.seq_len, vocab_size, config.advantage_std)
    for problem in batch.invalid:
        logger.warning("Left out of the batch: %s", problem)
    if batch.truncated:
        logger.warning("%d sequences were longer than --seq-len %d and were cut", batch.truncated, config.seq_len)
    if batch.ignored_overrides:
        logger.warning("Overrides that this trainer does not know: %s", ", ".join(sorted(batch.ignored_overrides)))
    if not batch.trained_tokens:
        reason = batch.invalid[0] if batch.invalid else "every token is masked with -100"
        raise BatchError(f"the batch from {config.atropos_url} holds nothing to train on: {reason}; look at the environment")
    return batch


if __name__ == "__main__":
    sys.exit(run(lambda stop: train(parse_config(sys.argv[1:]), stop)))
