"""python -m example_trainer.parameter_server --model-name M --port 9101 --vllm-servers
a:9001,b:9001
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()
    from example_trainer.parallel.launched import end_with_launcher

    end_with_launcher()  # before the imports below, which take seconds

from example_trainer.command_line import parse_section
from example_trainer.parallel.launch import is_launched, launch
from example_trainer.parameter_server.options import ParameterServerOptions
from example_trainer.parameter_server.serving import serve
from example_trainer.process import StopSignal, run

PROGRAM = "python -m example_trainer.parameter_server"


def main(arguments: Sequence[str], stop: StopSignal) -> int:
    """Serve in this process, or start one process for each shard and wait for all.

    Returns the exit status.
    """
    options = parse_section(ParameterServerOptions, PROGRAM, arguments)
    if options.shards > 1 and not is_launched(os.environ):
        return launch(
            [sys.executable, "-u", "-m", "example_trainer.parameter_server", *arguments],
            options.shards,
            stop,
        )
    serve(options, stop)
    return 0


if __name__ == "__main__":
    sys.exit(run(lambda stop: main(sys.argv[1:], stop)))
