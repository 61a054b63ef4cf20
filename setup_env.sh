#!/usr/bin/env bash
# Makes .venv with exactly the versions of requirements-cuda.txt (an NVIDIA GPU is visible) or
# requirements-cpu.txt (none is), and this project in it. Needs neither conda nor root.
#
#   bash setup_env.sh              a second run finds .venv complete and does nothing
#   QERL_ENV=cpu|cuda              choose the set yourself
#   PYTHON=python3.12              choose the interpreter (3.11 to 3.13) for a new .venv
set -euo pipefail

# GB free in the folder. CPU: .venv took 3.5 GB, and 6.5 GB with torch's CUDA build. CUDA: a guess.
CPU_DISK=10
CUDA_DISK=20

cd "$(dirname "${BASH_SOURCE[0]}")"
stamp=.venv/.qerl-complete # holds the fingerprint of what was installed; written last
candidates=${PYTHON:-python3 python3.12 python3.11 python3.13}
quiet=()
[ -t 1 ] || quiet=(--quiet) # no progress bars in a log

say() { echo "setup_env.sh: $*"; }
fail() { say "$*" >&2; exit 1; }

gpu_visible() {
  compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null && return
  command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

choose_kind() {
  case ${QERL_ENV:-} in
    cpu | cuda) echo "$QERL_ENV" ;;
    '') if gpu_visible; then echo cuda; else echo cpu; fi ;;
    *) fail "QERL_ENV is '$QERL_ENV', expected cpu or cuda" ;;
  esac
}

# The first interpreter that is new enough, or the one that PYTHON names.
choose_python() {
  local candidate
  local in_range='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
  for candidate in $candidates; do
    if "$candidate" -c "$in_range" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "needs Python 3.11, 3.12 or 3.13, and none of these is: $candidates." \
    "Name one: PYTHON=/path/to/python3.12 bash setup_env.sh"
}

check_machine() {
  local free
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "the pinned wheels are for Linux on x86-64, not $(uname -sm)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module (Debian and Ubuntu: install the package python3-venv)"
  free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1000000) }')
  [ "$free" -ge "$disk" ] || fail "$free GB free in $PWD, $disk GB needed for the $kind set"
}

# What makes .venv this one: the versions, the set, the folder (scripts in it hold absolute paths).
fingerprint() { { echo "$kind $PWD"; cat "$requirements" pyproject.toml; } | sha256sum | cut -d ' ' -f 1; }

install() {
  rm -f "$stamp"
  "$python" -m venv --clear .venv
  .venv/bin/python -m pip install "${quiet[@]}" --no-deps -r "$requirements"
  if [ "$kind" = cpu ]; then add_torch_libraries; fi
  .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
  .venv/bin/python -c 'import qerl, torch, transformers, trl, vllm'
}

# An index may offer only torch's CUDA build, which cannot be imported without NVIDIA's libraries.
add_torch_libraries() {
  local needs
  if .venv/bin/python -c 'import torch' 2>/dev/null; then return; fi
  say "this torch is the CUDA build: adding the libraries that it loads"
  needs=$(.venv/bin/python -c '
import importlib.metadata
names = ("cuda-", "nvidia-")
print("\n".join(r for r in importlib.metadata.requires("torch") if r.startswith(names)))')
  .venv/bin/python -m pip install "${quiet[@]}" -r /dev/stdin <<<"$needs"
}

kind=$(choose_kind)
requirements=requirements-$kind.txt
if [ "$kind" = cpu ]; then disk=$CPU_DISK; else disk=$CUDA_DISK; fi

# One run at a time: a second one waits for the first and then finds its work done.
exec 9<"${BASH_SOURCE[0]##*/}"
flock 9

wanted=$(fingerprint)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  say ".venv is complete ($kind set)"
  exit 0
fi
# `venv --clear` would empty the folder that a link points to, which another checkout works in.
[ ! -L .venv ] || fail ".venv is a link to $(readlink .venv), which was made elsewhere: remove the link"
python=$(choose_python)
check_machine
say "making .venv with $("$python" --version) and $requirements ($kind set)"
trap '[ $? = 0 ] || say "stopped: .venv is not complete, the reason stands above" >&2' EXIT
install
echo "$wanted" >"$stamp"
say "done: .venv/bin/python, or source .venv/bin/activate"
