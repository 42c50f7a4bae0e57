#!/usr/bin/env bash
# Follow the logs of all parts, each line behind its part's name.
# Options: scripts/logs.sh --help
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" logs "$@"
