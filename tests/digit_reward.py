"""Reward functions for tests, given to --reward: their scores vary, so that there are gradients."""

from qerl.data import REWARD_ARGUMENTS


def digits(**given) -> list[float]:
    """The number of digits in a completion, over ten; TRL gives what load_reward thinks it does."""
    assert set(given) == set(REWARD_ARGUMENTS), given.keys()
    completions = given["completions"]
    return [sum(map(str.isdigit, completion[-1]["content"])) / 10 for completion in completions]


def constant(completions, **kwargs) -> list[float]:
    """The same for every completion: a group without variance."""
    return [1.0] * len(completions)


def nothing(completions, **kwargs) -> list[None]:
    """No verdict on any completion."""
    return [None] * len(completions)


def endless(completions, **kwargs) -> list[float]:
    """What no reward may be."""
    return [float("inf")] + [0.0] * (len(completions) - 1)
