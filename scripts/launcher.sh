#!/usr/bin/env bash
# Run a command of the launcher with the virtual environment's Python. It is called by start.sh, status.sh, logs.sh, restart.sh and
# stop.sh, with their own name as first argument.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${LOCKSTEP_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || { echo "$1: $python is not there: run scripts/setup.sh first" >&2; exit 1; }
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$python" "$root/example_trainer/launcher/__main__.py" "$@"
