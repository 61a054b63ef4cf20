"""The start-up proof that sampler and trainer are one policy, with the adapter and without it.

Fixed tokens are scored by both, then the adapter is perturbed and they are scored again. An
adapter that is never applied, a base that differs, fused scales that differ: all show here, before
the first step, and none of them shows in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl import adapter, policy
from qerl.config import TrainConfig
from qerl.rollout import Engine

MOVE = 0.3  # mean change of a log-probability that the perturbation must reach
# The mean gap between the two that bf16 arithmetic explains; SmolLM2-135M's is 0.04.
LIMIT = TrainConfig.parity_limit


class NotOnePolicy(RuntimeError):
    """Engine and trainer disagree, or the adapter does not reach one of them."""


@dataclass(frozen=True)
class Parity:
    """Gaps and moves of log-probabilities, in nats."""

    gap_base: float  # mean |sampler - trainer| before the perturbation
    gap_mean: float  # |sampler - trainer|, over both adapters
    gap_max: float
    moved_trainer: float  # mean |change| when the adapter is perturbed
    moved_engine: float

    def __str__(self) -> str:
        return (
            f"sampler and trainer agree: mean gap {self.gap_mean:.4f}, largest {self.gap_max:.3f}; "
            f"perturbing the adapter moves them by {self.moved_engine:.3f} and "
            f"{self.moved_trainer:.3f}"
        )


def check(
    engine: Engine,
    model: torch.nn.Module,
    token_ids: list[list[int]],
    seed: int,
    limit: float = LIMIT,
) -> Parity:
    """Compare engine and trainer on `token_ids`; raises NotOnePolicy when they disagree.

    limit: nats, the largest mean gap that passes. The adapter is left as it was, in the model and
    in the engine.
    """
    before = _scores(engine, model, token_ids)
    factors = [p for name, p in model.named_parameters() if ".lora_B." in name]
    kept = [p.detach().clone() for p in factors]
    after = _perturbed(engine, model, token_ids, factors, before, seed)
    for parameter, value in zip(factors, kept, strict=True):
        parameter.data.copy_(value)
    engine.sync(adapter.of_model(model))
    parity = _compare(before, after)
    _refuse(parity, limit)
    return parity


def _scores(engine, model, token_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities (engine's, trainer's) of all tokens, flat, float64."""
    engine.sync(adapter.of_model(model))
    both = engine.score(token_ids), policy.score(model, token_ids)
    return tuple(torch.tensor(sum(rows, []), dtype=torch.float64) for rows in both)


def _perturbed(engine, model, token_ids, factors, before, seed):
    """Scores under a perturbed adapter, the perturbation doubled until the trainer's moved."""
    generator = torch.Generator().manual_seed(seed)
    for doubling in range(12):
        for parameter in factors:
            change = torch.randn(parameter.shape, generator=generator) * 0.02 * 2**doubling
            parameter.data.add_(change.to(parameter))
        after = _scores(engine, model, token_ids)
        if (after[1] - before[1]).abs().mean() > MOVE:
            return after
    raise NotOnePolicy("perturbing the adapter does not move the trainer's log-probabilities")


def _compare(before, after) -> Parity:
    gaps = torch.cat([before[0] - before[1], after[0] - after[1]]).abs()
    return Parity(
        float((before[0] - before[1]).abs().mean()),
        float(gaps.mean()),
        float(gaps.max()),
        float((after[1] - before[1]).abs().mean()),
        float((after[0] - before[0]).abs().mean()),
    )


def _refuse(parity: Parity, limit: float) -> None:
    if parity.gap_base <= limit and parity.moved_engine < parity.moved_trainer / 2:
        raise NotOnePolicy(
            f"the engine does not apply the adapter: perturbing it moves the trainer's "
            f"log-probabilities by {parity.moved_trainer:.3f} and the engine's by "
            f"{parity.moved_engine:.3f}"
        )
    gap = max(parity.gap_mean, parity.gap_base)  # NaN if the mean is
    if not gap <= limit:
        raise NotOnePolicy(
            f"sampler and trainer are not the same policy: mean gap {gap:.3f} "
            f"(expected below {limit}), largest {parity.gap_max:.3f}. Check the checkpoint with "
            "python -m qerl.check; if the arithmetic alone explains the gap, raise --parity-limit"
        )
