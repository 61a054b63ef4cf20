"""The data sets: prompts ask for the format that the rewards read, splits are apart, files checked.

The hub is not needed: rows in its own columns are fed to the conversion.
"""

import itertools
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qerl import data
from qerl.data import arithmetic, hub
from qerl.rewards import as_reward

DAPO_WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    'Find {x}.\n\nRemember to put your answer on its own line after "Answer:".'
)
CASES = [{"fn_name": None, "input": "2 3\n", "output": "5\n", "type": "stdin_stdout"}]
TAGS = "<think>So.</think>\n<answer>{}</answer>"
BOXED = "So it is \\boxed{{{}}}."

# name, a row as the hub has it, the right answer, the reply that was asked for, a wrong answer
HUB_ROWS = [
    ("gsm8k", {"question": "Eggs {?}", "answer": "9*2 = <<9*2=18>>18\n#### 18"}, "18", TAGS, "199"),
    ("gsm8k", {"question": "Money?", "answer": "So.\n#### 1,234"}, "$1,234", TAGS, "234"),
    ("bigmath", {"prompt": "x?", "solution": "\\frac{3}{4}", "source": "math"}, "3/4", BOXED, "4"),
    ("bigmath_hard", {"prompt": "x?", "solution": "42", "domain": []}, "42", BOXED, "4.2"),
    ("dapomath", {"prompt": "Find x.", "solution": "34", "data_source": "d"}, "34", BOXED, "35"),
    ("dapomath", {"prompt": DAPO_WRAPPED, "solution": "34"}, "34", BOXED, "-34"),
    ("miromind", {"problem": "x?", "clean_answer": "2\\sqrt{2}"}, "\\sqrt{8}", BOXED, "2\\sqrt{3}"),
    ("code", {"problem": "Add.", "verification_info": {"language": "python", "test_cases": CASES}},
     "sum(map(int, input().split()))", "```python\nprint({})\n```", "6"),
    ("math500", {"problem": "x?", "solution": "..", "answer": "(3, \\frac{\\pi}{2})", "level": 2},
     "\\left(3, \\pi/2\\right)", BOXED, "(3, \\pi)"),
    ("aime24", {"id": 60, "problem": "x?", "solution": "..", "answer": "025"}, "25", BOXED, "52"),
    ("aime25", {"problem": "x?", "answer": "70", "id": "0"}, "70", BOXED, "7"),
    ("amc23", {"id": 0, "question": "x?", "answer": 27.0, "url": "u"}, "27", BOXED, "72"),
]  # fmt: skip


def reward(functions, completion: str, answer: str) -> float:
    messages = [[{"role": "assistant", "content": completion}]]
    return sum(function(completions=messages, answer=[answer])[0] for function in functions)


def functions_of(name: str) -> tuple:
    kind = hub.SOURCES[name].kind
    return (as_reward(kind.correct, "correctness"), *kind.extra_rewards)


@pytest.mark.parametrize(("name", "row", "right", "reply", "wrong"), HUB_ROWS)
def test_the_asked_format_earns_the_full_reward(name, row, right, reply, wrong):
    converted = data.hub.convert(name, row)
    answer, kind = converted["answer"], hub.SOURCES[name].kind
    best = 1 + hub.FORMAT_WEIGHT * len(kind.extra_rewards)
    assert set(converted) == {"prompt", "answer"}
    assert reward(functions_of(name), reply.format(right), answer) == pytest.approx(best)
    assert kind.correct(reply.format(right), answer)
    assert reward(functions_of(name), reply.format(wrong), answer) == pytest.approx(best - 1)
    assert not kind.correct(reply.format(wrong), answer)


def test_every_hub_set_is_in_the_table():
    assert {name for name, *_ in HUB_ROWS} == set(hub.SOURCES)


@pytest.mark.parametrize(("name", "row", "right", "reply", "wrong"), HUB_ROWS)
def test_the_prompt_asks_for_the_format_that_is_read(name, row, right, reply, wrong):
    prompt = data.hub.convert(name, row)["prompt"]
    text = "\n".join(message["content"] for message in prompt)
    asked = {TAGS: "<answer>", BOXED: "\\boxed{}"}.get(reply, "```python block")
    assert asked in text
    assert [form for form in ("<answer>", "\\boxed{}", "Answer:", "####") if form in text] == (
        [asked] if asked != "```python block" else []
    )
    assert prompt[-1]["role"] == "user"


