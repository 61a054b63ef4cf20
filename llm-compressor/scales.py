"""The scale of each NVFP4 block that leaves the least error, instead of the block's maximum over 6.

E2M1's steps grow from 0.5 to 2, so mapping a block's maximum to 6 is often not its best use: "four
over six" (arXiv 2512.02010) tries the maximum over 6 and over 4. This tries every E4M3 scale from
two steps below the first to six above it, a factor of 0.8 to 1.75, as E4M3 has eight steps an
octave. The block's own scale is among them, so that no block can come out worse than rounded to
nearest. The global scale is not chosen here.
"""

from __future__ import annotations

import torch

from qerl import nvfp4

OBSERVER = "nvfp4_least_error"  # what config.json calls it, and llm-compressor's registry
STEPS = (0, -2, -1, 1, 2, 3, 4, 5, 6)  # the maximum's own scale first: it wins a tie
LARGEST_CODE = 126  # E4M3's 448; the codes of its positive values are in their order


def least_error(weight_NK: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The scales, float8_e4m3fn [N, K/16], with the least squared error in each block.

    Raises ValueError as `nvfp4.quantize` does.
    """
    start = nvfp4.scale_of(weight_NK, global_scale)
    magnitude = weight_NK.float().abs().view(*start.shape, nvfp4.BLOCK)
    best, least = start, torch.full_like(start, torch.inf, dtype=torch.float32)
    for step in STEPS:
        code = (start.view(torch.uint8).int() + step).clamp(1, LARGEST_CODE)
        scale = code.to(torch.uint8).view(torch.float8_e4m3fn)
        unit = (scale.float() / global_scale)[..., None]
        error = (_nearest(magnitude / unit) * unit - magnitude).square_().sum(-1)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _nearest(magnitude: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 magnitude; ties to the even code, as torch rounds halves to even."""
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (magnitude / step).round_().mul_(step).clamp_(max=nvfp4.E2M1_MAX)
