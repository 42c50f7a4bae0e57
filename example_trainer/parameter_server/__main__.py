"""python -m example_trainer.parameter_server --model-name M --port 9101 --vllm-servers a:9001,b:9001"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()

from example_trainer.command_line import parse_section
from example_trainer.parameter_server.options import ParameterServerOptions
from example_trainer.parameter_server.serving import serve
from example_trainer.process import run

PROGRAM = "python -m example_trainer.parameter_server"

if __name__ == "__main__":
    sys.exit(run(lambda stop: serve(parse_section(ParameterServerOptions, PROGRAM, sys.argv[1:]), stop)))