def test_a_problem_stands_in_its_prompt_as_it_is():
    converted = hub.convert("dapomath", {"prompt": DAPO_WRAPPED, "solution": "34"})
    assert converted["prompt"][0]["content"].startswith("Find {x}.\n\nReason")
    converted = hub.convert("gsm8k", {"question": "Eggs {?}", "answer": "#### 1"})
    assert converted["prompt"][1] == {"role": "user", "content": "Eggs {?}"}


def test_a_format_alone_earns_far_less_than_an_answer_alone():
    functions = functions_of("gsm8k")
    assert reward(functions, TAGS.format("17"), "18") == pytest.approx(0.2)
    assert reward(functions, "It is 18", "18") == 1.0


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gsm8k", {"question": "Eggs?", "answer": "eighteen"}),
        ("miromind", {"problem": "x?", "clean_answer": None}),
        ("bigmath", {"prompt": "x?", "solution": " "}),
        ("bigmath", {"prompt": "x?", "solution": "$$"}),
        ("bigmath", {"prompt": None, "solution": "1"}),
        ("code", {"problem": "f?", "verification_info": {"test_cases": []}}),
        (
            "code",
            {"problem": "f?", "verification_info": {"test_cases": [{"type": "function_call"}]}},
        ),
    ],
)
def test_a_row_that_cannot_be_scored_is_no_row(name, row):
    assert hub.convert(name, row) is None


def test_a_changed_hub_layout_is_named():
    with pytest.raises(ValueError, match="has no column answer; it has question, solution"):
        hub.convert("gsm8k", {"question": "x", "solution": "y"})


def test_unusable_rows_are_counted(monkeypatch, caplog):
    rows = [{"problem": "x?", "clean_answer": answer} for answer in ("1", None, "2")]
    monkeypatch.setattr(hub, "_download", lambda source, split: rows)
    assert [row["answer"] for row in data.load("miromind").rows] == ["1", "2"]
    assert "left out 1 of 3 rows" in caplog.text
    monkeypatch.setattr(hub, "_download", lambda source, split: rows[1:2])
    with pytest.raises(ValueError, match="no row"):
        data.load("miromind")


def test_a_hub_failure_names_the_set_and_the_way_out(tmp_path):
    program = "from qerl import data\ndata.load('gsm8k', 'test')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("ConnectionError: could not load openai/gsm8k")
    assert "HF_HUB_OFFLINE" in error and "--dataset PATH" in error


# Arithmetic


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_arithmetic_answers_are_right(level):
    for row in data.load(level, limit=300).rows:
        system, user = row["prompt"]
        assert system == {"role": "system", "content": ""}
        text = user["content"].removeprefix("What is ").removesuffix("?")
        assert eval(text, {"__builtins__": {}}) == int(row["answer"])


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_arithmetic_gives_the_full_reward_to_a_right_answer_only(level):
    task = data.load(level, "test", limit=20)
    for row in task.rows:
        value = int(row["answer"])
        assert reward(task.reward_functions, f"That is {value}.", row["answer"]) == 1.0
        assert reward(task.reward_functions, f"That is {value + 1}.", row["answer"]) == 0.0
        assert task.correct(f"{value}", row["answer"])


def test_level_one_is_all_hundred_sums_once():
    rows = [row for split in ("train", "test") for row in data.load("arithmetic", split).rows]
    expected = {f"What is {a} + {b}?" for a, b in itertools.product(range(10), repeat=2)}
    assert len(rows) == 100 and {row["prompt"][1]["content"] for row in rows} == expected
    assert len(data.load("arithmetic", "test").rows) == 25


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_no_test_problem_is_trained_on_whatever_the_seeds(level):
    def signs(split, seed):
        texts = (row["prompt"][1]["content"] for row in data.load(level, split, seed).rows)
        return {"".join(sorted(text)) for text in texts}  # so 3 + 4 is 4 + 3

    trained = signs("train", 0) | signs("train", 1)
    assert not trained & (signs("test", 0) | signs("test", 2))


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_problems_repeat_with_the_seed_and_a_limit_only_cuts(level):
    few, many = data.load(level, seed=3, limit=20).rows, data.load(level, seed=3, limit=50).rows
    assert few == many[:20]
    assert data.load(level, seed=3).rows != data.load(level, seed=4).rows
    assert len({row["prompt"][1]["content"] for row in many}) == len(many) == 50


