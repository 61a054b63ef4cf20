"""qerl/kernels/dequantize.py on a GPU: the reference's bits, at every code, scale and odd shape.

The reference is qerl/nvfp4.py, and float64 arithmetic beside it: a bf16 result is within half a
unit in the last place of the exact one, 2**-9 of it, and the two roundings before stay far below.
"""

import pytest
import torch

from qerl import nvfp4
from qerl.kernels import available
from qerl.kernels.dequantize import Rebuild, dequantize

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ODD_SHAPES = [(n, k) for n in (1, 3, 17) for k in (16, 48, 576)]
MODEL_SHAPES = {
    "7B q": (3584, 3584),
    "7B k": (512, 3584),
    "7B gate": (18944, 3584),
    "7B down": (3584, 18944),
    "32B q": (5120, 5120),
    "32B k": (1024, 5120),
    "32B gate": (27648, 5120),
    "32B down": (5120, 27648),
}
BF16_TOLERANCE = 2.0**-8  # relative


def random_weight(rows, columns):
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    byte = torch.randint(0, 127, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    global_scale = torch.rand(1, device="cuda") * 4096 + 1
    return packed, byte.view(torch.float8_e4m3fn), global_scale


def every_code_with_every_scale():
    """[254, 16]: each row holds the 16 codes under another scale byte, both NaNs left out."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(254, 1)
    byte = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    return packed.cuda(), byte.view(torch.float8_e4m3fn)[:, None].contiguous().cuda()


def poisoned(packed, dtype):
    """An output [N, K] in which an element that nothing wrote shows as NaN."""
    shape = (packed.shape[0], packed.shape[1] * 2)
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def same_bits(ours, theirs):
    integer = torch.int32 if theirs.dtype == torch.float32 else torch.int16
    return torch.equal(ours.view(integer), theirs.view(integer))


def test_the_kernel_is_available_here():
    assert available("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_with_every_scale(dtype):
    packed, scale = every_code_with_every_scale()
    global_scale = torch.tensor([1337.77], device="cuda")
    out = dequantize(packed, scale, global_scale, dtype, out=poisoned(packed, dtype))
    assert same_bits(out, nvfp4.dequantize(packed, scale, global_scale, dtype))
    on_cpu = nvfp4.dequantize(packed.cpu(), scale.cpu(), global_scale.cpu(), dtype)
    assert same_bits(out.cpu(), on_cpu)


def test_the_quotient_is_correctly_rounded_for_any_global_scale():
    packed, scale = every_code_with_every_scale()
    draw = torch.Generator().manual_seed(0)
    exponents = torch.linspace(-100, 99, 400)
    for global_scale in (torch.rand(400, generator=draw) + 1) * 2**exponents:
        global_scale = global_scale.reshape(1).cuda()
        out = poisoned(packed, torch.float32)
        dequantize(packed, scale, global_scale, torch.float32, out=out)
        expected = nvfp4.dequantize(packed, scale, global_scale, torch.float32)
        assert same_bits(out, expected), f"global scale {global_scale.item()}"


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes(shape, dtype):
    packed, scale, global_scale = random_weight(*shape)
    out = dequantize(packed, scale, global_scale, dtype, out=poisoned(packed, dtype))
    assert same_bits(out, nvfp4.dequantize(packed, scale, global_scale, dtype))


@pytest.mark.parametrize("name", MODEL_SHAPES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_model_shapes(name, dtype):
    packed, scale, global_scale = random_weight(*MODEL_SHAPES[name])
    out = poisoned(packed, dtype)
    assert dequantize(packed, scale, global_scale, dtype, out=out) is out
    assert same_bits(out, nvfp4.dequantize(packed, scale, global_scale, dtype))


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_bf16_is_within_its_rounding_of_float64(name):
    packed, scale, global_scale = random_weight(*MODEL_SHAPES[name])
    ours = dequantize(packed, scale, global_scale, torch.bfloat16, poisoned(packed, torch.bfloat16))
    for rows in torch.arange(packed.shape[0]).split(1024):
        low, high = rows[0], rows[-1] + 1
        exact = in_float64(packed[low:high], scale[low:high], global_scale)
        worst = ((ours[low:high].double() - exact).abs() / exact.abs().clamp(min=1e-300)).max()
        assert worst <= BF16_TOLERANCE  # a NaN fails too


def in_float64(packed, scale, global_scale):
    magnitudes = torch.tensor(nvfp4.MAGNITUDES, dtype=torch.float64, device="cuda")
    values = torch.cat([magnitudes, -magnitudes])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()
    factors = (scale.double() / global_scale.double()).repeat_interleave(nvfp4.BLOCK, dim=1)
    return values[codes] * factors


def test_a_nan_scale_is_not_taken_for_a_number():
    packed, scale, global_scale = random_weight(4, 64)
    scale.view(torch.uint8)[1, 2] = 0x7F
    scale.view(torch.uint8)[3, 0] = 0xFF
    is_nan = dequantize(packed, scale, global_scale).isnan().view(4, 4, 16)
    assert is_nan[1, 2].all() and is_nan[3, 0].all()
    assert is_nan.sum() == 32


def test_more_than_2_to_the_31_elements():
    rows, columns = 2**31 // 16384 + 8, 16384
    packed, scale, global_scale = random_weight(rows, columns)
    out = dequantize(packed, scale, global_scale, torch.bfloat16, poisoned(packed, torch.bfloat16))
    for part in (slice(0, 16), slice(rows // 2 - 8, rows // 2 + 8), slice(rows - 16, rows)):
        assert same_bits(out[part], nvfp4.dequantize(packed[part], scale[part], global_scale))
    assert not out.isnan().any()


def test_a_row_slice_of_a_fused_weight():
    packed, scale, global_scale = random_weight(96, 48)
    part = slice(33, 80)
    expected = nvfp4.dequantize(packed[part], scale[part], global_scale)
    assert same_bits(dequantize(packed[part], scale[part], global_scale), expected)


def test_a_cuda_graph_replays_it_on_new_weights():
    weight, other = random_weight(640, 1024), random_weight(640, 1024)
    out = poisoned(weight[0], torch.bfloat16)
    dequantize(*weight, out=out)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dequantize(*weight, out=out)
    for old, new in zip(weight, other, strict=True):
        old.view(torch.uint8).copy_(new.view(torch.uint8))
    out.fill_(float("nan"))
    graph.replay()
    assert same_bits(out, nvfp4.dequantize(*other))


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_a_kept_kernel_gives_the_same_bits_each_time(shape):
    weight = random_weight(*shape)
    rebuild = Rebuild(*weight)
    for dtype in DTYPES * 3:
        out = rebuild(poisoned(weight[0], dtype))
        assert same_bits(out, nvfp4.dequantize(*weight, dtype))


def test_nothing_waits_for_the_gpu():
    weight, out = random_weight(64, 64), torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    rebuild = Rebuild(*weight)
    dequantize(*weight), rebuild(out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dequantize(*weight), rebuild(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_compile_traces_it_without_a_break():
    weight = random_weight(48, 576)
    compiled = torch.compile(dequantize, backend="eager", fullgraph=True)
    assert same_bits(compiled(*weight), nvfp4.dequantize(*weight))


def test_tensors_on_two_devices_are_refused():
    packed, scale, global_scale = random_weight(4, 64)
    with pytest.raises(ValueError, match="global_scale is torch.float32"):
        dequantize(packed, scale, global_scale.cpu())
    with pytest.raises(ValueError, match="out is torch.float16"):
        dequantize(packed, scale, global_scale, out=poisoned(packed, torch.float16))
