"""Rows of a rollout: which groups have no variance, and how others take their place."""

import pytest
import torch

from qerl import groups


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 0.6, 0.7, 1.0, 100.1])
def test_equal_rewards_are_no_variance_whatever_rounding_says(reward, size):
    rewards = torch.full((2 * size, 1), reward)
    assert groups.without_variance(rewards, size).tolist() == [True, True]
    rewards[-1] += 1e-3
    assert groups.without_variance(rewards, size).tolist() == [True, False]


def test_a_verdict_that_is_missing_is_no_reward_of_0():
    nan = torch.nan
    rewards = torch.tensor([[nan], [nan], [1.0], [nan], [0.0], [1.0]])
    assert groups.without_variance(rewards, 2).tolist() == [True, True, False]
    both = torch.tensor([[nan, 1.0], [0.5, 0.5], [nan, 1.0], [1.0, nan]])
    assert groups.without_variance(both, 2).tolist() == [True, True]


def test_a_group_is_put_in_the_place_of_another_and_the_tokens_are_counted():
    def rollout(prompt: int, tokens: int, start: int) -> dict:
        rows = torch.arange(4)[:, None] + start
        made = {f"prompt_{n}": rows.expand(4, prompt).clone() for n in ("ids", "mask")}
        made |= {f"completion_{n}": rows.expand(4, tokens).clone() for n in ("ids", "mask")}
        return made | {"advantages": rows[:, 0].float(), "num_items_in_batch": torch.tensor(0)}

    for prompt in (1, 2, 3):
        for tokens in (1, 2, 3):
            mine, other = rollout(2, 2, start=1), rollout(prompt, tokens, start=11)
            groups.replace(mine, other, groups.rows_of(torch.tensor([1]), 2), torch.tensor([0, 1]))
            assert mine["advantages"].tolist() == [1, 2, 11, 12]
            wide, long = max(prompt, 2), max(tokens, 2)
            assert mine["prompt_ids"][0].tolist() == [0] * (wide - 2) + [1, 1]
            assert mine["prompt_ids"][2].tolist() == [0] * (wide - prompt) + [11] * prompt
            assert mine["completion_ids"][1].tolist() == [2, 2] + [0] * (long - 2)
            assert mine["completion_ids"][3].tolist() == [12] * tokens + [0] * (long - tokens)
            assert mine["num_items_in_batch"] == mine["completion_mask"].sum()
