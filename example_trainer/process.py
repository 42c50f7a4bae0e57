"""Log lines, signals, last line and exit status of a process of the trainer."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from atroposlib.utils.files import disk_refusal
from atroposlib.utils.log_lines import LogLines
from atroposlib.utils.processes import end_with_parent
from example_trainer.errors import ConfigError, TrainerError
from example_trainer.prerequisites import missing_package

logger = logging.getLogger(__name__)


class StopRequested(BaseException):
    """A signal asked the process to end.

    Like KeyboardInterrupt, it passes through `except Exception`.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignal:
    """Turns SIGTERM and SIGINT into StopRequested: at once while the process starts, and after
    `defer` only where stopping leaves everything whole. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._number = 0
        self._error: TrainerError | None = None
        self._deferred = False

    def install(self) -> None:
        """Take over SIGTERM and SIGINT. Call it in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.request(number)
        if not self._deferred:
            raise StopRequested(number)

    def defer(self) -> None:
        """From now on, raise StopRequested in `check` and `wait` only."""
        self.hold()
        self.check()

    def hold(self) -> None:
        """As `defer`, but a signal that has come already waits for the next `check`."""
        self._deferred = True

    def request(self, number: int) -> None:
        """Behave as if signal `number` had come after `defer`."""
        self._number = number
        self._event.set()

    def fail(self, error: TrainerError) -> None:
        """Called by another thread: the main one cannot go on, and shall raise `error` in `check`
        and `wait`.
        """
        self._error = error
        self._event.set()

    def check(self) -> None:
        """Raise StopRequested if a signal came, or what `fail` was given."""
        self.wait(0)

    def wait(self, seconds: float) -> None:
        """Sleep, but raise StopRequested as soon as a signal comes, or what `fail` is given."""
        if not self._event.wait(seconds):
            return
        if self._error is not None and not self._number:
            raise self._error
        raise StopRequested(self._number)


class _Formatter(logging.Formatter):
    """`07:53:11 message`; what is not plain information starts with its level, so that `grep ERROR`
    finds it. A rank other than 0 adds its number: `WARNING 07:53:11 [rank 1] message`.
    """

    def __init__(self, rank: str = "0") -> None:
        super().__init__()
        self._prefix = f"[rank {rank}] " * (rank != "0")

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {self._prefix}{record.getMessage()}"
        if record.levelno != logging.INFO:
            line = f"{record.levelname} {line}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


def log_to_stdout() -> None:
    """Send this project's log lines to standard output, and other libraries' warnings. If there are
    several ranks, rank 0 logs everything, and the others log warnings and errors only.
    """
    rank, level = "0", logging.INFO
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rank = os.environ.get("RANK", "0")
    if rank != "0":
        level = logging.WARNING
    handler = LogLines(sys.stdout)
    handler.setFormatter(_Formatter(rank))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for package in ("example_trainer", "vllm_patching"):
        logging.getLogger(package).setLevel(level)


def _report_thread(ended: threading.ExceptHookArgs) -> None:
    """Log the end of a thread.

    Threads of other libraries, such as TensorBoard's, write files too.
    """
    line = ended.exc_value and disk_refusal(ended.exc_value)
    if not line:
        threading.__excepthook__(ended)
        return
    name = getattr(ended.thread, "name", "?")
    logger.error("A thread has ended (%s): %s", name, line)


def run(main: Callable[[StopSignal], int | None]) -> int:
    """Run a process's work and turn how it ended into a last log line and an exit status.

    Args:
        main: the work. It may return an exit status of its own, such as that of the processes that
            it started.

    Returns:
        0 when done, or the status that `main` returns. 2 for a wrong option; 1 for any other error;
        128 + n when signal n asked to stop.
    """
    log_to_stdout()
    threading.excepthook = _report_thread
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # a rank of a torchrun that was killed would wait for the others, and hold its GPU
        end_with_parent()
    stop = StopSignal()
    stop.install()
    try:
        return main(stop) or 0
    except StopRequested as request:
        logger.info("Stopped by %s", request)
        return 128 + request.number
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except TrainerError as error:
        logger.error("%s", " ".join(str(error).split()))
        return 1
    except Exception as error:
        if isinstance(error, ImportError) and (line := missing_package(error)) is not None:
            logger.error("%s", line)
            return 1
        if (line := disk_refusal(error)) is not None:
            logger.error("%s", line)
            return 1
        logger.exception("This is a bug in the trainer, or the machine ran out of something:")
        logger.error("%s: %s", type(error).__name__, " ".join(str(error).split()))
        return 1


def leave(status: int) -> NoReturn:
    """End this process with a status, even if one of its threads still waits for another rank.

    At the end of the interpreter, Python stops such a thread in the middle of Gloo's C++ code. The
    C++ runtime then aborts the process (status 134). So a process that is one of several ranks runs
    the functions of `atexit` and ends at once.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
