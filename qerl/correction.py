"""Importance weights for completions sampled from another policy than the one that trains.

The sampler is noisy (AQN), quantized by another kernel and runs in another precision, so a token
was drawn with probability mu while the trainer gives it pi. Each token's loss is weighted by
pi / mu, truncated or masked at a cap so that no sequence dominates the step (Espeholt et al. 2018,
IMPALA; Ionides 2008, truncated importance sampling). With several updates on a rollout, pi is the
trainer before the first of them: the clipped ratio of the loss holds what they move.
"""

from __future__ import annotations

import math

import torch

MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def log_ratio(
    logps_BT: torch.Tensor, sampler_logps_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """log pi - log mu [B, T] of each token, in nats at the sampling temperature; 0 where masked."""
    return (logps_BT - sampler_logps_BT).masked_fill(mask_BT == 0, 0.0)


def weights(log_ratio_BT: torch.Tensor, mode: str, cap: float) -> torch.Tensor:
    """The weight of each token [B, T], or of each sequence [B, 1] in the sequence modes.

    Truncating clips a weight to `cap`; masking gives a token (or sequence) above it weight 0; the
    mode none gives all of them weight 1.
    """
    if mode not in MODES:
        raise ValueError(f"correction mode {mode!r}: expected one of {MODES}")
    if mode == "none":
        return torch.ones_like(log_ratio_BT)
    if mode.startswith("sequence"):
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True)
    ratio = log_ratio_BT.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=cap)
    return ratio.masked_fill(ratio > cap, 0.0)


def weighted(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, mode: str) -> torch.Tensor:
    """log pi / mu of what has a weight [U]: the tokens in the loss, or the sequences with any."""
    if mode.startswith("sequence"):
        return log_ratio_BT.sum(-1)[mask_BT.any(-1)]
    return log_ratio_BT[mask_BT.bool()]


def summary(
    token_log_ratios: torch.Tensor, weighted_log_ratios: torch.Tensor, cap: float
) -> dict[str, float]:
    """A step's figures, from log pi / mu of its tokens and of what has a weight (1-D, not empty).

    logp_gap_mean, logp_gap_max   |log pi - log mu| of the tokens, nats
    sampler_kl                    KL(mu || pi) in nats a token, by the estimator r - 1 - log r with
                                  r = pi / mu (Schulman 2020, "k3": unbiased and never negative)
    ratio_mean, ratio_max         of pi / mu before the cap; the mean's expectation is 1
    effective_sample_share        (sum r)^2 / (n sum r^2), Kish's: 1 when all weigh alike, 1 / n
                                  when one dominates
    capped_fraction               share of the weights above the cap
    """
    tokens, log_r = token_log_ratios.double(), weighted_log_ratios.double()
    total, squares = log_r.logsumexp(0), (2 * log_r).logsumexp(0)
    return {
        "logp_gap_mean": tokens.abs().mean().item(),
        "logp_gap_max": tokens.abs().max().item(),
        "sampler_kl": (tokens.exp() - 1 - tokens).mean().item(),
        "ratio_mean": (total.exp() / len(log_r)).item(),
        "ratio_max": log_r.max().exp().item(),
        "effective_sample_share": ((2 * total - squares).exp() / len(log_r)).item(),
        "capped_fraction": (log_r > math.log(cap)).double().mean().item(),
    }
