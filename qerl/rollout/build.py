"""What an engine is built from, and vLLM's LLM for it.

vLLM reads its environment when it is imported. This module sets it, and so comes before vLLM. What
is done with the LLM is qerl.rollout.engine's business.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from qerl import _compat
from qerl.config import LORA_SLOTS

# In this process: the model's tensors are reached directly and one CUDA context is enough.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# FlashInfer's sampler costs a minute and a half of compiling at start.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# The trainer shares these cores: vLLM must not bind the process to some of them.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# CUDA graphs of the decoding steps around vLLM's own kernels, without torch.compile.
CAPTURED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from."""

    model: str  # checkpoint folder or hub id
    max_model_len: int  # prompt + completion, tokens
    max_num_seqs: int = 64  # sequences sampled at once
    lora_rank: int = 0  # 0: no adapter
    lora_modules: tuple[str, ...] = ()  # last part of the adapted modules' names
    nf4: bool = False  # hold a 16-bit checkpoint in bitsandbytes' NF4, as QLoRA does; GPU only
    noise: bool = False  # whether syncs may carry noise
    noise_target: str = "norm"  # what it is added to, of qerl.noise.TARGETS
    gpu_memory_utilization: float = 0.3  # share of the device's memory, KV cache included
    kv_cache_gib: float = 0.0  # of the KV cache; 0: what is left of that share
    seed: int = 0
    enforce_eager: bool = False  # neither CUDA graphs nor torch.compile
    compile: bool = True  # torch.compile before the CUDA graphs are captured
    sleep: bool = False  # whether sleep() may free the KV cache; GPU only
    linear_backend: str = "auto"  # vLLM's name of the W4A16 kernel; fastest_linear_backend()


def build(settings: EngineSettings):
    """vLLM's LLM for these settings, with its faulty kernels avoided."""
    from vllm import LLM
    from vllm.platforms import current_platform

    from qerl.rollout.cpu_linear import NvFp4CpuLinearKernel

    _compat.let_vllm_read_nvfp4_on_cpu(NvFp4CpuLinearKernel)
    _compat.let_vllm_apply_adapters_with("qerl.rollout.lora.DensePunicaWrapper")
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return LLM(
        model=settings.model,
        dtype="bfloat16",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        # Given a size, vLLM does not measure what is free, so that engines may start side by side.
        kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30) or None,
        seed=settings.seed,
        enforce_eager=settings.enforce_eager or on_cpu,
        # The probability a token was drawn with: after the temperature (and top-p, top-k).
        logprobs_mode="processed_logprobs",
        worker_cls="qerl.rollout.worker.QeRLWorker",
        additional_config={"qerl_noise": settings.noise_target if settings.noise else ""},
        enable_sleep_mode=settings.sleep,
        quantization="bitsandbytes" if settings.nf4 else None,
        linear_backend=_linear_backend(settings),
        kv_cache_dtype="bfloat16",  # as the trainer computes, whatever the checkpoint says
        disable_log_stats=True,
        **({} if settings.compile else {"compilation_config": CAPTURED}),
        **_lora_options(settings),
    )


def _lora_options(settings: EngineSettings) -> dict:
    """vLLM's arguments for one adapter slot; none for rank 0."""
    if not settings.lora_rank:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(slot for slot in LORA_SLOTS if slot >= settings.lora_rank),
        "lora_target_modules": list(settings.lora_modules) or None,
    }


def _linear_backend(settings: EngineSettings) -> str:
    """The kernel that was asked for, with its faulty tilings avoided."""
    backend = settings.linear_backend
    backend = fastest_linear_backend() if backend == "auto" else backend
    if backend == "humming":
        _compat.let_humming_tile_soundly()
    return backend


def fastest_linear_backend() -> str:
    """vLLM's name of the W4A16 kernel to use: Humming where it is installed, else Marlin.

    Both are weight-only. Left to itself, vLLM takes Marlin for a weight-only checkpoint (README,
    "Hardware"; benchmarks/rollout.py compares them). For a checkpoint made for 4-bit activations
    it takes, on Blackwell, a kernel that rounds the activations too, which the trainer does not.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "auto"
    return "humming" if importlib.util.find_spec("humming") is not None else "marlin"
