"""sigma(step) against the published numbers, over every small schedule, and the noise vectors."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

from qerl import noise
from qerl.noise import SCHEDULES, Noise, Schedule

# shared/method.md, section 2: 1e-2 -> 1e-4 in ten stages, to three digits
PAPER = [0, 1e-2, 5.99e-3, 3.59e-3, 2.15e-3, 1.29e-3, 7.74e-4, 4.64e-4, 2.78e-4, 1.67e-4]
RELEASED = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]
SMALL_STAGES, SMALL_STEPS = range(1, 13), range(1, 41)


def schedule(num_stages=10, steps=100, kind="exponential", start=1e-2, end=1e-4):
    return Schedule(start, end, num_stages, steps, kind)


def stage_sigmas(made: Schedule) -> list[float]:
    return [made.stage_sigma(stage) for stage in range(made.num_stages)]


@pytest.mark.parametrize(("kind", "expected"), [("exponential", PAPER), ("released", RELEASED)])
def test_ten_stages_have_the_published_values(kind, expected):
    shown = [f"{sigma:.2e}" for sigma in stage_sigmas(schedule(kind=kind))]
    assert shown == [f"{sigma:.2e}" for sigma in expected]


@pytest.mark.parametrize(
    ("kind", "middle"),
    [
        ("linear", 0.06),
        ("cosine", 0.06),
        ("logarithmic", 0.11 + (0.01 - 0.11) * math.log(1 + 0.5 * (math.e - 1))),
    ],
)
def test_other_schedules_pass_through_their_middle(kind, middle):
    """Stages 1, 2 and 3 of four: start, halfway along the curve, end."""
    sigmas = stage_sigmas(schedule(num_stages=4, kind=kind, start=0.11, end=0.01))
    assert sigmas == pytest.approx([0, 0.11, middle, 0.01])


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("num_stages", range(1, 13))
def test_every_schedule_starts_without_noise_and_then_falls(kind, num_stages):
    sigmas = stage_sigmas(schedule(num_stages=num_stages, kind=kind))
    noisy = sigmas[1:]
    assert sigmas[0] == 0
    assert all(map(math.isfinite, sigmas))
    assert noisy[:1] == [1e-2][: len(noisy)]
    assert all(before > after for before, after in itertools.pairwise(noisy))
    assert all(sigma >= 1e-4 * (1 - 1e-12) for sigma in noisy)
    if kind != "exponential" and num_stages > 2:
        assert noisy[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_equal_ends_give_constant_noise(kind):
    assert stage_sigmas(schedule(kind=kind, end=1e-2)) == pytest.approx([0] + [1e-2] * 9)


@pytest.mark.parametrize("num_stages", SMALL_STAGES)
def test_stages_are_equal_and_the_last_one_takes_the_rest(num_stages):
    for steps in SMALL_STEPS:
        reached, length = min(num_stages, steps), max(steps // num_stages, 1)
        expected = [stage for stage in range(reached - 1) for _ in range(length)]
        expected += [reached - 1] * (steps - len(expected))
        made = schedule(num_stages, steps)
        assert [made.stage(step) for step in range(1, steps + 1)] == expected, steps


@pytest.mark.parametrize("num_stages", SMALL_STAGES)
def test_the_stage_is_the_papers_formula_while_that_is_a_stage(num_stages):
    """k = floor((step - 1) / floor(M / K)), as long as that is one of 0..K-1."""
    for steps in SMALL_STEPS:
        made, length = schedule(num_stages, steps), steps // num_stages
        for step in range(1, num_stages * length + 1):
            assert made.stage(step) == (step - 1) // length, (steps, step)


def test_sigma_of_a_step_is_that_of_its_stage():
    made = schedule(num_stages=10, steps=25)
    assert [made.sigma(step) for step in (1, 2)] == [0, 0]
    assert [made.sigma(step) for step in (3, 4)] == [1e-2, 1e-2]
    assert made.sigma(19) == made.sigma(25) == made.stage_sigma(9)


@pytest.mark.parametrize("num_stages", SMALL_STAGES)
def test_the_table_of_stages_says_the_sigma_of_every_step(num_stages):
    for steps in SMALL_STEPS:
        made, told = schedule(num_stages, steps), []
        for entry in str(made).split(", "):
            span, sigma = entry.split(": ")
            first, last = map(int, span.split("-"))
            told += [(step, sigma) for step in range(first, last + 1)]
        assert told == [(step, f"{made.sigma(step):.3g}") for step in range(1, steps + 1)]


def test_the_table_of_stages_is_compact():
    assert str(schedule(num_stages=3, steps=8)) == "1-2: 0, 3-4: 0.01, 5-8: 0.001"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "constant"}, "unknown noise schedule 'constant'"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"steps": 0}, "steps=0"),
        ({"end": 0.0}, "0 < sigma_end"),
        ({"end": -1e-4}, "0 < sigma_end"),
        ({"end": 2e-2}, "sigma_end <= sigma_start"),
        ({"end": math.nan}, "sigma_end=nan"),
        ({"start": math.nan}, "sigma_start=nan"),
    ],
)
def test_a_schedule_that_does_not_decay_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        schedule(**changes)


@pytest.mark.parametrize("step", [0, -1])
def test_steps_are_counted_from_1(step):
    with pytest.raises(ValueError, match="counted from 1"):
        schedule().sigma(step)


def test_a_vector_is_a_function_of_seed_step_and_name():
    first = Noise(3407, 7, 1e-2).vector("layers.0.input_layernorm", 64)
    torch.manual_seed(1)  # whatever else has been drawn
    torch.randn(3)
    assert torch.equal(first, Noise(3407, 7, 1e-2).vector("layers.0.input_layernorm", 64))
    others = [
        Noise(3408, 7, 1e-2).vector("layers.0.input_layernorm", 64),
        Noise(3407, 8, 1e-2).vector("layers.0.input_layernorm", 64),
        Noise(3407, 7, 1e-2).vector("layers.1.input_layernorm", 64),
    ]
    for other in others:
        assert (other - first).abs().min() > 0
        assert torch.corrcoef(torch.stack([first, other]))[0, 1].abs() < 0.5


def test_sigma_only_scales_a_vector():
    small, large = Noise(1, 2, 1e-4).vector("n", 64), Noise(1, 2, 1e-2).vector("n", 64)
    torch.testing.assert_close(small * 100, large)
    assert not Noise(1, 2, 0.0).vector("n", 64).any()


def test_drawing_a_vector_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    Noise(1, 2, 1e-2).vector("n", 64)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_a_vector_is_gaussian_with_the_asked_for_deviation(sigma):
    drawn = Noise(1, 2, sigma).vector("n", 200_000)
    assert drawn.dtype == torch.float32
    assert drawn.std().item() == pytest.approx(sigma, rel=0.01)
    assert abs(drawn.mean().item()) < 0.01 * sigma
    within = (drawn.abs() < sigma).float().mean().item()
    assert within == pytest.approx(0.6827, abs=0.005)


def test_another_process_draws_the_same_noise_and_the_command_prints_it():
    name, of = "model.layers.0.mlp.down_proj", "--steps 100 --step 37 --random-state 7 --size 96"
    told = subprocess.run(
        [sys.executable, "-m", "qerl.noise", *of.split(), "--name", name],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    sigma = schedule().sigma(37)
    drawn = Noise(7, 37, sigma).vector(name, 96)
    assert told[0] == f"step 37: sigma {sigma:.6g}"
    values, std = told[1].removeprefix(f"{name}: ").split(" ... std ")
    assert torch.equal(torch.tensor([float(v) for v in values.split()]), drawn[:4])  # to the bit
    assert float(std) == pytest.approx(drawn.std(correction=0).item(), rel=1e-5)


def test_without_a_step_the_command_prints_the_schedule(capsys):
    noise.main("--steps 25 --sigma-end 5e-4 --num-stages 5 --noise-schedule released".split())
    made = schedule(num_stages=5, steps=25, kind="released", end=5e-4)
    assert capsys.readouterr().out == f"{made}\n"


@pytest.mark.parametrize("flags", ["--steps 0", "--steps 9 --step 0", "--steps 9 --sigma-end 1"])
def test_the_command_refuses_what_is_no_schedule(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        noise.main(flags.split())
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_the_spans_of_the_stages_are_the_steps_that_have_them():
    """All small schedules; and one of many steps is told at once."""
    for stages in range(1, 8):
        for steps in range(1, 40):
            schedule = Schedule(1e-2, 1e-4, stages, steps)
            spans = schedule.spans()
            assert [step for span in spans for step in span] == list(range(1, steps + 1))
            assert all({schedule.stage(step) for step in s} == {i} for i, s in enumerate(spans))
    assert str(Schedule(1e-2, 1e-4, 2, 10**12)).startswith("1-500000000000: 0, 500000000001-")
