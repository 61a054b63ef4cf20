"""Each setting that cannot work is refused with the way out, and every flag is what --help says."""

from __future__ import annotations

import dataclasses
import math

import pytest

from qerl.config import TrainConfig, parse
from qerl.noise import Schedule

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


def kebab(name: str) -> str:
    return name.replace("_", "-")


def parsed(*flags: str) -> TrainConfig:
    return parse(["--model-name", "m", "--output-dir", "o", *flags])


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
        ("--warmup-ratio 1", "--warmup-ratio 1.0: expected at least 0 and below 1"),
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
