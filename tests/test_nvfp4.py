"""qerl.nvfp4 against compressed-tensors, bit for bit, and over the whole of its small spaces."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qerl.nvfp4 import BLOCK, MAGNITUDES, dequantize, global_scale_of, quantize

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
ODD_SHAPES = [(1, 16), (3, 48), (17, 576), (192, 1536), (5, 4096)]


def theirs(weight_NK):
    """compressed-tensors' own scales and packing of a weight, as llmcompressor calls them."""
    low, high = weight_NK.amin().float(), weight_NK.amax().float()
    global_scale = generate_gparam(low, high)
    blocks = weight_NK.view(weight_NK.shape[0], -1, BLOCK)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, global_scale)
    state = {"weight": weight_NK, "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, SCHEME)


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_quantize_is_bit_exact_against_compressed_tensors(shape, dtype):
    weight_NK = (torch.randn(shape) * 0.02).to(dtype)
    ours, state = quantize(weight_NK), theirs(weight_NK)
    assert torch.equal(ours.global_scale, state["weight_global_scale"])
    assert torch.equal(ours.scale.view(torch.uint8), state["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.packed, state["weight_packed"])


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_dequantize_is_bit_exact_against_compressed_tensors(shape):
    state = theirs((torch.randn(shape) * 0.02).bfloat16())
    ours = dequantize(
        state["weight_packed"], state["weight_scale"], state["weight_global_scale"], torch.bfloat16
    )
    assert torch.equal(ours, NVFP4PackedCompressor.decompress(state, SCHEME)["weight"].bfloat16())


def test_all_16_codes_under_all_e4m3_scales_are_the_product_rounded_once():
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = scales[scales.float().isfinite()]
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    global_scale = torch.tensor([937.0])
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64)
    effective = (scales.float() / global_scale).double()[:, None]
    expected = (values * effective).float()
    got = dequantize(packed, scales[:, None], global_scale, torch.float32)
    assert torch.equal(got, expected)


def test_every_value_of_the_format_survives_a_round_trip():
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES))[None]
    weight_NK = torch.cat([values * 0.25, values * 3])
    quantized = quantize(weight_NK, torch.ones(1))
    assert torch.equal(dequantize(*quantized, torch.float32), weight_NK)


def test_an_all_zero_block_comes_back_as_zeros():
    weight_NK = torch.cat([torch.zeros(2, 16), torch.randn(2, 16)], dim=1)
    assert not dequantize(*quantize(weight_NK))[:, :16].any()


def test_an_all_zero_weight_is_quantized_as_compressed_tensors_does():
    ours, state = quantize(torch.zeros(2, 32)), theirs(torch.zeros(2, 32))
    assert torch.equal(ours.global_scale, state["weight_global_scale"])
    assert not dequantize(*ours).any()


def test_a_shared_global_scale_is_that_of_the_largest_weight():
    small, large = torch.randn(4, 32), torch.randn(8, 32) * 9
    shared = global_scale_of(small, large)
    assert torch.equal(shared, global_scale_of(large))
    assert torch.equal(quantize(small, shared).global_scale, shared)


@pytest.mark.parametrize("columns", [1, 8, 24, 17])
def test_columns_that_are_not_a_multiple_of_16_are_refused(columns):
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize(torch.randn(4, columns))


def test_a_scale_of_the_wrong_shape_is_refused():
    packed, scale, global_scale = quantize(torch.randn(4, 32))
    with pytest.raises(ValueError, match=r"expected scale \[4, 2\]"):
        dequantize(packed, scale[:, :1], global_scale)
