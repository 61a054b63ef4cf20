"""Every data set held to its own prompt: read as `datasets` reads the hub, scored as in training.

Each hub set is written to a local folder in the hub's own layout, loaded by the real library under
that folder's name, and its reward functions are fed answers in the asked form and in other forms.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import pyarrow
import pyarrow.parquet
import pytest

from qerl import data
from qerl.data import arithmetic, hub
from qerl.rewards import code, math_worker

# A right answer as a data set gives it -> the same in other usual forms, and wrong ones.
NUMBERS = {
    "18": (
        ["18", "18.0", "18.00", "018", "$18", "\\$18.00", "18 dollars", "18\\text{ cm}", "18 cm^2"]
        + ["x = 18", "m + n = 18", "9 + 9 = 18", "36/2", "\\frac{36}{2}", "**18**", "18^\\circ"],
        ["", "199", "8", "1.8", "-18", "180", "18.5", "1 8", "18x", "18^2", "18/5", "2x = 18"]
        + ["18,000", "17 or 18", "less than 18", "\\geq 18", "18_{20}", "eighteen"],
    ),
    "1,234": (
        ["1,234", "1234", "1{,}234", "1\\,234", "$1,234", "1,234.00", "1234 eggs"],
        ["234", "1", "1.234", "1,234,000", "12,34", "1,235"],
    ),
    "-5": (["-5", "-5.0", "\u22125", "-\\$5", "-10/2", "-5°C"], ["5", "-15", "-5.5", "-50"]),
    "0.5": ([".5", "1/2", "\\frac{1}{2}", "\\frac12", "50%", "50\\%"], ["5", "0.05", "50", "5%"]),
    "50": (["50%", "50\\%", "50 percent", "50.0"], ["0.5", "0.5%", "5%", "500"]),
}
FORMULAS = {
    "3/4": (
        ["\\frac{3}{4}", "\\dfrac{3}{4}", "\\frac34", "6/8", "0.75", "75\\%", "\\frac{3}{4} cups"],
        ["4/3", "3", "34", "0.7", "75", "1 3/4", "1\\frac{3}{4}", "-3/4", "3/40"],
    ),
    "\\frac{3}{4}": (["3/4", "0.75", "75%", "3 / 4"], ["4/3", "3", "0.34", "\\frac{3}{5}"]),
    "2\\frac{1}{2}": (["2.5", "5/2", "2 1/2", "\\frac{5}{2}"], ["1/2", "21/2", "2", "12"]),
    "50\\%": (["50%", "50", "0.5", "\\frac{1}{2}", "50 percent"], ["5%", "5", "0.05", "0.5%"]),
    "5\\text{ cm}": (["5", "5 cm", "5 centimeters", "5.0\\,\\mathrm{cm}"], ["5 m", "50 cm", "0.5"]),
    "2\\sqrt{3}": (["\\sqrt{12}", "2\\sqrt3", "2√3"], ["\\sqrt{3}", "2\\sqrt{2}", "23"]),
    "(3,4)": (["(3, 4)", "\\left(3,4\\right)"], ["(4,3)", "[3,4]", "34", "(3,4,5)"]),
}
TAGS = "<think>I see 7 and 9.</think>\n<answer>{}</answer>"
BOXED = "I see 7 and 9. So it is \\boxed{{{}}}."
FORMS = [TAGS, BOXED, "<answer>\\boxed{{{}}}</answer>", "Hence:\n#### {}", "$\\boxed{{{}}}$"]

CODE_BLOCK = "Read, add, print.\n```python\n{}\n```"
CASES = [{"fn_name": None, "input": "2 3\n", "output": "5\n", "type": "stdin_stdout"}]
CASES += [{"fn_name": None, "input": "-1 1\n", "output": "0\n", "type": "stdin_stdout"}]
PROGRAMS = (
    ["print(sum(map(int, input().split())))", "a, b = map(int, input().split())\nprint(a+b, '\\n')"]
    + ["import sys\nsys.stdout.write(str(sum(int(w) for w in sys.stdin.read().split())))"],
    [
        "print(5)",
        "",
        "5",
        "print(sum(map(int, input().split())) or '')",
        "raise SystemExit",
        "while",
    ],
)


def columns(name: str, answers: list) -> dict[str, list]:
    """A hub set's own columns with these answers (for gsm8k at the end of a solution)."""
    count, problems = len(answers), [f"Problem {i}?" for i in range(len(answers))]
    if name == "gsm8k":
        return {"question": problems, "answer": [f"So <<1=1>>.\n#### {a}" for a in answers]}
    if name in ("bigmath", "bigmath_hard", "dapomath"):
        return {"prompt": problems, "solution": answers, "source": ["s"] * count}
    if name == "miromind":
        return {"id": list(range(count)), "problem": problems, "clean_answer": answers}
    if name == "code":
        info = [{"language": "python", "test_cases": cases} for cases in answers]
        return {"problem": problems, "gold_standard_solution": ["."] * count} | {
            "verification_info": info
        }
    if name == "amc23":
        floats = [float(answer.replace(",", "")) for answer in answers]
        return {"id": list(range(count)), "question": problems, "answer": floats}
    extra = {"math500": {"subject": ["Algebra"] * count, "level": [5] * count}}
    return {"problem": problems, "answer": answers} | extra.get(name, {"id": list(range(count))})


