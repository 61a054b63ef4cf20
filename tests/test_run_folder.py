"""A run folder is continued by its own settings alone, held by one process, and written whole."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.config import TrainConfig, parse
from qerl.run_folder import FREE_ON_RESUME, check_output_dir, make_output_dir, write_json


def prepare_output_dir(config: TrainConfig) -> bool:
    """What qerl.train does before it loads weights."""
    continued = check_output_dir(config)
    make_output_dir(config)
    return continued


def parsed(*flags: str, output_dir: str | Path) -> TrainConfig:
    return parse(["--model-name", "m", "--output-dir", str(output_dir), *flags])


def started(folder: Path, *flags: str) -> Path:
    """A run folder as the training leaves it before its first step."""
    config = parsed(*flags, output_dir=str(folder))
    folder.mkdir()
    write_json(folder / "config.json", {"flags": dataclasses.asdict(config)})
    (folder / "metrics.jsonl").write_text("")
    return folder


def saved(folder: Path, *flags: str) -> Path:
    """A run folder as the training leaves it after its first step."""
    started(folder, *flags)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def test_a_new_folder_is_made_and_is_not_a_run_to_continue(tmp_path):
    assert prepare_output_dir(parsed(output_dir=tmp_path / "a" / "b")) is False
    assert (tmp_path / "a" / "b").is_dir()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [".lock"]


def test_the_same_settings_continue_a_run(tmp_path):
    folder = saved(tmp_path / "run", "--lora-rank", "8")
    assert prepare_output_dir(parsed("--lora-rank", "8", output_dir=folder)) is True


def test_another_runs_folder_is_refused_with_what_differs(tmp_path):
    folder = saved(tmp_path / "run")
    with pytest.raises(ValueError) as refused:
        prepare_output_dir(parsed("--lora-rank", "8", "--no-ln", output_dir=folder))
    assert "--lora-rank was 16, now 8; --ln was True, now False" in str(refused.value)


def test_a_run_without_a_step_may_be_started_with_other_settings(tmp_path):
    folder = started(tmp_path / "run")
    assert prepare_output_dir(parsed("--lora-rank", "8", output_dir=folder)) is False


LEFT = ("metrics.jsonl", "checkpoint-3/trainer_state.json", "adapter/adapter_model.safetensors")


@pytest.mark.parametrize("file", LEFT)
def test_other_settings_are_refused_whatever_the_steps_have_left(tmp_path, file):
    folder = started(tmp_path / "run")
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("{}")
    assert prepare_output_dir(parsed(output_dir=folder)) is True
    with pytest.raises(ValueError, match="--lora-rank was 16, now 8"):
        prepare_output_dir(parsed("--lora-rank", "8", output_dir=folder))


@pytest.mark.parametrize("file", LEFT)
def test_steps_of_unknown_settings_are_refused_with_the_way_out(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    name = file.split("/")[0]
    with pytest.raises(ValueError, match=f"holds {name} but no config.json .* move them away"):
        prepare_output_dir(parsed(output_dir=tmp_path))


HOLD = """
import sys
from qerl.config import TrainConfig
from qerl.run_folder import make_output_dir
make_output_dir(TrainConfig(output_dir=sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_start_is_refused_until_the_first_has_died(tmp_path):
    config = parsed(output_dir=tmp_path / "run")
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, config.output_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match="is in use: another process is training there"):
        make_output_dir(config)
    first.kill()
    first.communicate()
    make_output_dir(config)
    make_output_dir(config)  # our own hold is no obstacle


def test_settings_that_do_not_alter_learning_may_change(tmp_path):
    folder = saved(tmp_path / "run")
    others = {"report_to": "wandb", "run_name": "x", "logging_steps": 5, "save_total_limit": 9}
    others |= {"save_steps": 7, "save_strategy": "no", "enforce_eager": True, "compile": False}
    others |= {"linear_backend": "marlin"}
    others |= {"vllm_gpu_memory_utilization": 0.1, "gradient_checkpointing": False}
    others |= {"parity_limit": 0.3}
    config = dataclasses.replace(parsed(output_dir=folder), **others, dry_run=True)
    assert set(others) | {"dry_run", "output_dir"} == set(FREE_ON_RESUME)
    assert prepare_output_dir(config) is True


def test_a_folder_that_was_moved_is_still_the_same_run(tmp_path):
    moved = saved(tmp_path / "run").rename(tmp_path / "moved")
    assert prepare_output_dir(parsed(output_dir=moved)) is True


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="is not writable .*: choose another folder"):
            prepare_output_dir(parsed(output_dir=folder))


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', '{"flags": ', "[]"])
def test_a_config_json_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json is not a training run's: choose another"):
        prepare_output_dir(parsed(output_dir=tmp_path))


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": 2, "bad": object()})
    assert json.loads(path.read_text()) == {"step": 1}
    write_json(path, {"step": 3})
    assert json.loads(path.read_text()) == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
