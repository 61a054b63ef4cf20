"""Studies of what is learned: arms x learning rates x seeds of one small task, then their table.

    python -m benchmarks.study exploration --runs RUNS     # as many of these side by side as fit
    python -m benchmarks.study exploration --runs RUNS --report STEM

A worker takes the next run that no one has finished or is working on, so workers on one RUNS folder
share the work and a killed one loses its last run alone. It keeps one engine, and so stays with the
runs that fit it; at its end it says how many are left. Every run is qerl.train's, on the same
problems in the same order for a seed. It is measured at a quarter, half and the end of its steps:
the accuracy on held-out problems, sampled at the training's temperature with the adapter of that
checkpoint and no noise, and the mean reward of the WINDOW steps up to there. --report reads what is
finished and writes STEM.md, STEM.json and STEM.png (benchmarks/study_report.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import gc
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qerl import adapter, config, data, evaluate, report, run_folder, train

MARKS = {"quarter": 0.25, "half": 0.5, "end": 1.0}  # shares of a run's steps
WINDOW = 5  # steps over which a reward is averaged
SAMPLES = 4  # completions of each held-out problem
RESULT = "result.json"


@dataclass(frozen=True)
class Study:
    """What is compared: the flags that each arm adds to those that all share."""

    arms: dict[str, str]
    learning_rates: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    flags: str
    reference: str  # the arm that the others are compared with
    pairs: tuple[tuple[str, str], ...] = ()  # arms whose difference over all rates is reported


SMOLLM2 = """
--num-generations 8 --max-prompt-length 64
--max-completion-length 16 --mask-truncated-completions False --warmup-ratio 0 --max-grad-norm 1
--optim adamw_torch --lora-rank 16 --lora-alpha 32 --gradient-checkpointing False --logging-steps 0
--compile False
"""
BF16 = "--model-name {models}/SmolLM2-135M-Instruct --precision bf16"
NVFP4 = "--model-name {models}/SmolLM2-135M-Instruct-NVFP4A16-rtn"
AQN = "--sigma-start 1e-2 --sigma-end 5e-4 --num-stages 10"  # the paper's table of settings
QUICKSTART_AQN = "--sigma-start 3e-3 --sigma-end 3e-4 --num-stages 10"
STUDIES = {
    "exploration": Study(
        arms={
            "bf16": f"{BF16} --no-ln",
            "bf16+aqn": f"{BF16} {AQN}",
            "nf4": f"{BF16.replace('bf16', 'nf4')} --no-ln",
            "nvfp4": f"{NVFP4} --no-ln",
            "nvfp4+aqn": f"{NVFP4} {AQN}",
            "nvfp4+aqn, uncorrected": f"{NVFP4} {AQN} --sampler-correction none",
        },
        learning_rates=("2e-4", "5e-4", "1e-3"),
        seeds=(1, 2, 3, 4, 5),
        steps=40,
        flags=f"--dataset arithmetic-mixed --per-device-train-batch-size 64 {SMOLLM2}",
        reference="nvfp4",
        pairs=(
            ("bf16+aqn", "bf16"),
            ("nvfp4+aqn", "nvfp4"),
            ("nvfp4+aqn, uncorrected", "nvfp4"),
            ("nvfp4+aqn, uncorrected", "nvfp4+aqn"),
            ("nvfp4", "nf4"),
        ),
    ),
    "quantizers": Study(
        arms={
            method: f"{NVFP4.replace('rtn', method)} {QUICKSTART_AQN}"
            for method in ("rtn", "mse", "gptq", "awq")
        },
        learning_rates=("5e-4",),
        seeds=(1, 2, 3),
        steps=40,
        flags=f"--dataset arithmetic --per-device-train-batch-size 32 {SMOLLM2}",
        reference="rtn",
    ),
}


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    study: Study
    arm: str
    learning_rate: str
    seed: int
    runs: Path

    @property
    def folder(self) -> Path:
        name = "".join(c if c.isalnum() else "-" for c in self.arm)
        return self.runs / f"{name}_{self.learning_rate}_{self.seed}"

    @property
    def steps(self) -> dict[str, int]:
        """The step of each mark."""
        return {mark: round(share * self.study.steps) for mark, share in MARKS.items()}

    def config(self, models: Path) -> config.TrainConfig:
        words = f"{self.study.flags} {self.study.arms[self.arm]}".split()
        return config.parse(
            [
                *(word.format(models=models) for word in words),
                *("--output-dir", str(self.folder), "--random-state", str(self.seed)),
                *("--learning-rate", self.learning_rate, "--max-steps", str(self.study.steps)),
                *("--save-steps", str(self.steps["quarter"]), "--save-total-limit", "4"),
            ]
        )

    def result(self) -> dict | None:
        """What was measured, once the run is finished."""
        path = self.folder / RESULT
        return json.loads(path.read_text()) if path.is_file() else None


def jobs(study: Study, runs: Path) -> list[Job]:
    """Every run, seed by seed, so that what is finished early holds a little of everything."""
    return [
        Job(study, arm, rate, seed, runs)
        for seed in study.seeds
        for rate in study.learning_rates
        for arm in study.arms
    ]


def work(todo: list[Job], models: Path) -> None:
    """Do the runs of `todo` that are left and fit the engine of the first one done here.

    Raises ValueError at a folder of other settings, finished or not: one table is of one study.
    """
    engine = held = None
    for job in todo:
        settings = job.config(models)
        run_folder.check_output_dir(settings)
        needed = settings.model_name, settings.precision, settings.has_noise
        if held not in (None, needed):
            continue
        with claimed(job) as free:
            if free and job.result() is None:
                plan = train.prepare(settings)
                engine, held = engine or build_engine(settings, plan), needed
                run_folder.write_json(job.folder / RESULT, do(job, settings, plan, engine))
                for folder in job.folder.glob("checkpoint-*"):  # until then a kill needs them
                    shutil.rmtree(folder)
    if left := sum(job.result() is None for job in todo):
        print(f"{left} of {len(todo)} runs are not finished: others are at them, or start a worker")


@contextmanager
def claimed(job: Job) -> Iterator[bool]:
    """Whether the run is free; if it is, it is this worker's within the block."""
    job.runs.mkdir(parents=True, exist_ok=True)
    with (job.runs / f".{job.folder.name}.claim").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def build_engine(settings: config.TrainConfig, plan):
    """The engine of a run, with a small cache of its own, so that many share a GPU."""
    from qerl.rollout import Engine

    wanted = train.engine_settings(settings, plan)
    return Engine(dataclasses.replace(wanted, gpu_memory_utilization=0.02, kv_cache_gib=0.5))


