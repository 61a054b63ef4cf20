"""Adaptive quantization noise (AQN): sigma of each step and the noise vectors, as pure functions.

From the QeRL paper (arXiv 2510.11696, section 3.3): for each RMSNorm that feeds quantized linears
a Gaussian vector Z ~ N(0, sigma^2), one entry an input channel, is added to the norm's gain w while
completions are sampled; sigma decays over K stages and stage 0 has none. Two targets:

    norm     w + Z: input channel i of q, k, v (or gate, up) is scaled by 1 + Z_i / w_i   (paper)
    linear   that, and W (x * (1 + Z)) in o_proj and down_proj, which no norm feeds

Everything here is a pure function of (seed, step, name), so that ranks agree and a resumed run
repeats its noise. Writing the vectors into an engine is qerl.rollout's business. To see them:

    python -m qerl.noise --steps 100                        sigma of every step
    python -m qerl.noise --steps 100 --step 37 --name model.layers.0.input_layernorm --size 3584
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from dataclasses import dataclass

import torch

SCHEDULES = ("exponential", "released", "linear", "cosine", "logarithmic")
TARGETS = ("norm", "linear")


@dataclass(frozen=True)
class Schedule:
    """How sigma falls over a run of `steps` optimizer steps cut into `num_stages` equal stages.

    kind: exponential is the paper's formula, which ends one factor above sigma_end; released is the
    original code's, which reaches sigma_end, as do linear, cosine and logarithmic.
    """

    sigma_start: float
    sigma_end: float
    num_stages: int
    steps: int
    kind: str = "exponential"

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            raise ValueError(f"unknown noise schedule {self.kind!r}: expected one of {SCHEDULES}")
        if self.num_stages < 1 or self.steps < 1:
            raise ValueError(
                f"num_stages={self.num_stages} and steps={self.steps} must both be at least 1"
            )
        if not 0 < self.sigma_end <= self.sigma_start:
            raise ValueError(
                f"sigma_end={self.sigma_end} and sigma_start={self.sigma_start}: expected "
                "0 < sigma_end <= sigma_start, since the noise decays (defaults 1e-4 and 1e-2)"
            )

    def stage(self, step: int) -> int:
        """The stage, 0..num_stages-1, of a step counted from 1; the last one takes the rest."""
        if step < 1:
            raise ValueError(f"step {step}: steps are counted from 1")
        return min((step - 1) // self._length, self.num_stages - 1)

    def __str__(self) -> str:
        """Each stage as `first-last: sigma`."""
        sigmas = map(self.stage_sigma, range(self.num_stages))
        spans = zip(self.spans(), sigmas, strict=False)  # fewer steps than stages leave some out
        return ", ".join(f"{span[0]}-{span[-1]}: {sigma:.3g}" for span, sigma in spans)

    def spans(self) -> list[range]:
        """The steps of each stage that has any."""
        firsts = range(1, self.steps + 1, self._length)[: self.num_stages]
        ends = [*firsts[1:], self.steps + 1]
        return [range(first, end) for first, end in zip(firsts, ends, strict=True)]

    @property
    def _length(self) -> int:
        return max(self.steps // self.num_stages, 1)

    def sigma(self, step: int) -> float:
        """The standard deviation of the noise at a step counted from 1."""
        return self.stage_sigma(self.stage(step))

    def stage_sigma(self, stage: int) -> float:
        """The standard deviation of a stage: 0 in stage 0, sigma_start in stage 1, then falling."""
        if stage == 0:
            return 0.0
        start, end, done = self.sigma_start, self.sigma_end, stage - 1
        reached = done / max(self.num_stages - 2, 1)  # 0 in stage 1, 1 in the last
        match self.kind:
            case "exponential":
                return start * (end / start) ** (done / max(self.num_stages - 1, 1))
            case "released":
                return start * (end / start) ** reached
            case "linear":
                return start + (end - start) * reached
            case "cosine":
                return end + (start - end) * (1 + math.cos(math.pi * reached)) / 2
            case "logarithmic":
                return start + (end - start) * math.log1p(reached * (math.e - 1))
        raise AssertionError(self.kind)


@dataclass(frozen=True)
class Noise:
    """The noise of one step: which vectors to draw, and how large."""

    seed: int
    step: int  # counted from 1
    sigma: float

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Z of the norm or linear called `name`: float32 [size] on the CPU, N(0, sigma^2)."""
        key = hashlib.sha256(f"{self.seed}/{self.step}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        return torch.randn(size, generator=generator) * self.sigma


def main(argv: list[str] | None = None) -> int:
    """Print the schedule, or a step's sigma and the vector of one name."""
    parser = argparse.ArgumentParser(prog="python -m qerl.noise", description=main.__doc__)
    add = parser.add_argument
    add("--steps", type=int, required=True, help="of the whole run, as its start prints them")
    add("--step", type=int, help="counted from 1; without it: sigma of every step")
    add("--name", help="module of the engine's model, such as model.layers.0.input_layernorm")
    add("--size", type=int, default=2048, help="channels of --name (2048)")
    add("--random-state", type=int, default=3407, help="of the run (3407)")
    add("--sigma-start", type=float, default=1e-2, help="(1e-2)")
    add("--sigma-end", type=float, default=1e-4, help="(1e-4)")
    add("--num-stages", type=int, default=10, help="(10)")
    add("--noise-schedule", choices=SCHEDULES, default="exponential", help="(exponential)")
    args = parser.parse_args(argv)
    try:
        print(_told(args))
    except ValueError as error:
        parser.error(str(error))
    return 0


def _told(args: argparse.Namespace) -> str:
    ends = args.sigma_start, args.sigma_end
    schedule = Schedule(*ends, args.num_stages, args.steps, args.noise_schedule)
    if args.step is None:
        return str(schedule)
    noise = Noise(args.random_state, args.step, schedule.sigma(args.step))
    told = f"step {args.step}: sigma {noise.sigma:.6g}"
    if args.name is None:
        return told
    drawn = noise.vector(args.name, args.size)
    first = " ".join(f"{value:.9g}" for value in drawn[:4].tolist())
    return f"{told}\n{args.name}: {first} ... std {drawn.std(correction=0):.6g}"


if __name__ == "__main__":
    sys.exit(main())
