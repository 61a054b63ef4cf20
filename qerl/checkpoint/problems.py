"""Everything wrong with a checkpoint folder, each thing by name and with the way to mend it.

The layers and shapes that should be there come from building the config's model on torch's meta
device, so any architecture that transformers knows is checked, in seconds and without its memory.
This is no check of quality: a sound folder may hold a badly calibrated model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from qerl.checkpoint.dialects import FORMAT, GLOBAL_SCALE, PACKED, SCALE, WEIGHTS
from qerl.checkpoint.files import (
    AGAIN,
    REPAIR,
    REQUANTIZE,
    Checkpoint,
    Header,
    Problem,
    read_files,
    read_json,
    tensors,
)
from qerl.nvfp4 import BLOCK

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Layers that engines read as one matrix, with one global scale.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Expected(NamedTuple):
    """What a tensor must look like."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = ("BF16", "F16", "F32")


def problems(folder: str | Path) -> list[Problem]:
    """Everything wrong with a checkpoint; an empty list for a sound one.

    Damaged files, and a quantization other than NVFP4, are all that is reported: what would merely
    follow from them is left out. Raises ValueError for a missing folder.
    """
    found, faults = read_files(Path(folder))
    faults += _tokenizer_problems(Path(folder))
    if found is None:
        return faults
    scheme = list(_scheme_problems(found)) if found.format is not None else []
    if scheme:
        return faults + scheme
    return faults + _layout_problems(found) + _scale_problems(found)


def _tokenizer_problems(folder: Path) -> list[Problem]:
    if not any((folder / name).exists() for name in TOKENIZERS):
        mend = "copy the tokenizer files of the model that this one was made from"
        return [Problem("tokenizer", f"none of {', '.join(TOKENIZERS)} is there", mend)]
    faults: list[Problem] = []
    for path in sorted(folder.glob("tokenizer*.json")):
        read_json(path, faults)
    return faults


def _scheme_problems(found: Checkpoint) -> Iterator[Problem]:
    """What quantization_config says that is not NVFP4 weights and nothing more."""
    if not found.is_nvfp4:
        yield Problem("config.json", f"format is {found.format}, not {FORMAT}", REQUANTIZE)
        return
    for group, said in (found.scheme["config_groups"] or {"config_groups": {}}).items():
        weights = {"symmetric": True} | (said.get("weights") or {})
        for key in WEIGHTS:
            if weights.get(key) != WEIGHTS[key]:
                what = f"{group}: {key} is {weights.get(key)!r}, expected {WEIGHTS[key]!r}"
                yield Problem("config.json", what, REQUANTIZE)
    if (found.scheme.get("transform_config") or {}).get("config_groups"):
        what = "transform_config rotates activations in the engine, and the trainer does not"
        yield Problem("config.json", what, REQUANTIZE)


def _layout_problems(found: Checkpoint) -> list[Problem]:
    """Tensors that are missing, left over, or of another shape or dtype than the model's."""
    # Whatever stops transformers from building the model is what the user must know.
    try:
        model = _empty_model(found.folder)
    except Exception as error:
        return [Problem("config.json", f"transformers cannot build its model: {error!r}", AGAIN)]
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    in_4_bits = _layers_in_4_bits(model, found)
    faults = list(_layer_problems(found, shapes, in_4_bits))
    settled = {problem.name for problem in faults}
    linears = {n.removesuffix(".weight") for n in shapes if n.endswith(".weight")}
    faults += _half_fused_problems(linears - settled, in_4_bits)
    expected = _expected(shapes, in_4_bits)
    for name in sorted(expected.keys() | found.headers.keys()):
        header = found.headers.get(name)
        absent_and_tied = header is None and name == "lm_head.weight" and found.tie_word_embeddings
        if not absent_and_tied and name.rpartition(".")[0] not in settled:
            faults += _tensor_problems(name, expected.get(name), header)
    return faults


def _empty_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _layers_in_4_bits(model: torch.nn.Module, found: Checkpoint) -> set[str]:
    """Names of the layers that quantization_config says are in 4 bits."""
    if not found.is_nvfp4:
        return set()
    from compressed_tensors.utils import match_named_modules

    groups = found.scheme["config_groups"].values()
    targets = [target for group in groups for target in group.get("targets") or []]
    return {name for name, _ in match_named_modules(model, targets, found.scheme.get("ignore"))}