def do(job: Job, settings: config.TrainConfig, plan, engine) -> dict:
    """Train a run and measure it at the checkpoints of its marks."""
    import torch

    try:
        train.run(settings, plan, engine)
    except train.Diverged as stopped:
        return {"stopped": str(stopped)}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    accuracy = {"start": held_out(job, settings, plan, engine, None)}
    for mark, step in job.steps.items():
        loaded = adapter.of_folder(job.folder / f"checkpoint-{step}")
        accuracy[mark] = held_out(job, settings, plan, engine, loaded)
    engine.sync(None)
    return {"accuracy": accuracy} | of_metrics(report.read(job.folder), job.steps)


def held_out(job: Job, settings: config.TrainConfig, plan, engine, loaded) -> float:
    """Accuracy at the training's own temperature, without noise."""
    from qerl.rollout import Sampling

    task = data.load(settings.dataset, "test")
    prompts = [data.prompt_ids(plan.tokenizer, row) for row in task.rows]
    engine.sync(loaded)
    sampling = Sampling(settings.max_completion_length, settings.temperature)
    found = evaluate.run_task(engine, plan.tokenizer, task, prompts, sampling, SAMPLES, job.seed)
    return found["accuracy"]


def of_metrics(rows: list[dict], steps: dict[str, int]) -> dict:
    """Rewards and entropies at the marks, from the rows of metrics.jsonl; null for no value."""
    found = {"alarms": sum(len(row["alarms"]) for row in rows)}
    for key in ("reward", "entropy"):
        found[key] = {mark: windowed(rows, key)[step - 1] for mark, step in steps.items()}
    found["entropy"]["start"] = rows[0]["entropy"]
    return found


def windowed(rows: list[dict], key: str) -> list[float | None]:
    """The mean of a key over the last WINDOW rows, at every row."""
    values = [row[key] for row in rows]
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    known = [[value for value in window if value is not None] for window in windows]
    return [statistics.fmean(window) if window else None for window in known]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("study", choices=STUDIES)
    add("--runs", type=Path, required=True, help="folder of the runs; workers share it")
    add("--models", type=Path, default=Path("models"), help="folder of the checkpoints (models)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--arms", help="do these alone, separated by semicolons; default: all")
    add("--report", type=Path, metavar="STEM", help="write the table of what is finished")
    arguments = parser.parse_args(argv)
    study = STUDIES[arguments.study]
    try:
        if arguments.report:
            from benchmarks import study_report

            study_report.write(study, arguments.runs, arguments.report)
        else:
            work(chosen(jobs(study, arguments.runs), arguments.arms), arguments.models)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def chosen(todo: list[Job], arms: str | None) -> list[Job]:
    """The runs of the arms that are named."""
    names = set(arms.split(";")) if arms else {job.arm for job in todo}
    if unknown := names - {job.arm for job in todo}:
        raise ValueError(f"--arms {'; '.join(sorted(unknown))}: expected some of this study's")
    return [job for job in todo if job.arm in names]


if __name__ == "__main__":
    sys.exit(main())
