"""Whole runs of qerl.train: real TRL, real vLLM, SmolLM2 in NVFP4, a few steps each.

Two runs are programs of their own, one of them killed and started again. The others go through
qerl.train.main in this process and share one engine (conftest.py).
"""

from __future__ import annotations

import gc
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
from safetensors.torch import load_file
from trl import GRPOTrainer

from qerl import checkpoint, parity, train
from qerl import trainer as training
from qerl.correction import MODES
from qerl.noise import Noise

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
# shared/design.md, contracts, and what has come since
KEYS = """
step loss reward reward_std entropy learning_rate grad_norm sigma noise_std noise_modules
logp_gap_mean logp_gap_max sampler_kl ratio_mean ratio_max effective_sample_share capped_fraction
clip_ratio_low clip_ratio_high completion_length truncated_fraction zero_variance_fraction
sampling_rounds resampled_groups loss_tokens signal_tokens tokens_per_s time_rollout_s
time_reward_s time_train_s time_sync_s peak_memory_gib kl overlong_punishment alarms
""".split()
WHEN_ASKED_FOR = ["kl", "overlong_punishment"]  # null otherwise
REPEATED = [k for k in KEYS if not k.startswith(("time", "tokens_per_s", "peak"))]
FLAGS = """
--dataset arithmetic --reward digit_reward:digits --max-steps 4 --save-steps 2 --save-total-limit 9
--per-device-train-batch-size 8 --num-generations 4 --max-prompt-length 64
--max-completion-length 12 --mask-truncated-completions False --learning-rate 1e-3
--warmup-ratio 0 --optim adamw_torch --gradient-checkpointing False --num-stages 4
""".split()


SMALL = ["--per-device-train-batch-size", "4"]  # one prompt: for what one group can show


def command(model: Path, run: Path, *flags: str) -> list[str]:
    return ["--model-name", str(model), "--output-dir", str(run), *FLAGS, *flags]


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


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def without_clocks(run: Path) -> list[dict]:
    return [{key: row[key] for key in REPEATED} for row in rows(run)]


def trained_adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


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
    assert said["versions"]["torch"] == torch.__version__.split("+")[0] or torch.__version__
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


# --- in this process, with the shared engine


@pytest.fixture
def built(engine, monkeypatch) -> list:
    """Makes train.main sample with the shared engine; the trainers that it builds.

    Without the check of parity, which takes longer than a step: test_parity.py has it, and so do
    the runs above.
    """
    trainers, build = [], train._build
    monkeypatch.setattr(parity, "check", lambda *a: "not checked")
    monkeypatch.setattr(train, "_engine", lambda config, plan: engine)
    monkeypatch.setattr(train, "_build", lambda *a: trainers.append(build(*a)) or trainers[-1])
    return trainers


