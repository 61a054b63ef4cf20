"""What the tests of the shared engine (tests/conftest.py builds it) have in common."""

from __future__ import annotations

import torch

RANK = 32  # of its adapter slot
CONTEXT = 320  # tokens: more than two of the blocks that the prefix cache keeps on a CPU


def adapted(base, rank: int = 16, seed: int = 0, size: float = 0.05):
    """The trainer's model with an adapter that is no longer zero; unload() before the next one."""
    from qerl import policy

    model = policy.adapt(base, rank, 2.0 * rank, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def flat(rows) -> torch.Tensor:
    return torch.tensor(sum(rows, []), dtype=torch.float64)


def gap(a, b) -> float:
    return (flat(a) - flat(b)).abs().mean().item()
