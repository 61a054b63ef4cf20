"""Turns a checkpoint folder of this project into what other makers write, with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ACTIVATIONS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def w4a4(folder: Path) -> Path:
    """llm-compressor's W4A4: activations quantized too, each layer with a scale for them."""
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = ACTIVATIONS | {"symmetric": True, "dynamic": "local"}
    (folder / "config.json").write_text(json.dumps(config))
    scale = torch.tensor([3.0])
    return _rewrite(folder, lambda n, t: {n: t} | _beside(n, ".input_global_scale", scale))


def modelopt(folder: Path, algorithm: str, own_file: bool = False) -> Path:
    """ModelOpt's names, multipliers and config, for W4A16_NVFP4 or (with W4A4's scales) NVFP4.

    own_file: the config as versions up to 0.29 wrote it, beside config.json.
    """
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    said = {"quant_algo": algorithm, "group_size": 16}
    if own_file:
        said |= {"kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        said = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": said}
        (folder / "hf_quant_config.json").write_text(json.dumps(said))
    else:
        cache = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
        said |= {"quant_method": "modelopt", "ignore": ["lm_head*"]} | cache
        config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))
    return _rewrite(folder, lambda n, t: _as_modelopt(n, t, w4a4=algorithm == "NVFP4"))


DIALECTS = {
    "W4A4": w4a4,
    "ModelOpt W4A4": lambda folder: modelopt(folder, "NVFP4"),
    "ModelOpt W4A16": lambda folder: modelopt(folder, "W4A16_NVFP4"),
    "ModelOpt 0.29": lambda folder: modelopt(folder, "NVFP4", own_file=True),
}


def _as_modelopt(name: str, tensor: torch.Tensor, w4a4: bool) -> dict[str, torch.Tensor]:
    if name.endswith(".weight_packed"):
        return {name.replace(".weight_packed", ".weight"): tensor}
    if not name.endswith(".weight_global_scale"):
        return {name: tensor}
    made = {name.replace(".weight_global_scale", ".weight_scale_2"): (1 / tensor).reshape(())}
    return made | (_beside(name, ".input_scale", torch.tensor(0.3)) if w4a4 else {})


def _beside(name: str, suffix: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith(".weight_global_scale"):
        return {}
    return {name.replace(".weight_global_scale", suffix): scale.clone()}


def _rewrite(folder: Path, change) -> Path:
    where = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored = load_file(file)
        made = {n: t for name, tensor in stored.items() for n, t in change(name, tensor).items()}
        save_file(made, file, {"format": "pt"})
        where |= dict.fromkeys(made, file.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"weight_map": where}))
    return folder
