"""The NVFP4 format in plain torch: the reference that every kernel is held to.

A weight [N, K] is stored as
    packed        uint8          [N, K/2]    two E2M1 codes a byte, the even column low
    scale         float8_e4m3fn  [N, K/16]   one a block of 16 consecutive columns
    global_scale  float32        [1]         a divisor, one a tensor (one a fused group)
and means  w = e2m1(code) * (scale / global_scale)  with the quotient and the product in float32,
rounded once to the output type. That is 4.5 bits a weight. An E2M1 code is a sign bit and three
magnitude bits that index MAGNITUDES.

The layout is compressed-tensors' `nvfp4-pack-quantized`; both functions are bit-exact against it
(tests/test_nvfp4.py). Fast versions live in qerl/kernels; choosing scales by anything but the
block's maximum is the quantizer's business (llm-compressor/), not this module's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Where a magnitude rounds up: halfway points, ties to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Quantized(NamedTuple):
    """A weight [N, K] in NVFP4."""

    packed: torch.Tensor  # uint8 [N, K/2]
    scale: torch.Tensor  # float8_e4m3fn [N, K/16]
    global_scale: torch.Tensor  # float32 [1], a divisor


def quantize(
    weight_NK: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Quantized:
    """Round a weight to the nearest NVFP4 values under its scales.

    weight_NK: floating point [N, K], K a multiple of 16, else ValueError.
    global_scale: float32 [1], shared by layers that an engine fuses; by default 448 * 6 / max|w|.
    scale: float8_e4m3fn [N, K/16], positive; by default `scale_of` the weight.
    """
    blocks = _blocks(weight_NK)
    if global_scale is None:
        global_scale = global_scale_of(weight_NK)
    if scale is None:
        scale = scale_of(weight_NK, global_scale)
    codes = _encode(blocks / (scale.float() / global_scale)[..., None])
    return Quantized(_pack(codes.flatten(1)), scale, global_scale.reshape(1))


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The dense weight [N, K] in `dtype` of a packed one (shapes in the module docstring)."""
    rows, half = packed.shape
    if scale.shape != (rows, half * 2 // BLOCK) or half * 2 % BLOCK:
        raise ValueError(
            f"packed {list(packed.shape)} and scale {list(scale.shape)} do not fit: "
            f"expected scale [{rows}, {half * 2 // BLOCK}] and K = {half * 2} a multiple of {BLOCK}"
        )
    values = _pairs(packed.device)[packed.int()].view(rows, -1, BLOCK)
    effective = scale.float() / global_scale
    return (values * effective[..., None]).view(rows, half * 2).to(dtype)


def scale_of(weight_NK: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The scales [N, K/16], float8_e4m3fn, that map each block's largest magnitude to 6."""
    scale = (_blocks(weight_NK).abs().amax(-1) / E2M1_MAX * global_scale).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    # An all-zero block would divide by zero; compressed-tensors gives it E4M3's epsilon too.
    eps = torch.tensor(torch.finfo(scale.dtype).eps, dtype=scale.dtype, device=scale.device)
    return torch.where(scale.float() == 0, eps, scale)


def global_scale_of(*weights_NK: torch.Tensor) -> torch.Tensor:
    """The divisor [1], float32, shared by these weights: their largest value maps to 448 * 6."""
    largest = torch.stack([w.abs().amax().float() for w in weights_NK]).amax()
    divisor = E4M3_MAX * E2M1_MAX / largest
    return divisor.nan_to_num(nan=1.0, posinf=1.0).reshape(1)  # all zeros: any divisor will do


def _blocks(weight_NK: torch.Tensor) -> torch.Tensor:
    columns = weight_NK.shape[-1]
    if weight_NK.dim() != 2 or columns % BLOCK:
        raise ValueError(
            f"a weight of shape {list(weight_NK.shape)} cannot be NVFP4: expected [N, K] with K a "
            f"multiple of {BLOCK}; leave this layer in 16 bits (the recipe's ignore list)"
        )
    return weight_NK.view(weight_NK.shape[0], columns // BLOCK, BLOCK)


def _encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each value, uint8 in 0..15; beyond 6 saturates."""
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code, midpoint in enumerate(_MIDPOINTS):
        codes += magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint
    return codes | ((values < 0).to(torch.uint8) << 3)


def _pack(codes_NK: torch.Tensor) -> torch.Tensor:
    return codes_NK[:, 0::2] | (codes_NK[:, 1::2] << 4)


def _pairs(device: torch.device) -> torch.Tensor:
    """[256, 2] float32: the two values of each packed byte, even column first."""
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
