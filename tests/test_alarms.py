"""Each alarm goes off on its case and on no other, says why, and a hopeless run ends with order."""

from __future__ import annotations

import pytest
import torch

import scripted
from qerl.alarms import ALARMS, Alarms
from qerl.metrics import Tally
from qerl.run_folder import last_checkpoint
from qerl.train import Diverged

# A step of a good run under noise of sigma 1e-2 (shared/measured.md), as metrics.jsonl has it.
GOOD = {
    "step": 1, "grad_norm": 0.7, "loss_tokens": 700, "signal_tokens": 500, "reward": 0.4,
    "entropy": 0.05, "effective_sample_share": 0.94, "ratio_max": 4.0, "logp_gap_mean": 0.189,
    "sigma": 1e-2,
}  # fmt: skip
EMPTY = dict.fromkeys(("entropy", "effective_sample_share", "ratio_max", "logp_gap_mean"))
CASES = {
    "bad_gradients": {"grad_norm": None},
    "no_tokens": {"loss_tokens": 0, "signal_tokens": 0, "grad_norm": 0.0} | EMPTY,
    "no_signal": {"signal_tokens": 0, "grad_norm": 0.0},
    "entropy_collapse": {"entropy": 0.019},
    "ratio_explosion": {"effective_sample_share": 0.4, "ratio_max": 160_000.0},
    "sampler_gap": {"logp_gap_mean": 0.46},
}


@pytest.mark.parametrize("name", ALARMS)
def test_each_alarm_goes_off_alone_and_says_why(name, capsys):
    assert Alarms(0.15).check(GOOD | CASES[name]) == [name]
    said = capsys.readouterr().out
    assert said.startswith(f"step 1: {name} (1 so far): ") and said.count("\n") == 1


def test_a_good_step_is_quiet(capsys):
    for changes in ({}, {"sigma": 0.0, "logp_gap_mean": 0.04}, {"reward": None}):
        assert Alarms(0.15).check(GOOD | changes) == []
    without_engine = EMPTY | {"entropy": 1.8, "sigma": 0.0}
    assert Alarms(0.15).check(GOOD | without_engine) == []
    assert capsys.readouterr().out == ""


def test_without_noise_the_gap_may_be_no_wider_than_at_the_start():
    clean = GOOD | {"sigma": 0.0}
    assert Alarms(0.15).check(clean) == ["sampler_gap"]
    assert Alarms(0.3).check(clean) == []


def test_of_many_steps_the_first_and_every_tenth_after_it_are_told(capsys):
    alarms, told = Alarms(0.15), []
    for step in range(1, 32):
        assert alarms.check(GOOD | CASES["no_signal"] | {"step": step}) == ["no_signal"]
        told += [step] if capsys.readouterr().out else []
    assert told == [1, 11, 21, 31]


def test_three_bad_steps_in_a_row_are_hopeless_and_fewer_are_not():
    alarms, bad = Alarms(0.15), GOOD | CASES["bad_gradients"]
    verdicts = []
    for row in (bad, bad, GOOD, bad, bad, bad):
        alarms.check(row)
        verdicts.append(alarms.hopeless)
    assert verdicts == [False] * 5 + [True]


# --- in a run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scripted.folder(tmp_path_factory.mktemp("models") / "tiny")


class Breaking(scripted.Engine):
    """An engine whose log-probabilities are not numbers in some calls, and the loss with them."""

    def __init__(self, bad_calls):
        super().__init__(lambda call, row: "1" * (row % 2))
        self.bad_calls, self.factors = bad_calls, []

    def sync(self, adapter, noise=None):
        self.factors.append({n: t.clone() for n, t in adapter.tensors.items()})
        return super().sync(adapter, noise)

    def generate(self, *args, **kwargs):
        self.gap = torch.nan if self.calls in self.bad_calls else 0.0
        return super().generate(*args, **kwargs)


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("clip", ["0", "0.2"])
def test_a_step_with_bad_gradients_is_skipped_and_counted(
    model, tmp_path, monkeypatch, capsys, clip
):
    engine = Breaking({1, 2})
    flags = ["--max-steps", "5", "--max-grad-norm", clip]
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, *flags)
    rows = scripted.rows(tmp_path)
    assert [row["alarms"] for row in rows] == [[], ["bad_gradients"], ["bad_gradients"], [], []]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True, False, False]
    before = engine.factors  # of steps 1 to 5
    moved = [not same(*pair) for pair in zip(before, before[1:], strict=False)]
    assert moved == [True, False, False, True]
    assert all(p.isfinite().all() for p in scripted.factors(trainer.model).values())
    assert capsys.readouterr().out.count("bad_gradients (1 so far)") == 1


