"""Where the time of a training step goes, from the run folders of real launchers.

    python -m benchmarks.end_to_end RUN [RUN ...] [--skip 1] [--output results.json]

Reads what qerl.train wrote, metrics.jsonl and config.json, and measures nothing itself. A number is
the median over the steps after the first --skip (which compile and warm up); a value that is null
in some steps (no token was in the loss) is taken over the others. step = rollout + reward + sync +
train; tokens/s are sampled tokens by the time of sampling; peak is the trainer's own record of
torch's memory (benchmarks/memory.py has the whole GPU); gap is |sampler - trainer| in nats a token;
"x first" is the first run's step time over this one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.harness import Column, Report

PARTS = ("rollout", "reward", "sync", "train")
MEDIANS = {  # column <- metrics.jsonl key
    **{f"{part}_s": f"time_{part}_s" for part in PARTS},
    "tokens_per_s": "tokens_per_s",
    "length": "completion_length",
    "peak_gib": "peak_memory_gib",
    "gap": "logp_gap_mean",
}
COLUMNS = [
    Column("run", "run", 34),
    Column("precision", "base", 5),
    Column("steps", "steps", 5, "d"),
    Column("step_s", "step s", 8, ".2f"),
    *(Column(f"{part}_s", f"{part} s", 9, ".2f") for part in PARTS),
    Column("speed", "x first", 7, ".2f"),
    Column("tokens_per_s", "tokens/s", 8, ".0f"),
    Column("length", "length", 7, ".0f"),
    Column("peak_gib", "peak GiB", 8, ".1f"),
    Column("gap", "gap", 7, ".4f"),
]


def read(run: Path) -> tuple[dict, list[dict]]:
    """The flags of a run and its metrics by step; ValueError when it has none."""
    config, metrics = run / "config.json", run / "metrics.jsonl"
    for file in (config, metrics):
        if not file.is_file():
            raise ValueError(f"{file} is missing: expected the --output-dir of a training run")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return json.loads(config.read_text())["flags"], rows


def median(values: list[float | None]) -> float | None:
    """Of the values that are there; None when none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summary(run: Path, skip: int) -> dict:
    """One line of the table, without its comparison with the first run."""
    flags, rows = read(run)
    if len(rows) <= skip:
        raise ValueError(f"{run} has {len(rows)} steps: expected more than --skip {skip}")
    rows = rows[skip:]
    row = {"run": run.name, "precision": flags["precision"], "steps": len(rows), "flags": flags}
    row["step_s"] = median([sum(r[f"time_{part}_s"] for part in PARTS) for r in rows])
    return row | {name: median([r[key] for r in rows]) for name, key in MEDIANS.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--skip", type=int, default=1, help="first steps left out (1)")
    parser.add_argument("--output", type=Path, help="write every row to this JSON file")
    args = parser.parse_args(argv)
    try:
        rows = [summary(run, args.skip) for run in args.runs]
    except ValueError as error:
        parser.error(str(error))
    report = Report(COLUMNS, args.output, {"skip": args.skip})
    for row in rows:
        report.add(row | {"speed": rows[0]["step_s"] / row["step_s"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
