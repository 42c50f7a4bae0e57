"""The error that ends a command of the launcher with one line."""

from __future__ import annotations

from example_trainer.child_processes.processes import ProcessError


class LauncherError(ProcessError):
    """The run cannot go on.

    The first line names the thing, its value and the remedy; what follows is log.
    """
