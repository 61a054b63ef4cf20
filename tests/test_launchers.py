"""Every launcher is sound shell, passes flags that exist, and is its partner but for the precision;
paper.sh passes the paper's numbers.

A launcher names its interpreter by its own place, so a copy of training/ with another program in
that place shows what would be run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from qerl import config, evaluate, train

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "training").glob("*.sh"))
LAUNCHERS = [path for path in SCRIPTS if path.name.endswith("_single_gpu.sh")]
PAIRS = sorted({re.sub("_(nvfp4|bf16)_", "_{}_", path.name) for path in LAUNCHERS})
RECORDER = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done >>"$RECORD"
printf '\\n' >>"$RECORD"
"""


# The paper's table of hyper-parameters (shared/method.md, section 3) by (data, size).
GSM8K = {
    **{"loss_type": "grpo", "num_generations": 8, "num_iterations": 4},
    **{"max_completion_length": 4096, "dataset": "gsm8k", "epsilon_high": 0.2},
}
BIGMATH = {
    **{"loss_type": "dapo", "num_generations": 16, "num_iterations": 1},
    **{"max_completion_length": 8192, "dataset": "bigmath", "epsilon_high": 0.28},
}
PAPER = {
    ("gsm8k", "3b"): GSM8K | {"vllm_gpu_memory_utilization": 0.20},
    ("gsm8k", "7b"): GSM8K | {"vllm_gpu_memory_utilization": 0.30},
    ("bigmath", "7b"): BIGMATH | {"vllm_gpu_memory_utilization": 0.30},
    ("bigmath", "14b"): BIGMATH | {"vllm_gpu_memory_utilization": 0.45},
    ("bigmath", "32b"): BIGMATH | {"vllm_gpu_memory_utilization": 0.40, "dataset": "bigmath_hard"},
}
EVERYWHERE = {
    **{"completions_per_step": 128, "lora_rank": 32, "optim": "adamw_8bit", "beta": 0.0},
    **{"sigma_start": 1e-2, "sigma_end": 5e-4, "num_stages": 10, "noise_schedule": "exponential"},
    **{"noise_target": "norm", "epsilon": 0.2},
}
ARMS = {
    "aqn": {"precision": "nvfp4", "has_noise": True, "learning_rate": 1e-5},
    "nvfp4": {"precision": "nvfp4", "has_noise": False, "learning_rate": 1e-5},
    "bf16": {"precision": "bf16", "has_noise": False, "learning_rate": 5e-6},
    "bf16-aqn": {"precision": "bf16", "has_noise": True, "learning_rate": 5e-6},
    "nf4": {"precision": "nf4", "has_noise": False, "learning_rate": 1e-5},
}


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    ours = ("METHOD", "MODEL_PATH", "DATASET", "OUTPUT_DIR")
    kept = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.run(
        ["bash", script, *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tree(tmp_path) -> Path:
    """training/ under a root whose interpreter only writes down what it is given."""
    shutil.copytree(ROOT / "training", tmp_path / "training")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDER)
    python.chmod(0o755)
    (tmp_path / "setup_env.sh").write_text("")
    return tmp_path


def recorded(tree: Path, script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """The arguments of each program that a script of the tree starts."""
    record = tree / "record"
    record.unlink(missing_ok=True)
    ended = run(tree / "training" / script, *arguments, RECORD=str(record), **environment)
    assert ended.returncode == 0, ended.stderr
    return [line.split("\0")[:-1] for line in record.read_text().split("\n")[:-1]]


def launched(tree: Path, script: str, *arguments: str, **environment: str) -> list[str]:
    """The flags that a launcher gives to qerl.train; its model folder is there."""
    environment = {"MODEL_PATH": str(tree)} | environment
    [words] = recorded(tree, script, *arguments, **environment)
    assert words[:2] == ["-m", "qerl.train"]
    return words[2:]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound_shell(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text()
    if path.name == "launch.sh":
        return  # sourced by the launchers
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text
    assert os.access(path, os.X_OK)


def test_there_is_a_pair_for_every_model():
    assert len(PAIRS) == 5
    assert {name.format(p) for name in PAIRS for p in ("nvfp4", "bf16")} == {
        path.name for path in LAUNCHERS
    }


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_differs_in_precision_alone(pair):
    """The comments aside, each names its partner there."""
    texts = {p: (ROOT / "training" / pair.format(p)).read_text() for p in ("nvfp4", "bf16")}
    code = {p: re.sub("(?m)^#.*\n", "", text) for p, text in texts.items()}
    assert code["nvfp4"] == code["bf16"].replace("PRECISION=bf16", "PRECISION=nvfp4")
    assert code["nvfp4"] != code["bf16"]
    for precision, other in (("nvfp4", "bf16"), ("bf16", "nvfp4")):
        assert pair.format(other) in texts[precision]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_trains_on_the_same_data_with_the_same_settings(tree, pair):
    made = {p: config.parse(launched(tree, pair.format(p))) for p in ("nvfp4", "bf16")}
    differing = {
        name
        for name in vars(made["nvfp4"])
        if getattr(made["nvfp4"], name) != getattr(made["bf16"], name)
    }
    assert differing == {"precision", "learning_rate", "output_dir"}
    assert (made["nvfp4"].learning_rate, made["bf16"].learning_rate) == (1e-5, 5e-6)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_a_launcher_passes_settings_that_the_trainer_knows_and_accepts(tree, path):
    made = config.parse(launched(tree, path.name))
    made.check()
    assert (made.loss_type, made.beta, made.epsilon, made.epsilon_high) == ("dapo", 0, 0.2, 0.28)
    assert (made.sigma_start, made.sigma_end, made.num_stages, made.ln) == (1e-2, 1e-4, 10, True)
    assert (made.lora_rank, made.lora_alpha, made.max_grad_norm) == (16, 16, 0.2)


def test_the_environment_and_the_command_line_win(tree):
    flags = launched(
        tree,
        "dapo_qwen2.5-7b_nvfp4_single_gpu.sh",
        *("--learning-rate", "3e-5", "--no-ln"),
        MODEL_PATH=str(tree / "training"),
        DATASET="bigmath",
        OUTPUT_DIR="my run",
    )
    made = config.parse(flags)
    assert (made.learning_rate, made.ln) == (3e-5, False)
    assert (made.model_name, made.dataset, made.output_dir) == (
        str(tree / "training"),
        "bigmath",
        "my run",
    )


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_a_dry_run_of_a_launchers_settings_passes(
    tree, path, smollm2, smollm2_nvfp4, tmp_path, capsys
):
    model = smollm2_nvfp4 if "nvfp4" in path.name else smollm2
    more = ["--dry-run", "--optim", "adamw_torch", "--dataset", "arithmetic", "--max-steps", "30"]
    run_dir = tmp_path / "run"
    flags = launched(tree, path.name, *more, MODEL_PATH=str(model), OUTPUT_DIR=str(run_dir))
    assert train.main(flags) == 0
    assert "sigma of the noise by step: 1-3: 0, 4-6: 0.01, 7-9: 0.00599" in capsys.readouterr().out
    assert not run_dir.exists()


def test_a_launcher_itself_makes_a_dry_run(smollm2_nvfp4, tmp_path):
    ended = run(
        ROOT / "training" / "dapo_qwen2.5-3b_nvfp4_single_gpu.sh",
        *("--dry-run", "--optim", "adamw_torch"),
        MODEL_PATH=str(smollm2_nvfp4),
        DATASET="arithmetic",
        OUTPUT_DIR=str(tmp_path / "run"),
    )
    assert ended.returncode == 0, ended.stderr
    assert f"--model-name {smollm2_nvfp4}\n" in ended.stdout


@pytest.mark.parametrize(
    "path", [path for path in LAUNCHERS if "nvfp4" in path.name], ids=lambda path: path.name
)
def test_without_its_checkpoint_a_launcher_says_how_to_make_it(tree, path):
    model = re.search("^MODEL=(.*)$", path.read_text(), re.M)[1]
    for method, data in (("rtn", ""), ("gptq", " --calibration gsm8k")):
        ended = run(tree / "training" / path.name, METHOD=method)
        assert ended.returncode == 2
        folder = f"{tree}/models/{Path(model).name}-NVFP4A16-{method}"
        command = f"quantize_nvfp4.py --model {model} --output {folder} --method {method}{data}\n"
        assert command in ended.stderr


def test_without_an_environment_a_launcher_says_how_to_make_it(tree):
    (tree / ".venv" / "bin" / "python").unlink()
    ended = run(tree / "training" / LAUNCHERS[0].name, MODEL_PATH=str(tree))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"bash {tree}/setup_env.sh" in ended.stderr


def test_launch_sh_refuses_a_precision_that_it_does_not_know(tree):
    script = tree / "training" / "mine.sh"
    script.write_text(
        "set -euo pipefail\nMODEL=a/b\nPRECISION=int8\nSETTINGS=()\n"
        'source "$(dirname "$0")/launch.sh"\n'
    )
    ended = run(script)
    assert ended.returncode == 2 and "PRECISION is 'int8'" in ended.stderr


# --- the paper's settings


@pytest.fixture(scope="module")
def roomy(smollm2, smollm2_nvfp4, tmp_path_factory) -> dict[bool, Path]:
    """The two small models (NVFP4 or not) with Qwen2.5's context, which BigMath's lengths need."""
    made = {}
    for nvfp4, folder in ((False, smollm2), (True, smollm2_nvfp4)):
        made[nvfp4] = tmp_path_factory.mktemp("roomy") / folder.name
        made[nvfp4].mkdir()
        for file in folder.iterdir():
            (made[nvfp4] / file.name).symlink_to(file)
        config_file = made[nvfp4] / "config.json"
        settings = json.loads(config_file.read_text()) | {"max_position_embeddings": 32768}
        config_file.unlink()
        config_file.write_text(json.dumps(settings))
    return made


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("data", "size"), PAPER)
def test_the_papers_settings_are_the_papers(tree, data, size, arm):
    made = config.parse(launched(tree, "paper.sh", data, size, arm))
    made.check()
    expected = EVERYWHERE | PAPER[data, size] | ARMS[arm]
    assert {name: getattr(made, name) for name in expected} == expected
    assert made.output_dir == str(tree / "runs" / f"paper-{data}-{size}-{arm}")


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("data", "size"), PAPER)
def test_a_dry_run_of_the_papers_settings_passes(tree, roomy, data, size, arm, capsys):
    environment = {"MODEL_PATH": str(roomy[arm in ("aqn", "nvfp4")]), "DATASET": "arithmetic"}
    more = ["--dry-run", "--optim", "adamw_torch", "--max-steps", "40"]
    flags = launched(tree, "paper.sh", data, size, arm, *more, **environment)
    assert train.main(flags) == 0
    told = capsys.readouterr().out
    assert ("sigma of the noise by step: 1-4: 0, 5-8: 0.01, 9-12: 0.00717" in told) == (
        arm in ("aqn", "bf16-aqn")
    )


def test_another_kind_of_checkpoint_has_a_run_folder_of_its_own(tree):
    made = config.parse(launched(tree, "paper.sh", "gsm8k", "3b", "aqn", METHOD="awq"))
    assert made.output_dir == str(tree / "runs" / "paper-gsm8k-3b-aqn-awq")


@pytest.mark.parametrize("arm", ["bf16", "nf4"])
def test_an_arm_without_its_own_checkpoint_starts_from_the_16_bit_model(tree, arm):
    made = config.parse(launched(tree, "paper.sh", "bigmath", "32b", arm, MODEL_PATH=""))
    assert made.model_name == "Qwen/Qwen2.5-32B-Instruct"


@pytest.mark.parametrize("words", ["", "gsm8k", "gsm8k 14b aqn", "bigmath 3b aqn", "gsm8k 7b int8"])
def test_what_the_paper_did_not_run_is_refused_with_the_usage(tree, words):
    ended = run(tree / "training" / "paper.sh", *words.split())
    assert ended.returncode == 2
    assert ended.stderr.startswith("bash training/paper.sh gsm8k 3b|7b ARM")


def test_nf4_without_a_gpu_or_its_package_is_refused_in_one_line(tree, smollm2, capsys):
    if torch.cuda.is_available():
        pytest.skip("NOT TESTED: there is a GPU here")
    more = ["--optim", "adamw_torch", "--max-steps", "4"]
    environment = {"MODEL_PATH": str(smollm2), "DATASET": "arithmetic"}
    flags = launched(tree, "paper.sh", "gsm8k", "3b", "nf4", *more, **environment)
    assert train.main(flags) == 2
    assert evaluate.main(["--nf4", "--model", str(smollm2), "--dataset", "arithmetic"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: NF4 needs an NVIDIA GPU and the package") for line in lines)


def test_the_quickstart_runs_programs_with_flags_that_they_know(tree):
    model = tree / "tiny"
    output = tree / "runs" / "quickstart"
    programs = recorded(tree, "quickstart.sh", MODEL=str(model), STEPS="7", SEED="3")
    names = [Path(words[1] if words[0] == "-m" else words[0]).name for words in programs]
    assert names == [
        "quantize_nvfp4.py",
        *("qerl.check", "qerl.evaluate", "qerl.train", "qerl.evaluate", "qerl.report"),
    ]
    for words in programs:
        if words[1] == "qerl.evaluate":
            evaluate._parse(words[2:])
    made = config.parse(programs[3][2:])
    made.check()
    assert (made.max_steps, made.random_state, made.output_dir) == (7, 3, str(output))
    assert made.model_name == str(tree / "models" / "tiny-NVFP4A16-mse")
    assert programs[0][programs[0].index("--method") + 1] == "mse"
    assert json.dumps(programs[4]).count("adapter") == 2  # --adapter <output>/adapter
