"""End this process when the launcher that started it ends.

Standard library only, because it runs before the imports of a trainer, which take seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from atroposlib.utils.processes import end_with_parent

LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"
"""Names the launcher's process id to the processes that it starts."""


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Kill this process when its launcher ends, however that ends. Without a launcher, do nothing.

    A rank of a killed launcher would wait for the other ranks and hold its GPU. It could not save
    anything: the store through which ranks agree is the launcher's.
    """
    launcher = environment.get(LAUNCHER_VARIABLE, "")
    if launcher.isdigit():
        end_with_parent(int(launcher))
