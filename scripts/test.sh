#!/usr/bin/env bash
# Set up, then check style and types and run the tests of the default tier, in about five minutes on two cores.
# The option --all runs the nightly tests too, as continuous integration does, in about 25 minutes.
# Other arguments go to pytest, which then chooses from all tests, such as -k bridge.
# Ends with pytest's closing lines, the check of types and the names of what failed. The status is 0 only if everything passed.
set -uo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  cat <<'USAGE'
usage: scripts/test.sh [--all | PYTEST_ARGUMENT ...]

Set up, check style and types, and run the tests.

  (nothing)        the default tests, in about five minutes on two cores
  --all            every test, in about 25 minutes
  PYTEST_ARGUMENT  chosen from all tests, such as: -k bridge

environment variables:
  LOCKSTEP_VENV          the virtual environment (default: .venv in the repository)
  LOCKSTEP_TEST_SECONDS  the limit for all tests (default: 4500)
USAGE
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=${LOCKSTEP_VENV:-$PWD/.venv}
tier=(-m "not nightly")
if [[ ${1:-} == --all ]]; then
  tier=()
  shift
fi
scripts/setup.sh --venv "$venv" || exit 1
# Where it is set, each of hundreds of processes compiles this project again, and each worker rewrites every test's assertions.
unset PYTHONDONTWRITEBYTECODE
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
# Types are checked beside the tests, because most tests wait.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
{ check mypy; check mypy -p bench -p scripts -p studies; } > "$types" 2>&1 &
checking=$!
if (($# > 0)); then
  "$venv/bin/python" -m pytest "$@" || failed+=("pytest $*")
else
  # So the tests are compiled once, and not by each worker at the same time.
  "$venv/bin/python" -m pytest --collect-only -qq > /dev/null 2>&1
  # One more at a time than there are cores, since most tests wait for processes, and one for tests that do little else. There are
  # at most 9, since each takes 2 GB. The tests are distributed over the workers by tests/conftest.py.
  workers=$(($(nproc) < 7 ? $(nproc) + 2 : 9))
  # At the limit pytest is interrupted, so that it still names what failed until then.
  seconds=${LOCKSTEP_TEST_SECONDS:-4500}
  timeout --foreground --signal=INT --kill-after=60 "$seconds" \
    "$venv/bin/python" -m pytest --numprocesses "$workers" --dist loadscope --no-loadscope-reorder "${tier[@]}"
  status=$?
  ((status == 124 || status == 137)) && failed+=("pytest, which had not ended after LOCKSTEP_TEST_SECONDS=$seconds")
  ((status != 0 && status != 124 && status != 137)) && failed+=("pytest")
fi
wait "$checking"
cat "$types"
mapfile -t wrong < <(sed -n 's/^test: \(.*\) \.\.\. FAILED$/\1/p' "$types")
failed+=("${wrong[@]}")
((${#failed[@]} == 0)) && exit 0
printf 'test: FAILED: %s\n' "${failed[@]}" >&2
exit 1