@pytest.mark.parametrize("level", ["arithmetic-2", "arithmetic-3", "arithmetic-4"])
def test_the_larger_levels_have_rows_enough(level):
    assert len(data.load(level).rows) == 2_000
    assert len(data.load(level, "test").rows) == 200


# Local files


def write(path: Path, *rows) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


CHAT = [{"role": "system", "content": ""}, {"role": "user", "content": "1 + 1?"}]


def test_a_jsonl_file_is_taken_as_it_stands(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        {"prompt": "1 + 1?", "answer": " 2 "},
        {"prompt": CHAT, "answer": 2},
        {"prompt": "3 / 2?", "answer": 1.5, "level": 1},
    )
    task = data.load(path)
    assert task.name == path
    assert [row["answer"] for row in task.rows] == ["2", "2", "1.5"]
    assert task.rows[0]["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert task.rows[1]["prompt"] == CHAT
    assert task.correct("so \\boxed{3/2}", "1.5")
    assert reward(task.reward_functions, "so 2", "2") == 1.0
    data.check_name(path)


@pytest.mark.parametrize(
    ("number", "text", "reply"),
    [
        (1e-05, "0.00001", "10^{-5}"),
        (1e16, "10000000000000000", "10^{16}"),
        (1.5e-7, "0.00000015", "1.5 \\times 10^{-7}"),
        (-0.1, "-0.1", "-\\frac{1}{10}"),
        (2.0, "2.0", "2"),
        (10**20, "1" + "0" * 20, "10^{20}"),
    ],
)
def test_a_number_is_written_so_that_a_right_reply_earns_its_reward(number, text, reply, tmp_path):
    task = data.load(write(tmp_path / "own.jsonl", {"prompt": "?", "answer": number}))
    [row] = task.rows
    assert row["answer"] == text
    assert reward(task.reward_functions, f"\\boxed{{{reply}}}", row["answer"]) == 1.0


def test_a_parquet_file_is_read_as_well(tmp_path):
    path = str(tmp_path / "own.parquet")
    decimals = [Decimal("2.50"), Decimal("3.00")]
    for answers, said in (([2, 3], ["2", "3"]), (decimals, ["2.50", "3.00"])):
        table = pyarrow.table({"prompt": [CHAT, CHAT], "answer": answers})
        pyarrow.parquet.write_table(table, path)
        rows = [{"prompt": CHAT, "answer": answer} for answer in said]
        assert data.load(path, "test").rows == rows


def test_a_limit_draws_by_the_seed_and_keeps_the_order(tmp_path):
    rows = [{"prompt": "?", "answer": number} for number in range(100)]
    path = write(tmp_path / "own.jsonl", *rows)

    def drawn(seed, limit):
        return [int(row["answer"]) for row in data.load(path, seed=seed, limit=limit).rows]

    assert drawn(0, 10) == sorted(drawn(0, 10)) and len(set(drawn(0, 10))) == 10
    assert drawn(0, 10) != drawn(1, 10)
    assert drawn(0, None) == drawn(0, 500) == list(range(100))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "?"}], "line 1 lacks answer"),
        ([{"prompt": "?", "answer": "1"}, {"question": "?", "answer": "1"}], "line 2 lacks prompt"),
        ([{"prompt": "?", "answer": "1"}, "{'prompt'"], "line 2 is not JSON"),
        (["[1]"], "line 1 must be an object"),
        ([""], "is empty"),
        ([{"prompt": "?", "answer": None}], "answer must be text or a number"),
        ([{"prompt": "?", "answer": " "}], "answer must be text or a number"),
        ([{"prompt": "?", "answer": r"\text{}"}], "answer must be text or a number"),
        ([{"prompt": "?", "answer": float("nan")}], "answer must be text or a number, not nan"),
        ([{"prompt": "?", "answer": float("inf")}], "answer must be text or a number, not inf"),
        ([{"prompt": "?", "answer": ["1"]}], "answer must be text or a number"),
        ([{"prompt": "?", "answer": True}], "answer must be text or a number"),
        ([{"prompt": " ", "answer": "1"}], "prompt must be text or a list"),
        ([{"prompt": [], "answer": "1"}], "prompt must be text or a list"),
        ([{"prompt": [{"role": "user"}], "answer": "1"}], "prompt must be text or a list"),
    ],
)
def test_a_faulty_file_is_refused_before_anything_else(lines, message, tmp_path):
    path = write(tmp_path / "own.jsonl", *lines)
    for check in (data.check_name, data.load):
        with pytest.raises(ValueError, match=message) as raised:
            check(path)
        assert path in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "caf\xe9?", "answer": "1"}', "line 1 is not UTF-8"),
        (b'{"prompt": "\\ud800", "answer": "1"}', "line 1 holds text that is not Unicode"),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_line(line, message, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=message):
        data.check_name(str(path))


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "?", "answer": "1"}\r\n')
    assert data.load(str(path)).rows[0]["answer"] == "1"


