#!/usr/bin/env bash
# Writes Qwen2.5-3B-Instruct-NVFP4A16-rtn into the current folder.
#   [MODEL_PATH=folder] bash quantize_qwen2.5_3b.sh [any flag of quantize_nvfp4.py]
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../.venv/bin/python" "$here/quantize_nvfp4.py" --model "$MODEL_PATH" "$@"
