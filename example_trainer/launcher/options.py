"""The options of start.sh, from flags and from LOCKSTEP_* variables; flags win."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from atroposlib.one_line_parser import OneLineParser
from example_trainer.child_processes import vllm_flags
from example_trainer.child_processes.files import write_whole
from example_trainer.child_processes.vllm_flags import Degrees
from example_trainer.launcher.command_line import (
    ROOT,
    LauncherError,
    check_model,
    learning_rate,
    positive_int,
    visible_gpus,
)
from example_trainer.launcher.records import (
    PARTS,
    SERVERS,
    Records,
    chosen,
    in_order,
    parts_of,
    refuse_keys,
)
from example_trainer.launcher.starter_models import STARTER_MODEL

PREFIX = "LOCKSTEP_"
"""The beginning of each variable."""

Gpus = tuple[int, ...]


def degrees(vllm_args: Sequence[str]) -> Degrees:
    """Read the degrees among vLLM's further flags, as vLLM itself would.

    Raises:
        LauncherError: a degree is not a number above 0.
    """
    try:
        return vllm_flags.degrees(vllm_args)
    except ValueError as error:
        raise LauncherError(f"--vllm-args: {error}") from error


def choose_gpus(
    vllm: Gpus | None,
    trainer: Gpus | None,
    visible: Gpus,
    cpu: bool,
    servers: int = 1,
    size: Degrees | None = None,
    trains: bool = True,
) -> tuple[Gpus, Gpus]:
    """The GPUs of all vLLM servers together and of the trainer; both empty on a CPU.

    One server: of three or more GPUs it gets the first two and the trainer the third; of two, each
    gets one; one they share. Several servers: each gets as many as `size` needs, or as many as
    there are for each beside the trainer's. That is a power of two, since a model's heads must be
    divisible by it. The trainer gets the next one. They share none.

    Args:
        vllm, trainer: what was asked for; None: choose.
        visible: the GPUs that there are.
        cpu: none shall be used.
        servers: how many vLLM servers.
        size: how large one server is.
        trains: the trainer is started here, and needs one.

    Raises:
        LauncherError: a GPU was asked for that is not there, or they cannot be dealt out evenly.
    """
    if cpu and (vllm or trainer):
        raise LauncherError(
            "--cpu excludes --vllm-gpus and --trainer-gpus: leave one or the other out"
        )
    missing = sorted({*(vllm or ()), *(trainer or ())} - set(visible))
    if missing:
        raise LauncherError(
            f"GPU {missing[0]} is not there: nvidia-smi and CUDA_VISIBLE_DEVICES leave {_listed(visible)}"
        )
    if not visible:
        return (), ()
    each = (size or Degrees()).gpus
    if vllm:
        _check_even(vllm, servers, each, size or Degrees())
    if servers > 1:
        return _for_several(vllm, trainer, visible, servers, each, trains)
    default = {1: (visible[:1], visible[:1]), 2: (visible[:1], visible[1:2])}.get(
        len(visible), (visible[:2], visible[2:3])
    )
    if each is not None and vllm is None:
        if each > len(visible):
            raise LauncherError(
                f"a server of {each} GPUs (--vllm-args) has only {_listed(visible)} here"
            )
        default = visible[:each], visible[each : each + 1] or visible[-1:]
    return vllm or default[0], trainer or default[1]


def _for_several(
    vllm: Gpus | None,
    trainer: Gpus | None,
    visible: Gpus,
    servers: int,
    each: int | None,
    trains: bool,
) -> tuple[Gpus, Gpus]:
    reserved = 1 if trains and not trainer else 0
    left = tuple(gpu for gpu in visible if gpu not in (trainer or ()))
    if vllm is None:
        room = (len(left) - reserved) // servers
        count = each or (1 << (room.bit_length() - 1) if room > 0 else 1)
        if count > room:
            beside = " beside the trainer's" if trains else ""
            raise LauncherError(
                f"--vllm-servers {servers} of {count} GPUs need {servers * count}{beside}, and {len(left) - reserved} of "
                f"{_listed(visible)} are left: give fewer servers, smaller ones, or --cpu"
            )
        vllm = left[: servers * count]
    if trainer is None:
        trainer = tuple(gpu for gpu in visible if gpu not in vllm)[:1]
    shared = sorted(set(vllm) & set(trainer))
    if trains and (shared or not trainer):
        what = (
            f"GPU {shared[0]} is both a server's and the trainer's"
            if shared
            else "no GPU is left for the trainer"
        )
        raise LauncherError(
            f"--vllm-servers {servers}: {what}: weights reach several servers from GPUs of the trainer's own"
        )
    return vllm, trainer


def _check_even(vllm: Gpus, servers: int, each: int | None, size: Degrees) -> None:
    if len(set(vllm)) != len(vllm):
        raise LauncherError(f"--vllm-gpus {_listed(vllm)} names a GPU twice")
    if each is not None and len(vllm) != servers * each:
        degree = f"tensor-parallel size {size.tensor}" + (
            f" and data-parallel size {size.data}" if size.data > 1 else ""
        )
        raise LauncherError(
            f"--vllm-gpus {_listed(vllm)}: {len(vllm)} GPUs, and {servers} server{'s' * (servers > 1)} of {degree} need "
            f"{servers * each}"
        )
    if len(vllm) % (servers * size.data):
        raise LauncherError(
            f"--vllm-gpus {_listed(vllm)}: {len(vllm)} GPUs cannot be dealt out evenly to {servers * size.data} "
            f"{'servers' if size.data == 1 else 'replicas'}: give a multiple of that"
        )


def _listed(gpus: Gpus) -> str:
    return ",".join(map(str, gpus)) or "none"


BRIDGES = ("auto", "broadcast", "single-copy", "lora", "restart", "none")
ENVIRONMENTS = ("arithmetic", "gsm8k")
RUN = Path("runs") / "stack"
OPTIONS_FILE = "options.json"


@dataclass(frozen=True)
class StackOptions:
    """One start of the stack; see the help texts in `parser`."""

    run: Path
    parts: tuple[str, ...]
    model: str
    environment: str
    bridge: str
    vllm_gpus: tuple[int, ...]
    trainer_gpus: tuple[int, ...]
    service_port: int
    vllm_ports: tuple[int, ...]
    master_port: int
    metrics_port: int
    steps: int
    lr: float | None
    batch_size: int | None
    restart_interval: int
    service_args: tuple[str, ...]
    vllm_args: tuple[str, ...]
    environment_args: tuple[str, ...]
    trainer_args: tuple[str, ...]
    wait: float
    links: bool
    resume: bool = False
    all_interfaces: bool = False
    joining: tuple[str, ...] = ()

    @property
    def servers(self) -> int:
        """Number of vLLM servers."""
        return len(self.vllm_ports)

    @property
    def vllm_port(self) -> int:
        """Where the first vLLM server listens."""
        return self.vllm_ports[0]

    def gpus_of(self, server: int) -> tuple[int, ...]:
        """The GPUs of a vLLM server, counted from 0; all have equally many."""
        each = len(self.vllm_gpus) // self.servers
        return self.vllm_gpus[server * each : (server + 1) * each]

    @property
    def host(self) -> str:
        """The address on which the parts listen."""
        return "0.0.0.0" if self.all_interfaces else "127.0.0.1"

    @property
    def small(self) -> bool:
        """True for the starter model, for which small sizes are right."""
        return Path(self.model) == STARTER_MODEL


def gpu_list(text: str) -> tuple[int, ...]:
    """`0,1` -> (0, 1)."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of GPUs: give indices such as 0 or 0,1"
        )
    return tuple(int(part) for part in text.split(","))


