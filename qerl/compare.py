"""`python -m qerl.compare BASE.json OTHER.json ...`: evaluations side by side, paired by question.

Reads what `python -m qerl.evaluate --output` wrote; loads no model. The first file is the baseline.
A difference is the mean over questions of (other - baseline); its error is that of this mean, so
that what makes a question hard for both cancels out (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from qerl import run_folder, statistics
from qerl.config import kebab

SAMPLING = ("temperature", "top_p", "max_completion_length", "samples", "seed")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qerl.compare", description=__doc__)
    parser.add_argument("evaluations", nargs="+", help="eval.json files; the first is the baseline")
    parser.add_argument("--output", default="", help="JSON file to write")
    arguments = parser.parse_args(argv)
    try:
        report = compare({path: read(Path(path)) for path in arguments.evaluations})
        print(table(report))
        if arguments.output:
            run_folder.write_json(arguments.output, report)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read(path: Path) -> dict:
    """One evaluation; ValueError when it is none, or has no values of single questions."""
    try:
        found = json.loads(path.read_text())
        complete = all("by_question" in result for result in found["datasets"].values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what qerl.evaluate --output writes") from error
    if not complete:
        raise ValueError(f"{path} keeps no values of single questions: evaluate again")
    return found


def compare(runs: dict[str, dict]) -> dict:
    """The report on evaluations by their names, the first of which is the baseline.

    "datasets" holds, for each data set and metric that all of them have, every run's mean and
    standard_error, and every other run's difference, difference_error and interval_95. "notes"
    says what was left out and which settings differ. Raises ValueError when fewer than two runs
    are given, when they share no data set, or when one asked other questions.
    """
    if len(runs) < 2:
        raise ValueError("one evaluation has nothing to be compared with: name two files or more")
    sets = {name: run["datasets"] for name, run in runs.items()}
    shared, left_out = _shared(sets)
    if not shared:
        listed = "; ".join(f"{name}: {', '.join(found)}" for name, found in sets.items())
        raise ValueError(f"the evaluations share no data set ({listed}): evaluate the same ones")
    compared = {}
    for name in shared:
        compared[name], less = _compare_set(name, {run: found[name] for run, found in sets.items()})
        left_out += [f"{name} {note}" for note in less]
    notes = [f"left out {note}" for note in left_out] + _settings_that_differ(runs)
    return {"baseline": next(iter(runs)), "datasets": compared, "notes": notes}


def _shared(tables: dict[str, dict]) -> tuple[list[str], list[str]]:
    """The keys that all tables have, in the first one's order, and a note on each other key."""
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    lacking = {key: [name for name, table in tables.items() if key not in table] for key in keys}
    notes = [f"{key}: not in {', '.join(names)}" for key, names in lacking.items() if names]
    return [key for key, names in lacking.items() if not names], notes


def _compare_set(name: str, results: dict[str, dict]) -> tuple[dict, list[str]]:
    """Metric -> run -> its numbers, and notes on the metrics that not every run has."""
    values = {run: dict(result["by_question"]) for run, result in results.items()}
    asked = {run: found.pop("id") for run, found in values.items()}
    base = next(iter(results))
    for run, ids in asked.items():
        if ids != asked[base]:
            raise ValueError(
                f"{run} and {base} asked different questions of {name} ({len(ids)} and "
                f"{len(asked[base])}, {len(set(ids) & set(asked[base]))} of them the same): "
                "differences are paired by question, so evaluate both with the same version of "
                "the data and the same --limit"
            )
    metrics, left_out = _shared(values)
    compared = {}
    for metric in metrics:
        compared[metric] = {run: _mean(found[metric]) for run, found in values.items()}
        for run in list(results)[1:]:
            compared[metric][run] |= _difference(values[run][metric], values[base][metric])
    return compared, left_out


def _mean(values: list[float]) -> dict:
    mean, error = statistics.mean_and_error(values)
    return {"mean": mean, "standard_error": error}


def _difference(values: list[float], baseline: list[float]) -> dict:
    paired = [value - base for value, base in zip(values, baseline, strict=True)]
    mean, error = statistics.mean_and_error(paired)
    interval = statistics.interval_95(mean, error)
    return {"difference": mean, "difference_error": error, "interval_95": interval}


def _settings_that_differ(runs: dict[str, dict]) -> list[str]:
    """A note on each sampling setting that is not the same in all: it is compared as well."""
    found = {key: [run.get(key) for run in runs.values()] for key in SAMPLING}
    return [
        f"--{kebab(key)} differs: {', '.join(map(str, values))}"
        for key, values in found.items()
        if len(set(values)) > 1
    ]


def table(report: dict) -> str:
    """The report as text, in percent and percentage points."""
    width = max(len(run) for found in report["datasets"].values() for run in found["pass@1"])
    lines = []
    for name, metrics in report["datasets"].items():
        for metric, runs in metrics.items():
            lines.append(f"{name} {metric}, %")
            lines += [f"  {run:<{width}}  {_row(found)}" for run, found in runs.items()]
    return "\n".join(lines + report["notes"])


def _row(found: dict) -> str:
    text = _value(found["mean"], found["standard_error"])
    if "difference" not in found:
        return text
    text += f"   difference {_value(found['difference'], found['difference_error'], sign='+')}"
    if found["interval_95"]:
        low, high = found["interval_95"]
        text += f", 95% from {100 * low:+.1f} to {100 * high:+.1f}"
    return text


def _value(mean: float, error: float | None, sign: str = "") -> str:
    return f"{100 * mean:{sign}5.1f} +- {'?' if error is None else f'{100 * error:.1f}'}"


if __name__ == "__main__":
    sys.exit(main())
