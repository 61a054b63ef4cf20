"""The figures of a step: their names in metrics.jsonl, what the loss adds to them, the terminal.

TRL measures rollouts and averages over passes; Tally measures the tokens in the loss over a whole
step. qerl.trainer collects both and writes the rows; qerl.alarms judges them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from qerl import correction

# metrics.jsonl key <- the name among TRL's metrics. First what is measured once a rollout.
ROLLOUT_METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "overlong_punishment": "rewards/overlong_punishment/mean",
    "completion_length": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "zero_variance_fraction": "frac_reward_zero_std",
    "sampling_rounds": "sampling/rounds",
    "resampled_groups": "sampling/resampled_groups",
}
# Means over the tokens in the loss: without a token they have no value.
TOKEN_METRICS = {
    "entropy": "entropy",
    "kl": "kl",
    "logp_gap_mean": "sampling/sampling_logp_difference/mean",
    "logp_gap_max": "sampling/sampling_logp_difference/max",
    "sampler_kl": "sampling/kl",
    "ratio_mean": "sampling/importance_sampling_ratio/mean",
    "ratio_max": "sampling/importance_sampling_ratio/max",
    "effective_sample_share": "sampling/effective_sample_share",
    "capped_fraction": "sampling/capped_fraction",
    "clip_ratio_low": "clip_ratio/low_mean",
    "clip_ratio_high": "clip_ratio/high_mean",
}
TRL_MEANS = ("kl", "clip_ratio_low", "clip_ratio_high")  # the ones of these that TRL measures
TRL_METRICS = ROLLOUT_METRICS | TOKEN_METRICS
SHOWN = """
loss grad_norm reward reward_std entropy logp_gap_mean logp_gap_max clip_ratio_low clip_ratio_high
completion_length truncated_fraction zero_variance_fraction
""".split()  # on the terminal


@dataclass
class Tally:
    """What the passes of one step found in their loss; lists hold a tensor a pass."""

    passes: list[int] = field(default_factory=list)  # tokens in the loss of each
    signal: int = 0  # those of them whose advantage is not 0
    entropies: list[torch.Tensor] = field(default_factory=list)  # of the tokens
    token_log_ratios: list[torch.Tensor] = field(default_factory=list)  # log pi / mu
    weighted_log_ratios: list[torch.Tensor] = field(default_factory=list)  # correction.weighted

    def count(self, mask_BT: torch.Tensor, advantages_B: torch.Tensor) -> None:
        self.passes.append(int(mask_BT.sum()))
        self.signal += int(mask_BT[advantages_B != 0].sum())

    @property
    def tokens(self) -> int:
        """The tokens in the loss of the step."""
        return sum(self.passes)

    def mean(self, values: list[float]) -> float:
        """The mean over the step's tokens of a figure that TRL has averaged in each pass."""
        weighted = (value * count for value, count in zip(values, self.passes, strict=True))
        return sum(weighted) / self.tokens

    def metrics(self, cap: float) -> dict[str, float]:
        """Over all tokens of the step; TRL averages over passes and counts an empty one as 0."""
        if not self.tokens:
            return dict.fromkeys(TOKEN_METRICS, math.nan)  # which TRL logs as null
        made = {"entropy": torch.cat(self.entropies).mean().item()}
        if not self.token_log_ratios:
            return made
        ratios = torch.cat(self.token_log_ratios), torch.cat(self.weighted_log_ratios)
        return made | correction.summary(*ratios, cap)


class Progress(TrainerCallback):
    """A bar with reward and time left, and a line every `every` steps (0: the bar alone)."""

    def __init__(self, every: int):
        self.every = every

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}):
            return
        if "reward" in logs:  # absent from the later updates on a rollout
            self.bar.set_postfix({key: _short(logs[key], ".2f") for key in ("reward", "entropy")})
        self.bar.update(state.global_step - self.bar.n)
        if self.every and state.global_step % self.every == 0:
            named = {key: TRL_METRICS.get(key, key) for key in SHOWN}
            shown = {key: logs[name] for key, name in named.items() if name in logs}
            line = "  ".join(f"{key} {_short(value, '.4g')}" for key, value in shown.items())
            self.bar.write(f"step {state.global_step}  {line}")

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def _short(value: float | None, form: str) -> str:
    """A number on the terminal; a dash for what TRL could not measure."""
    return "-" if value is None else format(value, form)


def finite(value: float | None) -> float | None:
    """JSON has no NaN: what TRL could not measure is null."""
    return value if value is not None and math.isfinite(value) else None


def peak_memory_gib() -> float:
    """Peak of torch's memory on the GPU, of the process on a CPU, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
