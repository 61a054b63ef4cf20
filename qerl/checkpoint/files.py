"""A checkpoint folder as its config, its files' headers and, on request, its tensors.

The quantized kind is compressed-tensors' `nvfp4-pack-quantized`, weight-only: the one thing that
the quantizer and the trainer share. Other makers' checkpoints are read into its terms (dialects).
For a Linear layer L with N outputs and K inputs it holds
    L.weight_packed        uint8          [N, K/2]
    L.weight_scale         float8_e4m3fn  [N, K/16]
    L.weight_global_scale  float32        [1]       equal over q/k/v and over gate/up
and all else (embeddings, norms, biases, lm_head) as in the 16-bit model. Nothing here reads tensor
data but `tensors`; whether the tensors make sense is qerl.checkpoint.problems' business.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from qerl.checkpoint import dialects
from qerl.checkpoint.dialects import FORMAT, PACKED

if TYPE_CHECKING:
    import torch

AGAIN = "download or write the folder again"
QUANTIZE = "python llm-compressor/quantize_nvfp4.py --model"
REQUANTIZE = f"quantize the 16-bit model again: {QUANTIZE} ID_OR_FOLDER"
REPAIR = "write it anew under one: python llm-compressor/quantize_nvfp4.py --repair FOLDER"


class Problem(NamedTuple):
    """One thing wrong with a checkpoint."""

    name: str  # the tensor, layer or file at fault
    what: str  # what is wrong with it: the value found and the value expected
    how_to_mend: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what} ({self.how_to_mend})"


class Header(NamedTuple):
    """What the header of a safetensors file says about a tensor."""

    file: str  # name inside the folder
    stored: str  # name inside the file, which a maker may have chosen differently
    dtype: str  # in safetensors' spelling: BF16, F32, U8, F8_E4M3
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, known from its config and its files' headers."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    scheme: Mapping[str, Any]  # its quantization_config as it is used here: weight-only
    headers: Mapping[str, Header]  # by tensor name; scales that are not used are left out
    quantized: tuple[str, ...]  # names of the layers stored in 4 bits
    quantizes_activations: bool  # W4A4: meant for FP4 activations, which this project does not use
    tie_word_embeddings: bool

    @property
    def format(self) -> str | None:
        """Of the quantization, None for a 16-bit model."""
        return self.scheme.get("format")

    @property
    def is_nvfp4(self) -> bool:
        return self.format == FORMAT


def resolve(name: str | Path) -> Path:
    """The local folder of a model: `name` if it is a folder, else a download from the hub.

    Raises ValueError when `name` is neither a folder nor a model that can be downloaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not _may_be_hub_id(str(name)):
        raise ValueError(_missing(name))
    import httpx
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    wanted += ["*.md", "LICENSE*", "NOTICE*"]  # for the quantized model to carry on
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted))
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{_missing(name)}, and the hub did not give it: {reason}") from error


def describe(folder: str | Path) -> Checkpoint:
    """Read a folder's config and tensor headers.

    Raises ValueError for a missing folder and for the first file that is missing or damaged.
    """
    found, faults = read_files(Path(folder))
    if found is None:
        raise ValueError(f"{folder}: {faults[0]}")
    return found


def require(folder: str | Path, nvfp4: bool | None = None) -> Checkpoint:
    """A cheap check ahead of hours of work: whole files, and the kind of weights asked for.

    nvfp4: True for NVFP4 weights, False for 16-bit ones, None for either. A line on stderr says so
    when a checkpoint for FP4 activations is taken as weight-only. Raises ValueError with the way
    out.
    """
    found = describe(folder)
    if nvfp4 and found.format is None:
        raise ValueError(
            f"{folder}: NVFP4 weights are needed and this model is not quantized. "
            f"Quantize it: {QUANTIZE} {folder}"
        )
    if nvfp4 and not found.is_nvfp4:
        raise ValueError(f"{folder}: format is {found.format}, not {FORMAT} ({REQUANTIZE})")
    if nvfp4 is False and found.format is not None:
        raise ValueError(
            f"{folder}: 16-bit weights are needed and this model is quantized already "
            f"({found.format}). Give the 16-bit model that it was made from."
        )
    if found.is_nvfp4 and found.quantizes_activations:
        said = "made for 4-bit activations too (W4A4): used as weight-only, activations in 16 bits"
        print(f"{folder}: {said}", file=sys.stderr)
    return found


def require_context(found: Checkpoint, tokens: int) -> None:
    """Raise ValueError for prompts and completions longer than the model's context."""
    context = found.config.get("max_position_embeddings", tokens)
    if tokens > context:
        raise ValueError(
            f"prompt + completion is {tokens} tokens, and {found.folder} knows {context}: lower "
            "--max-completion-length (or training's --max-seq-length)"
        )


