"""One adapter for the whole batch, as two dense matmuls a projection: y += (x A^T) B^T.

vLLM's own kernels serve many adapters at once and look each token's up; RL has exactly one, the
policy. The slot is read whatever a request names, so "no adapter" is a slot of zeros: the engine
sees to that. Named to vLLM through its platform's `get_punica_wrapper` (qerl._compat).
"""

from __future__ import annotations

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase


class DensePunicaWrapper(PunicaWrapperBase):
    """vLLM's adapter interface for a single slot; scales are folded into B when it is loaded."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device, **kwargs):
        super().__init__(max_num_batched_tokens, max_batches, device)
        slots = kwargs["lora_config"].max_loras
        if slots != 1:
            raise ValueError(f"one adapter at a time: expected max_loras=1, not {slots}")

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs) -> None:
        """Nothing depends on which token asks for which adapter."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        add_inputs: bool = True,
        **kwargs,
    ) -> None:
        """Add (or, without add_inputs, write) each slice's adapter output to y [T, N] in place.

        x [T, K]; lora_a_stacked[i] [1, 1, R, K] and lora_b_stacked[i] [1, 1, N_i, R] of slice i,
        whose width is output_slices[i].
        """
        start = 0
        for i, width in enumerate(output_slices):
            shrunk_TR = x @ lora_a_stacked[i][0, 0].T
            expand_RN = lora_b_stacked[i][0, 0].T
            part_TN = y[:, start : start + width]
            part_TN.addmm_(shrunk_TR, expand_RN, beta=float(add_inputs), alpha=scale)
            start += width

    def add_shrink(self, *args, **kwargs):
        raise NotImplementedError("fully sharded adapters (several GPUs) use vLLM's own kernels")

    add_expand = add_lora_embedding = add_lora_logits = add_shrink
