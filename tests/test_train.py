"""Each mistake of a user ends qerl.train with one line, before any weight is loaded.

Whole runs are test_trainer.py's matter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qerl import checkpoint, train
from qerl.config import TrainConfig, kebab, parse
from qerl.run_folder import write_json

# As Gemma 2's begins.
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
MISTAKES = {
    "model folder": (["--model-name", "./absent"], "there is no folder"),
    "model id": (["--model-name", "qerl-tests/absent"], "the hub did not give it"),
    "16-bit under nvfp4": (["--model-name", "{bf16}"], "quantize_nvfp4.py --model"),
    "nvfp4 under bf16": (["--precision", "bf16"], "16-bit weights are needed"),
    "folder without weights": (["--model-name", "{empty}"], "config.json"),
    "no chat template": (["--model-name", "{no_template}"], "has no chat template"),
    "template without system": (
        ["--model-name", "{no_system}"],
        "refuses a prompt of system",
    ),
    "data set": (["--dataset", "gsm9k"], "data set 'gsm9k' is not known. Known are"),
    "data file": (["--dataset", "absent.jsonl"], "absent.jsonl does not exist"),
    "data without answer": (["--dataset", "{no_answer}"], "line 1 lacks answer"),
    "data without rows": (["--dataset", "{no_rows}"], "is empty"),
    "data for tests only": (["--dataset", "math500"], "has no train split"),
    "too little data": (["--num-train-epochs", "0.001"], "do not fill one step"),
    "prompts too long": (["--max-prompt-length", "3"], "are longer than --max-prompt-length 3"),
    "reward": (["--reward", "nosuchmodule:f"], "cannot be imported"),
    "group": (["--num-generations", "3"], "does not divide the batch of 8"),
    "paged optimizer on a CPU": (["--optim", "paged_adamw_32bit"], "use --optim adamw_torch"),
    "optimizer on a CPU": (["--optim", "adamw_8bit"], "use --optim adamw_torch"),
    "kernel on a CPU": (["--linear-backend", "marlin"], "is about GPUs and none is visible"),
    "tracker": (["--report-to", "trackio"], "--report-to trackio"),
    "output folder": (["--output-dir", "{file}/run"], "is not writable"),
    "output folder, dry": (["--output-dir", "{file}/run", "--dry-run"], "is not writable"),
    "context": (["--max-completion-length", "9000"], "knows 8192"),
    "no tokenizer": (["--model-name", "{no_tokenizer}"], "has no tokenizer that can be read"),
    "output folder of another run": (["--output-dir", "{other_run}"], "other settings"),
}
PROGRAM = """
import contextlib, io, json, sys
from qerl.train import main
ended = {}
for name, argv in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended[name] = [main(argv), out.getvalue(), err.getvalue()]
heavy = [m for m in ("vllm", "trl", "datasets", "qerl.policy", "qerl.rollout") if m in sys.modules]
print("RESULT" + json.dumps([ended, heavy]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, smollm2, smollm2_nvfp4) -> dict[str, Path]:
    """The folders and files that MISTAKES name."""
    base = tmp_path_factory.mktemp("mistakes")
    made = {"bf16": smollm2, "nvfp4": smollm2_nvfp4, "new": base / "new", "base": base}
    texts = {"file": "", "no_rows.jsonl": "", "no_answer.jsonl": '{"prompt": "?"}'}
    for name, text in texts.items():
        (base / name).write_text(text)
        made[name.split(".")[0]] = base / name
    made["empty"] = base / "empty"
    made["empty"].mkdir()
    for name, absent in (("no_template", "chat_template"), ("no_tokenizer", "tokenizer")):
        made[name] = base / name
        made[name].mkdir()
        for file in smollm2_nvfp4.iterdir():
            if not file.name.startswith(absent):
                (made[name] / file.name).symlink_to(file)
    made["no_system"] = base / "no_system"
    shutil.copytree(smollm2_nvfp4, made["no_system"])
    (made["no_system"] / "chat_template.jinja").write_text(NO_SYSTEM)
    made["other_run"] = base / "other_run"
    made["other_run"].mkdir()
    write_json(base / "other_run" / "config.json", {"flags": dataclasses.asdict(TrainConfig())})
    (base / "other_run" / "metrics.jsonl").write_text('{"step": 1}\n')
    return made


@pytest.fixture(scope="module")
def programs(folders) -> tuple[dict, list]:
    """What qerl.train did with each of MISTAKES and a dry run; the heavy modules it loaded."""
    usual = "--model-name {nvfp4} --output-dir {new} --dataset arithmetic --optim adamw_torch"
    usual = f"{usual} --per-device-train-batch-size 8 --num-generations 4".split()
    commands = {name: usual + flags for name, (flags, _) in MISTAKES.items()}
    commands["dry run"] = [*usual, "--dry-run", "--num-stages", "4"]
    commands["short dry run"] = [*usual, "--dry-run", "--max-steps", "9"]
    given = {name: [word.format(**folders) for word in words] for name, words in commands.items()}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(given),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.rpartition("RESULT")[2])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_status_2_and_one_line_that_says_what_to_do(programs, name):
    status, out, err = programs[0][name]
    assert (status, out) == (2, "")
    assert MISTAKES[name][1] in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(programs, folders):
    status, out, err = programs[0]["dry run"]
    assert (status, err) == (0, "")
    assert "75 prompts (0 longer than 256 tokens left out), 37 steps of 2 prompts x 4" in out
    assert "sigma of the noise by step: 1-9: 0, 10-18: 0.01, 19-27: 0.00215, 28-37: 0.000464" in out
    for field in dataclasses.fields(TrainConfig):
        assert f"--{kebab(field.name)} " in out
    assert not folders["new"].exists()


def test_a_run_too_short_for_its_noise_is_told_so_and_goes_on(programs):
    status, out, _ = programs[0]["short dry run"]
    assert status == 0 and "WARNING: 1 of --num-stages 10 never come in 9 steps" in out
    assert "WARNING" not in programs[0]["dry run"][1]


def test_no_mistake_costs_the_loading_of_an_engine_or_a_model(programs):
    assert programs[1] == []


def test_a_run_of_several_processes_is_refused(monkeypatch):
    """The second would find the run folder held by the first, or wait for it for ever."""
    config = parse(["--optim", "adamw_torch"])
    train._check_machine(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE 2: a run is one process on one GPU"):
        train._check_machine(config)


def test_a_kernel_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="humming needs the package humming-kernels"):
        checkpoint.require_linear_backend("humming")
