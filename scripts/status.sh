#!/usr/bin/env bash
# Show whether the stack is up and moves; status 1 if anything is down.
# Options: scripts/status.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${LOCKSTEP_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || { echo "status: $python is not there: run scripts/setup.sh first" >&2; exit 1; }
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$python" "$root/example_trainer/launcher/__main__.py" status "$@"
