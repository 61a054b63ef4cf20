"""One adapter for the whole batch, as dense matmuls: y += (x A^T) B^T.

vLLM's own kernels serve many adapters at once and look each token's up; RL has exactly one, the
policy. A batch in which any request names it is sampled with it, whole; one in which none does
costs nothing, in CUDA graphs too. Projections that vLLM fuses (q, k, v; gate, up) share one matmul
with x.
Named to vLLM through its platform's `get_punica_wrapper` (qerl._compat).
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
    widths: list[int],
    scale: float,
    add_inputs: bool,
) -> None:
    """Add (or, without add_inputs, write) each part's adapter output to y [T, N] in place.

    x [T, K]; idle: bool [1] on the CPU, read when a CUDA graph is captured; a_parts[i] [1, 1, R, K]
    side by side in memory (see join_shrinks); b_parts[i] [1, 1, N_i, R] of the columns widths[i]
    wide. Scales of the adapter are folded into B.
    """
    if idle.item() and add_inputs:
        return
    rank, columns = a_parts[0].shape[-2:]
    a_RK = torch.as_strided(a_parts[0], (len(a_parts) * rank, columns), (columns, 1))
    shrunk_TR = x @ a_RK.T
    start = 0
    for i, width in enumerate(widths):
        part_TR = shrunk_TR[:, i * rank : (i + 1) * rank]
        expand_RN = b_parts[i][0, 0].T
        part_TN = y[:, start : start + width]
        part_TN.addmm_(part_TR, expand_RN, beta=float(add_inputs), alpha=scale)
        start += width


def _nothing(y, x, idle, a_parts, b_parts, widths, scale, add_inputs) -> None:
    """What torch.compile may know of add_adapter: it writes y, whose shape stays."""


# One opaque step to the compiler, which would otherwise tune every small matmul for a minute.
direct_register_custom_op("qerl_add_adapter", add_adapter, mutates_args=["y"], fake_impl=_nothing)


def join_shrinks(modules) -> None:
    """Put the A factors of each fused projection side by side, as add_adapter reads them."""
    for module in modules:
        parts = module.lora_a_stacked
        rank = parts[0].shape[-2]
        joined = torch.zeros(
            len(parts) * rank, parts[0].shape[-1], dtype=parts[0].dtype, device=parts[0].device
        )
        module.lora_a_stacked = tuple(
            joined[i * rank : (i + 1) * rank][None, None] for i in range(len(parts))
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
            list(output_slices),
            scale,
            add_inputs,
        )

    def add_shrink(self, *args, **kwargs):
        raise NotImplementedError("fully sharded adapters (several GPUs) use vLLM's own kernels")

    add_expand = add_lora_embedding = add_lora_logits = add_shrink