def _layer_problems(
    found: Checkpoint, shapes: dict[str, tuple[int, ...]], in_4_bits: set[str]
) -> Iterator[Problem]:
    """Layers stored the other way than the config says, or of a width that has no blocks."""
    for layer in (name.removesuffix(".weight") for name in shapes if name.endswith(".weight")):
        packed, dense = layer + PACKED in found.headers, layer + ".weight" in found.headers
        if layer in in_4_bits and shapes[layer + ".weight"][1] % BLOCK:
            what = f"{shapes[layer + '.weight'][1]} inputs, not a multiple of {BLOCK}"
            yield Problem(layer, what, "keep the layer in 16 bits: put it on the ignore list")
        elif layer in in_4_bits and dense and not packed:
            yield Problem(layer, "is dense, and the config says that it is in 4 bits", REQUANTIZE)
        elif layer not in in_4_bits and packed:
            yield Problem(layer, "is in 4 bits, and the config says that it is dense", REQUANTIZE)


def _half_fused_problems(layers: set[str], in_4_bits: set[str]) -> Iterator[Problem]:
    """Fused layers of which some are in 4 bits and some are not, which no engine can read."""
    for group in fused(layers):
        dense = [_last(layer) for layer in group if layer not in in_4_bits]
        if 0 < len(dense) < len(group):
            what = f"{', '.join(dense)} dense and the rest in 4 bits: an engine reads them as one"
            yield Problem(group[0].rpartition(".")[0], what, REQUANTIZE)


def _expected(shapes: dict[str, tuple[int, ...]], in_4_bits: set[str]) -> dict[str, Expected]:
    """What each tensor of the folder must look like, by name."""
    expected = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer == name or layer not in in_4_bits:
            expected[name] = Expected(shape)
            continue
        N, K = shape
        expected[layer + PACKED] = Expected((N, K // 2), ("U8",))
        expected[layer + SCALE] = Expected((N, K // BLOCK), ("F8_E4M3",))
        expected[layer + GLOBAL_SCALE] = Expected((1,), ("F32",))
    return expected


def _tensor_problems(
    name: str, expected: Expected | None, header: Header | None
) -> Iterator[Problem]:
    if expected is None:
        what = "is in the files, and not in the model that config.json describes"
        yield Problem(name, what, AGAIN)
    elif header is None:
        yield Problem(name, "is missing", AGAIN)
    elif header.shape != expected.shape:
        what = f"has shape {list(header.shape)}; config.json makes it {list(expected.shape)}"
        yield Problem(name, what, AGAIN)
    elif header.dtype not in expected.dtypes:
        what = f"has dtype {header.dtype}, expected {' or '.join(expected.dtypes)}"
        yield Problem(name, what, REQUANTIZE)


def _scale_problems(found: Checkpoint) -> list[Problem]:
    """Scales that are not finite and positive, and fused layers that do not share theirs."""
    faults: list[Problem] = []
    shared: dict[str, float] = {}
    for name, scale in tensors(found.folder, keep=lambda n: n.endswith((SCALE, GLOBAL_SCALE))):
        values = scale.float()
        bad = int((~(values.isfinite() & (values > 0))).sum())
        if bad:
            what = f"{bad} of {values.numel()} scales are not finite and positive"
            faults.append(Problem(name, what, REQUANTIZE))
        elif name.endswith(GLOBAL_SCALE):
            shared[name.removesuffix(GLOBAL_SCALE)] = values.max().item()
    return faults + list(_fused_problems(shared))


def _fused_problems(global_scales: dict[str, float]) -> Iterator[Problem]:
    for layers in fused(global_scales):
        if len({global_scales[layer] for layer in layers}) > 1:
            said = ", ".join(f"{_last(layer)} {global_scales[layer]:g}" for layer in layers)
            what = f"an engine reads these with one global scale, and they differ: {said}"
            yield Problem(layers[0].rpartition(".")[0], what, REPAIR)


def fused(layers: Iterable[str]) -> list[list[str]]:
    """The groups of two and more among these layers that engines read as one matrix."""
    known = set(layers)
    parents = sorted({layer.rpartition(".")[0] for layer in known})
    groups = [[f"{parent}.{m}" for m in members] for parent in parents for members in FUSED]
    present = [[layer for layer in group if layer in known] for group in groups]
    return [group for group in present if len(group) > 1]


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
