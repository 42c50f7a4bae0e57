#!/usr/bin/env bash
# Show whether the stack is up and moves; status 1 if anything is down.
# Options: scripts/status.sh --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" status "$@"