def test_a_file_that_is_no_parquet_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a parquet file"):
        data.check_name(write(tmp_path / "own.parquet", "text"))


def test_a_parquet_file_that_is_damaged_inside_is_refused(tmp_path):
    path = tmp_path / "own.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["?"] * 99, "answer": range(99)}), path)
    whole = path.read_bytes()
    for damaged in (whole[:4] + bytes(60) + whole[64:], whole[:-60] + bytes(50) + whole[-10:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a parquet file, or not whole"):
            data.check_name(str(path))


# Names


@pytest.mark.parametrize("check", [data.check_name, data.load])
def test_an_unknown_name_lists_the_known_ones_and_the_other_way(check):
    with pytest.raises(ValueError, match="gsm8k-2") as raised:
        check("gsm8k-2")
    assert all(name in str(raised.value) for name in data.names())
    assert ".jsonl or .parquet" in str(raised.value)


@pytest.mark.parametrize("check", [data.check_name, data.load])
def test_a_missing_file_is_named(check, tmp_path):
    with pytest.raises(ValueError, match="nowhere.jsonl does not exist"):
        check(str(tmp_path / "nowhere.jsonl"))


def test_every_known_name_passes_without_the_hub():
    for name in data.names():
        data.check_name(name)


@pytest.mark.parametrize(("name", "split"), [("math500", "train"), ("bigmath", "test")])
def test_a_split_that_a_set_has_not_is_refused(name, split):
    for check in (data.check_name, data.load):
        with pytest.raises(ValueError, match=f"no {split} split") as raised:
            check(name, split)
        assert "gsm8k" in str(raised.value)


def test_a_split_of_another_name_and_a_limit_of_nothing_are_refused():
    with pytest.raises(ValueError, match="validation"):
        data.load("arithmetic", "validation")
    with pytest.raises(ValueError, match="at least 1"):
        data.load("arithmetic", limit=0)
    with pytest.raises(ValueError, match="at most 50000"):
        data.load("arithmetic-3", limit=10**6)


# Order


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_every_epoch_is_a_permutation(rows):
    found = data.order(5 * rows, rows, seed=0)
    for epoch in range(5):
        assert sorted(found[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_the_order_of_the_first_prompts_does_not_depend_on_how_many_follow():
    longest = data.order(40, 7, seed=1)
    for count in range(41):
        assert data.order(count, 7, seed=1) == longest[:count]


def test_epochs_and_seeds_differ():
    found = data.order(200, 100, seed=0)
    assert found[:100] != found[100:]
    assert data.order(100, 100, seed=1) != found[:100]
    with pytest.raises(ValueError, match="at least one"):
        data.order(3, 0, seed=0)
