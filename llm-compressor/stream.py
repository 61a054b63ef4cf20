"""rtn and mse: one pass over a model's safetensors files, without a forward pass.

Memory holds one layer and the finished part of the output file, so a model may be far larger than
the RAM. llm-compressor's own model_free_ptq does rtn this way too, but holds each whole file
twice, and tells layers from embeddings by their names; tests/test_quantize.py holds this one to the
bytes of its `oneshot`. Methods that look at activations are calibrated.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import scales
from qerl import checkpoint, nvfp4
from qerl.checkpoint.dialects import FORMAT

SCALE_OF = {"rtn": nvfp4.scale_of, "mse": scales.least_error}
CHUNK = 2**18  # weights rounded at a time: their temporaries stay in the CPU's cache
INDEX = "model.safetensors.index.json"


def quantize(
    source: checkpoint.Checkpoint,
    layers: tuple[str, ...],
    method: str,
    folder: Path,
    done: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Write the weights and config.json of `source` to `folder`, `layers` in NVFP4.

    The files keep their names and hold the tensors that they held. Calls `done` after each layer.
    Returns ||W - Q|| / ||W|| of each layer.
    """
    errors: dict[str, float] = {}
    where: dict[str, str] = {}
    divisors = _Divisors(source, layers)
    for file in sorted({header.file for header in source.headers.values()}):
        made = {}
        for name, tensor in _tensors(source.folder / file):
            layer = name.removesuffix(".weight")
            if layer == name or layer not in divisors.group:
                made[name] = tensor
                continue
            stored, errors[layer] = _round(tensor, divisors.of(layer), SCALE_OF[method])
            made |= {f"{name}_{part}": value for part, value in stored._asdict().items()}
            done()
        save_file(made, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(made, file)
    write_index(source, where, folder)
    config = dict(source.config) | {"quantization_config": quantization_config(method)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return errors


def quantization_config(method: str) -> dict:
    """What llm-compressor writes into config.json for the scheme NVFP4A16."""
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.format = FORMAT
    if method == "mse":
        scheme.weights.observer = scales.OBSERVER
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status="compressed",
        format=FORMAT,
    )
    return config.model_dump(mode="json") | {"version": __version__}


class _Divisors:
    """The global scale of each fused group, read from its members' largest values when needed.

    The members may lie in different files.
    """

    def __init__(self, source: checkpoint.Checkpoint, layers: tuple[str, ...]):
        self.source = source
        self.group = {layer: (layer,) for layer in layers}
        for group in checkpoint.fused(layers):
            self.group |= dict.fromkeys(group, tuple(group))
        self.known: dict[tuple[str, ...], torch.Tensor] = {}

    def of(self, layer: str) -> torch.Tensor:
        group = self.group[layer]
        if group not in self.known:
            # The smallest divisor belongs to the largest value.
            self.known[group] = torch.stack([self._alone(member) for member in group]).amin(0)
        return self.known[group]

    def _alone(self, layer: str) -> torch.Tensor:
        name = layer + ".weight"
        [(_, weight_NK)] = _tensors(self.source.folder / self.source.headers[name].file, [name])
        largest = weight_NK.abs().amax()
        # In the weight's precision, as in llm-compressor, which overflows in float16.
        largest = largest.float() if largest.dtype == torch.float16 else largest
        divisor = nvfp4.E4M3_MAX * nvfp4.E2M1_MAX / largest
        return divisor.float().nan_to_num(posinf=1.0).reshape(1)  # all zeros: any divisor will do


def _tensors(file: Path, names: list[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as shard:
        for name in names or shard.keys():
            yield name, shard.get_tensor(name)


def _round(
    weight_NK: torch.Tensor, divisor: torch.Tensor, scale_of: Callable
) -> tuple[nvfp4.Quantized, float]:
    """The layer in NVFP4, on the CPU, and ||W - Q|| / ||W||; rounded on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    divisor = divisor.to(device)
    parts, missed, norm = [], 0.0, 0.0
    for rows in weight_NK.split(max(1, CHUNK // weight_NK.shape[1])):
        rows = rows.to(device)
        part = nvfp4.quantize(rows, divisor, scale_of(rows, divisor))
        exact = rows.float()
        missed += (nvfp4.dequantize(*part, torch.float32) - exact).square().sum().item()
        norm += exact.square().sum().item()
        parts.append(part)
    packed, scale = (torch.cat([p[i] for p in parts]).cpu() for i in (0, 1))
    stored = nvfp4.Quantized(packed, scale, divisor.cpu().clone())  # a file shares no storage
    return stored, (missed / norm) ** 0.5 if norm else 0.0


def write_index(source: checkpoint.Checkpoint, where: dict[str, str], folder: Path) -> None:
    """The index of the files in `folder`, tensor name -> file, if `source` has one."""
    if (source.folder / INDEX).exists():
        size = sum((folder / file).stat().st_size for file in set(where.values()))
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