FILES = {  # where the hub keeps the split that is asked for
    "gsm8k": "main/test-00000-of-00001.parquet",
    "bigmath": "level_3_4_5/train-00000-of-00001.parquet",
    "bigmath_hard": "level_4_5/train-00000-of-00001.parquet",
    "dapomath": "en/train-00000-of-00001.parquet",
    "miromind": "data/train-00000-of-00001.parquet",
    "code": "data/train-00000-of-00001.parquet",
    "math500": "test.jsonl",
    "aime24": "data/train-00000-of-00001.parquet",
    "aime25": "test.jsonl",
    "amc23": "test-00000-of-00001.parquet",
}


def split_of(name: str) -> str:
    """The split that evaluation uses, or else the one there is."""
    return "test" if "test" in hub.SOURCES[name].splits else "train"


def write(folder, name: str, answers: list) -> None:
    """The folder of a hub set: its card, which names the configurations, and one file."""
    source, file = hub.SOURCES[name], folder / FILES[name]
    file.parent.mkdir(parents=True)
    table = pyarrow.table(columns(name, answers))
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {source.config or 'default'}\n  data_files:\n"
        f"  - split: {source.splits[split_of(name)]}\n    path: {FILES[name]}\n---\n"
    )


def stand_in(name: str, answers: list, folder, monkeypatch) -> None:
    """Make `data.load(name)` read a folder of these answers in place of the hub's."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    write(folder / name, name, answers)
    here = dataclasses.replace(hub.SOURCES[name], hub_id=str(folder / name))
    monkeypatch.setitem(hub.SOURCES, name, here)


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """(name, answers) -> the task that `data.load` makes of the hub set with these answers."""

    def load(name: str, answers: list) -> data.Task:
        stand_in(name, answers, tmp_path, monkeypatch)
        task = data.load(name, split_of(name))
        assert len(task.rows) == len(answers)
        return task

    return load


def earned(task: data.Task, completion: str, answer: str) -> float:
    """The reward of a chat completion, as TRL asks for it."""
    messages = [[{"role": "assistant", "content": completion}]]
    return sum(reward(messages, answer=[answer])[0] for reward in task.reward_functions)


def misjudged(task: data.Task, table: dict, forms: list[str]) -> list:
    """What of a table's right answers does not earn 1 or more, and of its wrong ones does."""
    rows = zip(task.rows, table.values(), strict=True)
    return [
        (row["answer"], form.format(said), right)
        for row, both in rows
        for right, answers in zip((True, False), both, strict=True)
        for said in answers
        for form in forms
        if (earned(task, form.format(said), row["answer"]) >= 1) is not right
        or task.correct(form.format(said), row["answer"]) is not right
    ]


MATH = sorted(set(hub.SOURCES) - {"code"})


@pytest.mark.parametrize("name", MATH)
def test_a_mathematics_set_judges_usual_forms_of_right_and_wrong_answers(name, loaded):
    numbers_alone = name in ("gsm8k", "amc23")
    table = NUMBERS if numbers_alone else NUMBERS | FORMULAS
    assert misjudged(loaded(name, list(table)), table, FORMS) == []


