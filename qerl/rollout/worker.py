"""Our vLLM worker, named by `worker_cls`: places for noise, joined adapters, a sleep of its own.

AQN adds noise as small as 1e-4 to gains near 1, which bf16 would round away (its spacing there is
0.004 to 0.008): the gains are widened to float32, and a linear that no norm feeds gets a float32
factor for its input (NoisyLinear). All of this happens right after loading, before the model is
compiled or its CUDA graphs are captured, so that later writes reach the tensors the graphs read.

vLLM's own sleep moves the weights to the host and back, but between rollouts only the KV cache is
in the trainer's way. Ours (qerl.rollout.sleep) leaves the weights and the adapter's slot in place,
so that there is nothing to restore on waking.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from qerl.rollout.lora import join_factors
from qerl.rollout.proof import require_right_linears

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

# Each norm and the projection that it feeds, as vLLM fuses them, inside one decoder layer.
FEEDS = {"input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj"}
UNFED = ("self_attn.o_proj", "mlp.down_proj")  # the quantized linears that no norm feeds
NVFP4 = ("compressed-tensors", "modelopt", "modelopt_fp4")  # vLLM's names of its formats
HASH = 0x9E3779B1 - 2**32  # odd, 2**32 / golden ratio (Knuth's multiplicative hash), as int32


class NoisyLinear(torch.nn.Module):
    """W (x * (1 + Z)), of vLLM's linear (or its LoRA layer) W."""

    def __init__(self, linear: torch.nn.Module):
        super().__init__()
        base = getattr(linear, "base_layer", linear)
        self.linear = linear
        size, device = base.input_size_per_partition, next(base.parameters()).device
        self.scale_K = torch.nn.Buffer(torch.ones(size, device=device))  # 1 + Z, float32

    def forward(self, x: torch.Tensor):
        return self.linear(scaled(x, self.scale_K))


def scaled(x: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
    """x [..., K] in bf16 times scale_K in float32, rounded to bf16 stochastically: unbiased.

    Rounded to nearest, x * (1 + Z) would be x again in every token wherever |Z| is below 0.002,
    since x is on bf16's grid already. (A norm rounds once, from float32, so that a small Z shows
    there in some tokens and not in others.) The randomness is a hash of x and its neighbour, so
    that a text scored twice gets the same. Where scale_K is 1 the result is x to the bit, even when
    the compiler fuses this with what made x and skips the rounding in between.
    """
    bits = x.view(torch.int16).int()
    pairs = (bits & 0xFFFF) | (bits.roll(1, -1) << 16)
    drawn = ((pairs * HASH) >> 16) & 0xFFFF
    exact = (x * scale_K).view(torch.int32)  # bf16 is its upper half: adding may carry into it
    rounded = ((exact + drawn) & ~0xFFFF).view(torch.float32).to(x.dtype)
    return torch.where(scale_K == 1, x, rounded)


def noisy_norms(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The norms that feed q, k, v or gate, up in every decoder layer, by name.

    Raises ValueError when there are none, or when a layer has one of the two only: noise that
    touches a part of the model, or nothing, must not pass for AQN.
    """
    modules = dict(model.named_modules())
    norms = {
        name: module
        for name, module in modules.items()
        for norm, projection in FEEDS.items()
        if name.endswith(f".{norm}") and f"{name.removesuffix(norm)}{projection}" in modules
    }
    layers = {name.rsplit(".", 1)[0] for name in norms}
    if not norms or len(norms) != len(FEEDS) * len(layers):
        raise ValueError(
            f"found {len(norms)} norms that feed quantized linears in {len(layers)} layers of "
            f"{type(model).__name__}: expected {len(FEEDS)} a layer ({', '.join(FEEDS)}). AQN "
            "knows Qwen2, Qwen3 and Llama; run this model without noise (--ln False)"
        )
    return norms


def make_room(model: torch.nn.Module, target: str) -> None:
    """Give the model float32 gains and, for the target "linear", NoisyLinears.

    Raises ValueError when a layer lacks one of the norms or linears.
    """
    norms = noisy_norms(model)
    for norm in norms.values():
        norm.weight = torch.nn.Parameter(norm.weight.data.float(), requires_grad=False)
    if target == "norm":
        return
    for layer in {name.rpartition(".")[0]: None for name in norms}:
        for parent, _, child in (f"{layer}.{name}".rpartition(".") for name in UNFED):
            block = model.get_submodule(parent)
            if not hasattr(block, child):
                raise ValueError(f"{parent} has no {child}: use --noise-target norm")
            setattr(block, child, NoisyLinear(getattr(block, child)))


def noise_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """After make_room, what noise is written to, float32 [K], by the name it is drawn for."""
    found = {name: norm.weight.data for name, norm in noisy_norms(model).items()}
    linears = {n: m.scale_K for n, m in model.named_modules() if isinstance(m, NoisyLinear)}
    return found | linears


class QeRLWorker(_Worker):
    """vLLM's worker with loading and sleep changed (see the module docstring)."""

    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        if self.model_config.quantization in NVFP4 and not current_platform.is_cpu():
            sequences = self.vllm_config.scheduler_config.max_num_seqs
            require_right_linears(self.model_runner.model, sequences)
        if target := self.vllm_config.additional_config["qerl_noise"]:
            make_room(self.model_runner.model, target)
        if self.vllm_config.lora_config is not None:
            join_factors(self.model_runner.lora_manager._adapter_manager.modules.values())

    def sleep(self, level: int = 1) -> None:
        """vLLM's, without its assertion that the whole GPU has more free memory afterwards.

        Another process on the GPU may take some in that moment, which is none of our business.
        """
        self._get_sleep_mode_backend().suspend(level)

    def _get_sleep_mode_backend(self):
        from qerl.rollout.sleep import KvCacheSleep

        if self._sleep_mode_backend is None:
            self._sleep_mode_backend = KvCacheSleep()
        return self._sleep_mode_backend
