"""The frozen linear of the policy, forward and with the gradient of its input, at 8,192 tokens.

    python -m benchmarks.linear [--models qwen2.5-7b,qwen2.5-32b] [--output results.json]

For every projection shape of the models, without bias:
    bf16      nn.Linear, frozen
    nvfp4     qerl.linear.NVFP4Linear with its kernels
    torch     the same with qerl.nvfp4.dequantize in place of the kernel
    original  the first implementation's way (benchmarks/original.py)
All hold the same weight. First each one's output and input gradient on 64 tokens are compared with
float64; the table shows the relative error (Frobenius norm). Then they take turns (A, B, C, D, A,
...), each call on fresh random inputs, so that neither clocks nor caches favour one. A time is the
median of the repeats, by CUDA events; the GPU is kept busy beforehand, so that launching is not
measured, except where an arm itself waits for the GPU (torch and original do, for their tables).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import Column, Report, add_cpu_flag, device_of, several, spread
from benchmarks.shapes import SHAPES, fused_groups
from qerl import nvfp4
from qerl.linear import NVFP4Linear

MODELS = ["qwen2.5-7b", "qwen2.5-32b"]
ARMS = ("bf16", "nvfp4", "torch", "original")
WARM_UP = 3  # rounds that are not counted
CHECKED = 64  # tokens compared with float64
TOLERANCE = 1e-2  # bf16 rounds to 2**-9; weight and output are both rounded
BUSY_CYCLES = 2_000_000  # about a millisecond, longer than launching a forward and backward pass
COLUMNS = [
    Column("weight", "weight N x K", 14),
    Column("pass", "pass", 8),
    *(Column(f"{arm}_ms", f"{arm} ms", 12, ".3f") for arm in ARMS),
    Column("nvfp4_over_bf16", "nvfp4/bf16", 10, ".2f"),
    Column("original_over_nvfp4", "original/nvfp4", 14, ".1f"),
    Column("bf16_error", "bf16 error", 10, ".1e"),
    Column("nvfp4_error", "nvfp4 error", 11, ".1e"),
]


def shapes_of(models: list[str]) -> list[tuple[int, int]]:
    """The distinct weights [N, K] of the models' projections."""
    linears = [li for model in models for group in fused_groups(SHAPES[model]) for li in group]
    return list(dict.fromkeys((li.rows, li.columns) for li in linears))


def frozen(stored: nvfp4.Quantized, kind: type[NVFP4Linear], use_kernels: bool) -> NVFP4Linear:
    """An NVFP4 layer that holds these tensors."""
    rows, half = stored.packed.shape
    layer = kind(nn.Linear(half * 2, rows, bias=False, device="meta"), use_kernels)
    for name, tensor in zip(("packed", "scale", "global_scale"), stored, strict=True):
        setattr(layer, f"weight_{name}", nn.Parameter(tensor, requires_grad=False))
    return layer


def arms_of(rows: int, columns: int, device: str) -> dict[str, nn.Module]:
    """The four layers, on one random weight."""
    from benchmarks.original import DecompressedLinear

    stored = nvfp4.quantize(torch.randn(rows, columns, device=device) * 0.02)
    plain = nn.Linear(columns, rows, bias=False, device="meta")
    plain.weight = nn.Parameter(nvfp4.dequantize(*stored, torch.bfloat16), requires_grad=False)
    return {
        "bf16": plain,
        "nvfp4": frozen(stored, NVFP4Linear, use_kernels=True),
        "torch": frozen(stored, NVFP4Linear, use_kernels=False),
        "original": frozen(stored, DecompressedLinear, use_kernels=False),
    }