def test_three_in_a_row_end_the_run_with_a_checkpoint_and_status_1(model, tmp_path, monkeypatch):
    engine = Breaking({1, 2, 3})
    with pytest.raises(Diverged) as ended:
        scripted.run(monkeypatch, model, tmp_path, engine, "--max-steps", "9")
    said = str(ended.value)  # which Python prints, with status 1
    assert said.startswith("error: ended at step 4: 3 steps in a row") and "\n" not in said
    assert [row["step"] for row in scripted.rows(tmp_path)] == [1, 2, 3, 4]
    assert last_checkpoint(tmp_path).name == "checkpoint-4"
    assert not (tmp_path / "adapter").exists()
    good = Breaking(())
    scripted.run(monkeypatch, model, tmp_path, good, "--max-steps", "9")
    assert same(good.factors[0], engine.factors[1])  # continued with the last good adapter
    assert [row["step"] for row in scripted.rows(tmp_path)] == list(range(1, 10))


def test_an_engine_that_samples_what_is_not_a_number_ends_the_run_with_one_line(
    model, tmp_path, monkeypatch
):
    def broken(*args, **kwargs):
        raise FloatingPointError("a token whose log-probability is not finite")

    engine = Breaking(())
    monkeypatch.setattr(engine, "generate", broken)
    with pytest.raises(Diverged, match="^error: ended at step 0: a token .* lower --learning-rate"):
        scripted.run(monkeypatch, model, tmp_path, engine, "--max-steps", "2")


def test_means_of_trl_are_weighed_by_the_tokens_of_their_pass():
    tally = Tally()
    for kept in (3, 0, 1):
        mask_BT = (torch.arange(4) < kept).int()[None]
        tally.count(mask_BT, torch.ones(1))
    assert tally.tokens == tally.signal == 4
    assert tally.mean([0.2, 0.0, 0.6]) == pytest.approx(0.3)  # an empty pass is no 0


@pytest.mark.parametrize(
    ("script", "flags", "alarm"),
    [
        (lambda call, row: "1" * 8 + "...", [], "no_tokens"),
        (lambda call, row: "333", [], "no_signal"),
    ],
)
def test_a_step_that_teaches_nothing_says_so(
    model, tmp_path, monkeypatch, capsys, script, flags, alarm
):
    scripted.run(monkeypatch, model, tmp_path, scripted.Engine(script), *flags)
    (row,) = scripted.rows(tmp_path)
    assert row["alarms"] == [alarm] and row["grad_norm"] == 0
    assert f"step 1: {alarm} (1 so far)" in capsys.readouterr().out


def test_a_sampler_of_another_policy_is_named(model, tmp_path, monkeypatch):
    engine = scripted.Engine(lambda call, row: "1" * (row % 2), gap=-9.0)
    scripted.run(monkeypatch, model, tmp_path, engine)
    (row,) = scripted.rows(tmp_path)
    assert row["alarms"] == ["ratio_explosion", "sampler_gap"]


def test_a_good_run_is_quiet(model, tmp_path, monkeypatch, capsys):
    engine = scripted.Engine(lambda call, row: "1" * (row % 2))
    scripted.run(monkeypatch, model, tmp_path, engine, "--max-steps", "4")
    assert [row["alarms"] for row in scripted.rows(tmp_path)] == [[]] * 4
    assert "so far)" not in capsys.readouterr().out
