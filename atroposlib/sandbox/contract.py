"""What a sandbox is asked and what it answers, whichever it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from atroposlib.errors import EnvironmentFailure, RolloutFailure

ISOLATIONS = {
    "files": "a program sees Python's own files and nothing else of the host",
    "network": "it reaches no network, and no socket of another process",
    "processes": "it sees and signals no process but its own, and all of them end with it",
    "disk": "what it writes goes to an empty folder of limited size, which is gone afterwards",
    "syscalls": "parts of the kernel that a function has no use for are closed to it",
}
"""What a host may be unable to give, and what it would mean."""

End = Literal["exited", "signal", "deadline", "cpu", "memory", "output"]


class SandboxUnavailable(EnvironmentFailure):
    """This host cannot hold programs as they must be held; the message says what is missing, and
    the remedy.

    Attributes:
        missing: isolation -> why; empty where programs cannot be run at all.
    """

    def __init__(self, message: str, missing: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.missing = dict(missing or {})


class SandboxBroken(RolloutFailure):
    """A program could not be run, or what became of it is not known. That says nothing of the
    program: raised in a tool or a reward, it ends the rollout without a score."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use. Those of memory and disk are in bytes.

    Attributes:
        seconds: of wall time, over all calls.
        cpu_seconds: of processor time, of each of its processes; whole seconds.
        memory: of each of its processes, in addresses, and of all together, in what they use
            (docs/sandbox.md).
        processes: processes and threads at once, the first included.
        disk: of its temporary folder, and of each file.
        files: files and folders in it.
        open_files: descriptors of each process.
        output: bytes that it may write to standard output and error before it is ended.
        kept_output: of these, how many are kept: the first.
        results: bytes that what its function returns may have, as JSON, over all calls.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory: int = 512 << 20
    processes: int = 16
    disk: int = 16 << 20
    files: int = 256
    open_files: int = 64
    output: int = 4 << 20
    kept_output: int = 16 << 10
    results: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value}: must be above 0")


@dataclass(frozen=True)
class Program:
    """Python source, and what is done with it.

    Attributes:
        code: the source.
        function: the name of a function that it defines and that is called; None to run it as a
            script.
        calls: the arguments of each call, as values that JSON can hold.
        stdin: what it can read from standard input.
    """

    code: str
    function: str | None = None
    calls: Sequence[Sequence[Any]] = ()
    stdin: str = ""


@dataclass(frozen=True)
class Returned:
    """A call came back with this value, as JSON holds it: a tuple is a list, and keys are text."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """A call raised this: type and message, at most 500 characters."""

    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of a program. Nothing in it is to be believed but what the sandbox itself has
    seen: `end`, the times, `left`.

    A program writes `results` and `output` as it likes. Whether it is right is for whoever knows
    the expected values to say, by comparing: they are no part of a `Program`.

    Attributes:
        end: what ended it: it exited, a signal did, or a limit.
        code: its exit status, negative for a signal.
        results: of the calls, in order; shorter than these if it ended before.
        problem: why no call was made: it does not compile, raised, or defines no such function.
            None if there is no problem.
        output: the beginning of what it wrote.
        output_bytes: how much it wrote.
        left: processes that were still there when it had ended, and were killed.
        seconds: of wall time.
        cpu_seconds: of its processes together.
        peak_memory: bytes, as far as was seen.
    """

    end: End
    code: int
    results: list[Returned | Raised] = field(default_factory=list)
    problem: str | None = None
    output: str = ""
    output_bytes: int = 0
    left: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0


class Sandbox(Protocol):
    """A way to run programs that nobody trusts.

    `LocalSandbox` is one; a class of your own may ask another machine.
    """

    async def start(self) -> None:
        """Make ready.

        Raises:
            SandboxUnavailable: programs could not be held here.
        """

    async def run(self, program: Program) -> Outcome:
        """Run one program; many may be asked for at once.

        Raises:
            SandboxBroken: nothing is known of the program.
        """

    async def close(self) -> None:
        """End whatever runs."""
