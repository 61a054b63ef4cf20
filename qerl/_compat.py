"""Every patch of a third-party package: one guarded function each, with its reason and its end."""

from __future__ import annotations

import sys

# The architectures whose norms, SwiGLU and rotary embeddings Liger computes, as far as it has been
# tried (tests/gpu/test_fused.py).
LIGER_MODELS = ("llama", "qwen2")


def let_vllm_read_nvfp4_on_cpu(kernel: type) -> None:
    """Make vLLM choose `kernel`, a W4A16 NvFp4LinearKernel, on the CPU.

    Why: vLLM has `register_linear_kernel`, but `init_nvfp4_linear_kernel(use_a16=True)` picks
    Marlin or Humming by name and never looks at a registered kernel (0.26 to 0.27.1).
    How: on the CPU alone, the name Marlin in that function's module is our kernel.
    Can go: once the weight-only branch consults the registry.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu() or linear.MarlinNvFp4LinearKernel is kernel:
        return
    linear.register_linear_kernel(kernel, PlatformEnum.CPU, "nvfp4")
    linear.MarlinNvFp4LinearKernel = kernel


def let_humming_tile_soundly() -> None:
    """Keep Humming's linears from two tilings that give wrong rows on Hopper.

    Why: with humming 0.1.10 on an H200, tiles of 56 rows (batches of 49 to 56) give rows 40 and up
    wrong by half their size, and tiles of x shared by two blocks (large prefills) give some rows
    wrong by 4 to 28%, other rows each time. How: in Humming's table of tilings by GPU, Hopper's
    entry becomes a subclass that takes tiles of 64 rows instead and shares none.
    Can go: once `python -m pytest tests/gpu/test_linears.py` passes without it.
    """
    from humming.tune import heuristics_map

    hopper = heuristics_map[90]
    if hasattr(hopper, "mended_by_qerl"):
        return

    class Sound(hopper):
        mended_by_qerl = True

        @classmethod
        def get_config(cls, meta, shape_m, *args, **kwargs):
            rows = 64 if 48 < shape_m <= 56 else shape_m
            return super().get_config(meta, rows, *args, **kwargs) | {"multi_cast_size_a": 1}

    heuristics_map[90] = Sound


def let_vllm_apply_adapters_with(wrapper: str) -> None:
    """Make vLLM apply LoRA adapters through the PunicaWrapperBase subclass of this dotted name.

    Why: the platform names the wrapper, and a plugin would have to replace the whole platform to
    name another. How: the current platform's `get_punica_wrapper`.
    Can go: once LoRAConfig names the wrapper.
    """
    from vllm.platforms import current_platform

    type(current_platform).get_punica_wrapper = classmethod(lambda cls: wrapper)


def let_liger_compute_layers_of(model) -> bool:
    """Compute a model's norms, SwiGLU and rotary embeddings with liger-kernel; False: none of them.

    Why: transformers' integration of Liger also replaces classes and the rotary embedding in the
    architecture's module, for every model of the process, even on a CPU. How: run it, then put back
    what it replaced there; the rotary embedding, which layers look up in the module, becomes
    Liger's for tensors on a GPU alone.
    Can go: once Liger patches nothing but the instance it is given.
    """
    from transformers.integrations.liger import apply_liger_kernel

    if model.config.model_type not in LIGER_MODELS or model.config.hidden_act != "silu":
        return False
    modeling = vars(sys.modules[type(model).__module__])
    before, name = dict(modeling), "apply_rotary_pos_emb"
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    fused, plain = modeling[name], before[name]
    modeling.update(before)
    if not hasattr(plain, "split_by_qerl"):

        def rotary(q, *args, **kwargs):
            return (fused if q.is_cuda else plain)(q, *args, **kwargs)

        rotary.split_by_qerl = True
        modeling[name] = rotary
    return True
