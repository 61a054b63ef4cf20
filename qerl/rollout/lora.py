"""One adapter for the whole batch, as dense matmuls: y += (x A^T) B^T.

vLLM's own kernels serve many adapters at once and look up each token's; RL has exactly one, the
policy. If any request of a batch names the adapter, the whole batch is sampled with it; if none
does, it costs nothing, in CUDA graphs too. Projections that vLLM fuses (q, k, v; gate, up) share
both matmuls. vLLM finds the wrapper through its platform's `get_punica_wrapper` (qerl._compat).
"""

from __future__ import annotations

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.utils.torch_utils import direct_register_custom_op


def add_adapter(
    y: torch.Tensor,
    x: torch.Tensor,
    idle: torch.Tensor,
    a_parts: list[torch.Tensor],
    b_parts: list[torch.Tensor],
    scale: float,
    add_inputs: bool,
) -> None:
    """Add (or, without add_inputs, write) the adapter's output to y [T, N] in place.

    x [T, K]; idle: bool [1] on the CPU, read when a CUDA graph is captured; a_parts[i]
    [1, 1, R, K] and b_parts[i] [1, 1, N_i, R] lie in memory as join_factors puts them. Scales of
    the adapter are folded into B.
    """
    if idle.item() and add_inputs:
        return
    rank, columns = a_parts[0].shape[-2:]
    inner = len(a_parts) * rank
    a_RK = torch.as_strided(a_parts[0], (inner, columns), (columns, 1))
    b_NR = torch.as_strided(b_parts[0], (y.shape[-1], inner), (inner, 1))
    y.addmm_(x @ a_RK.T, b_NR.T, beta=float(add_inputs), alpha=scale)


def _nothing(y, x, idle, a_parts, b_parts, scale, add_inputs) -> None:
    """What torch.compile may know of add_adapter: it writes y, whose shape stays."""


# One opaque step to the compiler, which would otherwise tune every small matmul for a minute.
direct_register_custom_op("qerl_add_adapter", add_adapter, mutates_args=["y"], fake_impl=_nothing)


def join_factors(modules) -> None:
    """Give the factors of each fused projection the memory that add_adapter reads.

    The As lie one below the other, [P * R, K], and the Bs on the diagonal of one matrix
    [N, P * R], whose zeros cost less than a matmul a part.
    """
    for module in modules:
        a_parts, b_parts = module.lora_a_stacked, module.lora_b_stacked
        rank, columns = a_parts[0].shape[-2:]
        inner, rows = len(a_parts) * rank, [part.shape[-2] for part in b_parts]
        a_RK = a_parts[0].new_zeros(inner, columns)
        b_NR = b_parts[0].new_zeros(sum(rows), inner)
        module.lora_a_stacked = tuple(part[None, None] for part in a_RK.split(rank))
        module.lora_b_stacked = tuple(
            part[None, None, :, i * rank : (i + 1) * rank]
            for i, part in enumerate(b_NR.split(rows))
        )


class DensePunicaWrapper(PunicaWrapperBase):
    """vLLM's adapter interface for a single slot."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device, **kwargs):
        super().__init__(max_num_batched_tokens, max_batches, device)
        slots = kwargs["lora_config"].max_loras
        if slots != 1:
            raise ValueError(f"one adapter at a time: expected max_loras=1, not {slots}")
        # A tensor and not a bool: torch.compile would take a bool for a constant.
        self.idle = torch.tensor([False])

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs) -> None:
        """Note whether any token of the batch asks for the adapter (ids count from 1)."""
        self.idle.fill_(not any(mapping.index_mapping))

    def add_lora_linear(
        self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, add_inputs=True, **_
    ) -> None:
        """vLLM's call for every adapted projection: see add_adapter."""
        torch.ops.vllm.qerl_add_adapter(
            y,
            x,
            self.idle,
            list(lora_a_stacked),
            list(lora_b_stacked),
            scale,
            add_inputs,
        )

    def add_shrink(self, *args, **kwargs):
        raise NotImplementedError("fully sharded adapters (several GPUs) use vLLM's own kernels")

    add_expand = add_lora_embedding = add_lora_logits = add_shrink
