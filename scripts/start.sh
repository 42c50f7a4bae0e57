#!/usr/bin/env bash
# Start rollout service, vLLM, environment and trainer in the background, or some of them.
# Options: scripts/start.sh --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" start "$@"
