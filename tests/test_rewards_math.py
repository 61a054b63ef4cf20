"""Verdicts on numbers and formulas: right answers in usual forms, wrong ones that look right."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qerl import rewards
from qerl.rewards import math_worker

LONG = "thinking about 18 and \\boxed{ and <answer> " * 25_000  # a million characters


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("18", "18", True),
        ("It is 9 + 9 = 18.", "18", True),
        ("1,234", "1234", True),
        ("The result is -5", "-5", True),
        ("7 - 12 = -5!", "-5", True),
        ("18.0", "18", True),
        ("018", "18", True),
        ("First 3, then 18\n", "18", True),
        ("9-5", "5", True),  # a minus between two numbers is no sign
        ("199", "18", False),
        ("1.8", "18", False),
        ("18.5", "18", False),
        ("18.5", "5", False),
        ("-18", "18", False),
        ("18", "-18", False),
        ("18 or rather 19", "18", False),
        ("1,234", "234", False),
        ("eighteen", "18", False),
        ("", "18", False),
        ("9" * 10_000, "18", False),
    ],
)
def test_arithmetic_is_judged_by_the_last_number(completion, answer, right):
    assert rewards.last_integer_correct(completion, answer) is right


@pytest.mark.parametrize(
    ("completion", "final"),
    [
        ("<think>\\boxed{1}</think><answer>18</answer>", "18"),
        ("<answer>1</answer> no: <answer>18</answer>", "18"),
        ("<answer>\\boxed{18}</answer>", "18"),
        ("so \\boxed{1}, no, \\boxed{\\frac{3}{4}}.", "\\frac{3}{4}"),
        ("\\boxed{\\text{a } \\{b\\}}", "\\text{a } \\{b\\}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{18} then cut off in \\boxed{19", "18"),
        ("2 + 16\n#### 18\n", "18"),
        ("The answer is x + 1. I hope it is correct.", "x + 1"),
        ("Final Answer: The final answer is $18$. I hope it is correct.", "$18$"),
        ("**Answer:** 18", "18"),
        ("The answer is 18? No: 2 less, so 16.", "16"),
        ("I have 20, I eat 2, 18 left", "18"),
        ("that makes \\frac{3}{4}", "\\frac{3}{4}"),
        ("no number at all", ""),
    ],
)
def test_the_final_answer_is_found(completion, final):
    assert rewards.final_answer(completion).strip() == final


RIGHT = [
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("$1{,}234$", "1234"),
    ("\\$18", "18"),
    ("$18", "18"),
    ("€18", "18"),
    ("18.0", "18"),
    ("18.", "18"),
    ("**18**", "18"),
    ("025", "25"),
    ("27", "27.0"),
    (".5", "0.5"),
    ("\u22125", "-5"),
    ("3/4", "\\frac{3}{4}"),
    ("\\dfrac{3}{4}", "3/4"),
    ("6/8", "3/4"),
    ("0.75", "\\frac{3}{4}"),
    ("-\\frac{3}{4}", "\\frac{-3}{4}"),
    ("0.333333", "1/3"),
    ("1/3", "0.333333"),
    ("\\frac{1}{7}", "0.142857"),
    ("1e-05", "0.00001"),
    ("0.00001", "1E-5"),
    ("1e16", "10000000000000000"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("50\\%", "1/2"),
    ("50 percent", "50\\%"),
    ("50", "50%"),
    ("0.5", "50%"),
    ("200%", "2"),
    ("18 dollars", "18"),
    ("18 dollars per day", "18"),
    ("5 cm", "5"),
    ("5cm", "5"),
    ("5\\text{ cm}^2", "5"),
    ("5 inches", "5 inch"),
    ("90^\\circ", "90"),
    ("2 million", "2,000,000"),
    ("x = 18", "18"),
    ("9 * 2 = 18", "18"),
    ("9 \\times 2 = 18", "18"),
    ("f(2) = 18", "18"),
    ("x = 3 \\times 6", "18"),
    ("She earns 18 dollars a day", "18"),
    ("\\text{Evelyn}", "evelyn"),
    ("\\text{(C)}", "C"),
    ("(C) 5", "C"),
    ("\\text{(C) } 5", "\\text{(C)}"),
    ("33\\frac{1}{3}\\%", "1/3"),
    ("33 1/3%", "33\\frac{1}{3}\\%"),
    ("-3\\frac{1}{2}", "-3.5"),
    ("3\\frac{1}{2} hours", "3.5"),
    ("\\boldsymbol{18}", "18"),
    ("\\underline{18}", "18"),
    ("`18`", "18"),
    ("18^{\\circ}\\text{C}", "18"),
    ("18^\\circ\\text{C}", "18°C"),
    ("-5°C", "-5"),
    ("m+n = 18", "18"),
    ("1 234.0", "1234"),
    ("5 centimeters", "5\\text{ cm}"),
    ("3 hrs", "3\\text{ hours}"),
    ("6 ft", "6 feet"),
    # from here on math-verify decides
    ("11\\sqrt{2}", "11\\sqrt2"),
    ("11√2", "11\\sqrt{2}"),
    ("2pi", "2\\pi"),
    ("ln 2", "\\ln 2"),
    ("2 ln(3)", "\\ln 9"),
    ("sin(1)", "\\sin 1"),
    ("3\\frac{1}{2}", "3.5"),
    ("3 1/2", "3\\frac{1}{2}"),
    ("3 1/2", "3.5"),
    ("\\left(3, \\frac{\\pi}{2}\\right)", "(3,\\pi/2)"),
    ("[-2,7]", "x \\in [-2,7]"),
    ("x^2+2x+1", "(x+1)^2"),
    ("3\\times 10^4", "30000"),
    ("2, 1", "1,2"),
    ("\\begin{bmatrix}1 \\\\ 2\\end{bmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("-11i + 6", "6 - 11i"),
]
WRONG = [
    ("199", "18"),
    ("1", "18"),
    ("1.8", "18"),
    ("-18", "18"),
    ("180", "18"),
    ("18.0001", "18"),
    ("123456788", "123456789"),
    ("0.33", "1/3"),
    ("4/3", "3/4"),
    ("3/0", "3"),
    ("0.5", "50"),
    ("50", "0.5"),
    ("0.5%", "0.5"),
    ("5%", "0.5"),
    ("1%", "1"),
    ("5 million", "5"),
    ("5 m", "5 cm"),
    ("5x", "5"),
    ("5 x", "5"),
    ("5 \\pi", "5"),
    ("5 squared", "5"),
    ("18 or 20", "18"),
    ("2x = 18", "18"),
    ("x^2 = 18", "18"),
    ("x = 1.8", "18"),
    ("y = 2x + 5", "5"),
    ("3\\frac{1}{2}", "31/2"),
    ("eighteen", "18"),
    ("Bob", "\\text{Evelyn}"),
    ("x", "X + 1"),
    ("B", "C"),
    ("ABC", "CBA"),
    ("A C", "CA"),
    ("on", "\\text{no}"),
    ("2e", "2"),
    ("1e-4", "0.00001"),
    ("[2,7]", "[-2,7]"),
    ("(2,1)", "(1,2)"),
    ("11\\sqrt{3}", "11\\sqrt{2}"),
    ("", "18"),
    ("1 8", "18"),
    ("18**2", "18"),
    ("18_{20}", "18"),
    ("\\geq 18", "18"),
    ("x < 18", "18"),
    ("18 \\pm 2", "18"),
    ("less than 18", "18"),
    ("it is at least 18", "18"),
    ("18°F", "18°C"),
    ("1 3/4", "3/4"),
    ("3 1/2", "31/2"),
    ("3\\frac{1}{2}", "1.5"),
    ("-3\\frac{1}{2}", "-2.5"),
    ("33\\frac{1}{3}\\%", "33"),
    ("(B) 5", "C"),
    ("(C) 5", "5"),
    ("f(C) 5", "C"),
    ("ln 3", "\\ln 2"),
    ("2", "\\ln 2"),
    ("5 meters", "5\\text{ cm}"),
]


@pytest.mark.parametrize("wrap", ["\\boxed{{{}}}", "<think>17</think>\n<answer>{}</answer>"])
@pytest.mark.parametrize(("said", "answer"), RIGHT)
def test_a_right_answer_in_a_usual_form_is_right(said, answer, wrap):
    assert rewards.math_correct(f"Let us see, 7 and 9. {wrap.format(said)}", answer)


@pytest.mark.parametrize("wrap", ["\\boxed{{{}}}", "<think>17</think>\n<answer>{}</answer>"])
@pytest.mark.parametrize(("said", "answer"), WRONG)
def test_a_wrong_answer_that_looks_right_is_wrong(said, answer, wrap):
    assert not rewards.math_correct(f"Let us see, 18 and 5. {wrap.format(said)}", answer)


def test_the_right_number_before_another_final_answer_is_wrong():
    assert not rewards.math_correct("18 is near, but the total is 25", "18")
    assert not rewards.math_correct("\\boxed{18}, no: \\boxed{25}", "18")
    assert not rewards.math_correct("#### 25 after 18\n#### 25", "18")
    assert not rewards.math_correct("", "18")


def test_an_answer_that_cannot_be_right_is_refused():
    with pytest.raises(ValueError, match="empty"):
        rewards.math_correct("18", " ")


@pytest.mark.parametrize(
    "completion",
    [
        LONG + "\\boxed{18}",
        LONG + "<answer>18</answer>",
        LONG + "#### 18",
        "1" * 10**6 + " \\boxed{18}",
        "\\boxed{" * 10**5 + "18}",
        "\\boxed{" + " " * 15_000 + "18}",
    ],
)
def test_a_million_characters_cost_no_time(completion):
    start = time.monotonic()
    assert rewards.math_correct(completion, "18")
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    "unit", ["<answer>", "</answer>", "\\boxed{", "*", "{", "-1,", "answer ", "9"]
)
def test_a_million_characters_of_noise_cost_no_time(unit):
    completion = unit * (10**6 // len(unit))
    start = time.monotonic()
    rewards.math_correct(completion, "18")
    rewards.last_integer_correct(completion, "18")
    rewards.format_score(completion)
    assert time.monotonic() - start < 2.0


def test_numbers_are_settled_without_the_worker(monkeypatch):
    def asked(gold, candidate):
        raise AssertionError(f"asked about {candidate}")

    monkeypatch.setattr(math_worker.judge, "equal", asked)
    for said, answer in [("$18", "18"), ("3/4", "0.75"), ("19", "18"), ("who knows", "18")]:
        rewards.math_correct(f"\\boxed{{{said}}}", answer)


def test_the_verdict_is_the_same_off_the_main_thread():
    found = []

    def judge():
        found.append(rewards.math_correct("\\boxed{x^2+2x+1}", "(x+1)^2"))
        found.append(rewards.math_correct("\\boxed{x^2+2x+2}", "(x+1)^2"))

    threads = [threading.Thread(target=judge) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 3 + [True] * 3


@pytest.mark.parametrize("formula", ["9^{9^{9^{9}}}", "10^{10^{10}}", "(x+1)^{100000}"])
def test_a_formula_that_never_ends_is_stopped_and_the_next_one_is_judged(formula, monkeypatch):
    monkeypatch.setattr(math_worker.judge, "time_limit_s", 1.0)
    rewards.math_correct("\\boxed{x+y}", "y+x+z")  # the child runs, so its start is not timed
    child = math_worker.judge._child
    start = time.monotonic()
    assert not rewards.math_correct(f"\\boxed{{{formula}}}", "x + 18")
    assert time.monotonic() - start < 2.0
    assert child.poll() is not None  # really ended
    monkeypatch.setattr(math_worker.judge, "time_limit_s", 5.0)
    assert rewards.math_correct("\\boxed{x+y}", "y+x")


def test_a_tower_of_powers_returns_within_the_limit():
    start = time.monotonic()
    assert not rewards.math_correct("\\boxed{9**9**9**9}", "18")
    assert time.monotonic() - start < math_worker.TIME_LIMIT_S + 1


def test_a_killed_child_costs_one_verdict_only():
    rewards.math_correct("\\boxed{x+y}", "y+x")
    math_worker.judge._child.kill()
    math_worker.judge._child.wait()
    assert rewards.math_correct("\\boxed{x+y}", "y+x")


def test_the_child_ends_with_its_parent():
    program = (
        "from qerl.rewards import math_correct, math_worker\n"
        "assert math_correct(r'\\boxed{y+x}', 'x+y')\n"
        "print(math_worker.judge._child.pid)"
    )
    child = int(subprocess.check_output([sys.executable, "-c", program], cwd=_root(), text=True))
    assert not Path(f"/proc/{child}").exists()


def test_a_forked_process_gets_a_child_and_a_lock_of_its_own():
    rewards.math_correct("\\boxed{x+y}", "y+x")
    ours = math_worker.judge._child.pid
    with math_worker.judge._lock:  # as if another thread were asking just now
        forked = os.fork()
        if forked == 0:
            signal.alarm(30)  # ends a deadlock
            right = rewards.math_correct("\\boxed{x+y}", "y+x")
            os._exit(0 if right and math_worker.judge._child.pid != ours else 1)
        assert os.waitpid(forked, 0)[1] == 0
    assert math_worker.judge._child.pid == ours
    assert rewards.math_correct("\\boxed{x+z}", "z+x")


def _root() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("minus", ["-", "\u2212", "\u2013"])
@pytest.mark.parametrize(
    "said",
    [
        "\\boxed{{{}5}}",
        "<answer>{}5</answer>",
        "#### {}5",
        "The answer is {}5.",
        "**Answer:** {}5",
        "It comes to {}5",
        "x = {}5",
        "7 - 12 = {}\\frac{{10}}{{2}}",
    ],
)
def test_a_typographic_minus_is_a_minus_wherever_an_answer_stands(said, minus):
    assert rewards.math_correct(said.format(minus), "-5")
    assert rewards.math_correct(said.format("-"), f"{minus}5")
    assert not rewards.math_correct(said.format(minus), "5")
    if "frac" not in said:
        assert rewards.last_integer_correct(said.format(minus), f"{minus}5")
        assert not rewards.last_integer_correct(said.format(minus), "5")


def test_a_reference_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="'five' is not a number"):
        rewards.last_integer_correct("It is 5.", "five")
