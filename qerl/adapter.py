"""A LoRA adapter as plain tensors, the form in which it travels from trainer to engine.

Names are PEFT's file names (`base_model.model.<module>.lora_A.weight`), which vLLM reads too.
Never merged into the base, never written to disk on the way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

# PEFT settings under which A, B, rank and alpha are not the whole adapter: read as plain LoRA, it
# would be another one.
NOT_PLAIN = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True)
class Adapter:
    """LoRA factors: lora_A [R, K] and lora_B [N, R] under each module's name."""

    tensors: dict[str, torch.Tensor]
    rank: int
    alpha: float

    @property
    def modules(self) -> tuple[str, ...]:
        """The last part of the names of the adapted modules, such as q_proj."""
        return tuple(sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in self.tensors}))

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(K, N) of each adapted module, by its full name in the base model."""
        modules = {name.split(".lora_")[0] for name in self.tensors}
        return {
            module.removeprefix("base_model.model."): (
                self.tensors[f"{module}.lora_A.weight"].shape[1],
                self.tensors[f"{module}.lora_B.weight"].shape[0],
            )
            for module in modules
        }


def of_model(model: torch.nn.Module) -> Adapter:
    """The adapter of a PEFT model; its tensors share memory with the parameters."""
    config = model.peft_config["default"]
    tensors = {
        name.replace(".default.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_A.default." in name or ".lora_B.default." in name
    }
    if not tensors:
        raise ValueError("the model has no LoRA adapter named 'default'")
    return Adapter(tensors, config.r, config.lora_alpha)


def of_folder(folder: str | Path) -> Adapter:
    """The adapter in a PEFT folder (adapter_config.json and adapter_model.safetensors).

    Raises ValueError when a file is missing, is not whole, or says more than plain LoRA.
    """
    folder = Path(folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    for file in (weights, config):
        if not file.is_file():
            raise ValueError(
                f"{file} is missing: expected a PEFT adapter folder, such as <output-dir>/adapter"
            )
    try:
        settings = json.loads(config.read_text())
        rank, alpha = settings["r"], settings["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is not the configuration of a LoRA adapter") from error
    others = [f"{key} {settings[key]}" for key in NOT_PLAIN if settings.get(key)]
    if others:
        raise ValueError(f"{config} has {', '.join(others)}: expected plain LoRA factors alone")
    try:
        return Adapter(load_file(weights), rank, alpha)
    except SafetensorError as error:
        raise ValueError(f"{weights} is not whole ({error}): copy it again") from error
