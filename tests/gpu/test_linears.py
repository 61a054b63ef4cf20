"""vLLM's linears for 4-bit weights on this GPU, at every batch size, against the dense weight.

Shapes of SmolLM2, Qwen2.5-7B and 32B. Compiling Humming's kernels takes 10 to 20 s a shape, once.
"""

import pytest
import torch

from qerl import _compat, nvfp4

SHAPES = [(576, 1536), (3584, 3584), (4608, 3584), (3584, 18944), (37888, 3584), (5120, 27648)]
SIZES = [*range(1, 321), 500, 777, 1000, 2048, 4096]
REPEATS = 10  # of a size above 320: what is wrong there is wrong now and then
BF16 = 0.01  # relative error of a row by bf16 sums; 0.0056 was seen


def kernel_of(backend: str):
    """vLLM's kernel class as the engine takes it."""
    from vllm.model_executor.kernels.linear.nvfp4 import humming, marlin

    if backend == "marlin":
        return marlin.MarlinNvFp4LinearKernel
    pytest.importorskip("humming")
    _compat.let_humming_tile_soundly()
    return humming.HummingNvFp4LinearKernel


def layer_of(stored: nvfp4.Quantized, rows: int, columns: int) -> torch.nn.Module:
    """A vLLM layer as its scheme leaves it after loading: the divisor is a multiplier by then."""
    layer = torch.nn.Module()
    weights = {"weight": stored.packed, "weight_scale": stored.scale}
    weights["weight_global_scale"] = 1 / stored.global_scale.max()
    for name, tensor in weights.items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    layer.logical_widths = layer.output_partition_sizes = [rows]
    layer.input_size_per_partition, layer.output_size_per_partition = columns, rows
    layer.params_dtype, layer.has_bias = torch.bfloat16, False
    return layer


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("backend", ["humming", "marlin"])
def test_every_row_is_that_of_the_dense_weight_in_a_batch_of_any_size(backend, shape):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig

    weight_NK = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05
    stored = nvfp4.quantize(weight_NK)
    dense_NK = nvfp4.dequantize(*stored, torch.bfloat16)
    wrong = {}
    with set_current_vllm_config(VllmConfig()):
        kernel = kernel_of(backend)(NvFp4LinearLayerConfig())
        layer = layer_of(stored, *shape)
        kernel.process_weights_after_loading(layer)
        for size in SIZES:
            for _ in range(REPEATS if size > 320 else 1):
                x_TK = torch.randn(size, shape[1], device="cuda", dtype=torch.bfloat16)
                expected_TN = (x_TK @ dense_NK.T).float()
                error_TN = kernel.apply_weights(layer, x_TK).float() - expected_TN
                error = (error_TN.norm(dim=1) / expected_TN.norm(dim=1)).max().item()
                if not error < BF16:
                    wrong[size] = max(error, wrong.get(size, 0.0))
    assert not wrong
