"""Every patch of a third-party package: one guarded function each, with its reason and its end."""

from __future__ import annotations


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


def let_vllm_apply_adapters_with(wrapper: str) -> None:
    """Make vLLM apply LoRA adapters through the PunicaWrapperBase subclass of this dotted name.

    Why: the wrapper is the platform's to name and a platform plugin would have to replace the
    whole platform to name another. How: the current platform's `get_punica_wrapper`.
    Can go: once LoRAConfig names the wrapper.
    """
    from vllm.platforms import current_platform

    type(current_platform).get_punica_wrapper = classmethod(lambda cls: wrapper)
