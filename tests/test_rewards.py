"""What the rewards share: the format score, the overlong punishment, TRL's signature."""

import pytest

from qerl import rewards


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>18</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>\n18\n</answer>\n", 1.0),
        ("<think>a</think> so <answer>18</answer>", 0.5),
        ("<think>a</think><answer>18</answer> done", 0.5),
        ("<think></think><answer>18</answer>", 0.5),
        ("<answer>18</answer><think>a</think>", 0.5),
        ("<think>a</think><answer>18", 0.375),
        ("<answer>18</answer>", 0.25),
        ("<answer>1</answer><answer>18</answer>", 0.0),
        ("18", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_score_climbs_to_one(completion, score):
    assert rewards.format_score(completion) == score


@pytest.mark.parametrize(
    ("length", "punishment"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (150, -1)]
)
def test_the_overlong_punishment_is_a_straight_line(length, punishment):
    assert rewards.soft_overlong_punishment(length, 100, 20) == punishment


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_an_impossible_overlong_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match=str(buffer)):
        rewards.soft_overlong_punishment(10, 100, buffer)


def test_a_reward_takes_strings_and_chat_messages():
    reward = rewards.as_reward(rewards.last_integer_correct, "correctness")
    messages = [[{"role": "assistant", "content": "18"}], [{"role": "assistant", "content": "19"}]]
    assert reward.__name__ == "correctness"
    assert reward(["18", "19"], ["18", "18"]) == [1.0, 0.0]
    assert reward(completions=messages, answer=["18", "18"], prompts=["?", "?"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        reward(["18", "19"], ["18"])
