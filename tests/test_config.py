"""Each setting that cannot work is refused with the way out, before any weight is loaded."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl import train
from qerl.config import TrainConfig, parse
from qerl.noise import Schedule
from qerl.run_folder import FREE_ON_RESUME, check_output_dir, make_output_dir, write_json

FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
BOOLS = [name for name, field in FIELDS.items() if isinstance(field.default, bool)]
FLOATS = [name for name, field in FIELDS.items() if isinstance(field.default, float)]
NUMBERS = FLOATS + [name for name, field in FIELDS.items() if type(field.default) is int]
# shared/method.md, section 3: the flags that a user of the original trainer knows
RELEASED = """
dataset model-name output-dir use-vllm learning-rate adam-beta1 adam-beta2 weight-decay warmup-ratio
lr-scheduler-type optim logging-steps per-device-train-batch-size gradient-accumulation-steps
num-generations max-prompt-length max-completion-length num-train-epochs save-steps save-strategy
save-total-limit max-grad-norm max-seq-length lora-rank lora-alpha vllm-gpu-memory-utilization
random-state loss-type beta epsilon-high num-iterations mask-truncated-completions run-name ln
sigma-start sigma-end num-stages
""".split()


def prepare_output_dir(config: TrainConfig) -> bool:
    """What qerl.train does before it loads weights."""
    continued = check_output_dir(config)
    make_output_dir(config)
    return continued


def kebab(name: str) -> str:
    return name.replace("_", "-")


def parsed(*flags: str, output_dir: str = "o") -> TrainConfig:
    return parse(["--model-name", "m", "--output-dir", str(output_dir), *flags])


# --- rules


def test_the_defaults_pass():
    parsed().check()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model-name=", "--model-name is missing"),
        ("--output-dir=", "--output-dir is missing"),
        ("--num-generations 1", "a group needs at least 2"),
        ("--num-generations 3", "--num-generations 3 does not divide the batch of 2"),
        ("--num-generations 4 --gradient-accumulation-steps 3", "the batch of 6 completions"),
        ("--per-device-train-batch-size 0", "--per-device-train-batch-size 0: expected at least 1"),
        ("--gradient-accumulation-steps 0", "--gradient-accumulation-steps 0"),
        ("--num-iterations 0", "--num-iterations 0"),
        ("--max-prompt-length 0", "--max-prompt-length 0"),
        ("--max-completion-length 0", "--max-completion-length 0"),
        ("--lora-rank 0", "--lora-rank 0"),
        ("--lora-rank 513", "vLLM's largest adapter slot is 512"),
        ("--learning-rate inf", "--learning-rate inf: expected a finite number"),
        ("--num-train-epochs inf", "expected a finite number"),
        ("--sigma-start nan", "expected a finite number"),
        ("--num-stages 0", "--num-stages 0"),
        ("--num-stages 1", "is the stage without noise alone: take 2 or more, or --no-ln"),
        ("--parity-limit 0", "--parity-limit 0.0: expected more than 0"),
        ("--save-steps 0", "--save-steps 0"),
        ("--save-total-limit 0", "--save-total-limit 0"),
        ("--learning-rate 0", "--learning-rate 0.0: expected more than 0"),
        ("--temperature 0", "--temperature 0.0"),
        ("--num-train-epochs 0", "--num-train-epochs 0.0"),
        ("--lora-alpha 0", "--lora-alpha 0.0"),
        ("--epsilon 0", "--epsilon 0.0"),
        ("--epsilon 0.3", "--epsilon-high 0.28 is below --epsilon 0.3"),
        ("--vllm-gpu-memory-utilization 30", "between 0 and 1, such as 0.3"),
        ("--vllm-gpu-memory-utilization 1", "between 0 and 1, such as 0.3"),
        ("--warmup-ratio 1", "--warmup-ratio 1.0: expected 0 to 1"),
        ("--max-seq-length 2303", "shorter than prompt + completion (2304 tokens)"),
        ("--sampler-correction-cap 0.9", "--sampler-correction-cap 0.9: expected at least 1"),
        ("--sigma-end 0", "0 < sigma_end <= sigma_start"),
        ("--sigma-end 0.1", "0 < sigma_end <= sigma_start"),
        ("--use-vllm False", "add --no-ln"),
        ("--use-vllm False --ln False", "add --sampler-correction none"),
        ("--adam-beta1 1", "--adam-beta1 1.0"),
        ("--random-state 4294967296", "--random-state 4294967296"),
        ("--overlong-buffer 2049", "is longer than --max-completion-length 2048"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_the_way_out(flags, words):
    with pytest.raises(ValueError) as refused:
        parsed(*flags.split()).check()
    assert words in str(refused.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_may_be_negative(name):
    config = dataclasses.replace(parsed(), **{name: type(FIELDS[name].default)(-1)})
    with pytest.raises(ValueError, match=f"{kebab(name)} -1|{name}=-1"):
        config.check()


@pytest.mark.parametrize("name", FLOATS)
def test_no_number_may_be_nan(name):
    config = dataclasses.replace(parsed(), **{name: math.nan})
    with pytest.raises(ValueError, match=f"{kebab(name)} nan|{name}=nan"):
        config.check()


@pytest.mark.parametrize(
    "flags",
    [
        "--max-seq-length 2304",
        "--ln False --sigma-end 0",
        "--sigma-start 0 --sigma-end 0",
        "--use-vllm False --ln False --sampler-correction none",
        "--num-stages 2",
        "--num-stages 1 --no-ln",
        "--max-grad-norm 0 --beta 0 --warmup-ratio 0 --weight-decay 0 --logging-steps 0",
        "--num-generations 4 --gradient-accumulation-steps 2",
        "--overlong-buffer 2048 --dynamic-sampling 1",
    ],
)
def test_a_setting_at_its_limit_passes(flags):
    parsed(*flags.split()).check()


def test_steps_come_from_epochs_prompts_and_iterations():
    config = parsed("--per-device-train-batch-size", "8", "--num-generations", "4")
    assert config.prompts_per_step == 2
    assert config.steps(75) == 37
    assert dataclasses.replace(config, num_train_epochs=2.0).steps(75) == 75
    assert dataclasses.replace(config, num_iterations=3).steps(75) == 111
    assert dataclasses.replace(config, max_steps=5, num_iterations=3).steps(75) == 5
    with pytest.raises(ValueError, match="1 prompts x 1.0 epochs do not fill one step of 2"):
        config.steps(1)


def test_without_ln_or_sigma_there_is_no_schedule():
    assert parsed("--no-ln").schedule(10) is None
    assert parsed("--sigma-start", "0").schedule(10) is None
    assert parsed().schedule(100).sigma(11) == 1e-2


@pytest.mark.parametrize("iterations", range(1, 5))
@pytest.mark.parametrize("stages", range(2, 7))
def test_the_stages_that_a_short_run_never_reaches_are_counted(stages, iterations):
    """Noise enters at rollouts: every stage must have one, and a long enough run always does."""
    config = dataclasses.replace(parsed(), num_stages=stages, num_iterations=iterations)
    for steps in range(1, 30):
        stage_of = Schedule(1e-2, 1e-4, stages, steps).stage
        missed = set(range(stages)) - {stage_of(s) for s in range(1, steps + 1, iterations)}
        assert config.stages_left_out(steps) == len(missed)
        assert not missed or steps < stages * iterations
    assert dataclasses.replace(config, ln=False).stages_left_out(1) == 0


# --- the command line


def test_every_flag_of_the_released_trainer_is_known():
    assert {name.replace("-", "_") for name in RELEASED} <= set(FIELDS)


def test_the_command_line_gives_the_defaults():
    assert parse([]) == TrainConfig()


@pytest.mark.parametrize("name", BOOLS)
def test_a_switch_has_three_forms(name):
    flag = kebab(name)
    for on in ([f"--{flag}"], [f"--{flag}", "True"], [f"--{flag}", "yes"], [f"--{flag}=1"]):
        assert getattr(parse(on), name) is True, on
    for off in ([f"--no-{flag}"], [f"--{flag}", "False"], [f"--{flag}", "no"], [f"--{flag}=0"]):
        assert getattr(parse(off), name) is False, off


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-such-flag", "1"],
        ["--learning-rte", "1e-5"],
        ["--ln", "maybe"],
        ["--lora-rank", "many"],
        ["--lora-rank", "1.5"],
        ["--precision", "int8"],
        ["--noise-schedule", "constant"],
        ["--loss-type", "ppo"],
        ["--sampler-correction", "all"],
        ["--optim", "adamw_torsh"],
        ["--optim", "galore_adamw"],
        ["--optim", "lomo"],
        ["--lr-scheduler-type", "cosin"],
        ["--lr-scheduler-type", "cosine_with_min_lr"],
        ["--lr-scheduler-type", "reduce_lr_on_plateau"],
    ],
)
def test_a_flag_or_value_that_is_not_known_ends_with_status_2(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--top-p", "--top-k", "--min-p"])
def test_sampling_from_a_part_of_the_distribution_is_refused_with_the_reason(flag, capsys):
    """faults.md, 7: the sampler's log-probabilities would not be the trainer's."""
    for form in ([flag, "0.9"], [f"{flag}=0.9"]):
        with pytest.raises(SystemExit) as ended:
            parse(form)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"{flag} is not offered: training samples from the whole distribution" in said


def test_an_abbreviated_flag_is_not_guessed():
    """--max-s could become another flag as soon as one more begins so."""
    with pytest.raises(SystemExit):
        parse(["--max-st", "3"])


def test_help_shows_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for name, field in FIELDS.items():
        assert f"--{kebab(name)} " in shown
        assert f"(default: {field.default!r})" in shown


# --- the run folder


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


def test_a_run_of_several_processes_is_refused(monkeypatch):
    """The second would find the run folder held by the first, or wait for it for ever."""
    train._check_machine(parsed("--optim", "adamw_torch"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE 2: a run is one process on one GPU"):
        train._check_machine(parsed("--optim", "adamw_torch"))


# --- the whole program, before any weight is loaded

MISTAKES = {
    "model folder": (["--model-name", "./absent"], "there is no folder"),
    "model id": (["--model-name", "qerl-tests/absent"], "the hub did not give it"),
    "16-bit under nvfp4": (["--model-name", "{bf16}"], "quantize_nvfp4.py --model"),
    "nvfp4 under bf16": (["--precision", "bf16"], "16-bit weights are needed"),
    "folder without weights": (["--model-name", "{empty}"], "config.json"),
    "no chat template": (["--model-name", "{no_template}"], "has no chat template"),
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
    made["other_run"] = saved(base / "other_run")
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
    for name in FIELDS:
        assert f"--{kebab(name)} " in out
    assert not folders["new"].exists()


def test_a_run_too_short_for_its_noise_is_told_so_and_goes_on(programs):
    status, out, _ = programs[0]["short dry run"]
    assert status == 0 and "WARNING: 1 of --num-stages 10 never come in 9 steps" in out
    assert "WARNING" not in programs[0]["dry run"][1]


def test_no_mistake_costs_the_loading_of_an_engine_or_a_model(programs):
    assert programs[1] == []
