#!/usr/bin/env bash
# Start rollout service, vLLM, environment and trainer in the background, or some of them.
# Options: scripts/start.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${LOCKSTEP_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || { echo "start: $python is not there: run scripts/setup.sh first" >&2; exit 1; }
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$python" "$root/scripts/ops/__main__.py" start "$@"
