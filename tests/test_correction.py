"""The importance weights against values worked out by hand, in every mode."""

import math

import pytest
import torch

from qerl.correction import MODES, log_ratio, summary, weighted, weights

CAP = 2.0
# pi / mu of each token of two sequences; the zeros of MASK are outside the loss.
RATIO = torch.tensor([[1.0, 0.5, 3.0, 9.0], [2.0, 4.0, 0.25, 0.1]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
EXPECTED = {
    "none": [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]],
    "token_truncate": [[1.0, 0.5, 2.0, 1.0], [2.0, 2.0, 0.25, 1.0]],
    "token_mask": [[1.0, 0.5, 0.0, 1.0], [2.0, 0.0, 0.25, 1.0]],
    "sequence_truncate": [[1.5], [2.0]],
    "sequence_mask": [[1.5], [2.0]],
}


def weigh(ratio=RATIO, mask=MASK, mode="token_truncate", cap=CAP):
    sampler = torch.full_like(ratio, -1.5)
    return weights(log_ratio(sampler + ratio.log(), sampler, mask), mode, cap)


@pytest.mark.parametrize("mode", EXPECTED)
def test_each_mode_has_the_weights_worked_out_by_hand(mode):
    torch.testing.assert_close(weigh(mode=mode), torch.tensor(EXPECTED[mode]))


def test_a_sequence_above_the_cap_is_cut_or_left_out():
    ratio, mask = torch.tensor([[2.0, 1.25]]), torch.ones(1, 2)
    torch.testing.assert_close(weigh(ratio, mask, "sequence_truncate"), torch.tensor([[2.0]]))
    torch.testing.assert_close(weigh(ratio, mask, "sequence_mask"), torch.tensor([[0.0]]))


def test_every_mode_is_worked_out_by_hand():
    assert set(EXPECTED) == set(MODES)


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_sampler_that_agrees_gives_weight_1(mode):
    made = weigh(torch.ones(2, 4), torch.ones(2, 4), mode)
    assert torch.equal(made, torch.ones_like(made))


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
def test_what_stands_in_masked_places_does_not_matter(mode, padding):
    logps, sampler = torch.zeros(2, 4), torch.full((2, 4), -0.1)
    clean = weights(log_ratio(logps, sampler, MASK), mode, CAP)
    logps, sampler = (values.masked_fill(MASK == 0, padding) for values in (logps, sampler))
    dirty = weights(log_ratio(logps, sampler, MASK), mode, CAP)
    assert torch.equal(dirty, clean)


@pytest.mark.parametrize("mode", EXPECTED)
def test_one_token_that_explodes_is_held_to_the_cap(mode):
    ratio = torch.tensor([[1.0, 1e20], [1.0, 1.0]])
    made = weigh(ratio, torch.ones(2, 2), mode)
    assert made.isfinite().all() and made.max() <= CAP


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_ratio_beyond_float32_is_held_to_the_cap(mode):
    made = weights(torch.full((1, 2), 500.0), mode, CAP)
    assert made.isfinite().all() and made.max() <= CAP


@pytest.mark.parametrize("mode", ["token", "sequence", ""])
def test_a_mode_that_is_not_known_is_refused(mode):
    with pytest.raises(ValueError, match="expected one of"):
        weigh(mode=mode)


# --- the figures of a step


def test_what_is_weighted_are_tokens_or_sequences_in_the_loss():
    ratio, mask = RATIO.log(), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    ratio = ratio.masked_fill(mask == 0, 0.0)
    for mode in ("none", "token_truncate", "token_mask"):
        torch.testing.assert_close(weighted(ratio, mask, mode).exp(), torch.tensor([1.0, 0.5, 3.0]))
    for mode in ("sequence_truncate", "sequence_mask"):
        torch.testing.assert_close(weighted(ratio, mask, mode).exp(), torch.tensor([1.5]))


def test_the_figures_are_those_worked_out_by_hand():
    r = torch.tensor([1.0, 0.5, 4.0, 2.0])
    made = summary(r.log(), r.log(), 2.5)
    assert made["ratio_mean"] == pytest.approx(7.5 / 4)
    assert made["ratio_max"] == pytest.approx(4)
    assert made["effective_sample_share"] == pytest.approx(7.5**2 / (4 * (1 + 0.25 + 16 + 4)))
    assert made["capped_fraction"] == 0.25
    assert made["logp_gap_mean"] == pytest.approx(math.log(2) * (0 + 1 + 2 + 1) / 4)
    assert made["logp_gap_max"] == pytest.approx(2 * math.log(2))
    k3 = [0, 0.5 - 1 + math.log(2), 4 - 1 - 2 * math.log(2), 2 - 1 - math.log(2)]
    assert made["sampler_kl"] == pytest.approx(sum(k3) / 4)


def test_the_kl_is_the_sampler_s_from_the_trainer():
    """Of tokens drawn from mu, the mean of k3 comes to KL(mu || pi), and not to KL(pi || mu)."""
    mu, pi = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    drawn = torch.repeat_interleave(torch.arange(3), (mu * 1000).round().int())
    ratios = (pi / mu).log()[drawn]
    kl = (mu * (mu / pi).log()).sum().item()
    assert summary(ratios, ratios, CAP)["sampler_kl"] == pytest.approx(kl, rel=1e-4)


def test_one_sample_that_dominates_leaves_a_share_of_one_in_n():
    for wild in (30.0, 700.0):  # the second is beyond float32
        ratios = torch.tensor([0.0] * 99 + [wild])
        assert summary(ratios, ratios, CAP)["effective_sample_share"] == pytest.approx(0.01)
    alike = summary(torch.zeros(7), torch.zeros(7), CAP)
    assert alike["effective_sample_share"] == pytest.approx(1)
    assert (alike["ratio_mean"], alike["ratio_max"]) == (pytest.approx(1), 1)
