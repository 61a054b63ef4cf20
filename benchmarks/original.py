"""The first QeRL's way through an NVFP4 linear, for comparison: decompress in PyTorch, each time.

compressed-tensors' own decompression runs inside every forward, and autograd keeps the dense weight
that it returns until the backward pass has used it. Not part of the package.
"""

from __future__ import annotations

from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from torch import nn
from torch.nn import functional as F

from qerl.linear import NVFP4Linear

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
STORED = ("weight_packed", "weight_scale", "weight_global_scale")


class DecompressedLinear(NVFP4Linear):
    """A frozen linear that makes its dense weight [N, K] anew on every forward."""

    def forward(self, x):
        """x [..., K] -> [..., N] in x's dtype (bf16 under autocast)."""
        stored = {name: getattr(self, name) for name in STORED}
        weight_NK = NVFP4PackedCompressor.decompress(stored, SCHEME)["weight"]
        return F.linear(x, weight_NK.to(x.dtype), self.bias)


def decompress_everywhere(model: nn.Module) -> None:
    """Turn every NVFP4Linear of a model into a DecompressedLinear; ValueError without any."""
    layers = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no NVFP4Linear: expected an NVFP4 checkpoint")
    for layer in layers:
        layer.__class__ = DecompressedLinear
