"""NVFP4 weight -> dense bf16, fp16 or fp32 weight, at the speed of the memory (Triton).

    w[n, k] = e2m1(code[n, k]) * (scale[n, k // 16] / global_scale)

with the quotient and the product rounded to float32 and the result rounded once more to the
output type: the same bits as `qerl.nvfp4.dequantize`, for any global scale between 2**-100 and
2**100 (tests/gpu/test_dequantize.py). This is not a matrix product, and it does not quantize.

How it works. Both inputs are contiguous, so the weight is one stream of 32-bit words: word i
holds elements 8i to 8i+7, the lowest in the lowest nibble, and takes scale byte i // 2. A thread
turns one word into eight outputs that lie side by side, so that loads coalesce and the stores of
a 16-bit output are 16 bytes wide without an exchange through shared memory. No table is needed:

    E2M1 s.ee.m     placed in a half's sign, exponent and mantissa reads as e2m1 * 2**-14, subnormal
                    0.5 included; nibbles j and j + 4 lie 16 bits apart, so two are placed at once
    E4M3 s.eeee.mmm placed likewise reads as scale * 2**-8

Powers of two are exact, so the divisor carries both: scale * 2**-8 / (global * 2**-22) is the
effective scale times the 2**14 that the codes lack, correctly rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = triton.knobs.runtime.interpret


# A program decodes UNROLL * 128 words. Seventeen other cuts (1 to 8 words a thread, 2 to 8 warps,
# striding programs, streaming stores, PTX, a reciprocal for the division) were within 2% or slower
# on an H200; a weight of a large model runs at 94% of a device copy.
WARPS = 4
UNROLL = 2
CONSTANTS = {"WORDS": 32 * WARPS, "UNROLL": UNROLL}  # the kernel's compile-time arguments


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dense weight [N, K] of a packed one; the fast `qerl.nvfp4.dequantize`.

    packed: uint8 [N, K/2]; scale: float8_e4m3fn [N, K/16]; global_scale: float32 [1], a divisor;
    all contiguous and on one GPU. dtype: bfloat16, float16 or float32. out: written and returned
    when given, contiguous [N, K] of `dtype`. Nothing waits for the GPU, so it can be captured in
    a CUDA graph. Raises ValueError for anything else.
    """
    _check_inputs(packed, scale, global_scale, dtype)
    shape = (packed.shape[0], packed.shape[1] * 2)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    else:
        _check("out", out, dtype, shape, packed.device)
    with torch.cuda.device(packed.get_device()):  # -1, the CPU, leaves the device alone
        _launch(*_as_integers(packed, scale), global_scale, out)
    return out


class Rebuild:
    """`dequantize` of one weight into any buffer, on the current GPU, checked and looked up once.

    A 7B training step rebuilds 2,352 weights, and on a slow host the way to a launch (the checks,
    Triton's look at every argument) takes longer than many a kernel. So the compiled kernel is kept
    and launched itself, as in Triton's tutorial on softmax.
    """

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor):
        """Tensors as `dequantize` takes them, or ValueError; they stay where they are."""
        _check_inputs(packed, scale, global_scale, torch.bfloat16)
        self.inputs = *_as_integers(packed, scale), global_scale
        self.kernels = {}

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        """out: contiguous [N, K], its memory aligned to 16 bytes; written and returned."""
        kernel = self.kernels.get(out.dtype)
        if kernel is None:
            self.kernels[out.dtype] = _launch(*self.inputs, out)
        else:
            kernel(*self.inputs, out, self.inputs[0].numel(), *CONSTANTS.values())
        return out


