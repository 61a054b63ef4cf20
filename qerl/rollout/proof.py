"""The start-up proof that vLLM's linear kernels compute the same at every batch size.

A kernel for 4-bit weights has a tiling for each range of batch sizes, and one tiling can be wrong
where all others are right: Humming 0.1.10 on Hopper gave wrong rows for 49 to 56 sequences
(qerl._compat avoids that one). As completions end one by one, the batch passes through every size,
and prompts make batches of any. qerl.parity proves that the rows are those of the trainer's
weights, at a few sizes; this compares all sizes with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

CHUNK = 32  # rows a call; every other size is compared with this one
EVERY = 256  # rows up to which all sizes are tried: Humming's tiles on Hopper have 8 to 176
PREFILL = 2048  # rows, as vLLM's prefill has
TOLERANCE = 0.02  # relative error of a row; bf16 sums in another order came to 0.008 on an H200


class WrongLinears(RuntimeError):
    """vLLM's kernel computes wrong rows at some batch sizes; the message names them."""


def wrong_sizes(
    apply: Callable[[torch.Tensor], torch.Tensor], columns: int, sizes: Iterable[int], device
) -> list[int]:
    """The sizes M at which a row of apply(x [M, K]) -> [M, N] differs from CHUNK rows at a time.

    x is random, in bf16, with K = `columns`.
    """
    sizes = sorted(set(sizes))
    generator = torch.Generator(device).manual_seed(0)
    x_TK = torch.randn(sizes[-1], columns, generator=generator, device=device).bfloat16()
    expected_TN = torch.cat([apply(part) for part in x_TK.split(CHUNK)]).float()
    size_T = expected_TN.norm(dim=1)
    found = []
    for size in sizes:
        error_T = (apply(x_TK[:size]).float() - expected_TN[:size]).norm(dim=1) / size_T[:size]
        if not bool((error_T < TOLERANCE).all()):  # NaN is not below it
            found.append(size)
    return found


def require_right_linears(model: torch.nn.Module, sequences: int) -> None:
    """Raise WrongLinears unless the linears of a vLLM model are right at every batch size.

    Tried are one linear of each shape and kind (layers may have been left in 16 bits), at every
    size from 1 to `sequences`, as in decoding, or to EVERY, as in short prompts, and at PREFILL.
    """
    from vllm.model_executor.layers.linear import LinearBase

    kinds = {}
    for module in model.modules():
        if isinstance(module, LinearBase):
            shape = tuple(module.output_partition_sizes), module.input_size
            kinds[*shape, type(module.quant_method)] = module
    sizes = [*range(1, max(sequences, EVERY) + 1), PREFILL]
    for (rows, columns, _), linear in kinds.items():
        device = next(linear.parameters()).device
        wrong = wrong_sizes(
            lambda x, li=linear: li.quant_method.apply(li, x), columns, sizes, device
        )
        if wrong:
            raise WrongLinears(
                f"vLLM's kernel for the linears of {sum(rows)} x {columns} is wrong for batches of "
                f"{', '.join(map(str, wrong))} rows: take another, --linear-backend marlin"
            )
