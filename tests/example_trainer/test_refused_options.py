"""Every command line that the trainer refuses: the flags, and how its one line begins."""

from __future__ import annotations

import shlex

import pytest

from example_trainer.command_line import parse_config
from example_trainer.errors import ConfigError

REFUSED = {
    # names and values
    "--learning-rate 1e-5": "unknown flag --learning-rate; see --help",
    "--trainingsteps 3": "unknown flag --trainingsteps; did you mean --training-steps?",
    "--batchsize=3": "unknown flag --batchsize; did you mean --batch-size?",
    "--zzzzzz 3": "unknown flag --zzzzzz; see --help",
    "--train 3": "unknown flag --train; ",
    "stray": "unexpected argument stray",
    "--vllm-restart-interval 3 --weight-bridge-mode shared_vllm": (
        "--vllm-restart-interval needs --weight-bridge-mode none, which is 'shared_vllm'"
    ),
    "--vllm-restart-interval 3 --max-staleness 2": "--max-staleness 2 would drop every rollout",
    "--replay recent": "--replay recent needs --max-staleness, without which nothing drops",
    "--optimizer-offload maybe": "--optimizer-offload 'maybe': give auto, on or off",
    "--optimizer adamw8bit": "--optimizer 'adamw8bit': input should be 'adamw' or 'adamw-8bit'",
    "--replay lifo": "--replay 'lifo': input should be 'fifo', 'recent' or 'uniform'",
    "--max-reuse 2": "--max-reuse 2 needs --max-staleness, at least 1: what was trained on once",
    "--max-reuse 2 --colocate": "--max-reuse 2 needs --max-staleness, at least 1",
    "--max-reuse 2 --max-staleness 1 --correction none": (
        "--max-reuse 2 needs a --correction, which is 'none'"
    ),
    "--vllm-gpus 0 --vllm-restart-interval 0": (
        "--vllm-gpus needs --weight-bridge-mode none and a --vllm-restart-interval above 0"
    ),
    "--vllm-gpus 0 --weight-bridge-mode shared_vllm": (
        "--vllm-gpus needs --weight-bridge-mode none and a --vllm-restart-interval above 0"
    ),
    "--keep-optimizer-states -1": "--keep-optimizer-states '-1': give 0 or more, or all",
    "--keep-optimizer-states some": "--keep-optimizer-states 'some': give 0 or more, or all",
    "--vllm-restart-interval 3 --vllm-gpus zero": "--vllm-gpus 'zero'",
    "--lr fast": "--lr 'fast': input should be a valid number",
    "--lr": "argument --lr: expected one argument; see --help",
    "--lr -1": "--lr '-1': input should be greater than or equal to 0",
    "--vllm-port 99999": "--vllm-port '99999': input should be less than or equal to 65535",
    "--weight-bridge-mode shared": (
        "--weight-bridge-mode 'shared': input should be 'none', 'shared_vllm'"
    ),
    "--atropos-url localhost:8000": (
        "--atropos-url 'localhost:8000': 'localhost:8000' does not begin with http://"
    ),
    "--weight-bridge-mode lora_only --lora-dropout 0.1 --minibatches 4": (
        "--lora-dropout 0.1 and --ppo-epochs 1 with --minibatches 4 exclude each other. The "
        "ratio to the batch's first"
    ),
    "--single-copy": "--single-copy needs --weight-bridge-mode shared_vllm, which is 'none'",
    "--weight-bridge-mode shared_vllm --single-copy --use-shared-memory": (
        "--use-shared-memory and --single-copy exclude each other"
    ),
    "--weight-bridge-mode shared_vllm --single-copy --expert-parallel 2": (
        "--single-copy and --expert-parallel 2 exclude each other: the ranks of a single copy "
        "split each expert's inner width"
    ),
    "--weight-bridge-mode shared_vllm --single-copy --ppo-epochs 2": (
        "--single-copy and --ppo-epochs 2 with --minibatches 1 exclude each other. Between "
        "the updates"
    ),
    "--profile 5-3": (
        "--profile '5-3': no step lies in it; steps are counted from 1, as in 3 or 3-5"
    ),
    "--profile 0-3": "--profile '0-3': no step lies in it",
    "--profile all": "--profile 'all': string should match",
    # the algorithm
    "--advantage-beta 0.2": "--advantage-beta 0.2 needs --advantages exponential",
    "--advantages exponential --advantage-beta 0": "--advantage-beta '0'",
    "--advantages exponential --advantage-std": (
        "--advantage-std has no part in --advantages exponential"
    ),
    "--loss drgrpo": "unknown --loss drgrpo; did you mean dr_grpo?",
    "--loss x": (
        "unknown --loss x; there are grpo, dr_grpo, dapo, gspo, cispo, reinforce, rloo, "
        "reinforce_pp, "
    ),
    "--advantages grup": "unknown --advantages grup; did you mean group?",
    "--advantages nowhere:f": (
        "--advantages nowhere:f: there is no module nowhere in the current directory, beside the"
    ),
    "--loss rloo --clip-eps 0.1": (
        "--clip-eps has no part in --loss rloo, which has no bounds; leave it out"
    ),
    "--loss reinforce --clip-eps-high 1": (
        "--clip-eps-high has no part in --loss reinforce, which has no bounds"
    ),
    "--loss gspo --dual-clip 3": (
        "--dual-clip has no part in --loss gspo, which has --clip-eps and --clip-eps-high; leave"
    ),
    "--clip-eps 1.5": "--clip-eps '1.5': input should be less than or equal to 1",
    "--adam-eps inf": "--adam-eps 'inf': input should be a finite number",
    "--weight-decay inf": "--weight-decay 'inf': input should be a finite number",
    "--clip-eps-high inf": "--clip-eps-high 'inf': input should be a finite number",
    "--sequence-kl-limit inf": "--sequence-kl-limit 'inf': input should be a finite number",
    "--dual-clip 1": "--dual-clip '1': input should be greater than 1",
    "--kl-coef nan": "--kl-coef 'nan': input should be ",
    "--loss rloo --advantage-std": (
        "--advantage-std has no part in --advantages leave_one_out: only group, batch, "
    ),
    "--advantages zero --advantage-std": (
        "--advantage-std has no part in --advantages zero: only group, batch, "
    ),
    "--kl-in reward": "--kl-in reward needs --kl-coef, without which no divergence is taken",
    "--distill-in loss": (
        "--distill-in loss needs --distill-coef, without which there is no teacher"
    ),
    "--correction-low 0.2": (
        "--correction-low has no part in --correction token_truncate, whose weights have an "
        "upper bound"
    ),
    "--overlong-buffer 9": (
        "--overlong-buffer needs --truncated-answers penalise, which is 'train'"
    ),
    "--minibatches 65": (
        "--minibatches 65 are more than the 64 sequences of a batch (--batch-size × "
        "--gradient-accum"
    ),
    # parameter servers
    "--weight-bridge-mode parameter_server": (
        "--weight-bridge-mode parameter_server needs --parameter-servers host:port"
    ),
    "--weight-bridge-mode parameter_server --parameter-servers h:1 --vllm-servers h:2": (
        "--vllm-servers are given to the parameter servers"
    ),
    "--weight-bridge-mode parameter_server --parameter-servers h:1 --weight-transfer direct": (
        "--weight-transfer direct and --weight-bridge-mode parameter_server exclude each "
        "other: a parameter server receives beside what it holds"
    ),
    "--weight-bridge-mode parameter_server --parameter-servers h:1 --push-every 4 --max-staleness 2": (
        "--max-staleness 2 would wait for newer rollouts for ever: with --push-every 4 they "
        "are up to 3 versions behind"
    ),
    "--weight-bridge-mode parameter_server --parameter-servers h:1 --single-copy": (
        "--single-copy needs --weight-bridge-mode shared_vllm"
    ),
    "--weight-bridge-mode parameter_server --weight-bridge-mode none --push-every 2": (
        "--push-every needs --weight-bridge-mode parameter_server"
    ),
    # deterministic mode
    "--deterministic --weight-bridge-mode none": (
        "--deterministic needs --weight-bridge-mode shared_vllm or parameter_server, and it is"
    ),
    "--deterministic --weight-bridge-mode lora_only": (
        "--deterministic excludes --weight-bridge-mode lora_only: vLLM's kernels for adapters"
    ),
    "--deterministic --weight-bridge-mode shared_vllm --temperature 0.7": (
        "--deterministic needs --temperature 1, which is 0.7"
    ),
    # turns on one GPU
    "--colocate --max-staleness 1": "--colocate needs --max-staleness 0, which is",
    "--colocate --weight-bridge-mode lora_only": (
        "--colocate needs --weight-bridge-mode shared_vllm"
    ),
    "--colocate --use-shared-memory": "--use-shared-memory and --colocate exclude",
    "--colocate --ppo-epochs 2": "--colocate and --ppo-epochs 2",
    "--colocate --vllm-servers a:1,b:2": "2 --vllm-servers",
    # adapters
    "--lora-target-modules query v_proj": (
        "--lora-target-modules ['query', 'v_proj']: no projection is called 'query'"
    ),
    # addresses
    "--vllm-host http://localhost": (
        "--vllm-host 'http://localhost': 'http://localhost' is a URL or a path; give the host alone"
    ),
    "--vllm-servers ::1:9001": (
        "--vllm-servers ['::1:9001']: '::1:9001' is not an address (an IPv6 address with a port "
        "needs brackets"
    ),
    "--weight-bridge-mode parameter_server --parameter-servers localhost": (
        "--parameter-servers ['localhost']: 'localhost' is not an address, for it has no port"
    ),
}
"""Flags besides --model-name -> the beginning of the message."""
INCOMPLETE = {
    "--lr 1": "--model-name is required",
    "--config /nowhere/c.yaml": "cannot read --config /nowhere/c.yaml: No such file or directory",
}
"""Command lines without a model."""


def refusal(words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(words)
    return str(caught.value)


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_are_wrong_or_contradict_each_other_are_one_line(words: str) -> None:
    message = refusal(["--model-name", "m", *shlex.split(words)])
    assert message.startswith(REFUSED[words])
    assert "\n" not in message


@pytest.mark.parametrize("words", INCOMPLETE)
def test_what_is_missing_is_one_line(words: str) -> None:
    message = refusal(shlex.split(words))
    assert message.startswith(INCOMPLETE[words])
    assert "\n" not in message
