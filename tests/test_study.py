"""benchmarks.study: who does which run, what is measured, and the arithmetic of the table."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest

from benchmarks import study, study_report
from qerl import config

TINY = study.Study(
    arms={"aqn": "--num-stages 2", "uncorrected": "--num-stages 2 --sampler-correction none"},
    learning_rates=("1e-3",),
    seeds=(1, 2),
    steps=4,
    flags="--model-name {model} --dataset arithmetic --per-device-train-batch-size 4 "
    "--num-generations 2 --max-prompt-length 64 --max-completion-length 4 --optim adamw_torch "
    "--mask-truncated-completions False --gradient-checkpointing False --logging-steps 0",
    reference="aqn",
)

NAMED = dataclasses.replace(TINY, flags=TINY.flags.format(model="m"))


def written(job: study.Job, **values: float) -> None:
    """A finished run that measured the same at every mark."""
    job.folder.mkdir(parents=True)
    marks = ("start", *study.MARKS)
    result = {key: dict.fromkeys(marks, value) for key, value in values.items()}
    (job.folder / study.RESULT).write_text(json.dumps(result))
    rows = [{"step": step, "reward": 0.5, "entropy": 1.0} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (job.folder / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("name", study.STUDIES)
def test_every_run_of_a_study_is_one_that_training_takes(name, tmp_path):
    """Also: runs of a seed differ in the arm's own flags and the rate alone."""
    asked = study.STUDIES[name]
    made = study.jobs(asked, tmp_path)
    assert len(made) == len(asked.arms) * len(asked.learning_rates) * len(asked.seeds)
    assert len({job.folder for job in made}) == len(made)
    found = [job.config(Path("models")) for job in made]
    for settings in found:
        settings.check()
        assert settings.stages_left_out(settings.max_steps) == 0
        assert settings.max_steps % settings.save_steps == 0
    own = {"model_name", "precision", "linear_backend", "ln", "sigma_start", "sigma_end"}
    free = own | {"sampler_correction", "output_dir", "random_state", "learning_rate"}
    shared = {f.name for f in dataclasses.fields(config.TrainConfig)} - free
    assert all(len({getattr(settings, name) for settings in found}) == 1 for name in shared)


def test_two_workers_never_hold_one_run(tmp_path):
    job = study.jobs(TINY, tmp_path)[0]
    with study.claimed(job) as mine:
        with study.claimed(job) as theirs:
            assert (mine, theirs) == (True, False)
    with study.claimed(job) as later:
        assert later


def test_a_folder_of_models_may_have_a_space_in_its_name(tmp_path):
    job = study.jobs(study.STUDIES["quantizers"], tmp_path)[0]
    settings = job.config(Path("my models"))
    assert settings.model_name == "my models/SmolLM2-135M-Instruct-NVFP4A16-rtn"


