"""A W4A16 NVFP4 linear for vLLM's CPU build, whose own weight-only kernels are CUDA's.

The 4-bit weight is expanded once at load: a CPU runs the same loop as a GPU, without the memory
saving. Registered with vLLM by qerl._compat.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.platforms import current_platform

from qerl.nvfp4 import dequantize


class NvFp4CpuLinearKernel(NvFp4LinearKernel):
    """Expands the weight to the activation's type after loading, then a dense matmul."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        if current_platform.is_cpu():
            return True, None
        return False, "it is the CPU's kernel"

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # The scheme has inverted the divisor by now: back to the format's own.
        dense_NK = dequantize(
            layer.weight, layer.weight_scale, 1 / layer.weight_global_scale, layer.params_dtype
        )
        layer.weight = torch.nn.Parameter(dense_NK, requires_grad=False)
        del layer.weight_scale

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)
