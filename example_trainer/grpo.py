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

import torch

from example_trainer.assembly import (
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
from example_trainer.checkpointing import find_resume, load_state
from example_trainer.config import TrainerConfig, parse_config
from example_trainer.data import Batch, parse_batch
from example_trainer.deterministic.pairing import make_parity, pin_settings
from example_trainer.errors import CheckpointError, NonFiniteError, RankError, TrainerError
from example_trainer.memory_plan import check_memory
from example_trainer.metrics import import_wandb, step_line, step_row
from example_trainer.metrics_server import serve_metrics
from example_trainer.parallel.ranks import join_ranks
from example_trainer.parallel.shared import SharedRollouts, agreed_stop
from example_trainer.process import StopRequested, StopSignal, run
from example_trainer.rollout_client import RolloutClient, Upkeep
from example_trainer.step import accumulate_gradients
from example_trainer.weight_bridge.base import BridgeError
from example_trainer.weight_bridge.factory import make_bridge

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
        exporter = serve_metrics(config.metrics_port) if ranks.is_main else None
        start = find_resume(config.resume, config.save_path, checkpoint_prefix(config))
        bridge = make_bridge(config, stop, ranks)
        stack.callback(bridge.close)
        dtype = choose_dtype(config, bridge.serving_dtype(), device)
        check_memory(config, bridge, dtype, device)
        make = decoder_maker(config, ranks)
        model = make_model(config, start, dtype, device, make)
        parity = make_parity(config, model, stop)
        reference = make_reference(config, model, dtype, device, make)
        # The masters are copied from the checkpoint before the bridge may put the parameters onto the server's memory.
        optimizer = make_optimizer(config, model)
        if start:
            load_state(start, optimizer)
            logger.info("Resuming from %s at step %d", start, optimizer.steps)
        if optimizer.steps >= config.training_steps:
            logger.info("Nothing to do: %d of %d steps are done", optimizer.steps, config.training_steps)
            return
        checkpoints = make_checkpoints(config, model, last=optimizer.steps if start else None, ranks=ranks)
        options = config.shareable
        metrics = make_metrics(config, optimizer.steps, exporter, ranks)
        stack.callback(metrics.close)
        client = make_client(config, stop, ranks)
        stack.callback(client.close)

        stop = agreed_stop(stop, ranks)
        bridge.connect(model)
        stop.defer()  # an update of the server's weights must not be torn apart
        bridge.sync(optimizer.steps, optimizer.write_weights, optimizer.masters)  # nothing may be generated with older weights
        client.register(registration(config, optimizer.steps))
        upkeep = Upkeep(bridge.server_restarted, lambda: bridge.keep_serving(optimizer.write_weights))
        try:
            while optimizer.steps < config.training_steps:
                begun = time.perf_counter()
                batch = read_batch(client, config, model.geometry.vocab_size, upkeep)
                waited = time.perf_counter()
                sums = accumulate_gradients(model, optimizer, batch, config, stop, reference, parity)
                step = optimizer.step()
                trained = time.perf_counter()
                if config.restarts_vllm_at(optimizer.steps):
                    checkpoints.save(model, optimizer, options)  # what the bridge starts vLLM on
                report = bridge.sync(optimizer.steps, optimizer.write_weights, optimizer.masters)
                client.acknowledge(optimizer.steps)
                synced = time.perf_counter()
                seconds = (waited - begun, trained - waited, synced - trained)
                row = step_row(batch, sums, step, report, bridge, client.queue_size(), seconds, optimizer.steps)
                row |= parity.row(optimizer)
                metrics.write(optimizer.steps, row)
                logger.info("%s", step_line(optimizer.steps, config.training_steps, row))
                due = config.checkpoint_interval and optimizer.steps % config.checkpoint_interval == 0
                if due and checkpoints.last != optimizer.steps:
                    checkpoints.save(model, optimizer, options)
                stop.check()
        except (StopRequested, TrainerError, BridgeError) as error:
            # What was learned is kept, unless it is what is broken.
            if not isinstance(error, NonFiniteError | CheckpointError | RankError) and optimizer.steps not in (
                0,
                checkpoints.last,
            ):
                checkpoints.save(model, optimizer, options)
            raise
        if checkpoints.last != optimizer.steps:
            checkpoints.save(model, optimizer, options)
        logger.info("Training complete: %d steps, checkpoint %s", optimizer.steps, checkpoints.path(optimizer.steps))


def read_batch(
    client: RolloutClient | SharedRollouts,
    config: TrainerConfig,
    vocab_size: int,
    upkeep: Upkeep | None = None,
) -> Batch:
    """Wait for a batch and check it. Says what it had to leave out or cut.

    Raises:
        TrainerError: nothing in the batch can be trained on.
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
        raise TrainerError(f"the batch from {config.atropos_url} holds nothing to train on: {reason}; look at the environment")
    return batch


if __name__ == "__main__":
    sys.exit(run(lambda stop: train(parse_config(sys.argv[1:]), stop)))