def copied(whole: Path, folder: Path, *without: str) -> Path:
    """A copy of a run folder that lacks what `without` names."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*without))
    return folder


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


def test_training_changes_the_adapter_and_nothing_else(built, engine, smollm2_nvfp4, tmp_path):
    tokens = [[1, 34, 216, 1232, 504, 3575]]
    clean = engine.score(tokens)
    flags = ["--max-steps", "2", "--num-stages", "2", *SMALL]
    flags = command(smollm2_nvfp4, tmp_path / "run", *flags)
    assert train.main(flags) == 0
    trained = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): parameter
        for name, parameter in built[0].model.named_parameters()
    }
    for name, stored in checkpoint.tensors(smollm2_nvfp4):
        assert torch.equal(trained.pop(name).view(torch.uint8), stored.view(torch.uint8)), name
    assert trained and all(".lora_" in name for name in trained)
    engine.sync(None)
    assert engine.score(tokens) == clean


def test_a_save_that_fails_leaves_the_checkpoint_before_it(
    built, smollm2_nvfp4, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    flags = ["--max-steps", "3", "--num-stages", "3", "--save-steps", "1", *SMALL]
    flags = command(smollm2_nvfp4, run, *flags)
    save = training.QeRLTrainer._save_rng_state

    def full_disk(trainer, folder):
        if trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")
        save(trainer, folder)

    with monkeypatch.context() as patched:
        patched.setattr(training.QeRLTrainer, "_save_rng_state", full_disk)
        with pytest.raises(OSError, match="No space left"):
            train.main(flags)
    assert not (run / "checkpoint-2").exists()
    assert train.main(flags) == 0
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert built[-1].state.global_step == 3


def test_two_updates_a_rollout_work_and_are_continued_in_mid_cycle(
    built, smollm2_nvfp4, tmp_path, capsys
):
    flags = ["--num-iterations", "2", "--save-steps", "1", "--num-stages", "2", *SMALL]
    run = tmp_path / "run"
    assert train.main(command(smollm2_nvfp4, run, *flags)) == 0
    first, second, third, fourth = rows(run)
    for one, other in ((first, second), (third, fourth)):  # one rollout, two updates
        assert one["reward"] == other["reward"] and one["sigma"] == other["sigma"]
        assert one["grad_norm"] > 0 and other["grad_norm"] > 0
    assert (first["sigma"], third["sigma"]) == (0, 1e-2)
    assert first["logp_gap_mean"] < 0.05 < third["logp_gap_mean"]
    # Stopped between the two updates: step 2 has to sample anew, steps 3 and 4 share theirs again.
    again = copied(run, tmp_path / "again", "adapter", "checkpoint-[234]")
    assert train.main(command(smollm2_nvfp4, again, *flags)) == 0
    assert f"continuing from {again / 'checkpoint-1'}" in capsys.readouterr().out
    assert without_clocks(again)[0] == without_clocks(run)[0]
    for key in ("step", "sigma", "learning_rate"):
        assert [row[key] for row in rows(again)] == [row[key] for row in rows(run)]
    assert rows(again)[2]["reward"] == rows(again)[3]["reward"]
    prompts = [[sample["prompt"] for sample in rows(r, "samples.jsonl")] for r in (run, again)]
    assert prompts[0] == prompts[1]


def test_an_odd_number_of_steps_takes_one_more_rollout(built, smollm2_nvfp4, tmp_path):
    flags = ["--num-iterations", "2", "--max-steps", "1", "--save-strategy", "no", "--no-ln"]
    assert train.main(command(smollm2_nvfp4, tmp_path / "run", *flags, *SMALL)) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]


def one_step(model: Path, run: Path, *flags: str) -> dict:
    """metrics.jsonl's line of a run of one step, which is too short for noise."""
    flags = ["--max-steps", "1", "--no-ln", "--save-strategy", "no", *SMALL, *flags]
    assert train.main(command(model, run, *flags)) == 0
    [row] = rows(run)
    return row


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_gradient_accumulation_does_not_change_the_update(
    built, smollm2_nvfp4, tmp_path, loss_type
):
    flags = ["--loss-type", loss_type, "--per-device-train-batch-size", "8"]
    at_once = one_step(smollm2_nvfp4, tmp_path / "at once", *flags)
    flags += ["--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "4"]
    in_parts = one_step(smollm2_nvfp4, tmp_path / "in parts", *flags)
    for key in ("reward", "completion_length", "learning_rate"):
        assert in_parts[key] == at_once[key]
    for key, within in (("grad_norm", 0.03), ("entropy", 0.03), ("logp_gap_mean", 0.1)):
        assert in_parts[key] == pytest.approx(at_once[key], rel=within), key


@pytest.mark.parametrize("more", [[], ["--num-iterations", "2"]])  # our loss, and TRL's own
def test_a_batch_of_truncated_completions_is_a_step_of_nothing(
    built, smollm2_nvfp4, tmp_path, capsys, more
):
    flags = ["--mask-truncated-completions", "True", "--max-completion-length", "2", *more]
    row = one_step(smollm2_nvfp4, tmp_path / "run", *flags)
    assert (row["truncated_fraction"], row["loss"], row["grad_norm"]) == (1, 0, 0)
    # no token in the loss: not "no entropy", nor "nothing clipped"
    empty = [key for key in KEYS if row[key] is None]
    assert set(empty) == {*training.TOKEN_METRICS, *WHEN_ASKED_FOR}
    assert row["alarms"] == ["no_tokens"]
    said = capsys.readouterr().out
    assert said.count("every completion was cut off at --max-completion-length") == 1
    assert "with --mask-truncated-completions False" in said and "entropy -" in said
    unmoved = [t for n, t in trained_adapter(tmp_path / "run").items() if ".lora_B." in n]
    assert not any(tensor.any() for tensor in unmoved)


def test_a_reward_that_gives_nothing_is_null_and_teaches_nothing(built, smollm2_nvfp4, tmp_path):
    run = tmp_path / "run"
    row = one_step(smollm2_nvfp4, run, "--reward", "digit_reward:nothing")
    assert (row["reward"], row["reward_std"], row["grad_norm"]) == (None, None, 0)
    assert {sample["reward"] for sample in rows(run, "samples.jsonl")} == {None}
    assert "NaN" not in (run / "samples.jsonl").read_text()


def test_groups_without_variance_are_reported_and_teach_nothing(built, smollm2_nvfp4, tmp_path):
    row = one_step(smollm2_nvfp4, tmp_path / "run", "--reward", "digit_reward:constant")
    assert (row["reward"], row["reward_std"], row["zero_variance_fraction"]) == (1, 0, 1)
    assert row["grad_norm"] == 0


def test_sampling_with_transformers_works_without_an_engine(built, smollm2_nvfp4, tmp_path):
    flags = "--use-vllm False --ln False --sampler-correction none".split()
    row = one_step(smollm2_nvfp4, tmp_path / "run", *flags)
    assert (row["sigma"], row["noise_modules"], row["logp_gap_mean"]) == (0, 0, None)
    assert row["grad_norm"] > 0


def test_without_correction_the_step_is_taken_and_the_gap_still_reported(
    built, smollm2_nvfp4, tmp_path
):
    row = one_step(smollm2_nvfp4, tmp_path / "run", "--sampler-correction", "none")
    assert 0 < row["logp_gap_mean"] < 0.08 and row["grad_norm"] > 0


def test_a_policy_that_does_not_move_keeps_its_ratio_at_1(built, smollm2_nvfp4, tmp_path):
    """As good as no learning rate and no noise: what is left is the gap of bf16 arithmetic."""
    flags = ["--learning-rate", "1e-30", "--no-ln", "--max-steps", "3", "--save-strategy", "no"]
    assert train.main(command(smollm2_nvfp4, tmp_path / "run", *flags, *SMALL)) == 0
    for row in rows(tmp_path / "run"):
        assert row["ratio_mean"] == pytest.approx(1, abs=0.03) and row["sampler_kl"] < 0.01
        assert row["effective_sample_share"] > 0.98 and row["capped_fraction"] == 0
        assert (row["clip_ratio_low"], row["clip_ratio_high"]) == (0, 0)
        assert row["grad_norm"] > 0 and row["alarms"] == []
    tensors = trained_adapter(tmp_path / "run")
    assert max(t.abs().max() for name, t in tensors.items() if ".lora_B." in name) < 1e-28


@pytest.mark.parametrize("temperature", ["0.5", "1.6"])
def test_sampler_and_trainer_agree_at_the_temperature(built, smollm2_nvfp4, tmp_path, temperature):
    """faults.md, 7."""
    row = one_step(smollm2_nvfp4, tmp_path / "run", "--temperature", temperature)
    assert 0 < row["logp_gap_mean"] < 0.08 and row["effective_sample_share"] > 0.95


def test_the_bf16_control_takes_the_same_path(smollm2, tmp_path):
    row = one_step(smollm2, tmp_path / "run", "--precision", "bf16")
    assert sorted(row) == sorted(KEYS)
    assert 0 < row["logp_gap_mean"] < 0.08 and row["grad_norm"] > 0


def test_two_policies_end_the_program_with_one_line(engine, smollm2_nvfp4, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_engine", lambda config, plan: engine)
    flags = ["--max-steps", "1", "--no-ln", "--parity-limit", "1e-6"]
    with pytest.raises(SystemExit) as ended:
        train.main(command(smollm2_nvfp4, tmp_path / "run", *flags))
    said = str(ended.value)  # which Python prints, with status 1
    assert said.startswith("error: sampler and trainer are not the same policy: mean gap 0.0")
    assert "(expected below 1e-06)" in said and "raise --parity-limit" in said
    assert "\n" not in said and not (tmp_path / "run" / "metrics.jsonl").exists()


# --- the correction in the loss


@pytest.fixture
def batch(built, engine, smollm2_nvfp4, tmp_path):
    """A trainer and inputs sampled under strong noise, with TRL's own weights among them."""
    config = train.settings.parse(command(smollm2_nvfp4, tmp_path / "run"))
    trainer = train._build(config, train._plan(config), engine)
    trainer.current_gradient_accumulation_steps = 1
    trainer.vllm_generation._noise = lambda: Noise(1, 1, 0.03)
    trainer.model.train()
    # as TRL would have them before the update
    trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_clip_max = config.sampler_correction_cap
    return trainer, [trainer.train_dataset[0]] * 4


def gradient(trainer, compute, inputs) -> tuple[float, torch.Tensor]:
    """The loss, and its gradient in all of lora_B."""
    trainer.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = compute(trainer.model, inputs)
    loss.backward()
    named = trainer.model.named_parameters()
    return loss.item(), torch.cat([p.grad.flatten() for n, p in named if ".lora_B." in n])


def test_our_weights_are_trls_without_its_extra_forward_pass(batch):
    trainer, prompts = batch
    for mode in MODES[1:]:
        trainer.vllm_importance_sampling_mode = trainer._correction = mode
        inputs = trainer._generate_and_score_completions(prompts)
        theirs = gradient(trainer, lambda *a: GRPOTrainer._compute_loss(trainer, *a), inputs)
        own = ("old_per_token_logps", "importance_sampling_ratio")
        ours = {key: value for key, value in inputs.items() if key not in own}
        trainer.vllm_importance_sampling_correction = False  # as QeRLTrainer leaves it
        plain = gradient(trainer, lambda *a: GRPOTrainer._compute_loss(trainer, *a), ours)
        fused = gradient(trainer, trainer._compute_loss, ours)
        trainer.vllm_importance_sampling_correction = True
        assert fused[0] == pytest.approx(theirs[0], rel=0.02, abs=2e-3), mode
        assert (fused[1] - theirs[1]).norm() < 0.05 * theirs[1].norm(), mode
        assert (plain[1] - theirs[1]).norm() > 0.1 * theirs[1].norm(), mode


def test_the_collector_looks_at_nothing_from_before_the_training(monkeypatch):
    seen = []
    monkeypatch.setattr(
        GRPOTrainer, "train", lambda self: seen.append(gc.get_freeze_count()), raising=False
    )
    training.QeRLTrainer.train(object.__new__(training.QeRLTrainer))
    assert seen[0] > 10_000
    assert gc.get_freeze_count() == 0  # what a run leaves behind can be collected
