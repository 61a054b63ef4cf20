"""A short run of qerl.train on SmolLM2 as several test files do it, and what it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

# shared/design.md, contracts, and what has come since
KEYS = """
step loss reward reward_std entropy learning_rate grad_norm sigma noise_std noise_modules
logp_gap_mean logp_gap_max sampler_kl ratio_mean ratio_max effective_sample_share capped_fraction
clip_ratio_low clip_ratio_high completion_length truncated_fraction zero_variance_fraction
sampling_rounds resampled_groups loss_tokens signal_tokens tokens_per_s time_rollout_s
time_reward_s time_train_s time_sync_s peak_memory_gib kl overlong_punishment alarms
""".split()
WHEN_ASKED_FOR = ["kl", "overlong_punishment"]  # null otherwise
REPEATED = [k for k in KEYS if not k.startswith(("time", "tokens_per_s", "peak"))]
FLAGS = """
--dataset arithmetic --reward digit_reward:digits --max-steps 4 --save-steps 2 --save-total-limit 9
--per-device-train-batch-size 8 --num-generations 4 --max-prompt-length 64
--max-completion-length 12 --mask-truncated-completions False --learning-rate 1e-3
--warmup-ratio 0 --optim adamw_torch --gradient-checkpointing False --num-stages 4
""".split()
SMALL = ["--per-device-train-batch-size", "4"]  # one prompt: for what one group can show


def command(model: Path, run: Path, *flags: str) -> list[str]:
    return ["--model-name", str(model), "--output-dir", str(run), *FLAGS, *flags]


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def without_clocks(run: Path) -> list[dict]:
    return [{key: row[key] for key in REPEATED} for row in rows(run)]


def copied(whole: Path, folder: Path, *without: str) -> Path:
    """A copy of a run folder that lacks what `without` names."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*without))
    return folder


def trained_adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")
