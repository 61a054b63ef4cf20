"""The rewards: every verdict on right answers in usual forms and on wrong ones that look right."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from qerl import rewards
from qerl.rewards import code, math_worker

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
    # from here on math-verify decides
    ("11\\sqrt{2}", "11\\sqrt2"),
    ("11√2", "11\\sqrt{2}"),
    ("2pi", "2\\pi"),
    ("3\\frac{1}{2}", "3.5"),
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


SUM = json.dumps([{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1\n", "output": "0\n"}])
ASSERT = json.dumps([{"assert": "assert add(2, 3) == 5"}])


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("completion", "tests", "right"),
    [
        (block("a, b = map(int, input().split())\nprint(a + b)"), SUM, True),
        (block("print(sum(map(int, open(0).read().split())), '\\n\\n')"), SUM, True),
        (block("print(5)"), SUM, False),  # passes the first case only
        (block("print(1)") + block("print(sum(map(int, input().split())))"), SUM, True),
        (block("print(sum(map(int, input().split())))") + block("print(1)"), SUM, False),
        ("print(sum(map(int, input().split())))", SUM, False),
        ("```python\nprint(sum(map(int, input().split())))", SUM, False),  # cut off
        (block("print(sum(map(int, input().split()"), SUM, False),
        (block("print(sum(map(int, input().split())))\nraise SystemExit(1)"), SUM, False),
        (block("def add(a, b):\n    return a + b"), ASSERT, True),
        (block("def add(a, b):\n    return a - b"), ASSERT, False),
        (block("import os\nos._exit(0)"), ASSERT, False),
        (block("raise SystemExit(0)"), ASSERT, False),
        (block('def add(a, b):\n    return 0\n"""'), ASSERT, False),
        (
            block("def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    1/0"),
            ASSERT,
            True,
        ),
    ],
)
def test_a_program_is_judged_by_its_tests(completion, tests, right):
    assert rewards.code_correct(completion, tests) is right


PRINTS_1 = json.dumps([{"input": "", "output": "1"}])


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.getaddrinfo('localhost', 80)",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 0)",
        "open('{outside}/left', 'w')",
        "import os\nos.mkdir('{outside}/left')",
        "import sqlite3\nsqlite3.connect('{outside}/left').execute('create table t (x)')",
        "import os\nos.symlink('{outside}/left', 'link')\nopen('link', 'w')",
        "x = bytearray(8 << 30)",
        "open('large', 'wb').write(bytes(32 << 20))",
        "print('x' * (32 << 20))",
    ],
)
def test_a_program_is_kept_from(program, namespaces, tmp_path, monkeypatch):
    if namespaces and not code._has_namespaces():
        pytest.skip("this machine lets this user make no namespaces")
    monkeypatch.setattr(code, "_has_namespaces", lambda: namespaces)
    program = program.format(outside=tmp_path)
    assert rewards.code_correct(block("print(1)"), PRINTS_1)
    assert not rewards.code_correct(block(f"{program}\nprint(1)"), PRINTS_1)
    if "print('x'" not in program:  # refused by an exception, and not broken otherwise
        indented = program.replace("\n", "\n    ")
        guarded = f"try:\n    {indented}\nexcept (OSError, MemoryError):\n    print(1)"
        assert rewards.code_correct(block(guarded), PRINTS_1)
    assert not list(tmp_path.iterdir())


def test_a_program_may_write_in_its_own_folder_and_use_threads():
    program = (
        "import threading, pathlib\n"
        "t = threading.Thread(target=lambda: pathlib.Path('a').write_text('1'))\n"
        "t.start(); t.join(); print(open('a').read())"
    )
    assert rewards.code_correct(block(program), PRINTS_1)


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_that_never_ends_is_stopped(namespaces, monkeypatch):
    if namespaces and not code._has_namespaces():
        pytest.skip("this machine lets this user make no namespaces")
    monkeypatch.setattr(code, "_has_namespaces", lambda: namespaces)
    monkeypatch.setattr(code, "TIME_LIMIT_S", 1.0)
    started = []
    monkeypatch.setattr(
        code, "_start", lambda *a, f=code._start: started.append(f(*a)) or started[0]
    )
    start = time.monotonic()
    assert not rewards.code_correct(block("while True: pass"), PRINTS_1)
    assert time.monotonic() - start < 3.0
    until = time.monotonic() + 5  # the kernel may take a moment
    while _group(started[0].pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _group(started[0].pid)


def _group(leader: int) -> list[str]:
    """The processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(path.parent.name)
    return found


LEAVING = {
    "a folder that is closed": "os.mkdir('a')\nopen('a/b', 'w').write('c')\nos.chmod('a', 0)",
    "a pipe": "os.mkfifo('a')\nos.mkfifo('../b')",
    "a database": (
        "import sqlite3\nfile = sqlite3.connect('a.db')\nfile.execute('create table t (x)')\n"
        "file.execute('insert into t values (1)')"
    ),
    "a link": "os.symlink('program.py', 'a')",
    "folders too deep for shutil.rmtree": (
        "for _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
    ),
}


@pytest.mark.parametrize("left", LEAVING)
def test_nothing_is_left_in_the_temporary_folder(left, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert rewards.code_correct(block(f"import os\n{LEAVING[left]}\nprint(1)"), PRINTS_1)
    assert not list(tmp_path.iterdir())


def test_a_program_sees_none_of_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "1")
    assert rewards.code_correct(
        block("import os\nprint(1 - os.environ.get('SECRET_TOKEN', '').count('1'))"), PRINTS_1
    )


@pytest.mark.parametrize("tests", ["", "[]", "{}", "assert f()", '[{"input": "1"}]', "[1]"])
def test_tests_of_another_layout_are_refused(tests):
    with pytest.raises(ValueError, match="JSON list"):
        rewards.code_correct(block("print(1)"), tests)


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
