"""Whole runs of qerl.train on a random model of two layers that says what a script tells it to."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import scripted
from qerl import run_folder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scripted.folder(tmp_path_factory.mktemp("models") / "tiny")


def varied(call: int, row: int) -> str:
    return "1" * (row % 2)


def dull_at_first(call: int, row: int) -> str:
    """Prompt 0 earns 0.2 and 0, prompt 1 the same 0.3 twice; new prompts earn as prompt 0."""
    return "333" if call == 0 and row >= 2 else "22" * (row % 2)


def test_a_dull_group_is_sampled_again_with_a_new_prompt(model, tmp_path, monkeypatch):
    engine = scripted.Engine(dull_at_first)
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, "--dynamic-sampling", "3")
    (row,) = scripted.rows(tmp_path)
    assert (row["sampling_rounds"], row["resampled_groups"]) == (2, 1)
    assert row["zero_variance_fraction"] == 0 and row["alarms"] == []
    first, second = engine.prompts
    assert len(set(first)) == 2 and len(second) == 2 and set(second).isdisjoint(first)
    assert len(set(engine.seeds)) == 2
    taught = sum((list(rows["completion_ids"]) for rows in trainer._buffered_inputs), [])
    words = scripted.tokenizer()
    assert sorted(words.decode(ids, skip_special_tokens=True) for ids in taught) == [
        "", "", "22", "22",
    ]  # fmt: skip
    assert row["loss_tokens"] == row["signal_tokens"] == 1 + 1 + 3 + 3
    assert row["reward"] == pytest.approx((0.2 + 0 + 0.3 + 0.3) / 4)  # the first round's
    assert row["completion_length"] == (1 + 3 + 4 + 4) / 4


def test_what_dynamic_sampling_draws_is_a_function_of_the_step(model, tmp_path, monkeypatch):
    def asked(run):
        engine = scripted.Engine(lambda call, row: "1")
        flags = ["--dynamic-sampling", "2", "--max-steps", "2"]
        scripted.run(monkeypatch, model, tmp_path / run, engine, *flags)
        return engine.prompts, engine.seeds

    (prompts, seeds), again = asked("one"), asked("two")
    assert (prompts, seeds) == again
    assert len(set(map(tuple, prompts))) == len(set(seeds)) == 2 * 3


@pytest.mark.parametrize(
    "flags", [["--max-steps", "2", "--dynamic-sampling", "1"], ["--num-iterations", "2"]]
)
def test_a_run_killed_before_its_adapter_was_written_does_no_step_more(
    model, tmp_path, monkeypatch, flags
):
    """The rows go on after its last step: prompts to draw from, or the rest of a rollout."""

    def weights():
        more = [*flags, "--save-strategy", "steps"]
        trainer = scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *more)
        return trainer.state.max_steps, load_file(tmp_path / "adapter/adapter_model.safetensors")

    steps, whole = weights()
    shutil.rmtree(tmp_path / "adapter")
    _, continued = weights()
    assert [row["step"] for row in scripted.rows(tmp_path)] == list(range(1, steps + 1))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_without_success_the_rounds_end_and_the_rest_is_reported(model, tmp_path, monkeypatch):
    engine = scripted.Engine(lambda call, row: "333")
    scripted.run(monkeypatch, model, tmp_path, engine, "--dynamic-sampling", "3")
    (row,) = scripted.rows(tmp_path)
    assert (row["sampling_rounds"], row["resampled_groups"], engine.calls) == (4, 6, 4)
    assert row["zero_variance_fraction"] == 1 and row["alarms"] == ["no_signal"]


def test_without_the_flag_nothing_is_sampled_again(model, tmp_path, monkeypatch):
    engine = scripted.Engine(dull_at_first)
    scripted.run(monkeypatch, model, tmp_path, engine)
    (row,) = scripted.rows(tmp_path)
    assert (row["sampling_rounds"], row["resampled_groups"], engine.calls) == (1, 0, 1)
    assert row["zero_variance_fraction"] == 0.5
    assert (row["loss_tokens"], row["signal_tokens"]) == (1 + 3 + 4 + 4, 1 + 3)


def test_a_group_without_variance_moves_nothing(model, tmp_path, monkeypatch):
    """faults.md, 10. In TRL eight rewards of 0.3 have an advantage of 3e-4, and Adam takes it."""
    engine = scripted.Engine(lambda call, row: "333")
    flags = ["--per-device-train-batch-size", "8", "--num-generations", "8", "--weight-decay", "0"]
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, *flags)
    (row,) = scripted.rows(tmp_path)
    assert (row["zero_variance_fraction"], row["grad_norm"]) == (1, 0)
    assert {sample["advantage"] for sample in scripted.rows(tmp_path, "samples.jsonl")} == {0}
    moved = [n for n, p in scripted.factors(trainer.model).items() if ".lora_B." in n and p.any()]
    assert not moved


def test_the_punishment_for_length_teaches_and_is_logged_apart(model, tmp_path, monkeypatch):
    """8 tokens at most and a buffer of 4: 7 tokens with their end cost 3/4, 3 tokens nothing."""
    engine = scripted.Engine(lambda call, row: "11xxxx" if row % 2 else "11")
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, "--overlong-buffer", "4")
    (row,) = scripted.rows(tmp_path)
    assert row["overlong_punishment"] == pytest.approx(-0.75 / 2)
    assert (row["reward"], row["reward_std"]) == (pytest.approx(0.2), pytest.approx(0, abs=1e-6))
    assert row["zero_variance_fraction"] == 0 and row["grad_norm"] > 0
    samples = scripted.rows(tmp_path, "samples.jsonl")
    assert [sample["reward"] for sample in samples] == pytest.approx([0.2] * 4)
    short, long = samples[0]["advantage"], samples[1]["advantage"]
    assert short == pytest.approx(-long) and short > 0.5
    assert trainer.reward_func_names == ["digits", "overlong_punishment"]


def test_no_verdict_is_still_none_under_a_punishment(model, tmp_path, monkeypatch):
    engine = scripted.Engine(lambda call, row: "1" * (3 + 4 * (row % 2)))
    flags = ["--overlong-buffer", "4", "--reward", "digit_reward:nothing"]
    scripted.run(monkeypatch, model, tmp_path, engine, *flags)
    (row,) = scripted.rows(tmp_path)
    assert (row["reward"], row["overlong_punishment"], row["grad_norm"]) == (None, None, 0)


def test_an_infinite_reward_ends_the_run_and_is_named(model, tmp_path, monkeypatch):
    """It left a group with advantages of NaN, which was told as one that earned the same."""
    with pytest.raises(ValueError, match="the reward endless is infinite"):
        flags = ["--reward", "digit_reward:endless"]
        scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *flags)


def test_the_kl_to_the_base_model_is_there_when_asked_for(model, tmp_path, monkeypatch):
    flags = ["--max-steps", "3", "--max-grad-norm", "0", "--learning-rate", "1e-2"]
    kls = {}
    for beta in ("0", "0.1"):
        output = tmp_path / beta
        scripted.run(monkeypatch, model, output, scripted.Engine(varied), *flags, "--beta", beta)
        kls[beta] = [row["kl"] for row in scripted.rows(output)]
        assert not (output / "adapter" / "ref").exists()
    assert kls["0"] == [None] * 3
    assert kls["0.1"][0] == pytest.approx(0, abs=1e-6) and kls["0.1"][2] > 1e-4


@pytest.mark.parametrize("iterations", ["1", "2"])
def test_the_ratios_are_those_of_sampler_and_trainer(model, tmp_path, monkeypatch, iterations):
    """One row of four is 1.5 nats more likely to the sampler than to the trainer."""
    for gap, capped in ((1.5, 0), (-1.5, 0.25)):
        engine = scripted.Engine(lambda call, row: "12" if row % 2 else "xy", gap)
        output = tmp_path / str(gap)
        scripted.run(monkeypatch, model, output, engine, "--num-iterations", iterations)
        (row,) = scripted.rows(output)
        assert row["logp_gap_mean"] == pytest.approx(1.5 / 4, abs=0.05)
        assert row["logp_gap_max"] == pytest.approx(1.5, abs=0.1)
        r = torch.tensor([-gap, 0, 0, 0]).exp()
        assert row["ratio_mean"] == pytest.approx(r.mean().item(), rel=0.05)
        assert row["ratio_max"] == pytest.approx(r.max().item(), rel=0.1)
        kish = (r.sum() ** 2 / (4 * r.square().sum())).item()
        assert row["effective_sample_share"] == pytest.approx(kish, abs=0.05)
        assert row["sampler_kl"] == pytest.approx((r - 1 - r.log()).mean().item(), rel=0.1)
        assert row["capped_fraction"] == capped


def test_save_steps_of_a_second_start_count(model, tmp_path, monkeypatch):
    """trainer_state.json holds those of the first, which transformers would take."""

    def saved(*flags):
        more = ["--max-steps", "4", "--save-strategy", "steps", "--save-total-limit", "9", *flags]
        scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *more)
        return sorted(path.name for path in tmp_path.glob("checkpoint-*"))

    assert saved("--save-steps", "2") == ["checkpoint-2", "checkpoint-4"]
    for name in ("adapter", "checkpoint-4"):
        shutil.rmtree(tmp_path / name)
    assert saved("--save-steps", "1") == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_a_users_copy_of_a_checkpoint_is_neither_removed_nor_taken_for_one(
    model, tmp_path, monkeypatch
):
    def copying(call, row):
        for name in ("checkpoint-1-mine", "checkpoint-9-mine"):
            (tmp_path / name).mkdir(exist_ok=True)
        return varied(call, row)

    flags = "--max-steps 3 --save-strategy steps --save-steps 1 --save-total-limit 1".split()
    scripted.run(monkeypatch, model, tmp_path, scripted.Engine(copying), *flags)
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == ["checkpoint-1-mine", "checkpoint-3", "checkpoint-9-mine"]
    assert run_folder.last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_a_start_from_the_first_step_says_so_and_records_its_own_versions(
    model, tmp_path, monkeypatch, capsys
):
    def record(*flags):
        scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *flags)
        return json.loads((tmp_path / "config.json").read_text())

    said = record()
    shutil.rmtree(tmp_path / "adapter")  # as a run that was killed before it saved a checkpoint
    (tmp_path / "config.json").write_text(
        json.dumps(said | {"git_commit": "another", "versions": {}})
    )
    again = "has no checkpoint: starting again at step 1"
    assert again not in capsys.readouterr().out
    assert record("--parity-limit", "0.3") == said | {
        "flags": said["flags"] | {"parity_limit": 0.3}
    }
    assert again in capsys.readouterr().out
