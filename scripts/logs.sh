#!/usr/bin/env bash
# Follow the logs of all parts, each line behind its part's name.
# Options: scripts/logs.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${LOCKSTEP_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || { echo "logs: $python is not there: run scripts/setup.sh first" >&2; exit 1; }
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$python" "$root/example_trainer/launcher/__main__.py" logs "$@"
