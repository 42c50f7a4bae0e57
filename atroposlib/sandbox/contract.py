"""The request to a sandbox and its answer, whichever sandbox it is; and the verdict about a
program.

The verdict is made outside of the sandbox: only this side knows the right values.
"""

import math
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
"""Isolations that a host may lack, and the promise of each."""

End = Literal["exited", "signal", "deadline", "cpu", "memory", "processes", "output"]


class SandboxUnavailable(EnvironmentFailure):
    """This host cannot isolate programs as required. The message names the missing isolation and
    the remedy.

    Attributes:
        missing: isolation -> why; empty where programs cannot be run at all.
    """

    def __init__(self, message: str, missing: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.missing = dict(missing or {})


class SandboxBroken(RolloutFailure):
    """A program could not be run, or its end is unknown. The program may be right: if a tool or a
    reward raises this, the rollout ends without a score."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program. Memory and disk are in bytes.

    Attributes:
        seconds: of wall time, over all calls.
        cpu_seconds: of processor time, of each of its processes; whole seconds.
        memory: of each of its processes, in addresses, and of all together, in what they use
            (docs/sandbox.md).
        processes: processes and threads at once, the first included.
        disk: of its temporary folder, and of each file.
        files: files and folders in it.
        open_files: descriptors of each process.
        output: bytes that it may write to standard output, and to standard error, before it is
            ended.
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
    """The end of a program, and its results. Only `end`, the times and `left` are trustworthy: the
    sandbox itself measures them.

    A program can write anything into `results` and `output`. The caller compares them with the
    expected values, which a `Program` does not contain.

    Attributes:
        end: what ended it: it exited, a signal did, or a limit.
        code: its exit status, negative for a signal.
        results: of the calls, in order; shorter than these if it ended before.
        problem: why no call was made: it does not compile, raised, or defines no such function.
            None if there is no problem.
        output: the beginning of what it wrote to standard output.
        output_bytes: how much it wrote there.
        errors: the beginning of what it wrote to standard error.
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
    errors: str = ""
    left: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0


class Sandbox(Protocol):
    """A way to run programs that are not trusted.

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


Kind = Literal["right", "wrong", "crash", "timeout", "contained"]

TOLERANCE = 1e-6
"""Relative, and absolute near 0, by which a number that is expected as a float may differ."""


REFUSED = ("PermissionError: [Errno 1] ", "OSError: [Errno 12] ", "MemoryError")
"""Beginnings of the errors that a program meets where the sandbox refuses something: EPERM, ENOMEM,
and no more addresses. A program may raise them without cause. That changes the name of its failure,
and never a failure into a success."""


@dataclass(frozen=True)
class Verdict:
    """The worth of a program.

    Attributes:
        kind: `right` if every call returned what was expected. Otherwise `timeout` (no time left),
            `contained`, `crash` (it does not compile, raised, or died), or `wrong`. `contained`:
            another limit ended it, the sandbox refused a call, or processes of it had to be killed.
        passed: calls that returned what was expected.
        why: for a person, one line.
    """

    kind: Kind
    passed: int
    why: str


def same_value(expected: Any, got: Any) -> bool:
    """Return whether two values that JSON can hold are equal: types count, but that a whole number may
    stand for a float.

    Tuples are lists here. Floats are equal within TOLERANCE, and NaN equals NaN. An expected float
    of at most TOLERANCE must be met to a thousandth, or 0 would equal it.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(expected) == len(got)
            and all(same_value(one, other) for one, other in zip(expected, got, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and expected.keys() == got.keys()
            and all(same_value(value, got[key]) for key, value in expected.items())
        )
    if not isinstance(expected, float):
        return type(got) is type(expected) and bool(got == expected)
    if type(got) not in (int, float):
        return False
    allowed = TOLERANCE
    if 0 < abs(expected) <= TOLERANCE:
        allowed = abs(expected) / 1000
    try:
        return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=allowed) or (
            expected != expected and got != got
        )
    except OverflowError:  # a whole number that no float can be
        return False


def verdict(outcome: Outcome, expected: Sequence[Any]) -> Verdict:
    """Judge a program by what its calls returned.

    Args:
        outcome: of running it with one call for each expected value.
        expected: the values, as JSON holds them; the program has never seen them.
    """
    results = outcome.results[: len(expected)]
    same = [
        isinstance(got, Returned) and same_value(value, got.value)
        for value, got in zip(expected, results, strict=False)
    ]
    passed = sum(same)
    if expected and passed == len(expected) and outcome.end == "exited":
        return Verdict("right", passed, f"all {passed} calls returned what was expected")
    if outcome.end in ("deadline", "cpu"):
        return Verdict("timeout", passed, f"it took too long (ended by its {outcome.end} limit)")
    if outcome.end in ("memory", "processes", "output"):
        return Verdict("contained", passed, f"ended by its {outcome.end} limit")
    if outcome.left:
        return Verdict("contained", passed, f"{outcome.left} processes of it had to be killed")
    if outcome.problem is not None:
        if outcome.problem.startswith(REFUSED):
            return Verdict("contained", passed, f"refused by the sandbox: {outcome.problem}")
        return Verdict("crash", passed, outcome.problem)
    if outcome.end == "signal":
        return Verdict("crash", passed, f"ended by signal {-outcome.code}")
    for number, (ok, got) in enumerate(zip(same, results, strict=True)):
        if not ok:
            if isinstance(got, Raised) and got.text.startswith(REFUSED):
                return Verdict(
                    "contained", passed, f"refused by the sandbox: call {number} raised {got.text}"
                )
            if isinstance(got, Raised):
                return Verdict("crash", passed, f"call {number} raised {got.text}")
            return Verdict("wrong", passed, f"call {number} returned {got.value!r:.100}")
    return Verdict(
        "crash",
        passed,
        f"it ended with status {outcome.code} after {len(results)} of {len(expected)} calls",
    )
