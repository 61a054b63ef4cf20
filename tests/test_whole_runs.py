"""qerl.train as a program of its own: one run undisturbed, one killed and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from qerl import train
from qerl import trainer as training
from runs import KEYS, WHEN_ASKED_FOR, command, copied, rows, trained_adapter, without_clocks

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent


def start(model: Path, run: Path) -> subprocess.Popen:
    """`python -m qerl.train` as a program of its own."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "qerl.train", *command(model, run)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(program: subprocess.Popen) -> str:
    said, _ = program.communicate(timeout=300)
    assert program.returncode == 0, said
    return said


# --- a run from start to end


@pytest.fixture(scope="module")
def whole(smollm2_nvfp4, tmp_path_factory) -> Path:
    """The run folder of a run that nobody disturbed."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(smollm2_nvfp4, run))
    return run


def test_every_step_has_a_line_with_every_key(whole):
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4]
    for row in rows(whole):
        assert sorted(row) == sorted(KEYS) and row["alarms"] == []
        for key in set(KEYS) - {"alarms"}:
            wanted = type(None) if key in WHEN_ASKED_FOR else int | float
            assert isinstance(row[key], wanted), key


def test_noise_is_as_large_as_the_schedule_says_and_in_every_norm(whole):
    sigmas = [0, 1e-2, 1e-2 * 1e-2 ** (1 / 3), 1e-2 * 1e-2 ** (2 / 3)]
    assert [row["sigma"] for row in rows(whole)] == pytest.approx(sigmas)
    for row, sigma in zip(rows(whole), sigmas, strict=True):
        assert row["noise_std"] == pytest.approx(sigma, rel=0.05)
        assert row["noise_modules"] == (60 if sigma else 0)
    noisy = rows(whole)[1:]
    assert len({row["noise_std"] / row["sigma"] for row in noisy}) == len(noisy)  # drawn anew


def test_without_noise_sampler_and_trainer_agree(whole):
    gaps = [row["logp_gap_mean"] for row in rows(whole)]
    assert 0 < gaps[0] < 0.05
    assert gaps[1] > 2 * gaps[0]  # sigma 1e-2
    assert gaps[3] < 0.08  # sigma 4.6e-4


def test_the_learning_rate_falls_along_its_cosine(whole):
    rates = [row["learning_rate"] for row in rows(whole)]
    assert rates == pytest.approx([1e-3, 8.5355e-4, 5e-4, 1.4645e-4], rel=1e-3)


def test_every_group_learned_something(whole):
    for row in rows(whole):
        assert row["grad_norm"] > 0 and row["reward_std"] > 0
        assert row["completion_length"] <= 12 and 0 <= row["truncated_fraction"] <= 1


def test_samples_hold_prompts_completions_rewards_and_advantages(whole):
    samples = rows(whole, "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4}
    for sample in samples:
        assert set(sample) == {"step", "prompt", "completion", "reward", "advantage"}
        assert "What is" in json.dumps(sample["prompt"])


def test_the_adapter_that_is_left_is_a_trained_one(whole):
    tensors = trained_adapter(whole)
    assert len(tensors) == 30 * 7 * 2
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(tensor.any() for tensor in tensors.values())


def test_config_json_says_what_was_run(whole, smollm2_nvfp4):
    said = json.loads((whole / "config.json").read_text())
    assert said["flags"]["model_name"] == str(smollm2_nvfp4)
    assert said["flags"]["learning_rate"] == 1e-3 and said["flags"]["lora_rank"] == 16
    assert said["seed"] == said["flags"]["random_state"] == 3407
    assert said["versions"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert set(said["versions"]) >= {"torch", "transformers", "trl", "peft"}
    assert said["git_commit"] is None or len(said["git_commit"]) == 40


def test_the_run_folder_holds_whole_checkpoints_and_nothing_half_written(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"config.json", "metrics.jsonl", "samples.jsonl", "adapter"} <= names
    assert {"checkpoint-2", "checkpoint-4"} <= names
    assert not [name for name in names if "partial" in name]


# --- a run that was killed


def wait_for(path: Path, program: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert program.poll() is None, program.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def killed(smollm2_nvfp4, tmp_path_factory) -> tuple[Path, str]:
    """A run killed after its first checkpoint, in a later save and in mid-line, and started again.

    The folder, and what the second start said.
    """
    run = tmp_path_factory.mktemp("runs") / "killed"
    program = start(smollm2_nvfp4, run)
    wait_for(run / "checkpoint-2", program)
    program.send_signal(signal.SIGKILL)
    program.communicate()
    assert not (run / "adapter").exists()
    half = run / training.PARTIAL / "checkpoint-3"
    half.mkdir(parents=True)
    shutil.copy(run / "checkpoint-2" / "trainer_state.json", half)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 3, "lo')
    return run, finish(start(smollm2_nvfp4, run))


def test_the_same_command_continues_from_the_last_whole_checkpoint(killed):
    run, said = killed
    assert f"continuing from {run / 'checkpoint-2'}" in said
    assert not (run / training.PARTIAL).exists() and not (run / "checkpoint-3").exists()


def test_a_killed_run_takes_the_steps_that_it_would_have_taken(killed, whole):
    assert without_clocks(killed[0]) == without_clocks(whole)


def test_a_killed_run_samples_the_same_completions(killed, whole):
    assert rows(killed[0], "samples.jsonl") == rows(whole, "samples.jsonl")


def test_a_killed_run_ends_with_the_same_adapter(killed, whole):
    ours, theirs = trained_adapter(killed[0]), trained_adapter(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- its folder afterwards


def test_a_finished_run_says_so_and_keeps_its_record(whole, smollm2_nvfp4, tmp_path, capsys):
    for without in ((), ("checkpoint-*",)):  # the second is what --save-strategy no leaves
        run = copied(whole, tmp_path / f"run{len(without)}", *without)
        assert train.main(command(smollm2_nvfp4, run)) == 0
        assert f"{run} is finished: its adapter is in {run / 'adapter'}" in capsys.readouterr().out
        assert rows(run) == rows(whole)
        assert rows(run, "samples.jsonl") == rows(whole, "samples.jsonl")


def test_other_settings_in_the_folder_of_a_run_are_refused(whole, smollm2_nvfp4, capsys):
    assert train.main(command(smollm2_nvfp4, whole, "--lora-rank", "8")) == 2
    assert "--lora-rank was 16, now 8" in capsys.readouterr().err
