"""qerl/kernels on a machine without a GPU: Triton's interpreter runs the kernel, and its compiler
builds it for the GPUs that it is meant for.

The interpreter truncates float32 to bf16 where a GPU rounds to nearest (triton 3.6), so bf16 is
compared bit by bit in tests/gpu only; float32 outputs show every bit before that rounding.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qerl import nvfp4
from qerl.kernels import available

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="NOT TESTED: no triton here")

ROOT = Path(__file__).parents[1]
SHAPES = [(n, k) for n in (1, 3, 17) for k in (16, 48, 576)]
DTYPES = (torch.float32, torch.float16)
# Triton decides at import whether it interprets, so the kernel runs in a process of its own.
INTERPRET = """
import sys, torch
from qerl.kernels.dequantize import Rebuild, dequantize
results = []
for *weight, dtype in torch.load(sys.argv[1]):
    out = torch.full((weight[0].shape[0], weight[0].shape[1] * 2), float("nan"), dtype=dtype)
    results.append(dequantize(*weight, dtype, out=out))
    rebuild = Rebuild(*weight)
    for _ in range(2):
        again = rebuild(torch.full_like(out, float("nan")))
        assert torch.equal(again.nan_to_num(7), out.nan_to_num(7))
torch.save(results, sys.argv[2])
"""


def every_code_with_every_scale():
    """[254, 16]: each row holds the 16 codes under another scale byte, both NaNs left out."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(254, 1)
    byte = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    return packed, byte.view(torch.float8_e4m3fn)[:, None].contiguous()


def random_weight(rows, columns, seed):
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
    byte = torch.randint(0, 127, (rows, columns // 16), generator=draw, dtype=torch.uint8)
    return packed, byte.view(torch.float8_e4m3fn)


def cases():
    weights = {f"{n}x{k}": random_weight(n, k, seed=n * k) for n, k in SHAPES}
    weights["codes x scales"] = every_code_with_every_scale()
    global_scale = torch.tensor([1337.77])
    return {
        f"{name} {str(dtype).removeprefix('torch.')}": (*weight, global_scale, dtype)
        for name, weight in weights.items()
        for dtype in DTYPES
    }


CASES = cases()
NAN_CASE = (
    torch.zeros(1, 16, dtype=torch.uint8),
    torch.tensor([[0x7F, 0xFF]], dtype=torch.uint8).view(torch.float8_e4m3fn),
    torch.ones(1),
    torch.float16,
)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The kernel's output for every case."""
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save([*CASES.values(), NAN_CASE], folder / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET, folder / "cases.pt", folder / "results.pt"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([*CASES, "NaN"], torch.load(folder / "results.pt"), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_the_bits_of_the_reference(case, interpreted):
    expected = nvfp4.dequantize(*CASES[case])
    integer = torch.int32 if expected.dtype == torch.float32 else torch.int16
    assert interpreted[case].dtype == expected.dtype
    assert torch.equal(interpreted[case].view(integer), expected.view(integer))


def test_a_nan_scale_is_not_taken_for_a_number(interpreted):
    assert interpreted["NaN"].isnan().all()


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "dtype, rounding", [("bf16", "cvt.rn.bf16x2.f32"), ("fp16", "cvt.rn.f16x2.f32")]
)
def test_compiled_it_rounds_to_nearest_and_stores_16_bytes(capability, dtype, rounding):
    compiled = compile_kernel(capability, dtype)
    stores = [line for line in compiled.asm["ptx"].splitlines() if "st.global" in line]
    assert stores and all("st.global.v4.b32" in line for line in stores)
    assert rounding in compiled.asm["ptx"]
    assert compiled.metadata.shared == 0, "outputs are exchanged through shared memory"


def compile_kernel(capability, dtype):
    import triton
    from triton.backends.compiler import GPUTarget

    from qerl.kernels.dequantize import CONSTANTS, WARPS, _dequantize_kernel

    pointers = {"packed_ptr": "*i32", "scale_ptr": "*i8", "global_ptr": "*fp32"}
    signature = {**pointers, "out_ptr": f"*{dtype}", "n_words": "i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = triton.compiler.ASTSource(
        fn=_dequantize_kernel,
        signature={**signature, **dict.fromkeys(CONSTANTS, "constexpr")},
        constexprs={(_dequantize_kernel.arg_names.index(k),): v for k, v in CONSTANTS.items()},
        attrs=aligned,
    )
    options = {"num_warps": WARPS, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


PACKED, SCALE = random_weight(2, 32, seed=0)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((PACKED, SCALE, ONE), "needs a CUDA GPU; use qerl.nvfp4.dequantize"),
        ((PACKED, SCALE, ONE, torch.float64), "dtype torch.float64: expected one of"),
        ((PACKED[:, :9], SCALE, ONE), r"packed has shape \[2, 9\]"),
        ((PACKED.view(torch.int8), SCALE, ONE), "packed is torch.int8"),
        ((PACKED, SCALE.float(), ONE), "scale is torch.float32"),
        ((PACKED, SCALE[:1], ONE), r"expected torch.float8_e4m3fn \[2, 2\]"),
        ((PACKED, SCALE, ONE.double()), "global_scale is torch.float64"),
        ((PACKED.t().contiguous().t(), SCALE, ONE), "packed has strides"),
    ],
)
def test_a_wrong_argument_says_what_was_expected(arguments, message):
    from qerl.kernels.dequantize import dequantize

    with pytest.raises(ValueError, match=message):
        dequantize(*arguments)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_kernel_is_available_without_a_gpu(device):
    assert not available(device)
