"""Other makers' NVFP4 checkpoints in the terms of compressed-tensors, weight-only.

NVIDIA's ModelOpt stores a layer L as
    L.weight          uint8          [N, K/2]
    L.weight_scale    float8_e4m3fn  [N, K/16]
    L.weight_scale_2  float32        []        a multiplier: 1 / weight_global_scale
and says so in config.json's quantization_config or, up to its version 0.29, in a file of its own,
hf_quant_config.json. Both makers may add scales of activations (W4A4) and of an 8-bit KV cache;
neither is used here, where both stay in 16 bits. ModelOpt's other algorithms (mixed precision,
AWQ, SVD) are more than NVFP4 weights: each becomes a format under its own name, which is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qerl.nvfp4 import BLOCK

if TYPE_CHECKING:
    import torch

    from qerl.checkpoint.files import Header

FORMAT = "nvfp4-pack-quantized"
# What compressed-tensors' weight arguments must say; `symmetric` is true where nothing is said.
WEIGHTS = {
    "group_size": BLOCK,
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "symmetric": True,
}
PACKED, SCALE, GLOBAL_SCALE = ".weight_packed", ".weight_scale", ".weight_global_scale"
MULTIPLIER = ".weight_scale_2"
ACTIVATION_SCALES = (".input_global_scale", ".input_scale")
UNUSED = ACTIVATION_SCALES + (".k_scale", ".v_scale")  # the latter two are the KV cache's


def weight_only(scheme: Any) -> tuple[dict[str, Any], bool]:
    """A quantization_config in compressed-tensors' form, and whether it quantizes activations.

    The form returned leaves activations and KV cache alone. Raises ValueError for a
    quantization_config of another structure.
    """
    said = scheme.get("quantization", scheme) if isinstance(scheme, dict) else scheme
    _must_be_objects(said)
    if "quant_algo" in said:
        said = _of_modelopt(said)
    groups = said.get("config_groups") or {}
    in_16_bits = {"input_activations": None, "output_activations": None}
    plain = said | {
        "format": _format(said, groups),
        "config_groups": {name: group | in_16_bits for name, group in groups.items()},
        "kv_cache_scheme": None,
    }
    return plain, any(group.get("input_activations") for group in groups.values())


def headers(stored: Iterable[Header]) -> dict[str, Header]:
    """The headers of the tensors that are used, under compressed-tensors' names."""
    used = [header for header in stored if not header.stored.endswith(UNUSED)]
    return {_name(header): header._replace(shape=_shape(header)) for header in used}


def value(header: Header, stored: torch.Tensor) -> torch.Tensor:
    """A stored tensor in compressed-tensors' form: a multiplier becomes a divisor."""
    return (1 / stored if header.stored.endswith(MULTIPLIER) else stored).reshape(header.shape)


def _name(header: Header) -> str:
    name = header.stored
    if name.endswith(".weight") and header.dtype == "U8":
        return name.removesuffix(".weight") + PACKED
    if name.endswith(MULTIPLIER):
        return name.removesuffix(MULTIPLIER) + GLOBAL_SCALE
    return name


def _shape(header: Header) -> tuple[int, ...]:
    """[1] for a global scale that is stored without a dimension."""
    is_global = header.stored.endswith((GLOBAL_SCALE, MULTIPLIER))
    return header.shape or (1,) if is_global else header.shape


def _must_be_objects(said: Any) -> None:
    groups = said.get("config_groups") or {} if isinstance(said, dict) else said
    inner = list(groups.values()) if isinstance(groups, dict) else []
    inner += [group.get("weights") or {} for group in inner if isinstance(group, dict)]
    for part in (groups, *inner):
        if not isinstance(part, dict):
            raise ValueError(f"has {part!r:.60} in quantization_config, where an object belongs")


def _format(said: dict[str, Any], groups: dict[str, Any]) -> str | None:
    """The format that all groups share ("mixed-precision" may stand for it), else the config's."""
    formats = {group.get("format") for group in groups.values()} - {None}
    if len(formats) == 1:
        return formats.pop()
    return said.get("format") or said.get("quant_method")


def _of_modelopt(said: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt's quantization_config as compressed-tensors would write it."""
    algorithm = str(said["quant_algo"]).upper()
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        return {"format": f"ModelOpt's {algorithm}"}
    groups = (said.get("config_groups") or {}).values()
    sizes = [(group.get("weights") or {}).get("group_size") for group in groups]
    size = next(filter(None, [said.get("group_size"), *sizes]), BLOCK)
    weights = WEIGHTS | {"group_size": size, "dynamic": False}
    activations = weights if algorithm == "NVFP4" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": [_regex(p) for p in said.get("exclude_modules", said.get("ignore")) or []],
        "config_groups": {"group_0": group | {"format": FORMAT}},
    }


def _regex(wildcard: str) -> str:
    """compressed-tensors' form of a name that ModelOpt leaves out, wherever it stands in a path."""
    return "re:.*" + re.escape(wildcard).replace(r"\*", ".*")
