"""gptq and awq: llm-compressor's modifiers, a decoder layer at a time, on calibration tokens.

GPTQ (arXiv 2210.17323) rounds a layer's columns in turn and lets the later ones make up for the
earlier ones' error on the calibration inputs. AWQ (arXiv 2306.00978) moves scale from a layer's
inputs into its weights where that loses least, and then rounds: its norms, and the rows of v_proj
and up_proj, differ from the original model's. Both take each block's scale from scales.least_error.
What does not fit into RAM waits on disk, and a layer is on the GPU, if there is one, for its turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from compressed_tensors.offload import load_offloaded_model
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.observers import Observer
from loguru import logger
from transformers import AutoConfig, AutoModelForCausalLM

import scales
from qerl import checkpoint, nvfp4

# Said dozens of times on a machine without a GPU.
TRITE = ("No accelerator available! Compressing model on CPU instead",)
BATCH = 8  # calibration sequences in one forward pass


@Observer.register(scales.OBSERVER)
class LeastError(Observer):
    """scales.least_error as an observer of weights; the global scale stays llm-compressor's."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """observed: [1, N, K/16, 16]."""
        self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))
        self.weight_NK = observed[0].flatten(1)

    def get_qparams(self) -> dict:
        found = super().get_qparams()
        scale = scales.least_error(self.weight_NK, found["global_scale"])
        return found | {"scale": scale.to(found["scale"].dtype)}


def quantize(source: Path, folder: Path, method: str, tokens_ST: torch.Tensor) -> dict[str, float]:
    """Write weights and config of the 16-bit model in `source` to `folder`, in NVFP4.

    method: gptq or awq. tokens_ST: int64, calibration sequences of one length. What of the model
    does not fit into RAM waits beside `folder`, whose parent is the caller's to remove.
    Returns ||W - Q|| / ||W|| of each layer; for awq, W is the weight after its scaling.
    """
    logger.remove()
    logger.add(sys.stderr, level="WARNING", filter=lambda record: record["message"] not in TRITE)
    model = _load(source, folder.parent / "offloaded")
    rows = Dataset.from_dict({"input_ids": tokens_ST.tolist()})
    # compressed-tensors compiles its rounding, for 10 s and the same bits.
    with torch.compiler.set_stance("force_eager"):
        oneshot(
            model=model,
            dataset=rows,
            recipe=_recipe(method),
            num_calibration_samples=len(tokens_ST),
            max_seq_length=tokens_ST.shape[1],
            batch_size=BATCH,
            shuffle_calibration_samples=False,
            pipeline="sequential",
        )
        errors = dict(_errors(model, source if method == "gptq" else None))
        model.save_pretrained(folder, save_compressed=True)
    return errors


def _load(source: Path, offload_folder: Path) -> torch.nn.Module:
    """The model, in RAM as far as it fits, the rest in `offload_folder`."""
    dtype = AutoConfig.from_pretrained(source).dtype
    # llm-compressor's global scales overflow in float16.
    dtype = torch.bfloat16 if dtype == torch.float16 else "auto"
    with load_offloaded_model():
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, device_map="auto_offload", offload_folder=offload_folder
        )


def _recipe(method: str) -> list:
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.weights.observer = scales.OBSERVER
    what = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    if method == "gptq":
        return [GPTQModifier(**what)]
    return [AWQModifier(), QuantizationModifier(**what)]


def _errors(model: torch.nn.Module, source: Path | None) -> Iterator[tuple[str, float]]:
    """||W - Q|| / ||W|| by layer, with W from the folder `source`, or else from the model."""
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "weight_global_scale")}
    ours = ((name + ".weight", module.weight) for name, module in layers.items())
    kept = checkpoint.tensors(source, keep={n + ".weight" for n in layers}.__contains__)
    for name, weight_NK in kept if source else ours:
        layer = layers[name.removesuffix(".weight")]
        scale = layer.weight_scale.to(torch.float8_e4m3fn)
        stored = nvfp4.quantize(layer.weight, layer.weight_global_scale, scale)
        exact = weight_NK.to(scale.device).float()
        missed = nvfp4.dequantize(*stored, torch.float32) - exact
        yield name.removesuffix(".weight"), (missed.norm() / exact.norm()).item()