def require_linear_backend(name: str) -> None:
    """Raise ValueError for a --linear-backend that this machine does not have.

    Here, as require_nf4 is, so that programs can ask before they load an engine.
    """
    import torch

    if name == "auto":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"--linear-backend {name} is about GPUs and none is visible: leave it out")
    if name == "humming" and importlib.util.find_spec("humming") is None:
        raise ValueError(
            "--linear-backend humming needs the package humming-kernels, which setup_env.sh "
            "installs where it finds a GPU: use marlin, or leave it out"
        )


def require_nf4() -> None:
    """Raise ValueError where this machine cannot hold a 16-bit checkpoint in bitsandbytes' NF4."""
    import torch

    if not (torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes")):
        raise ValueError(
            "NF4 needs an NVIDIA GPU and the package bitsandbytes, which setup_env.sh installs "
            "where it finds one: use nvfp4 or bf16 here"
        )


def tensors(
    folder: str | Path,
    device: str | torch.device = "cpu",
    keep: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor as stored) whose name `keep` accepts, file by file.

    Names and global scales are those of the module docstring, whoever made the checkpoint.
    Raises ValueError as `describe` does.
    """
    headers = {name: h for name, h in describe(folder).headers.items() if keep(name)}
    for file in sorted({header.file for header in headers.values()}):
        with safe_open(Path(folder) / file, framework="pt", device=str(device)) as shard:
            for name, header in headers.items():
                if header.file == file:
                    yield name, dialects.value(header, shard.get_tensor(header.stored))


def read_files(folder: Path) -> tuple[Checkpoint | None, list[Problem]]:
    """The checkpoint and no problems, or None and what is wrong with its files.

    Raises ValueError for a missing folder.
    """
    if not folder.is_dir():
        raise ValueError(_missing(folder))
    faults: list[Problem] = []
    config = read_json(folder / "config.json", faults)
    scheme = _read_scheme(folder, config, faults)
    headers = _read_headers(folder, faults)
    if faults:
        return None, faults
    try:
        return _checkpoint(folder, config, scheme, headers), []
    except ValueError as error:
        return None, [Problem("config.json", str(error), AGAIN)]


def _may_be_hub_id(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/")


def _missing(name: str | Path) -> str:
    return f"there is no folder {str(name)!r} (an NVFP4 one is made by: {QUANTIZE} ID_OR_FOLDER)"


def read_json(path: Path, faults: list[Problem]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            return value
        faults.append(Problem(path.name, f"is a {type(value).__name__}, not an object", AGAIN))
    except FileNotFoundError:
        faults.append(Problem(path.name, "is missing", AGAIN))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        faults.append(Problem(path.name, f"is not JSON: {error}", AGAIN))
    except OSError as error:
        faults.append(Problem(path.name, f"cannot be read: {error.strerror}", AGAIN))
    return {}


def _read_scheme(folder: Path, config: dict, faults: list[Problem]) -> Any:
    """quantization_config, which ModelOpt once wrote into a file of its own."""
    own = folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and own.exists():
        return read_json(own, faults)
    return config.get("quantization_config")


def _read_headers(folder: Path, faults: list[Problem]) -> dict[str, Header]:
    index = folder / "model.safetensors.index.json"
    where = read_json(index, faults).get("weight_map", {}) if index.exists() else {}
    if not (isinstance(where, dict) and all(isinstance(file, str) for file in where.values())):
        faults.append(Problem(index.name, f"has a weight_map that is {where!r:.40}", AGAIN))
        where = {}
    headers: dict[str, Header] = {}
    for file in sorted(set(where.values())) or ["model.safetensors"]:
        headers |= _read_file_headers(folder, file, faults)
    at_fault = {problem.name for problem in faults}
    for name, file in where.items():
        if file not in at_fault and (name not in headers or headers[name].file != file):
            faults.append(Problem(name, f"{index.name} says it is in {file}, and it is not", AGAIN))
    return headers


def _read_file_headers(folder: Path, file: str, faults: list[Problem]) -> dict[str, Header]:
    try:
        with safe_open(folder / file, framework="pt") as shard:
            parts = {name: shard.get_slice(name) for name in shard.keys()}
            found = [Header(file, n, p.get_dtype(), tuple(p.get_shape())) for n, p in parts.items()]
            return {header.stored: header for header in found}
    except FileNotFoundError:
        faults.append(Problem(file, "is missing", AGAIN))
    except (SafetensorError, OSError) as error:
        faults.append(Problem(file, f"is cut short or damaged: {error}", AGAIN))
    return {}


def _checkpoint(folder: Path, config: dict, scheme: Any, stored: dict[str, Header]) -> Checkpoint:
    scheme, quantizes_activations = dialects.weight_only(scheme) if scheme else ({}, False)
    headers = dialects.headers(stored.values()) if scheme else stored
    return Checkpoint(
        folder=folder,
        config=MappingProxyType(config),
        scheme=MappingProxyType(scheme),
        headers=MappingProxyType(headers),
        quantized=tuple(n.removesuffix(PACKED) for n in headers if n.endswith(PACKED)),
        quantizes_activations=quantizes_activations
        or any(name.endswith(dialects.ACTIVATION_SCALES) for name in stored),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
