#!/usr/bin/env bash
# DAPO on Llama-3.1-Nemotron-Nano-8B-v1, base in bf16, one GPU.
# Its partner for comparison: llama3.1_8b_nemotron_nvfp4_single_gpu.sh
set -euo pipefail

MODEL=nvidia/Llama-3.1-Nemotron-Nano-8B-v1
PRECISION=bf16
SETTINGS=(
  --num-generations 4 --per-device-train-batch-size 2 --gradient-accumulation-steps 32
  --max-prompt-length 256 --max-completion-length 2048
  --vllm-gpu-memory-utilization 0.3
)

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
