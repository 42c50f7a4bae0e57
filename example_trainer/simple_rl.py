r"""Reinforcement learning in one process tree on one GPU: sample, score, compare every token bit for bit, step, repeat.

    python example_trainer/simple_rl.py                                # Qwen3-1.7B on GSM8K, bitwise on-policy
    python example_trainer/simple_rl.py --digits 2                     # the starter model on sums, also without a network
    python example_trainer/simple_rl.py --no-batch-invariant           # ordinary kernels, for comparison
    python example_trainer/simple_rl.py --model Qwen/Qwen3-1.7B --problems train.jsonl --max-tokens 512 --lr 1e-6
    python example_trainer/simple_rl.py --no-batch-invariant --staleness 4 --loss gspo --correction sequence_mask
    tensorboard --logdir=./outputs/rl_training                         # train/reward_mean, train/entropy

Without a GPU or the Hugging Face hub the first command trains the starter model on sums, and logs one line on why. vLLM runs
as a child, on the same GPU and the same copy of the weights. Sampler and trainer take turns, so every token is trained on
under the weights that it was sampled with. With --staleness K these are the weights of K steps before, for every batch. The
trainer's flags of the algorithm, its corrections, lengths and optimizer are flags here too. The weights of the last step are
saved to OUTPUT/checkpoints/step_N, a Hugging Face checkpoint. evaluations.jsonl holds what --evaluate-every measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path: import from the repository, and never a sibling file by a bare name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()

import argparse
import contextlib
import itertools
import logging
import os
import shlex
import time
from collections.abc import Iterator

import torch

from atroposlib.one_line_parser import OneLineParser
from example_trainer.api_keys import revealed
from example_trainer.batch.evaluations import Evaluation
from example_trainer.batch.local_sampler import HeldOut, SampledBatches, Sampler
from example_trainer.batch.problems import GSM8K, Problem, Task, find_task
from example_trainer.batch.reader import BatchReader, replayed_routers
from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import ProcessError, Supervisor
from example_trainer.command_line import add_section, checked_config
from example_trainer.config import (
    AlgorithmOptions,
    CorrectionOptions,
    LengthOptions,
    MixtureOptions,
    ModelOptions,
    OptimizerOptions,
    Section,
    TrainerConfig,
)
from example_trainer.deterministic.pairing import make_pairing, make_parity, pin_settings
from example_trainer.deterministic.parity import ParityCheck
from example_trainer.errors import ConfigError, TrainerError
from example_trainer.launcher import roles
from example_trainer.models import Decoder
from example_trainer.models.hf_checkpoint import find_checkpoint
from example_trainer.observe.metrics import MetricsLog, evaluation_line
from example_trainer.observe.perf import StepProfiler, make_speed
from example_trainer.parallel.ranks import Ranks
from example_trainer.prerequisites import require_vllm
from example_trainer.process import StopSignal, run
from example_trainer.simple_defaults import (
    GUIDE_RUN,
    STARTER_RUN,
    choose_kernels,
    choose_run,
    mark_given,
)
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.loop import train as take_steps
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
from example_trainer.training.runs import PREFIX, new_run, require_save_path
from example_trainer.training.step import make_objective
from example_trainer.training.trainer import Trainer
from example_trainer.weight_bridge.factory import make_bridge

logger = logging.getLogger("example_trainer.simple_rl")
START_SECONDS = 600.0
PASSED_ON: dict[type[Section], tuple[str, ...]] = {
    AlgorithmOptions: ("ref_logprobs_from_workers",),
    CorrectionOptions: (),
    LengthOptions: (),
    OptimizerOptions: ("lr",),
    MixtureOptions: ("expert_parallel",),
    ModelOptions: tuple(
        name for name in ModelOptions.model_fields if name not in ("dtype", "num_threads")
    ),
}
"""The trainer's sections whose flags are flags here too, but for those fields."""
LEAST = {"staleness": 0, "evaluate_every": 0, "held_out": 1, "problem_count": 1}
"""The smallest value of an option."""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options; options of PASSED_ON are there only if they are given."""
    about = "Reinforcement learning with bitwise equal sampler and trainer."
    parser = OneLineParser(prog="simple_rl.py", description=about, allow_abbrev=False)
    add_flags(parser)
    for section, left_out in PASSED_ON.items():
        add_section(parser, section, left_out)
    options = parser.parse_args(arguments)
    mark_given(options)
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: give at least {least}")
    for name in ("ppo_epochs", "minibatches"):
        # Text; the trainer's options refuse what is not a number.
        value = getattr(options, name, "1")
        if value.isdecimal() and int(value) > 1 and not options.two_copies:
            parser.error(
                f"--{name.replace('_', '-')} {value} needs --two-copies: between the updates of a batch the trainer's weights "
                "change, and with one copy vLLM would sample from them"
            )
    return options


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are not the trainer's."""
    switch = "vLLM's and the trainer's kernels give the same bits, or the run stops; off: count how many tokens differ"
    guide = f"{GUIDE_RUN.model} on {GSM8K} if none of --model, --problems and --digits is given and the hub can be reached"
    problems = f"JSON lines with question and answer, {GSM8K}, or module:name of a Task; not given: sums, or see --model"
    count = "train on the first N problems over and over; not given: on all that the task has"
    passes = f"sequences of --max-model-len tokens that fit into a forward pass {_default('micro_batch')}"
    stale = (
        "train each batch this many steps after the weights that sampled it (default: %(default)s)"
    )
    every = "steps between greedy answers to the task's held-out problems; 0: never (default: %(default)s)"
    copies = (
        "the trainer has a copy of the weights of its own, and vLLM is on the last GPU that can "
        "be seen. If that is the only one, the trainer is beside it. With --dtype float32 it "
        "trains in that, and a batch may be for several updates (--minibatches, --ppo-epochs)"
    )
    cache = "exact size of vLLM's cache instead, for a GPU that other runs use at the same time"
    more = 'more flags for vLLM, in quotes: --vllm-args "--max-num-seqs 64"'
    output = "metrics, logs, TensorBoard, weights (default: %(default)s)"
    either = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--batch-invariant", action=either, help=f"{switch} (default: on where there is a GPU)")
    add("--model", help=f"folder or hub id; not given: {guide}, else the starter model")
    add("--problems", help=problems)
    add("--digits", type=int, help=f"of each operand of the sums (default: {STARTER_RUN.digits})")
    add("--thinking", action=either, help="pass enable_thinking to the chat template")
    add("--problem-count", type=int, metavar="N", help=count)
    add("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    add("--groups", type=int, default=8, help="problems in a step (default: %(default)s)")
    add("--group-size", type=int, default=16, help="answers to each (default: %(default)s)")
    add("--max-tokens", type=int, help=f"of an answer {_default('max_tokens')}")
    add("--max-model-len", type=int, default=1024, help="prompt and answer (default: %(default)s)")
    add("--micro-batch", type=int, help=passes)
    add("--staleness", type=int, default=0, help=stale)
    add("--evaluate-every", type=int, default=0, help=every)
    add("--held-out", type=int, default=200, help="so many of them (default: %(default)s)")
    add("--two-copies", action="store_true", help=copies)
    add("--lr", type=float, help=f"learning rate {_default('lr')}")
    add("--seed", type=int, default=0, help="of problems and samples (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--gpu-memory", type=float, help=f"vLLM's share of the GPU {_default('gpu_memory')}")
    add("--cache-gib", type=float, help=cache)
    add("--vllm-args", default="", help=more)
    add("--output", type=Path, default=Path("outputs/rl_training"), help=output)


def _default(name: str) -> str:
    """The two defaults of an option, for --help."""
    ours, guides = getattr(STARTER_RUN, name), getattr(GUIDE_RUN, name)
    return f"(default: {ours}; {guides} where {GUIDE_RUN.model} is chosen by itself)"


def trainer_config(options: argparse.Namespace, port: int) -> TrainerConfig:
    """The same options as grpo.py's. Raises ConfigError if one does not fit."""
    passed_on = {name for section in PASSED_ON for name in section.model_fields} & vars(
        options
    ).keys() - {"device", "seed"}
    return checked_config(
        {
            "forward_zero_advantages": True,  # every token is compared, in the control too
            **{name: getattr(options, name) for name in passed_on},
            "model_name": options.model,
            "device": options.device,
            "weight_bridge_mode": "shared_vllm",
            "single_copy": not options.two_copies,
            "use_shared_memory": options.two_copies,
            "vllm_port": port,
            "training_steps": options.steps,
            "batch_size": options.group_size,
            "gradient_accumulation_steps": options.groups,
            "tokens_per_microbatch": options.micro_batch * options.max_model_len,
            "lr": options.lr,
            "seq_len": options.max_model_len,
            "seed": options.seed,
            "deterministic": options.batch_invariant,
            "max_staleness": options.staleness,
            "log_dir": options.output,
            "save_path": options.output / "checkpoints",
            "checkpoint_interval": 0,
        },
        passed_on,
    )


def last_gpu(count: int, visible: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a vLLM with its own copy of the weights; a trainer takes the
    first GPU.

    Args:
        count: GPUs that this process sees.
        visible: its CUDA_VISIBLE_DEVICES.
    """
    return (visible.split(",") if visible else [str(number) for number in range(count)])[-1]


def start_vllm(
    supervisor: Supervisor,
    options: argparse.Namespace,
    device: torch.device,
    ports: tuple[int, int],
) -> None:
    """Start the server and wait until it generates.

    Raises:
        TrainerError: it ended, or was not ready in time; the error has its log's last lines.
    """
    port, rendezvous = ports
    folder, on_gpu = options.output.resolve(), device.type == "cuda"
    bridge = roles.bridge_variables(rendezvous, folder, shared=True)
    os.environ |= {name: bridge[name] for name in ("MASTER_ADDR", "MASTER_PORT")}  # for both sides
    variables = bridge | {"VLLM_NO_USAGE_STATS": "1"}
    memory, cache = None, None
    if on_gpu:
        memory, cache = options.gpu_memory, int((options.cache_gib or 0) * 2**30) or None
        if options.two_copies:
            gpu = last_gpu(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            variables["CUDA_VISIBLE_DEVICES"] = gpu
    else:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive"}
    server_flags = roles.vllm_flags(
        "127.0.0.1",
        on_gpu,
        max_model_len=options.max_model_len,
        seed=options.seed,
        deterministic=options.batch_invariant,
        gpu_memory_utilization=memory,
        kv_cache_memory_bytes=cache,
    )
    command = roles.anywhere(roles.vllm_server(options.model, port, server_flags))
    if getattr(options, "router_replay", False):
        command.append("--enable-return-routed-experts")
    command += shlex.split(options.vllm_args)
    log = folder / "vllm.log"
    logger.info("Starting vLLM, log: %s", log)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        vllm = supervisor.start("the vLLM server", command, log, variables, grace=20.0)
        url = f"http://127.0.0.1:{port}/health_generate"
        seconds = supervisor.wait_for_http(vllm, url, START_SECONDS)
    except (ProcessError, OSError) as error:
        raise TrainerError(" | ".join(line.strip() for line in str(error).splitlines())) from error
    logger.info("vLLM is ready after %.0f s", seconds)


def make_held_out(
    options: argparse.Namespace, task: Task, sampler: Sampler, metrics: MetricsLog
) -> HeldOut | None:
    """Make what measures the weights during training; None without --evaluate-every."""
    if not options.evaluate_every or task.held_out is None:
        return None

    def record(evaluation: Evaluation) -> None:
        metrics.write_evaluation(evaluation.weight_version or 0, evaluation)
        logger.info("%s", evaluation_line(evaluation))

    return HeldOut(sampler, task.held_out(options.held_out), options.evaluate_every, record)


def repeated(problems: Iterator[Problem], count: int | None) -> Iterator[Problem]:
    """The first `count` problems over and over, in one order; all problems if no count is given."""
    return problems if count is None else itertools.cycle(list(itertools.islice(problems, count)))


def train(options: argparse.Namespace, stop: StopSignal) -> None:
    """The whole run."""
    choose_kernels(options)
    pin_settings(trainer_config(options, port=1))
    if (note := choose_run(options)) is not None:
        logger.info("%s", note)
    task = find_task(options.problems, options.digits)
    if options.evaluate_every and task.held_out is None:
        raise ConfigError(
            f"--evaluate-every needs held-out problems, which a file has not: give --problems {GSM8K}, or module:name of a Task"
        )
    with contextlib.ExitStack() as stack:
        run_training(options, task, stop, stack)


def run_training(
    options: argparse.Namespace, task: Task, stop: StopSignal, stack: contextlib.ExitStack
) -> None:
    """Start vLLM, train, and log how many tokens differed.

    Args:
        stack: closes the parts.
    """
    ports = stack.enter_context(PortReservations())
    port, rendezvous = ports.pick(), ports.pick()
    config, ranks = trainer_config(options, port), Ranks()
    require_vllm()
    require_save_path(config.save_path)
    config = fitted_to_model(config)
    objective = make_objective(config)
    if config.optimizer == "adamw-8bit":
        quantisation()  # a missing package ends the run before anything is loaded
    device = choose_device(config.device, config.num_threads)
    torch.manual_seed(options.seed)
    start_vllm(stack.enter_context(Supervisor()), options, device, (port, rendezvous))
    bridge = make_bridge(config, stop, ranks, has_service=False)
    stack.callback(bridge.close)
    dtype = choose_dtype(config, bridge.serving_dtype(), device, bridge.converts)
    make = decoder_maker(config, ranks)
    model = make_model(config, None, dtype, device, make)
    reference = make_reference(config, model, dtype, device, make)
    pairing = make_pairing(config, model, stop)
    parity = make_parity(config, pairing) or ParityCheck({}, {}, stop=False)
    optimizer = make_optimizer(config, model)
    checkpoints = make_checkpoints(config)
    stack.callback(checkpoints.close)
    metrics = MetricsLog(config.log_dir, config.shareable)
    stack.callback(metrics.close)
    batches, held_out = make_batches(options, config, task, model, device, metrics, stack)
    bridge.connect(model)
    stop.defer()  # an update of the server's weights must not be torn apart
    bridge.sync(0, optimizer.write_weights, optimizer.masters)
    take_steps(
        Trainer(
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
            speed=make_speed(model, device, dtype, reference=reference is not None),
            profiler=StepProfiler(config.profiled_steps, config.log_dir),
            reference=reference,
        )
    )
    if held_out is not None:
        held_out.look(options.steps, last=True)
    log_parity(parity, options.batch_invariant)


def make_checkpoints(config: TrainerConfig) -> Checkpoints:
    """Make the store of the last step's weights; no run resumes from it."""
    run = new_run(config.model_name, config.save_path, PREFIX, time.time_ns() // 10**6)
    return Checkpoints(config.save_path, run, keep_states=0)


def make_batches(
    options: argparse.Namespace,
    config: TrainerConfig,
    task: Task,
    model: Decoder,
    device: torch.device,
    metrics: MetricsLog,
    stack: contextlib.ExitStack,
) -> tuple[SampledBatches, HeldOut | None]:
    """Make the source of batches, and what measures the weights on held-out problems."""
    sampler = Sampler(
        f"http://127.0.0.1:{config.vllm_port}", str(find_checkpoint(options.model)), options.group_size, options.max_tokens,
        options.seed, revealed(config.vllm_api_key), config.temperature, options.thinking,
        config.router_replay,
    )  # fmt: skip
    stack.callback(sampler.close)
    held_out = make_held_out(options, task, sampler, metrics)
    problems = repeated(task.training(options.seed), options.problem_count)
    tokens_per_bin = options.micro_batch * options.max_model_len
    sizes = model.geometry
    reader = BatchReader(
        config,
        sizes.vocab_size,
        tokens_per_bin,
        media_tokens=sizes.media_tokens,
        routers=replayed_routers(config, sizes),
    )
    return SampledBatches(
        sampler,
        problems,
        options.groups,
        reader,
        device,
        options.staleness,
        options.steps,
        held_out,
    ), held_out


def log_parity(parity: ParityCheck, verified: bool) -> None:
    """Log how many tokens were compared, and that all are equal if that was verified."""
    if verified:
        logger.info(
            "✓ vLLM-TorchTitan bitwise determinism verified: %d tokens match exactly",
            parity.compared_in_all,
        )
        return
    logger.info(
        "%d of %d tokens have another logprob in the trainer than in vLLM",
        parity.mismatched_in_all,
        parity.compared_in_all,
    )


if __name__ == "__main__":
    sys.exit(run(lambda stop: train(parse_arguments(sys.argv[1:]), stop)))
