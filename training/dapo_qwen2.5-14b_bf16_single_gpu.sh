#!/usr/bin/env bash
# DAPO on Qwen2.5-14B-Instruct, base in bf16, one GPU.
# Its partner for comparison: dapo_qwen2.5-14b_nvfp4_single_gpu.sh
set -euo pipefail

MODEL=Qwen/Qwen2.5-14B-Instruct
PRECISION=bf16
SETTINGS=(
  --num-generations 2 --per-device-train-batch-size 2 --gradient-accumulation-steps 1
  --max-prompt-length 256 --max-completion-length 2048
  --vllm-gpu-memory-utilization 0.4
)

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
