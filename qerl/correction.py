"""Importance weights for completions sampled from another policy than the one that trains.

The sampler is noisy (AQN), quantized by another kernel and runs in another precision, so a token
was drawn with probability mu while the trainer gives it pi. Each token's loss is weighted by
pi / mu, truncated or masked at a cap so that no sequence dominates the step (Espeholt et al. 2018,
IMPALA; Ionides 2008, truncated importance sampling).
"""

from __future__ import annotations

import torch

MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def weights(
    logps_BT: torch.Tensor,
    sampler_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: str,
    cap: float,
) -> torch.Tensor:
    """The weight of each token [B, T], or of each sequence [B, 1] in the sequence modes.

    logps are natural logarithms at the sampling temperature; mask is 1 for tokens in the loss.
    Truncating clips a weight to `cap`; masking gives a token (or sequence) above it weight 0; none
    weighs all alike.
    """
    if mode not in MODES:
        raise ValueError(f"correction mode {mode!r}: expected one of {MODES}")
    if mode == "none":
        return torch.ones_like(logps_BT)
    log_ratio = (logps_BT - sampler_logps_BT).masked_fill(mask_BT == 0, 0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=cap)
    return ratio.masked_fill(ratio > cap, 0.0)