def port(text: str) -> int:
    """A TCP port, or 0."""
    if not text.isdecimal() or int(text) >= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a TCP port")
    return int(text)


def ports(text: str) -> tuple[int, ...]:
    """`9001` or `9001,9005` -> the ports."""
    return tuple(port(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    """Flags in quotes, as a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {error}") from None


def run_folder(text: str) -> Path:
    """The folder of a run, which may not exist yet."""
    path = os.path.expanduser(text)
    if os.path.exists(path) and not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} is a file: give the folder of a run")
    return Path(text)


def read_variable(variable: str, read: Callable[[str], object]) -> object:
    """Read an option's variable; None if it is not set.

    Raises:
        LauncherError: the option cannot have this value.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    try:
        return read(value)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise LauncherError(f"{variable}={value}: {error}") from error


def add_run_option(parser: argparse.ArgumentParser) -> None:
    """--run, which all four commands have.

    Raises:
        LauncherError: the variable names a file.
    """
    named = os.environ.get("LOCKSTEP_RUN")
    default = read_variable("LOCKSTEP_RUN", run_folder) if named else ROOT / RUN
    parser.add_argument(
        "--run",
        type=run_folder,
        default=default,
        help=f"the run's folder (default: {RUN}, or $LOCKSTEP_RUN)",
    )


Option = tuple[str, str | None, str, Callable[[str], object]]
"""Name, default, help and type of an option that has a value."""


def options_with_values() -> list[Option]:
    """Return each option that has a value."""
    return [
        (
            "model",
            None,
            "checkpoint folder or Hugging Face name (default: the starter model)",
            str,
        ),
        (
            "environment",
            None,
            "arithmetic, gsm8k, or an environment's file (default: arithmetic for the starter model, else gsm8k)",
            str,
        ),
        (
            "bridge",
            "auto",
            f"how weights reach vLLM: {', '.join(BRIDGES)}; restart: the trainer starts vLLM itself",
            str,
        ),
        *machine_options(),
        ("steps", "100", "optimizer steps", positive_int),
        ("lr", None, "learning rate", learning_rate),
        (
            "batch-size",
            None,
            "sequences of an optimizer step, divided by the trainer's --gradient-accumulation-steps",
            positive_int,
        ),
        (
            "restart-interval",
            "3",
            "steps between restarts of vLLM, with --bridge restart",
            positive_int,
        ),
        *(
            (
                f"{part}-args",
                "",
                f'further flags for the {part}, in quotes: --{part}-args="--flag value"',
                words,
            )
            for part in PARTS
        ),
        ("wait", "600", "seconds that vLLM may take to load", positive_int),
    ]


def machine_options() -> list[Option]:
    """Return the options of servers, GPUs and ports."""
    master_port = os.environ.get("MASTER_PORT", "29500")
    return [
        (
            "vllm-servers",
            "1",
            "how many vLLM servers: parts vllm, vllm-2, vllm-3, …",
            positive_int,
        ),
        (
            "vllm-gpus",
            None,
            "GPUs of vLLM, such as 0,1, dealt out evenly to its servers: a server's tensor-parallel degree is their number",
            gpu_list,
        ),
        ("trainer-gpus", None, "GPUs of the trainer, such as 2", gpu_list),
        ("service-port", "8000", "rollout service", port),
        (
            "vllm-port",
            "9001",
            "vLLM; further servers get the next ones, or name one for each: 9001,9011",
            ports,
        ),
        ("master-port", master_port, "where trainer and vLLM meet", port),
        ("metrics-port", "0", "the trainer's figures for Prometheus; 0: none", port),
    ]


SWITCHES = {
    "cpu": "use no GPU (default where nvidia-smi finds none)",
    "all-interfaces": "service, vLLM and the trainer's figures can be reached from other machines, with the keys in the run's "
    "keys.env (default: from this one alone)",
    "resume": "start again what of this run does not run, with the options of its last start; the trainer goes on from its "
    "newest checkpoint. With a larger --vllm-servers: further servers join the training that runs",
    "ray": "an asynchronous run on Ray in the foreground instead, by --config FILE (default: "
    "the starter model on this machine's cores). Then --folder and --steps are the "
    "only other flags (docs/async.md)",
    "no-links": "put no links to the logs into the folder where this is typed",
}
"""Options without a value, and their help."""


def of_living_parts(given: argparse.Namespace) -> dict[str, str]:
    """Return the options that all parts of a run share, as its last start had them.

    A later start of further parts must reach the parts that live. A run without living parts has
    none.
    """
    run = given.run.expanduser().absolute()
    if not (run / OPTIONS_FILE).exists() or not Records(run).living():
        return {}
    before = last_start(run)
    shared: dict[str, object] = {
        "model": before.model,
        "bridge": before.bridge,
        "vllm-servers": before.servers,
        "service-port": before.service_port,
        "vllm-port": _listed(before.vllm_ports),
        "master-port": before.master_port,
    }
    if before.vllm_gpus and not given.cpu:
        shared["vllm-gpus"] = _listed(before.vllm_gpus)
        shared["trainer-gpus"] = _listed(before.trainer_gpus)
    return {name: str(value) for name, value in shared.items()}


def parser(shared: Mapping[str, str] = MappingProxyType({})) -> OneLineParser:
    """The command line of start.sh.

    Args:
        shared: defaults from parts of the run that live, by option.

    Raises:
        LauncherError: a variable has a name or a value that cannot work.
    """
    refuse_misspelt_variables()
    made = OneLineParser(
        prog="scripts/start.sh",
        description="Start the stack, or some parts of it, in the background. Every option can also be given as a variable: "
        "--vllm-port 9901 as LOCKSTEP_VLLM_PORT=9901, --cpu as LOCKSTEP_CPU=1, and so on. Beside living parts of the run, "
        "the model, the bridge, GPUs and ports are theirs unless given.",
        allow_abbrev=False,
    )
    made.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"which to start: {', '.join(PARTS)}, vllm-2 and so on, {SERVERS} for every vLLM server (default: all)",
    )
    add_run_option(made)
    for name, default, description, read in options_with_values():
        if default is not None:
            description += f" (default: {default})"
        value = read_variable(variable_of(name), read)
        if value is None:
            value = shared.get(name, default)
        made.add_argument(f"--{name}", default=value, help=description, type=read)
    for name, description in SWITCHES.items():
        on = switched_on(variable_of(name))
        made.add_argument(f"--{name}", action="store_true", default=on, help=description)
    return made


def variable_of(option: str) -> str:
    """Return the variable that sets an option."""
    return PREFIX + option.upper().replace("-", "_")


def switched_on(variable: str) -> bool:
    """Read the variable of an option without a value.

    Raises:
        LauncherError: it is neither 1 nor 0.
    """
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise LauncherError(f"{variable}={value}: give 1 to switch it on, or 0")
    return value == "1"


def refuse_misspelt_variables() -> None:
    """Refuse a variable whose name is almost that of an option: start.sh would ignore it.

    Raises:
        LauncherError: there is one.
    """
    names = [name for name, *_ in options_with_values()] + ["run", *SWITCHES]
    known = {variable_of(name) for name in names}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known:
            option = variable.removeprefix(PREFIX).lower().replace("_", "-")
            if near := difflib.get_close_matches(option, names, n=1, cutoff=0.8):
                raise LauncherError(
                    f"{variable} is not a variable of start.sh: did you mean {variable_of(near[0])}?"
                )


def parse(arguments: Sequence[str]) -> StackOptions:
    """Read and check the command line.

    Raises:
        LauncherError: something cannot work.
        SystemExit: `--help`, or a line that does not parse (status 2).
    """
    given = parser().parse_args(arguments)
    if given.resume:
        return resumed(given, arguments)
    given = parser(of_living_parts(given)).parse_args(arguments)
    parts = chosen(given.parts, parts_of(given.vllm_servers))
    if given.bridge not in BRIDGES:
        raise LauncherError(f"--bridge {given.bridge}: give one of {', '.join(BRIDGES)}")
    model = check_model(given.model or str(STARTER_MODEL))
    environment = check_environment(given.environment, model)
    for part in PARTS:
        refuse_keys(part, getattr(given, f"{part}_args"))
    check_servers(given.vllm_servers, given.bridge)
    visible: tuple[int, ...] = ()
    if not given.cpu:
        visible = visible_gpus()
    vllm_gpus, trainer_gpus = choose_gpus(
        given.vllm_gpus,
        given.trainer_gpus,
        visible,
        given.cpu,
        given.vllm_servers,
        degrees(given.vllm_args),
        "trainer" in parts,
    )
    if given.bridge == "restart":
        if {"vllm", SERVERS} & set(given.parts):
            raise LauncherError(
                "--bridge restart: the trainer starts vLLM itself, so leave vllm out of the parts"
            )
        parts = tuple(part for part in parts if part != "vllm")
    return StackOptions(
        run=given.run.expanduser().absolute(),
        parts=parts,
        model=model,
        environment=environment,
        bridge=given.bridge,
        vllm_gpus=vllm_gpus,
        trainer_gpus=trainer_gpus,
        service_port=given.service_port,
        vllm_ports=server_ports(given.vllm_port, given.vllm_servers),
        master_port=given.master_port,
        metrics_port=given.metrics_port,
        steps=given.steps,
        lr=given.lr,
        batch_size=given.batch_size,
        restart_interval=given.restart_interval,
        service_args=given.service_args,
        vllm_args=given.vllm_args,
        environment_args=given.environment_args,
        trainer_args=given.trainer_args,
        wait=float(given.wait),
        links=not given.no_links,
        all_interfaces=given.all_interfaces,
    )


def check_environment(name: str | None, model: str) -> str:
    """The environment as the processes shall get it: one of ENVIRONMENTS, or the absolute path of a
    file.

    Args:
        name: as it was given; None to choose by the model.

    Raises:
        LauncherError: there is no such environment.
    """
    if not name:
        return {str(STARTER_MODEL): "arithmetic"}.get(model, "gsm8k")
    if name in ENVIRONMENTS:
        return name
    if Path(name).is_file() and name.endswith(".py"):
        return str(Path(name).resolve())
    raise LauncherError(
        f"--environment {name}: give {' or '.join(ENVIRONMENTS)}, or the path of an environment's .py file"
    )


def check_servers(servers: int, bridge: str) -> None:
    """Refuse several servers where weights can reach one alone.

    Raises:
        LauncherError: they cannot.
    """
    if servers > 1 and bridge not in ("auto", "broadcast", "lora"):
        raise LauncherError(
            f"--vllm-servers {servers} excludes --bridge {bridge}: several are reached by broadcast or lora"
        )


def server_ports(given: tuple[int, ...], servers: int) -> tuple[int, ...]:
    """A port for each server: as many as were given, or the next ones after a single given port.

    Raises:
        LauncherError: another number of ports than of servers, one twice, or none left.
    """
    found = tuple(range(given[0], given[0] + servers)) if len(given) == 1 else given
    if len(found) != servers:
        raise LauncherError(
            f"--vllm-port names {len(found)} ports for {servers} servers: give one, or one for each"
        )
    if len(set(found)) != servers:
        raise LauncherError(f"--vllm-port {','.join(map(str, found))} names a port twice")
    if max(found) > 65535:
        raise LauncherError(
            f"--vllm-port {given[0]}: {servers} servers need as many ports, and the last one is 65535"
        )
    return found


def save(options: StackOptions) -> None:
    """Keep the options in the run's folder, for --resume; parts that were started before count as
    this start's.
    """
    records = Records(options.run)
    parts = in_order(
        (*options.parts, *(part for part in records.parts() if part in parts_of(options.servers)))
    )
    if options.resume:  # of parts of one stack
        parts = in_order((*parts, *last_start(options.run).parts))
    values = asdict(options) | {
        "run": str(options.run),
        "parts": parts,
        "resume": False,
        "joining": (),
    }
    write_whole(options.run / OPTIONS_FILE, json.dumps(values, indent=1).encode())


def last_start(run: Path) -> StackOptions:
    """The options of the run's last start.

    Raises:
        LauncherError: there was no start, or one by another version of start.sh.
    """
    try:
        values: dict[str, Any] = json.loads((run / OPTIONS_FILE).read_text())
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return StackOptions(**{**values, "run": run})
    except (AttributeError, TypeError) as error:  # without names, or with other ones
        raise LauncherError(
            f"{run / OPTIONS_FILE} is of another version of start.sh ({error}): start without "
            "--resume"
        ) from None
    except FileNotFoundError:
        raise LauncherError(
            f"nothing that could go on was started in {run}: {OPTIONS_FILE} is not there. If the folder of a living run "
            "was removed, end its processes with scripts/stop.sh. Then start without --resume"
        ) from None
    except (OSError, ValueError) as error:
        raise LauncherError(
            f"{run / OPTIONS_FILE} cannot be read ({error}): start without --resume, and with the options of the last "
            "start. commands.sh beside it has its commands"
        ) from None


def grown(before: StackOptions, servers: int, visible: tuple[int, ...]) -> StackOptions:
    """The same stack with more vLLM servers, which the running trainer and environments shall then
    use.

    Args:
        before: the stack.
        servers: how many it shall have.
        visible: the GPUs that there are.

    Raises:
        LauncherError: it has as many, its trainer reaches one alone, or there are too few ports or
            GPUs.
    """
    more = servers - before.servers
    if more < 1:
        raise LauncherError(
            f"--resume --vllm-servers {servers}: this run has {before.servers}: give more, or end one with scripts/stop.sh"
        )
    if before.servers == 1:
        raise LauncherError(
            f"--resume --vllm-servers {servers}: this run was started for one server alone: stop it, and start it with "
            f"--vllm-servers {servers}"
        )
    each = len(before.vllm_gpus) // before.servers
    free = [gpu for gpu in visible if gpu not in (*before.vllm_gpus, *before.trainer_gpus)]
    if len(free) < more * each:
        raise LauncherError(
            f"--resume --vllm-servers {servers}: {more * each} more GPUs are needed, {each} for each server, and "
            f"{len(free)} are free"
        )
    last, names = before.vllm_ports[-1], parts_of(servers)
    added = tuple(part for part in names if part not in parts_of(before.servers))
    return replace(
        before,
        parts=in_order((*before.parts, *added)),
        vllm_ports=(*before.vllm_ports, *server_ports((last + 1,), more)),
        vllm_gpus=(*before.vllm_gpus, *free[: more * each]),
        joining=added,
    )


def resumed(given: argparse.Namespace, arguments: Sequence[str]) -> StackOptions:
    """The options of the run's last start, for the parts that are named now, or for all that do not
    run.

    Raises:
        LauncherError: there was no start, everything runs, or other options are given as well.
    """
    flags = [word.split("=")[0] for word in arguments if word.startswith("--")]
    extra = [
        flag for flag in flags if flag not in ("--resume", "--run", "--no-links", "--vllm-servers")
    ]
    if extra:
        raise LauncherError(
            f"--resume takes the options of the last start: leave {extra[0]} out, or leave --resume out"
        )
    run = given.run.expanduser().absolute()
    before = last_start(run)
    if "--vllm-servers" in flags:
        before = grown(before, given.vllm_servers, () if not before.vllm_gpus else visible_gpus())
    named = chosen(given.parts, before.parts) if given.parts else ()
    absent = [part for part in named if part not in before.parts]
    if absent:
        raise LauncherError(
            f"--resume: {absent[0]!r} was not part of the last start, which had "
            f"{', '.join(before.parts)}"
        )
    records = Records(run)
    running = set(records.living())
    parts = named or tuple(part for part in before.parts if part not in running)
    if not parts:
        raise LauncherError(f"--resume: everything of {run} runs already")
    return replace(before, parts=parts, resume=True, links=not given.no_links)
