"""Our vLLM worker, named by `worker_cls`: float32 gains, joined adapters, a sleep of its own.

AQN adds noise as small as 1e-4 to gains near 1, which bf16 would round away (its spacing there is
0.004 to 0.008). The gains are widened right after loading, before the model is compiled or its
CUDA graphs are captured, so that later writes go to the very tensors the graphs read.

vLLM's own sleep moves the weights to the host and back; between rollouts only the KV cache is in
the trainer's way. Ours leaves the weights and the adapter's slot where they are, so that there is
nothing to lose on waking.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from qerl.rollout.lora import join_shrinks

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

# Each norm and the projection that it feeds, as vLLM fuses them, inside one decoder layer.
FEEDS = {"input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj"}


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


class QeRLWorker(_Worker):
    """vLLM's worker with loading and sleep changed (see the module docstring)."""

    def load_model(self, **kwargs) -> None:
        super().load_model(**kwargs)
        if self.vllm_config.additional_config["qerl_noise"]:
            for norm in noisy_norms(self.model_runner.model).values():
                gain = norm.weight
                norm.weight = torch.nn.Parameter(gain.data.float(), requires_grad=False)
        if self.vllm_config.lora_config is not None:
            join_shrinks(self.model_runner.lora_manager._adapter_manager.modules.values())

    def _get_sleep_mode_backend(self):
        from qerl.rollout.sleep import KvCacheSleep

        if self._sleep_mode_backend is None:
            self._sleep_mode_backend = KvCacheSleep()
        return self._sleep_mode_backend
