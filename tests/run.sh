#!/usr/bin/env bash
# Every test that this machine can run, environment included.
#   bash tests/run.sh [any pytest flag, or test files]      quick ones only: -m 'not slow'
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash setup_env.sh
.venv/bin/ruff check .

left_out=()
if ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  left_out=(--ignore=tests/gpu)
  echo
  echo "*** NO GPU HERE: tests/gpu IS SKIPPED. Run tests/run.sh on a machine with one too. ***"
  echo
fi
exec .venv/bin/python -m pytest "${left_out[@]}" "$@"
