#!/usr/bin/env bash
# Start rollout service, vLLM, environment and trainer in the background, or some of them.
# Options: scripts/start.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${LOCKSTEP_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || { echo "start: $python is not there: run scripts/setup.sh first" >&2; exit 1; }
for word in "$@"; do
  [[ $word == --ray ]] || continue
  # In the foreground: docs/async.md. Every other word is for the driver.
  words=() config=
  for word in "$@"; do
    [[ $word == --ray ]] || words+=("$word")
    [[ $word == --config* ]] && config=given
  done
  [[ $config ]] || words=(--config "$root/example_trainer/configs/arithmetic_async_cpu.yaml" "${words[@]}")
  PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m example_trainer.async_grpo "${words[@]}"
done
# Run by path, so that relative paths among the options keep counting from where the command was typed.
exec "$python" "$root/example_trainer/launcher/__main__.py" start "$@"
