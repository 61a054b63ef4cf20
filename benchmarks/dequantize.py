"""How fast qerl/kernels/dequantize.py turns the weights of a model into bf16, on this GPU.

    python -m benchmarks.dequantize [--output results.json]

Prints TB/s a weight, counting the bytes read (codes and scales) and written, and the milliseconds
that all projections of a model take; beside them a device copy of as many bytes, and a fill of the
output alone, since four fifths of the traffic are writes. Every result is first compared with
qerl/nvfp4.py, bit by bit, in a poisoned output. Calls rotate among sets of random inputs and
outputs that together exceed the L2 cache four times, run from a CUDA graph, and are timed by
events; a time is the median of REPLAYS replays. The kernel is timed twice: the difference is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from benchmarks.shapes import SHAPES, fused_groups
from qerl import nvfp4
from qerl.kernels import available
from qerl.kernels.dequantize import dequantize

DTYPE = torch.bfloat16
REPLAYS = 20
GRAPH_SECONDS = 2e-3  # at 4 TB/s; long against the gap between two replays
MODELS = ("qwen2.5-7b", "qwen2.5-32b")


class Weights(NamedTuple):
    """One set of inputs and the output that belongs to it."""

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    out: torch.Tensor

    def traffic(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.out.nbytes


class Result(NamedTuple):
    """One line of the JSON output."""

    name: str
    rows: int
    columns: int
    bytes: int
    microseconds: float

    def tb_per_s(self) -> float:
        return self.bytes / self.microseconds / 1e6


def random_weights(rows: int, columns: int) -> Weights:
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    byte = torch.randint(0x40, 0x7F, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    global_scale = torch.rand(1, device="cuda") * 4096 + 4096
    out = torch.full((rows, columns), float("nan"), dtype=DTYPE, device="cuda")
    return Weights(packed, byte.view(torch.float8_e4m3fn), global_scale, out)


def enough_sets(rows: int, columns: int) -> list[Weights]:
    first = random_weights(rows, columns)
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    more = max(3, ceil(4 * cache / first.traffic())) - 1
    return [first, *(random_weights(rows, columns) for _ in range(more))]


def rebuild(weights: Weights) -> None:
    dequantize(weights.packed, weights.scale, weights.global_scale, DTYPE, out=weights.out)


def check(weights: Weights) -> None:
    weights.out.fill_(float("nan"))
    rebuild(weights)
    expected = nvfp4.dequantize(weights.packed, weights.scale, weights.global_scale, DTYPE)
    if not torch.equal(weights.out.view(torch.int16), expected.view(torch.int16)):
        raise AssertionError(f"{list(weights.out.shape)} differs from qerl.nvfp4")


def microseconds(call: Callable[[int], None], sets: int, traffic: int) -> float:
    """The median time of call(i), i walking the sets, over replays of one CUDA graph."""
    rounds = ceil(GRAPH_SECONDS / (sets * traffic / 4e12))
    call(0)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds * sets):
            call(i % sets)
    times = [replay_ms(graph) for _ in range(REPLAYS + 3)][3:]
    return statistics.median(times) * 1e3 / (rounds * sets)


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_shape(rows: int, columns: int) -> list[Result]:
    sets = enough_sets(rows, columns)
    traffic = sets[0].traffic()
    check(sets[0])
    results = baselines(sets)
    for name in ("dequantize", "dequantize again"):
        time = microseconds(lambda i: rebuild(sets[i]), len(sets), traffic)
        results.append(Result(name, rows, columns, traffic, time))
    return results


def baselines(sets: list[Weights]) -> list[Result]:
    """A copy of as many bytes as dequantization moves, and a fill of its output."""
    shape, traffic, written = sets[0].out.shape, sets[0].traffic(), sets[0].out.nbytes
    size = (2, traffic // 2)
    halves = [torch.randint(0, 256, size, dtype=torch.uint8, device="cuda") for _ in sets]
    copy = microseconds(lambda i: halves[i][0].copy_(halves[i][1]), len(sets), traffic)
    fill = microseconds(lambda i: sets[i].out.fill_(1.0), len(sets), written)
    return [Result("copy", *shape, traffic, copy), Result("fill", *shape, written, fill)]


def weights_of(model: str) -> list[tuple[int, int]]:
    """The shape of every projection of one layer."""
    return [(li.rows, li.columns) for group in fused_groups(SHAPES[model]) for li in group]


def print_table(results: list[Result], models: list[str]) -> None:
    shapes = list(dict.fromkeys((r.rows, r.columns) for r in results))
    times = {(r.name, r.rows, r.columns): r.microseconds for r in results}
    speeds = {(r.name, r.rows, r.columns): r.tb_per_s() for r in results}
    heads = [f"{n}x{k}" for n, k in shapes] + [
        f"{model.removeprefix('qwen2.5-')} ms" for model in models
    ]
    print(f"{'TB/s':32}" + "".join(f"{head:>12}" for head in heads))
    for name in dict.fromkeys(r.name for r in results):
        cells = [f"{speeds[name, *shape]:12.2f}" for shape in shapes]
        for model in models:
            layer = sum(times[name, *shape] for shape in weights_of(model))
            cells.append(f"{layer * SHAPES[model]['num_hidden_layers'] / 1e3:12.2f}")
        print(f"{name:32}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="write every time to this JSON file")
    args = parser.parse_args()
    if not available("cuda"):
        parser.error("needs a CUDA GPU, Ampere or later, and Triton")

    results = []
    for shape in dict.fromkeys(shape for model in args.models for shape in weights_of(model)):
        results += measure_shape(*shape)
        torch.cuda.empty_cache()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()), "\n")
    print_table(results, args.models)
    if args.output:
        lines = [{**r._asdict(), "tb_per_s": r.tb_per_s()} for r in results]
        args.output.write_text(json.dumps({**machine, "results": lines}, indent=1))


if __name__ == "__main__":
    main()
