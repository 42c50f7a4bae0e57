#!/usr/bin/env bash
# Set up, then check style and types and run the tests. What follows the command goes to pytest: scripts/test.sh -k bridge
# Ends with pytest's closing line, or with the names of the checks that failed; status 0 only if everything passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=${LOCKSTEP_VENV:-$PWD/.venv}
scripts/setup.sh --venv "$venv" || exit 1
failed=()
check() {
  local output
  if output=$("$venv/bin/python" -m "$@" 2>&1); then
    echo "test: $* ... ok"
  else
    printf '%s\n' "$output"
    echo "test: $* ... FAILED"
    failed+=("$*")
  fi
}
check ruff check .
check ruff format --check .
check mypy
check mypy -p scripts
"$venv/bin/python" -m pytest "$@"
status=$?
((${#failed[@]} == 0)) && exit "$status"
printf 'test: FAILED: %s\n' "${failed[@]}" >&2
exit 1