@pytest.mark.parametrize("name", MATH)
def test_the_asked_form_is_in_the_prompt_and_earns_the_most(name, loaded):
    task = loaded(name, ["18"])
    [row] = task.rows
    asked = "\n".join(message["content"] for message in row["prompt"])
    form = TAGS if "<answer>" in asked else BOXED
    assert ("<answer>" in asked) != ("\\boxed{}" in asked)
    best = earned(task, form.format("18"), row["answer"])
    assert best == max(earned(task, other.format("18"), row["answer"]) for other in FORMS)
    assert best == 1 + hub.FORMAT_WEIGHT * (form == TAGS)


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_an_arithmetic_set_judges_usual_forms_of_right_and_wrong_integers(level):
    task = data.load(level, "test", limit=10)
    for row in task.rows:
        number = int(row["answer"])
        right = [f"{number}", f"{number:,}", f"{number}.0", f"It is {number}!", f"x = {number}"]
        right += [f"{number} dollars", f"**{number}**", f"\\boxed{{{number}}}", f"{number:,}."]
        right += [f"<answer>{number}</answer>", f"{number + 1}? No: {number}\n", f"${abs(number)}"]
        right = right[:-1] if number < 0 else right
        wrong = ["", f"{number}9", f"1{number}", f"{number}.5", f"{number + 1}", f"{-number - 1}"]
        wrong += [f"{number} or {number + 1}", "many"]
        wrong += [f"{number},000", f"{number}/7"] if number else []  # of 0 that is 0
        assert [said for said in right if earned(task, said, row["answer"]) != 1] == []
        assert [said for said in wrong if earned(task, said, row["answer"]) != 0] == []


def test_the_code_set_judges_programs(loaded):
    table = {"sum": PROGRAMS}
    assert misjudged(loaded("code", [CASES]), table, [CODE_BLOCK, CODE_BLOCK + "\nDone."]) == []


def test_every_known_name_is_in_the_tables():
    assert set(data.names()) == {*MATH, "code", *arithmetic.LEVELS}
    assert set(FILES) == set(hub.SOURCES)


MILLION = 10**6
EMPTY = ["", " \n", "<answer></answer>", "\\boxed{}", "```python\n```"]
ENORMOUS = ["9" * MILLION, "\\boxed{" * (MILLION // 7), "\\boxed{" + "x+" * (MILLION // 2) + "1}"]
ENORMOUS += ["```python\n" * (MILLION // 10), "```python\n#" + "x" * MILLION + "\nprint(1)\n```"]
ENORMOUS += ["<answer>" * (MILLION // 8) + "</answer>", "the answer is " * (MILLION // 14)]


@pytest.mark.parametrize("name", data.names())
def test_an_empty_or_enormous_completion_earns_nothing_within_the_time_limit(name, loaded):
    """In a thread, where a time limit by signals would not work."""
    if name in hub.SOURCES:
        task = loaded(name, [CASES] if name == "code" else ["18"])
    else:
        task = data.load(name, "test", limit=1)
    limit = code.TIME_LIMIT_S if name == "code" else math_worker.TIME_LIMIT_S
    answer, found = task.rows[0]["answer"], []

    def judge():
        for completion in [
            "",
            " \n",
            "<answer></answer>",
            "\\boxed{}",
            "```python\n```",
            *ENORMOUS,
        ]:
            start = time.monotonic()
            right = earned(task, completion, answer) >= 1 or task.correct(completion, answer)
            found.append((completion[:20], right, time.monotonic() - start < limit))

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert len(found) == len(EMPTY + ENORMOUS)
    assert [case for case in found if case[1:] != (False, True)] == []


def test_rows_are_read_in_the_hubs_own_columns(loaded):
    """A number becomes text, a thousands comma goes, a problem stands in the prompt as it is."""
    assert loaded("amc23", ["27"]).rows[0]["answer"] == "27.0"
    assert loaded("gsm8k", ["1,234"]).rows[0]["answer"] == "1234"
    assert loaded("aime24", ["025"]).rows[0]["answer"] == "025"
    assert "Problem 0?" in loaded("math500", ["1"]).rows[0]["prompt"][-1]["content"]