def errors(layer: nn.Module, weight_NK: torch.Tensor) -> dict[str, float]:
    """Relative error of the output and of the input gradient, against a float64 weight."""
    rows, columns = weight_NK.shape
    like = {"dtype": torch.bfloat16, "device": weight_NK.device}
    x_TK = torch.randn(CHECKED, columns, **like).requires_grad_()
    grad_TN = torch.randn(CHECKED, rows, **like)
    y_TN = layer(x_TK)
    (dx_TK,) = torch.autograd.grad(y_TN, x_TK, grad_TN)
    return {
        "forward": _relative(y_TN, x_TK.double() @ weight_NK.T),
        "backward": _relative(dx_TK, grad_TN.double() @ weight_NK),
    }


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def checked_errors(arms: dict[str, nn.Module]) -> dict[str, dict[str, float]]:
    """Each arm's errors; AssertionError above the tolerance: a wrong layer is not timed."""
    packed = arms["nvfp4"]
    stored = packed.weight_packed, packed.weight_scale, packed.weight_global_scale
    weight_NK = nvfp4.dequantize(*stored, torch.float32).double()
    found = {name: errors(layer, weight_NK) for name, layer in arms.items()}
    for name, error in found.items():
        if not max(error.values()) < TOLERANCE:  # NaN fails too
            raise AssertionError(f"{name} {list(weight_NK.shape)} is wrong: {error}")
    return found


def milliseconds(call: Callable[[], None], device: str) -> float:
    """The time of one call: the GPU's own, or a wall clock's on a CPU."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def times(
    arms: dict[str, nn.Module], tokens: int, backward: bool, repeats: int, device: str
) -> dict[str, list[float]]:
    """Milliseconds of every arm in every counted round."""
    plain = arms["bf16"]
    like = {"dtype": torch.bfloat16, "device": device}
    x_TK = torch.empty(tokens, plain.in_features, **like).requires_grad_()
    grad_TN = torch.empty(tokens, plain.out_features, **like)
    found = {name: [] for name in arms}
    for _ in range(WARM_UP + repeats):
        for name, layer in arms.items():
            with torch.no_grad():
                x_TK.normal_()
                grad_TN.normal_()
            call = _pass(layer, x_TK, grad_TN if backward else None)
            found[name].append(milliseconds(call, device))
    return {name: values[WARM_UP:] for name, values in found.items()}


def _pass(layer, x_TK, grad_TN) -> Callable[[], None]:
    """A forward pass, and the backward one when there is a gradient to start from."""

    def call() -> None:
        y_TN = layer(x_TK)
        if grad_TN is not None:
            torch.autograd.grad(y_TN, x_TK, grad_TN)

    return call


def measure(shape: tuple[int, int], tokens: int, repeats: int, device: str):
    """The rows of a weight: its forward pass, then forward and backward."""
    arms = arms_of(*shape, device)
    error = checked_errors(arms)
    for name, backward in (("forward", False), ("both", True)):
        found = times(arms, tokens, backward, repeats, device)
        row = {"weight": f"{shape[0]} x {shape[1]}", "pass": name, "tokens": tokens}
        row |= {f"{arm}_ms": statistics.median(values) for arm, values in found.items()}
        row |= {f"{arm}_spread_percent": spread(values) for arm, values in found.items()}
        kind = "backward" if backward else "forward"
        row |= {f"{arm}_error": error[arm][kind] for arm in arms}
        row["nvfp4_over_bf16"] = row["nvfp4_ms"] / row["bf16_ms"]
        row["original_over_nvfp4"] = row["original_ms"] / row["nvfp4_ms"]
        yield row


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.linear", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--models", type=several(*SHAPES), default=MODELS, help=f"default: {','.join(MODELS)}"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the input (8192)")
    parser.add_argument("--repeats", type=int, default=20, help="counted rounds (20)")
    parser.add_argument("--output", type=Path, help="write every row to this JSON file")
    add_cpu_flag(parser)
    args = parser.parse_args(argv)
    args.device = device_of(args, parser)
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    torch.manual_seed(0)
    settings = {"device": args.device, "tokens": args.tokens, "repeats": args.repeats}
    report = Report(COLUMNS, args.output, settings)
    for shape in shapes_of(args.models):
        for row in measure(shape, args.tokens, args.repeats, args.device):
            report.add(row)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
