"""The scales of least error: no block is worse than rounded to nearest, few could be better."""

from __future__ import annotations

import pytest
import torch

import scales
from qerl import nvfp4

POSITIVE = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
WEIGHTS = {
    "normal": torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02,
    "heavy-tailed": torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) ** 3,
    "bfloat16": torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "uniform": torch.rand(64, 256, generator=torch.Generator().manual_seed(3)),
}


def block_errors(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The squared error of each block [N, K/16] as an engine sees it, in float32."""
    stored = nvfp4.quantize(weight, nvfp4.global_scale_of(weight), scale)
    missed = nvfp4.dequantize(*stored, torch.float32) - weight.float()
    return missed.square().unflatten(1, (-1, nvfp4.BLOCK)).sum(-1)


def chosen(weight: torch.Tensor) -> torch.Tensor:
    return scales.least_error(weight, nvfp4.global_scale_of(weight))


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_no_block_is_worse_than_rounded_to_nearest_and_many_are_better(weight):
    rtn, mse = block_errors(weight, None), block_errors(weight, chosen(weight))
    assert (mse <= rtn * (1 + 1e-6)).all()
    assert (mse < rtn).float().mean() > 0.4


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_all_the_scales_that_E4M3_has_leave_hardly_less_error(weight):
    found = block_errors(weight, chosen(weight))
    rows = (weight.shape[0], weight.shape[1] // nvfp4.BLOCK)
    every = [block_errors(weight, scale.expand(rows)) for scale in POSITIVE]
    assert found.sum() < 1.001 * torch.stack(every).amin(0).sum()


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_four_over_six_leaves_more(weight):
    """arXiv 2512.02010: the better of the maximum over 6 and over 4."""
    divisor = nvfp4.global_scale_of(weight)
    over_six = nvfp4.scale_of(weight, divisor)
    over_four = nvfp4.scale_of(weight, divisor * 1.5)
    either = torch.minimum(block_errors(weight, over_six), block_errors(weight, over_four))
    assert block_errors(weight, chosen(weight)).sum() < 0.95 * either.sum()


def test_a_block_of_zeros_stays_zeros():
    weight = torch.zeros(1, 32)
    weight[0, 16:] = 1
    stored = nvfp4.quantize(weight, nvfp4.global_scale_of(weight), chosen(weight))
    assert (stored.scale.float() > 0).all()
    assert torch.equal(nvfp4.dequantize(*stored, torch.float32), weight)
