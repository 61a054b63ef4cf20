#!/usr/bin/env bash
# The paper's own settings (arXiv 2510.11696, table of hyper-parameters) on one GPU:
#   bash training/paper.sh gsm8k 3b|7b ARM [flags]            GRPO on GSM8K
#   bash training/paper.sh bigmath 7b|14b|32b ARM [flags]     DAPO on BigMath, levels 3-5 (32b: 4-5)
# ARM: aqn (NVFP4 with noise), bf16-aqn (bf16 with noise), nvfp4, bf16 or nf4 (QLoRA), without.
# METHOD=awq in front takes the paper's kind of checkpoint in place of rtn, in a run folder of its own.
# What the paper leaves open is the released launchers' (optimizer, prompt length, alpha / rank),
# NVFP4's (the learning rate of nf4) or 0 (the KL of GRPO: --beta).
set -euo pipefail

usage() { sed -n '3,6s/^# *//p' "$0" >&2; exit 2; }

case ${1:-}-${2:-} in
  gsm8k-3b | gsm8k-7b)
    DATASET=${DATASET:-gsm8k}
    SETTINGS=(
      --loss-type grpo --epsilon-high 0.2 --mask-truncated-completions False
      --num-generations 8 --num-iterations 4 --save-steps 100
      --per-device-train-batch-size 2 --gradient-accumulation-steps 64
      --max-prompt-length 256 --max-completion-length 4096
    ) ;;
  bigmath-7b | bigmath-14b | bigmath-32b)
    if [ "$2" = 32b ]; then levels=bigmath_hard; else levels=bigmath; fi
    DATASET=${DATASET:-$levels}
    SETTINGS=(
      --num-generations 16 --num-iterations 1
      --per-device-train-batch-size 1 --gradient-accumulation-steps 128
      --max-prompt-length 1024 --max-completion-length 8192
    ) ;;
  *) usage ;;
esac
case ${3:-} in
  aqn) PRECISION=nvfp4 noise=--ln ;;
  bf16-aqn) PRECISION=bf16 noise=--ln ;;
  nvfp4 | bf16 | nf4) PRECISION=$3 noise=--no-ln ;;
  *) usage ;;
esac
case $2 in 3b) share=0.2 ;; 7b) share=0.3 ;; 14b) share=0.45 ;; 32b) share=0.4 ;; esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=Qwen/Qwen2.5-${2^^}-Instruct
OUTPUT_DIR=${OUTPUT_DIR:-$(dirname "$here")/runs/paper-$1-$2-$3${METHOD:+-$METHOD}}
SETTINGS+=(
  --lora-rank 32 --lora-alpha 32 "$noise" --sigma-end 5e-4
  --vllm-gpu-memory-utilization "$share"
)
shift 3
source "$here/launch.sh"
