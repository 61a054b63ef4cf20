"""Runs of qerl.train.main in this process: real TRL, real vLLM, SmolLM2 in NVFP4, a few steps each.

They share one engine (conftest.py). test_whole_runs.py has the program itself.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from qerl import checkpoint, parity, train
from qerl import trainer as training
from qerl.correction import MODES
from qerl.noise import Noise
from runs import (
    KEYS,
    SMALL,
    WHEN_ASKED_FOR,
    command,
    copied,
    rows,
    trained_adapter,
    without_clocks,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def built(engine, monkeypatch) -> list:
    """Makes train.main sample with the shared engine; the trainers that it builds.

    Without the check of parity, which takes longer than a step: test_parity.py has it, and so do
    those of test_whole_runs.py.
    """
    trainers, build = [], train._build
    monkeypatch.setattr(parity, "check", lambda *a: "not checked")
    monkeypatch.setattr(train, "_engine", lambda config, plan: engine)
    monkeypatch.setattr(train, "_build", lambda *a: trainers.append(build(*a)) or trainers[-1])
    return trainers


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
