"""`python -m qerl.report RUN [RUN ...]`: draw curves.png from the metrics of runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

PANELS = (
    ("reward", "reward"),
    ("entropy", "entropy, nats a token"),
    ("sigma", "AQN sigma"),
    ("completion_length", "completion length, tokens"),
    ("logp_gap_mean", "|sampler - trainer|, nats a token"),
)
TIMES = ("time_rollout_s", "time_reward_s", "time_sync_s", "time_train_s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qerl.report", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders (they hold metrics.jsonl)")
    parser.add_argument("--output", default="", help="default: curves.png in the first run folder")
    arguments = parser.parse_args(argv)
    output = Path(arguments.output or Path(arguments.runs[0]) / "curves.png")
    try:
        if not output.suffix:  # matplotlib would add .png, and write RUN.png for the folder RUN
            raise ValueError(f"--output {output} has no kind of picture: end it with .png")
        draw({_label(run, arguments.runs): read(Path(run)) for run in arguments.runs}, output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


def _label(run: str, runs: list[str]) -> str:
    """The folder's name, or the path as given where two folders share one."""
    names = [Path(other).resolve().name for other in runs]
    name = Path(run).resolve().name
    return name if names.count(name) == 1 else run


def read(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl, by step."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: expected the --output-dir of a training run")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not whole: delete it") from error
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError(f"{path}, line {number} has no step: expected a training run's file")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty: the run has not finished its first step")
    return rows


def draw(runs: dict[str, list[dict]], output: Path) -> None:
    """Six panels: PANELS as lines, one a run, and where the time of a step goes.

    What a row lacks is a gap in the line, and counts for nothing in a mean.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    for axis, (key, title) in zip(axes.flat, PANELS, strict=False):
        for name, rows in runs.items():
            values = [math.nan if row.get(key) is None else row[key] for row in rows]
            # A value between two gaps, or of a single step, has no line: the marker shows it.
            axis.plot([row["step"] for row in rows], values, label=name, marker=".", markersize=3)
        axis.set(title=title, xlabel="step")
    axes.flat[0].legend(fontsize="small")
    _draw_times(axes.flat[5], runs)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def _draw_times(axis, runs: dict[str, list[dict]]) -> None:
    """Mean seconds of each part of a step, stacked, a bar a run."""
    bottoms = dict.fromkeys(runs, 0.0)
    for key in TIMES:
        means = {name: _mean(key, rows) for name, rows in runs.items()}
        label = key.removeprefix("time_").removesuffix("_s")
        axis.bar(list(means), list(means.values()), bottom=list(bottoms.values()), label=label)
        bottoms = {name: bottoms[name] + means[name] for name in runs}
    axis.set(title="mean seconds a step")
    axis.margins(y=0.25)
    axis.legend(fontsize="small", ncols=4, loc="upper center")


def _mean(key: str, rows: list[dict]) -> float:
    """The mean of a key over the rows that have it; 0 if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / max(len(values), 1)


if __name__ == "__main__":
    sys.exit(main())
