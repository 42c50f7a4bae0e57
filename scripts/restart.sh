#!/usr/bin/env bash
# Restart the vLLM servers one by one, while training goes on with the others.
# Options: scripts/restart.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${LOCKSTEP_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || { echo "restart: $python is not there: run scripts/setup.sh first" >&2; exit 1; }
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$python" "$root/example_trainer/launcher/__main__.py" restart "$@"
