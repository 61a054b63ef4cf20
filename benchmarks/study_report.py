"""The report of a study's finished runs (benchmarks.study): curves, a row for each arm and rate.

A rate is chosen by the same numbers that are reported, which flatters every arm a little: all
rates are in the table, and the differences of a study's pairs are means over all rates. Intervals
are over seeds; the held-out problems are the same for all.
"""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.harness import machine
from benchmarks.study import MARKS, WINDOW, Job, Study, windowed
from qerl import report, run_folder
from qerl.statistics import mean_and_error

# Student's t for a two-sided 95% interval, by number of values.
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def mean_and_interval(values: list[float]) -> tuple[float, float | None]:
    """The mean over seeds and half of its 95% interval by Student's t; None for one seed."""
    mean, error = mean_and_error(values)
    return mean, None if error is None else T_95[len(values)] * error


def table(study: Study, runs: Path) -> list[dict]:
    """A row for each arm and rate: every measure's (mean, half of the interval), and the seeds."""
    rows = []
    for arm in study.arms:
        for rate in study.learning_rates:
            made = [Job(study, arm, rate, seed, runs) for seed in study.seeds]
            found = {job.seed: result for job in made if (result := job.result())}
            stopped = [seed for seed, result in found.items() if "stopped" in result]
            whole = {seed: found[seed] for seed in found if seed not in stopped}
            rows.append(summary(whole) | {"arm": arm, "rate": rate, "stopped": len(stopped)})
    compare(rows, study.reference)
    return rows


def summary(results: dict[int, dict]) -> dict:
    """(mean, half of the interval) of each measure over seeds."""
    made = {"seeds": len(results)}
    for key in ("accuracy", "reward", "entropy"):
        for mark in ("start", *MARKS):
            values = [r[key][mark] for r in results.values() if r[key].get(mark) is not None]
            made[f"{key}_{mark}"] = mean_and_interval(values) if values else None
    made["end_by_seed"] = {seed: result["accuracy"]["end"] for seed, result in results.items()}
    return made


def compare(rows: list[dict], reference: str) -> None:
    """Mark the best rate of each arm, and add its difference to the reference, seed by seed.

    A rate at which fewer runs were stopped is better, whatever the others of its runs learned.
    """
    finished = [row for row in rows if row["seeds"]]
    finished.sort(key=lambda row: (-row["stopped"], row["accuracy_end"][0]))
    best = {row["arm"]: row for row in finished}  # the last of an arm stays
    for row in best.values():
        row["best"] = True
        theirs = best.get(reference, {}).get("end_by_seed", {})
        pairs = [(end, theirs[seed]) for seed, end in row["end_by_seed"].items() if seed in theirs]
        if row["arm"] != reference and pairs:
            row["difference"] = mean_and_interval([ours - other for ours, other in pairs])


HEAD = (
    "arm | rate | seeds | accuracy at a quarter | half | end | against {reference} | "
    "reward at a quarter | half | end | entropy at step 1 | half | end"
)


def markdown(study: Study, rows: list[dict]) -> str:
    """The table; accuracies and rewards in percent, the best rate of each arm in bold."""
    head = HEAD.format(reference=study.reference)
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    for row in rows:
        arm = f"**{row['arm']}**" if row.get("best") else row["arm"]
        seeds = f"{row['seeds']}" + (f", {row['stopped']} stopped" if row["stopped"] else "")
        cells = [arm, row["rate"], seeds]
        cells += [percent(row[f"accuracy_{mark}"]) for mark in MARKS]
        cells += [percent(row.get("difference"), "+")]
        cells += [percent(row[f"reward_{mark}"]) for mark in MARKS]
        cells += [plain(row[f"entropy_{mark}"]) for mark in ("start", "half", "end")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(study: Study, runs: Path) -> list[dict]:
    """How much more accurate the first arm of each pair is at each mark, in the mean of all rates.

    Seed by seed, of those seeds of which both arms finished every rate.
    """
    rows = []
    for pair in study.pairs:
        ours, theirs = (over_rates(study, runs, arm) for arm in pair)
        seeds = sorted(ours.keys() & theirs.keys())
        row = {"pair": pair, "seeds": len(seeds)}
        for mark in MARKS:
            gains = [ours[seed][mark] - theirs[seed][mark] for seed in seeds]
            row[mark] = mean_and_interval(gains) if gains else None
        rows.append(row)
    return rows


def over_rates(study: Study, runs: Path, arm: str) -> dict[int, dict[str, float]]:
    """An arm's accuracy at each mark, the mean over rates, by the seeds that finished them all."""
    found = {}
    for seed in study.seeds:
        made = [Job(study, arm, rate, seed, runs).result() for rate in study.learning_rates]
        if all(result and "stopped" not in result for result in made):
            accuracies = [result["accuracy"] for result in made]
            found[seed] = {m: math.fsum(a[m] for a in accuracies) / len(made) for m in MARKS}
    return found


def pairs_markdown(rows: list[dict]) -> str:
    """The table of `differences`, in points."""
    lines = ["| difference | seeds | at a quarter | half | end |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [" less ".join(row["pair"]), str(row["seeds"])]
        cells += [percent(row[mark], "+") for mark in MARKS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(value: tuple | None, sign: str = "") -> str:
    """ "61.2 ± 1.3" of a mean and half of its interval."""
    if value is None:
        return ""
    mean, half = value
    return f"{100 * mean:{sign}.1f}" + ("" if half is None else f" ± {100 * half:.1f}")


def plain(value: tuple | None) -> str:
    if value is None:
        return ""
    return f"{value[0]:.2f}" + ("" if value[1] is None else f" ± {value[1]:.2f}")


def draw(study: Study, rows: list[dict], runs: Path, output: Path) -> None:
    """Reward and entropy by step at each arm's best rate: the mean over seeds, and its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    for row in (row for row in rows if row.get("best")):
        made = [Job(study, row["arm"], row["rate"], seed, runs) for seed in row["end_by_seed"]]
        for axis, key in zip(axes, ("reward", "entropy"), strict=True):
            curves = [windowed(report.read(job.folder), key) for job in made]
            _draw_band(axis, curves, f"{row['arm']}, rate {row['rate']}")
    axes[0].set(title=f"reward, mean of {WINDOW} steps", xlabel="step", ylim=(0, 1))
    axes[1].set(title="entropy, nats a token", xlabel="step", ylim=(0, None))
    axes[0].legend(fontsize="small")
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def _draw_band(axis, curves: list[list[float | None]], label: str) -> None:
    """The mean of curves of one length, and its interval as a band; None leaves a gap."""
    known = [[math.nan if value is None else value for value in curve] for curve in curves]
    points = [mean_and_interval(list(values)) for values in zip(*known, strict=True)]
    steps = range(1, len(points) + 1)
    [line] = axis.plot(steps, [mean for mean, _ in points], label=label)
    low, high = ([mean + sign * (half or 0.0) for mean, half in points] for sign in (-1, 1))
    axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def write(study: Study, runs: Path, stem: Path) -> None:
    rows = table(study, runs)
    if not any(row.get("best") for row in rows):
        raise ValueError(f"{runs} holds no finished run of this study: start a worker first")
    text, apart = markdown(study, rows), differences(study, runs)
    if apart:
        text += "\n\n" + pairs_markdown(apart)
    found = {"machine": machine(), "rows": rows, "differences": apart}
    run_folder.write_json(f"{stem}.json", found)
    Path(f"{stem}.md").write_text(text + "\n")
    draw(study, rows, runs, Path(f"{stem}.png"))
    print(text)
