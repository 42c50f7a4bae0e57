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
  esac
done
# A wrong option shows before the minutes that a first set-up takes; so does --help.
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
  LOCKSTEP_CHECK_ONLY=1 python3 "$root/example_trainer/launcher/quickstart/__main__.py" "$@"
  for argument in "$@"; do [[ $argument == -h || $argument == --help ]] && exit 0; done
fi
start=$SECONDS
"$root/scripts/setup.sh" "${device[@]}" --venv "$venv"
export LOCKSTEP_SECONDS_SETUP=$((SECONDS - start))
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$venv/bin/python" "$root/example_trainer/launcher/quickstart/__main__.py" "$@"
