#!/usr/bin/env bash
# Restart the vLLM servers one by one, while training goes on with the others.
# Options: scripts/restart.sh --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" restart "$@"
