"""A synthetic checkpoint folder, and the means to break it: a Llama of 2 layers in two shards.

Quantized by qerl.nvfp4, of tensors alone: no model is built, and the tokenizer is an empty file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qerl import checkpoint, nvfp4

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
    },
}
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
Q = "model.layers.0.self_attn.q_proj"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def layer_tensors(index: int, quantized: bool) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{index}."
    norms = ("input_layernorm", "post_attention_layernorm")
    made = {f"{prefix}{norm}.weight": torch.ones(64, dtype=torch.bfloat16) for norm in norms}
    for name, shape in LINEARS.items():
        weight = torch.randn(shape, dtype=torch.bfloat16)
        if not quantized:
            made[f"{prefix}{name}.weight"] = weight
            continue
        stored = nvfp4.quantize(weight, torch.tensor([600.0]))
        made[f"{prefix}{name}.weight_packed"] = stored.packed
        made[f"{prefix}{name}.weight_scale"] = stored.scale
        made[f"{prefix}{name}.weight_global_scale"] = stored.global_scale
    return made


def write_folder(folder: Path, quantized: bool = True) -> Path:
    torch.manual_seed(0)
    folder.mkdir()
    ends = {
        "model.embed_tokens.weight": torch.randn(50, 64, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
    }
    shards = [layer_tensors(0, quantized), layer_tensors(1, quantized) | ends]
    where = {}
    for file, shard in zip(SHARDS, shards, strict=True):
        save_file(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = CONFIG | ({"quantization_config": SCHEME} if quantized else {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights_scheme(folder: Path, **changes) -> None:
    group = {"targets": ["Linear"], "weights": WEIGHTS | changes}
    edit_config(folder, quantization_config=SCHEME | {"config_groups": {"group_0": group}})


def edit_shard(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put tensors into the first shard, or take out those that are None."""
    tensors = load_file(folder / SHARDS[0]) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / SHARDS[0])
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    where = {name: file for name, file in where.items() if file != SHARDS[0]}
    where |= dict.fromkeys(kept, SHARDS[0])
    index.write_text(json.dumps({"weight_map": where}))


def said(folder: Path) -> dict[str, str]:
    """Each problem's name and what is said of it; every one must say how to mend it."""
    found = checkpoint.problems(folder)
    assert all(problem.how_to_mend for problem in found)
    assert len({problem.name for problem in found}) == len(found)
    return {problem.name: problem.what for problem in found}
