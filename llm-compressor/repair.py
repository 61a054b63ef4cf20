"""Rewrites an NVFP4 checkpoint as one that loads right, without the weights that it was made from.

Fused layers (q, k, v; gate, up) with global scales of their own get a common one. Codes stay; each
block's scale becomes the E4M3 value nearest to scale * new / old. The new divisor is that of the
member under which the group's weights move least: its own do not move at all, nor do those of a
member whose divisor differs by a power of two, if no scale leaves E4M3's normal range (2^-6 to
448).

All else is written in the standard form: ModelOpt's names and multipliers become those of
compressed-tensors, and scales of activations (W4A4) and of a KV cache are left out. Missing files
and scales that are not positive are beyond repair: they need the 16-bit model.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from qerl import checkpoint, nvfp4
from qerl.checkpoint.dialects import GLOBAL_SCALE, PACKED, SCALE
from stream import INDEX, write_index

RECORD = "quantization.json"
REWRITTEN = ("config.json", "hf_quant_config.json", INDEX)  # all other files are copied
PARTS = (PACKED, SCALE, GLOBAL_SCALE)
SMALLEST = 2**-9  # E4M3's smallest positive value: a scale of 0 would be taken for a fault


class Moved(NamedTuple):
    """A layer's scales under another divisor, and what that costs."""

    scale: torch.Tensor  # float8_e4m3fn [N, K/16]
    divisor: torch.Tensor  # float32 [1]
    missed: float  # ||W' - W||^2
    norm: float  # ||W||^2


def error(moved: Collection[Moved]) -> float:
    """||W' - W|| / ||W|| over these layers."""
    norm = sum(layer.norm for layer in moved)
    return math.sqrt(sum(layer.missed for layer in moved) / norm) if norm else 0.0


def together(members: list[nvfp4.Quantized]) -> list[Moved]:
    """The members under the one of their divisors that moves their weights least."""
    divisors = torch.cat([member.global_scale for member in members]).unique().split(1)
    choices = [[_move(member, divisor) for member in members] for divisor in divisors]
    return min(choices, key=lambda choice: sum(moved.missed for moved in choice))


def repair(source: checkpoint.Checkpoint, folder: Path) -> dict[str, Moved]:
    """Write the repaired form of `source` to `folder`; returns the layers whose groups differed."""
    mended: dict[str, Moved] = {}
    for group in _at_odds(source):
        names = {layer + part for layer in group for part in PARTS}
        stored = dict(checkpoint.tensors(source.folder, keep=names.__contains__))
        members = [nvfp4.Quantized(*(stored[layer + part] for part in PARTS)) for layer in group]
        mended |= dict(zip(group, together(members), strict=True))
    _write(source, folder, mended)
    return mended


def note(folder: Path, key: str, value: dict) -> None:
    """Put an entry into the folder's quantization.json, which is made if there is none."""
    file = folder / RECORD
    said = json.loads(file.read_text()) if file.exists() else {}
    _write_json(file, said | {key: value})


def _move(member: nvfp4.Quantized, divisor: torch.Tensor) -> Moved:
    """One layer under `divisor`: each scale the nearest to what keeps its block's weights."""
    old, energy = member.scale.float(), _energy(member.packed)
    nearest = (old * (divisor / member.global_scale)).clamp(SMALLEST, nvfp4.E4M3_MAX)
    scale = torch.where(old > 0, nearest, old).to(member.scale.dtype)
    before, after = old / member.global_scale, scale.float() / divisor
    missed = (energy * (after - before).square()).sum().item()
    return Moved(scale, divisor.clone(), missed, (energy * before.square()).sum().item())


def _energy(packed: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each block's codes [N, K/16], float32."""
    rows, half = packed.shape
    blocks = rows, half * 2 // nvfp4.BLOCK
    values = nvfp4.dequantize(packed, torch.ones(blocks), torch.ones(1), torch.float32)
    return values.square().view(*blocks, nvfp4.BLOCK).sum(-1)


def _at_odds(source: checkpoint.Checkpoint) -> list[list[str]]:
    """The fused groups whose members have different global scales."""
    stored = checkpoint.tensors(source.folder, keep=lambda name: name.endswith(GLOBAL_SCALE))
    scales = {name.removesuffix(GLOBAL_SCALE): scale.item() for name, scale in stored}
    groups = checkpoint.fused(source.quantized)
    return [group for group in groups if len({scales[layer] for layer in group}) > 1]


def _write(source: checkpoint.Checkpoint, folder: Path, mended: dict[str, Moved]) -> None:
    """The files of `source` in the standard form, each tensor in the file that it was in."""
    folder.mkdir()
    for file in source.folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in REWRITTEN:
            shutil.copy(file, folder)
    changed = {layer + SCALE: moved.scale for layer, moved in mended.items()}
    changed |= {layer + GLOBAL_SCALE: moved.divisor for layer, moved in mended.items()}
    where = {name: header.file for name, header in source.headers.items()}
    for file in sorted(set(where.values())):
        names = {name for name, home in where.items() if home == file}
        stored = checkpoint.tensors(source.folder, keep=names.__contains__)
        tensors = {name: changed.get(name, tensor) for name, tensor in stored}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    write_index(source, where, folder)
    config = dict(source.config) | {"quantization_config": dict(source.scheme)}
    _write_json(folder / "config.json", config)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: written and sound, 1: beyond repair, nothing written, 2: nothing to do."""
    parser = argparse.ArgumentParser("repair", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="NVFP4 checkpoint folder")
    parser.add_argument("--output", type=Path, help="folder to write [FOLDER-repaired]")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    output = args.output or folder.with_name(f"{folder.name}-repaired")
    mended: dict[str, Moved] = {}

    def make(whole: Path) -> None:
        mended.update(repair(source, whole))
        note(whole, "repaired", _cost(folder, mended))

    try:
        source = checkpoint.require(folder, nvfp4=True)
        faults = checkpoint.write(output, make)
    except ValueError as problem:
        print(f"repair: {problem}", file=sys.stderr)
        return 2
    for fault in faults:
        print(f"repair: not written, {fault}", file=sys.stderr)
    if faults:
        return 1
    for layer, moved in mended.items():
        print(f"{layer}: relative error added {error([moved]):.2e}")
    cost = f"relative error added {error(mended.values()):.2e}"
    print(f"{output}: written and sound; global scales differed in {len(mended)} layers, {cost}")
    return 0


def _cost(folder: Path, mended: dict[str, Moved]) -> dict:
    layers = {layer: error([moved]) for layer, moved in mended.items()}
    return {"from": folder.name, "relative_error": error(mended.values()), "layers": layers}


if __name__ == "__main__":
    sys.exit(main())
