#!/usr/bin/env bash
# Sourced by the launchers, which set MODEL, PRECISION and SETTINGS first. Not to be run by itself.
# From the environment: METHOD of the NVFP4 checkpoint (rtn), MODEL_PATH, DATASET, OUTPUT_DIR. Any
# qerl.train flag may follow on the command line and wins.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
python=$root/.venv/bin/python

# A pair differs in precision and learning rate alone (paper, table of hyper-parameters).
case $PRECISION in
  nvfp4) LEARNING_RATE=1e-5 SUFFIX=-NVFP4A16-${METHOD:-rtn} ;;
  bf16) LEARNING_RATE=5e-6 SUFFIX= ;;
  nf4) LEARNING_RATE=1e-5 SUFFIX=-NF4 ;;
  *) echo "launch.sh: PRECISION is '$PRECISION', expected nvfp4, bf16 or nf4" >&2; exit 2 ;;
esac

name=$(basename "$MODEL")$SUFFIX
if [ "$PRECISION" = nvfp4 ]; then default=$root/models/$name; else default=$MODEL; fi
MODEL_PATH=${MODEL_PATH:-$default}
DATASET=${DATASET:-gsm8k}
OUTPUT_DIR=${OUTPUT_DIR:-$root/runs/$name-$(basename "$DATASET")}

[ -x "$python" ] || { echo "No environment yet: bash $root/setup_env.sh" >&2; exit 2; }
if [ "$PRECISION" = nvfp4 ] && [ ! -d "$MODEL_PATH" ]; then
  case ${METHOD:-rtn} in gptq | awq) calibration=" --calibration gsm8k" ;; *) calibration= ;; esac
  cat >&2 <<END
No NVFP4 checkpoint at $MODEL_PATH. Make it once:
  $python $root/llm-compressor/quantize_nvfp4.py --model $MODEL --output $default --method ${METHOD:-rtn}$calibration
or name the folder of one you have in the environment: MODEL_PATH=folder
END
  exit 2
fi

exec "$python" -m qerl.train \
  --model-name "$MODEL_PATH" --precision "$PRECISION" --learning-rate "$LEARNING_RATE" \
  --dataset "$DATASET" --output-dir "$OUTPUT_DIR" \
  --loss-type dapo --beta 0 --epsilon 0.2 --epsilon-high 0.28 --mask-truncated-completions \
  --optim adamw_8bit --adam-beta1 0.9 --adam-beta2 0.99 --weight-decay 0.1 \
  --warmup-ratio 0.1 --lr-scheduler-type cosine --max-grad-norm 0.2 \
  --lora-rank 16 --lora-alpha 16 \
  --ln --sigma-start 1e-2 --sigma-end 1e-4 --num-stages 10 \
  "${SETTINGS[@]}" "$@"
