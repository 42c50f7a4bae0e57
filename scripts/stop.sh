#!/usr/bin/env bash
# Stop what start.sh started: environment, trainer, vLLM, rollout service.
# Options: scripts/stop.sh --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" stop "$@"
