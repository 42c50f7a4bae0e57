#!/usr/bin/env bash
# Set up, then check style and types and run the tests. What follows the command goes to pytest: scripts/test.sh -k bridge
# Ends with pytest's closing lines, and then the names of what failed, if anything did; status 0 only if everything passed.
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
if (($# > 0)); then
  "$venv/bin/python" -m pytest "$@" || failed+=("pytest $*")
else
  # Two at a time: most tests wait for processes, so that one of them leaves a core idle. The second one's lines come at the end,
  # and what failed in the first one once more below them, so that the end of a log tells both.
  output=$(mktemp -d)
  "$venv/bin/python" -m pytest --ignore tests/e2e > "$output/others" 2>&1 &
  others=$!
  trap 'kill "$others" 2> /dev/null; rm -rf "$output"' EXIT
  first=ok
  "$venv/bin/python" -m pytest tests/e2e 2>&1 | tee "$output/e2e" || first=failed
  wait "$others" || failed+=("pytest --ignore tests/e2e")
  cat "$output/others"
  if [[ $first == failed ]]; then
    failed+=("pytest tests/e2e")
    echo "test: tests/e2e ended so:"
    tail -n 40 "$output/e2e"
  fi
fi
((${#failed[@]} == 0)) && exit 0
printf 'test: FAILED: %s\n' "${failed[@]}" >&2
exit 1
