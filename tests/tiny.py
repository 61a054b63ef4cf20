"""Random models of two layers as checkpoint folders, in 16 bits or in NVFP4, for fast tests.

Every shape that has broken such a loader is in them: K of 64 and 96 (no multiple of 128), an odd
vocabulary, tied and untied embeddings, biases on q, k and v. They answer nonsense.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from qerl import nvfp4

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
VOCABULARY = 307
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": WEIGHTS | {"symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
}


def model(family: str, tied: bool, seed: int = 0) -> torch.nn.Module:
    """A random bf16 model whose biases and gains are not the zeros and ones of a fresh one."""
    config = FAMILIES[family](
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in made.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return made.requires_grad_(False).eval()


def write_dense(folder: Path, family: str, tied: bool) -> Path:
    """The 16-bit checkpoint folder of `model(family, tied)`."""
    model(family, tied).save_pretrained(folder)
    return folder


def write_nvfp4(folder: Path, family: str, tied: bool) -> Path:
    """The same model in NVFP4: fused layers share a global scale, all else stays bf16."""
    dense = model(family, tied)
    dense.save_pretrained(folder)
    save_file(_packed(dense.state_dict(), tied), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    return folder


def dequantized(family: str, tied: bool) -> torch.nn.Module:
    """transformers' dense bf16 model with the values that `write_nvfp4` stores."""
    dense = model(family, tied)
    state = dense.state_dict()
    for name in _linears(state):
        stored = nvfp4.quantize(state[name], _shared_scale(state, name))
        state[name].copy_(nvfp4.dequantize(*stored))
    return dense


def _packed(state: dict[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in state.items():
        if name in _linears(state):
            stored = nvfp4.quantize(tensor, _shared_scale(state, name))
            made |= {f"{name}_{part}": value for part, value in stored._asdict().items()}
        elif not (tied and name == "lm_head.weight"):
            made[name] = tensor
    return made


def _linears(state: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in state if name.endswith("_proj.weight")]


def _shared_scale(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    parent, child, _ = name.rsplit(".", 2)
    group = next((group for group in FUSED if child in group), (child,))
    return nvfp4.global_scale_of(*(state[f"{parent}.{member}.weight"] for member in group))
