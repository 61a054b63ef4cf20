#!/usr/bin/env bash
# Writes Llama-3.1-Nemotron-Nano-8B-v1-NVFP4A16-rtn into the current folder.
#   [MODEL_PATH=folder] bash quantize_llama3.1_nemotron_8b.sh [any flag of quantize_nvfp4.py]
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-nvidia/Llama-3.1-Nemotron-Nano-8B-v1}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../.venv/bin/python" "$here/quantize_nvfp4.py" --model "$MODEL_PATH" "$@"