def _as_integers(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packed.view(torch.int32), scale.view(torch.int8)


def _launch(
    words: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor
):
    """Compile the kernel where that is new and launch it; what launches it again on such tensors.

    That is None in Triton's interpreter, which compiles nothing, and under torch.compile.
    """
    grid = (triton.cdiv(words.numel(), CONSTANTS["WORDS"] * UNROLL), 1, 1)
    inputs = words, scale, global_scale, out, words.numel()
    kernel = _dequantize_kernel[grid](*inputs, **CONSTANTS, num_warps=WARPS, num_stages=1)
    return None if kernel is None else kernel[grid]


def _check_inputs(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: expected one of {', '.join(map(str, DTYPES))}")
    if packed.dim() != 2 or packed.shape[1] * 2 % BLOCK:
        raise ValueError(
            f"packed has shape {list(packed.shape)}: expected [N, K/2] with K a multiple of {BLOCK}"
        )
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _check("packed", packed, torch.uint8, (rows, columns // 2), packed.device)
    _check("scale", scale, torch.float8_e4m3fn, (rows, columns // BLOCK), packed.device)
    _check("global_scale", global_scale, torch.float32, (1,), packed.device)
    if packed.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"packed is on {packed.device}: this kernel needs a CUDA GPU; "
            "use qerl.nvfp4.dequantize elsewhere"
        )


def _check(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    got = (tensor.dtype, tuple(tensor.shape), tensor.device)
    if got != (dtype, shape, device):
        raise ValueError(
            f"{name} is {got[0]} {list(got[1])} on {got[2]}: "
            f"expected {dtype} {list(shape)} on {device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: call .contiguous() on it first")


@triton.jit
def _dequantize_kernel(
    packed_ptr,  # int32 [n_words]
    scale_ptr,  # int8 [n_words / 2], the bits of an E4M3
    global_ptr,  # float32 [1]
    out_ptr,  # [8 * n_words]
    n_words,
    WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    lane = tl.arange(0, WORDS)
    column = tl.arange(0, 8)
    # 64 bits once a program, 32 within it: a weight may hold more than 2**31 elements.
    start = tl.program_id(0).to(tl.int64) * WORDS * UNROLL
    left = tl.minimum(n_words - start, WORDS * UNROLL).to(tl.int32)
    words = ()
    scales = ()
    # All loads go out before the first is needed, the divisor's last: one wait a program.
    for step in tl.static_range(UNROLL):
        at = step * WORDS + lane
        words = words + (tl.load(packed_ptr + start + at, mask=at < left),)
        scales = scales + (tl.load(scale_ptr + start // 2 + at // 2, mask=at < left),)
    divisor = tl.load(global_ptr) * 2.0**-22
    for step in tl.static_range(UNROLL):
        at = step * WORDS + lane
        factor = tl.div_rn(_e4m3_over_256(scales[step]), divisor)
        tl.store(
            out_ptr + start * 8 + at[:, None] * 8 + column[None, :],
            _decode(words[step], factor, WORDS).to(out_ptr.dtype.element_ty),
            mask=(at < left)[:, None],
        )


@triton.jit
def _e4m3_over_256(byte):
    """int8, the bits of an E4M3 -> float32 of 2**-8 times its value."""
    wide = byte.to(tl.int32)
    # The sign extension fills bits 8 up; bit 14 belongs to a half's exponent.
    value = ((wide << 7) & 0xBFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _decode(word, factor, WORDS: tl.constexpr):
    """int32 [WORDS] and factor [WORDS] -> float32 [WORDS, 8], lowest nibble first."""
    v0, v4 = _pair(word, 0)
    v1, v5 = _pair(word, 4)
    v2, v6 = _pair(word, 8)
    v3, v7 = _pair(word, 12)
    # join adds a fastest axis, so the last one tells odd elements from even ones.
    even = tl.join(tl.join(v0 * factor, v4 * factor), tl.join(v2 * factor, v6 * factor))
    odd = tl.join(tl.join(v1 * factor, v5 * factor), tl.join(v3 * factor, v7 * factor))
    return tl.join(even, odd).reshape([WORDS, 8])


@triton.jit
def _pair(word, SHIFT: tl.constexpr):
    """The codes at bits SHIFT and SHIFT + 16 of a word, as float32 of e2m1 * 2**-14."""
    if SHIFT > 9:
        magnitudes = word >> (SHIFT - 9)
    else:
        magnitudes = word << (9 - SHIFT)
    signs = (word << (12 - SHIFT)) & -0x7FFF8000  # 0x80008000 as an int32
    halves = (magnitudes & 0x0E000E00) | signs
    low = halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (halves >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high
