"""What goes wrong in a run without ending it: read off a step's metrics, and told with its cause.

Each alarm reads one row of metrics.jsonl and nothing else, so that a finished run can be judged by
the same rules. The limits are constants with their reasons beside them: none is a matter of taste
that a run would have to set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

# Nats a token. A run that learned its task to the end kept 0.05; at 0.02 a token is drawn against
# the policy's first choice about once in 500, and the completions of a group repeat each other.
ENTROPY_FLOOR = 0.02
# Below it, more than half of the step's samples count for nothing. AQN at sigma 1e-2 spreads the
# log ratios by about 0.25 nats, which leaves a share of 0.94.
SAMPLE_SHARE_FLOOR = 0.5
# Nats of |sampler - trainer| that noise may add to --parity-limit, for each unit of sigma: twice
# what was measured on SmolLM2-135M (0.035 without noise, 0.189 at sigma 1e-2).
GAP_BY_SIGMA = 30.0
FAILED_IN_A_ROW = 3  # steps with bad gradients that end a run: by then it is not one bad batch
TOLD_EVERY = 10  # steps with the same alarm, counted from the first


@dataclass(frozen=True)
class Alarm:
    """When it goes off, and what the terminal says then: a template over the row's keys."""

    fires: Callable[[dict], bool]
    says: str


def _below(row: dict, key: str, limit: float) -> bool:
    """Whether a figure is below a limit; False for one that the step lacks."""
    return row[key] is not None and row[key] < limit


def _gap_too_wide(row: dict) -> bool:
    gap, limit = row["logp_gap_mean"], row["gap_limit"] + GAP_BY_SIGMA * row["sigma"]
    return gap is not None and gap > limit


ALARMS = {
    "bad_gradients": Alarm(
        lambda row: row["grad_norm"] is None,
        "the gradients are NaN or infinite and the step was skipped. Usually the learning rate is "
        f"too high, or a kernel failed; {FAILED_IN_A_ROW} such steps in a row end the run",
    ),
    "no_tokens": Alarm(
        lambda row: row["loss_tokens"] == 0,
        "every completion was cut off at --max-completion-length and left out of the loss, so that "
        "the step taught nothing: raise it, or keep such completions with "
        "--mask-truncated-completions False",
    ),
    "no_signal": Alarm(
        lambda row: row["signal_tokens"] == 0 < row["loss_tokens"],
        "in every group the completions earned the same, so that the step taught nothing (mean "
        "reward {reward}). Usually the problems are too hard or too easy for the model, or the "
        "reward does not find the answer: read samples.jsonl, take other data, a larger "
        "--num-generations or --dynamic-sampling",
    ),
    "entropy_collapse": Alarm(
        lambda row: _below(row, "entropy", ENTROPY_FLOOR),
        "the entropy is {entropy} nats a token, so that completions of a group hardly differ "
        f"(limit {ENTROPY_FLOOR}). Usually the learning rate is too high or the task is learned: "
        "lower it, raise --epsilon-high or --sigma-start, or end the run",
    ),
    "ratio_explosion": Alarm(
        lambda row: _below(row, "effective_sample_share", SAMPLE_SHARE_FLOOR),
        "the importance ratios leave {effective_sample_share} of the samples (limit "
        f"{SAMPLE_SHARE_FLOOR}; largest ratio {{ratio_max}}). Usually there is too much noise: "
        "lower --sigma-start; or whole sequences are weighted: --sampler-correction token_truncate",
    ),
    "sampler_gap": Alarm(
        _gap_too_wide,
        "sampler and trainer differ by {logp_gap_mean} nats a token, more than --parity-limit "
        f"and {GAP_BY_SIGMA:.0f} times sigma explain. Usually the adapter or the noise reached "
        "the sampler wrongly, or one of its kernels is wrong (--linear-backend marlin takes "
        "others): do not trust the run, and report it",
    ),
}


class Alarms:
    """The alarms of a run: call `check` with the row of each step."""

    def __init__(self, gap_limit: float):
        """gap_limit: nats of |sampler - trainer| that pass without noise."""
        self.gap_limit = gap_limit
        self.failed_in_a_row = 0  # steps with bad gradients, up to the last one checked
        self._counts = Counter()

    def check(self, row: dict) -> list[str]:
        """The names of the alarms that a row of metrics.jsonl sets off; also tells the terminal."""
        known = row | {"gap_limit": self.gap_limit}
        names = [name for name, alarm in ALARMS.items() if alarm.fires(known)]
        self.failed_in_a_row = self.failed_in_a_row + 1 if "bad_gradients" in names else 0
        for name in names:
            self._tell(name, row)
        return names

    @property
    def hopeless(self) -> bool:
        """Whether the run should end."""
        return self.failed_in_a_row >= FAILED_IN_A_ROW

    def _tell(self, name: str, row: dict) -> None:
        """Say it the first time, and then every TOLD_EVERY times."""
        self._counts[name] += 1
        if self._counts[name] % TOLD_EVERY == 1:
            short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            says, count = ALARMS[name].says.format_map(short), self._counts[name]
            tqdm.write(f"step {row['step']}: {name} ({count} so far): {says}")