class Trained:
    """Stands for qerl.train and the engine of a worker: a run leaves its four checkpoints."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(study.train, "prepare", lambda settings: None)
        monkeypatch.setattr(study.train, "run", self.run)
        monkeypatch.setattr(study, "build_engine", lambda *a: self)
        monkeypatch.setattr(study, "held_out", lambda *a: 0.5)
        monkeypatch.setattr(study.adapter, "of_folder", lambda folder: folder.stat())

    def sync(self, adapter) -> None:
        pass

    def run(self, settings: config.TrainConfig, plan, engine) -> None:
        folder = Path(settings.output_dir)
        if (folder / "adapter").is_dir():
            return  # as qerl.train does
        for step in range(1, settings.max_steps + 1):
            (folder / f"checkpoint-{step}").mkdir(parents=True)
        flags = {"flags": dataclasses.asdict(settings)}
        (folder / "config.json").write_text(json.dumps(flags))
        row = json.dumps({"reward": 0.5, "entropy": 1.0, "alarms": [], "step": 1})
        (folder / "metrics.jsonl").write_text(f"{row}\n" * settings.max_steps)
        (folder / "adapter").mkdir()


def test_a_worker_killed_ahead_of_its_result_leaves_what_the_next_measures(tmp_path, monkeypatch):
    Trained(monkeypatch)
    job = study.jobs(NAMED, tmp_path)[0]
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(study.run_folder, "write_json", ended)
        study.work([job], tmp_path)
    study.work([job], tmp_path)
    assert job.result()["accuracy"]["end"] == 0.5
    assert not list(job.folder.glob("checkpoint-*"))


def ended(*arguments, by: type[BaseException] = KeyboardInterrupt) -> None:
    raise by("error: ended")


def test_a_run_that_diverges_is_a_result_and_a_broken_engine_is_none(tmp_path, monkeypatch):
    Trained(monkeypatch)
    first, second, *_ = study.jobs(NAMED, tmp_path)
    first.folder.mkdir()
    monkeypatch.setattr(study.train, "run", functools.partial(ended, by=study.train.Diverged))
    study.work([first], tmp_path)
    assert first.result() == {"stopped": "error: ended"}
    monkeypatch.setattr(study.train, "run", functools.partial(ended, by=SystemExit))  # parity's
    with pytest.raises(SystemExit):
        study.work([second], tmp_path)
    assert second.result() is None


def test_results_of_other_settings_are_refused_and_not_taken_for_this_studys(tmp_path, monkeypatch):
    Trained(monkeypatch)
    job = study.jobs(NAMED, tmp_path)[0]
    study.work([job], tmp_path)
    longer = dataclasses.replace(job, study=dataclasses.replace(NAMED, steps=8))
    with pytest.raises(ValueError, match="--max-steps was 4, now 8"):
        study.work([longer], tmp_path)


def test_a_worker_says_what_it_leaves_undone(tmp_path, monkeypatch, capsys):
    Trained(monkeypatch)
    todo = study.jobs(NAMED, tmp_path)
    with study.claimed(todo[0]):
        study.work(todo, tmp_path)
    assert "1 of 4 runs are not finished" in capsys.readouterr().out
    study.work(todo, tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_study_trains_measures_and_reports_each_run_once(
    engine, smollm2_nvfp4, tmp_path, monkeypatch, capsys
):
    flags = TINY.flags.format(model=smollm2_nvfp4)
    asked = dataclasses.replace(TINY, flags=flags)
    built = []
    monkeypatch.setitem(study.STUDIES, "quantizers", asked)
    monkeypatch.setattr(study, "build_engine", lambda *a: built.append(a) or engine)
    arguments = ["quantizers", "--runs", str(tmp_path)]
    assert study.main(arguments) == 0
    results = [job.result() for job in study.jobs(asked, tmp_path)]
    assert len(built) == 1
    for result in results:
        assert set(result["accuracy"]) == {"start", "quarter", "half", "end"}
        assert all(0 <= value <= 1 for value in result["accuracy"].values())
        assert result["entropy"]["start"] > 0
    assert not list(tmp_path.glob("*/checkpoint-*")) and len(list(tmp_path.glob("*/adapter"))) == 4
    assert engine._request is None  # nothing of a run is left in the engine
    monkeypatch.setattr(study, "do", lambda *a: pytest.fail("a finished run was done again"))
    assert study.main(arguments) == 0
    assert study.main([*arguments, "--report", str(tmp_path / "table")]) == 0
    assert "| uncorrected | 1e-3 | 2 |" in capsys.readouterr().out.replace("**", "")
    assert {path.suffix for path in tmp_path.glob("table.*")} == {".md", ".json", ".png"}


def test_the_interval_is_students_and_the_difference_is_paired_by_seed(tmp_path):
    asked = dataclasses.replace(TINY, learning_rates=("1e-4", "1e-3"))
    ends = {("aqn", "1e-4"): (0.1, 0.3), ("aqn", "1e-3"): (0.4, 0.6)}
    ends |= {("uncorrected", "1e-4"): (0.5, 0.7), ("uncorrected", "1e-3"): (0.2, 0.2)}
    for job in study.jobs(asked, tmp_path):
        end = ends[job.arm, job.learning_rate][job.seed - 1]
        written(job, accuracy=end, reward=0.5, entropy=1.0)
    rows = {(row["arm"], row["rate"]): row for row in study_report.table(asked, tmp_path)}
    mean, half = rows["aqn", "1e-3"]["accuracy_end"]
    # of two values the standard error is half their distance; t of one degree of freedom is 12.706
    assert math.isclose(mean, 0.5) and math.isclose(half, 12.706 * 0.1)
    assert [key for key, row in rows.items() if row.get("best")] == [
        ("aqn", "1e-3"),
        ("uncorrected", "1e-4"),
    ]
    mean, half = rows["uncorrected", "1e-4"]["difference"]  # 0.5 - 0.4 and 0.7 - 0.6
    assert math.isclose(mean, 0.1) and math.isclose(half, 0, abs_tol=1e-9)
    text = study_report.markdown(asked, list(rows.values()))
    assert "| **uncorrected** | 1e-4 | 2 | 60.0 ± 127.1 |" in text and "| +10.0 ± 0.0 |" in text


def test_the_difference_of_a_pair_is_over_all_rates_of_the_seeds_that_have_them(tmp_path):
    pair = ("uncorrected", "aqn")
    asked = dataclasses.replace(
        TINY, learning_rates=("1e-4", "1e-3"), seeds=(1, 2, 3), pairs=(pair,)
    )
    gains = {("1e-4", 1): 0.1, ("1e-3", 1): 0.3, ("1e-4", 2): 0.0, ("1e-3", 2): 0.2}
    for job in study.jobs(asked, tmp_path):
        end = 0.5 + gains.get((job.learning_rate, job.seed), 0) * (job.arm == "uncorrected")
        if job.seed < 3 or job.arm == "aqn":  # of the third seed one arm is missing
            written(job, accuracy=end, reward=0.5, entropy=1.0)
    [row] = study_report.differences(asked, tmp_path)
    assert row["pair"] == pair and row["seeds"] == 2
    assert math.isclose(row["end"][0], 0.15) and math.isclose(row["end"][1], 12.706 * 0.05)
    text = study_report.pairs_markdown([row])
    assert "| uncorrected less aqn | 2 | +15.0 ± 63.5 |" in text


def test_a_stopped_run_is_counted_and_never_averaged(tmp_path):
    first, second, *_ = study.jobs(TINY, tmp_path)
    written(first, accuracy=0.5, reward=0.5, entropy=1.0)
    second = dataclasses.replace(first, seed=2)
    second.folder.mkdir()
    (second.folder / study.RESULT).write_text('{"stopped": "NaN"}')
    row = study_report.table(TINY, tmp_path)[0]
    assert (row["seeds"], row["stopped"], row["accuracy_end"]) == (1, 1, (0.5, None))
    assert "1, 1 stopped" in study_report.markdown(TINY, [row])


def test_a_rate_with_stopped_runs_is_not_the_best_by_the_runs_that_are_left(tmp_path):
    asked = dataclasses.replace(TINY, learning_rates=("1e-4", "1e-3"))
    for job in study.jobs(asked, tmp_path):
        if job.learning_rate == "1e-3" and job.seed == 2:
            job.folder.mkdir()
            (job.folder / study.RESULT).write_text('{"stopped": "NaN"}')
        else:
            written(job, accuracy=float(job.learning_rate), reward=0.5, entropy=1.0)
    rows = study_report.table(asked, tmp_path)
    assert [row["rate"] for row in rows if row.get("best")] == ["1e-4", "1e-4"]


def test_the_band_of_a_curve_is_the_interval_of_the_table_and_has_gaps():
    from matplotlib import pyplot

    _, axis = pyplot.subplots()
    study_report._draw_band(axis, [[0.4, 0.4, 0.4], [0.6, None, 0.6]], "arm")
    [line], [band] = axis.lines, axis.collections
    assert line.get_ydata()[0] == 0.5 and math.isnan(line.get_ydata()[1])
    heights = [y for path in band.get_paths() for y in path.vertices[:, 1]]
    assert math.isclose(max(heights), 0.5 + 12.706 * 0.1)
    pyplot.close()


def test_a_windowed_mean_passes_over_what_has_no_value():
    rows = [{"reward": value} for value in (0.0, None, 1.0, 1.0, 1.0, 1.0, 1.0)]
    assert study.windowed(rows, "reward") == [0.0, 0.0, 0.5, 2 / 3, 0.75, 1.0, 1.0]
    assert study.windowed([{"reward": None}], "reward") == [None]


def test_a_study_without_a_finished_run_has_no_report(tmp_path, capsys):
    arguments = ["quantizers", "--runs", str(tmp_path), "--report", str(tmp_path / "table")]
    assert study.main(arguments) == 2
    assert "holds no finished run" in capsys.readouterr().err
    assert study.main(["quantizers", "--runs", str(tmp_path), "--arms", "fp8"]) == 2
    with pytest.raises(SystemExit):  # the table has all arms
        study.main([*arguments, "--arms", "rtn"])
