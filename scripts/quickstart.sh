#!/usr/bin/env bash
# Set up, then train a small model with the whole stack on this machine: rollout service, vLLM, environment, trainer.
# Options: scripts/quickstart.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LOCKSTEP_VENV:-$root/.venv}
device=()
for argument in "$@"; do
  case $argument in
    --cpu | --gpu) device=("$argument") ;;
    -h | --help) # needs nothing installed
      cd "$root" && exec python3 -m scripts.quickstart --help ;;
  esac
done
start=$SECONDS
"$root/scripts/setup.sh" "${device[@]}" --venv "$venv"
export LOCKSTEP_SECONDS_SETUP=$((SECONDS - start))
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$venv/bin/python" "$root/scripts/quickstart/__main__.py" "$@"
