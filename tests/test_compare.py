"""Evaluations side by side: differences by hand, pairing that pays, and what cannot be paired."""

from __future__ import annotations

import json
import math
import random

import pytest

from qerl import compare, evaluate


def evaluation(verdicts, name="gsm8k", questions=None, **settings) -> dict:
    """What evaluate writes of given verdicts; majorities are the first sample's."""
    rows = questions or [{"prompt": str(i), "answer": "1"} for i in range(len(verdicts))]
    result = evaluate.summary(rows, verdicts, [float(row[0]) for row in verdicts])
    return {"datasets": {name: result}, "temperature": 0.6} | settings


def written(path, run) -> str:
    path.write_text(json.dumps(run))
    return str(path)


BASE = [[True, False], [False, False], [False, False]]
BETTER = [[True, True], [True, False], [False, False]]


def test_differences_by_question_are_those_worked_out_by_hand():
    report = compare.compare({"base": evaluation(BASE), "better": evaluation(BETTER)})
    found = report["datasets"]["gsm8k"]
    assert list(found) == ["pass@1", "pass@2", "majority@2"]
    one = found["pass@1"]["better"]  # differences 0.5, 0.5, 0
    error = math.sqrt((2 * (1 / 6) ** 2 + (1 / 3) ** 2) / 2 / 3)
    assert one["mean"] == pytest.approx(0.5) and one["difference"] == pytest.approx(1 / 3)
    assert one["difference_error"] == pytest.approx(error)
    assert one["interval_95"] == pytest.approx((1 / 3 - 1.96 * error, 1 / 3 + 1.96 * error))
    assert found["pass@2"]["better"]["difference"] == pytest.approx(1 / 3)  # 0, 1, 0
    assert "difference" not in found["pass@1"]["base"]
    assert (report["baseline"], report["notes"]) == ("base", [])


def test_a_run_against_a_copy_of_itself_differs_by_nothing():
    same = evaluation(BASE)
    found = compare.compare({"a": same, "b": same})["datasets"]["gsm8k"]["pass@1"]["b"]
    assert (found["difference"], found["difference_error"]) == (0.0, 0.0)


def test_pairing_takes_the_difficulty_of_the_questions_out():
    random.seed(0)
    easy = [random.random() < 0.5 for _ in range(200)]
    base = [[right] * 4 for right in easy]
    better = [[right or random.random() < 0.1] * 4 for right in easy]
    runs = {"base": evaluation(base), "better": evaluation(better)}
    found = compare.compare(runs)["datasets"]["gsm8k"]["pass@1"]
    unpaired = math.hypot(found["base"]["standard_error"], found["better"]["standard_error"])
    assert 0 < found["better"]["difference_error"] < unpaired / 2


def test_the_program_prints_a_table_and_writes_it(tmp_path, capsys):
    files = [written(tmp_path / f"{i}.json", evaluation(v)) for i, v in enumerate((BASE, BETTER))]
    assert compare.main([*files, "--output", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert "gsm8k pass@1, %" in out and "difference +33.3 +- 16.7, 95% from +0.7 to +66.0" in out
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["datasets"]["gsm8k"]["pass@1"][files[1]]["mean"] == pytest.approx(0.5)


def test_one_question_is_compared_without_an_error():
    runs = {"a": evaluation([[True]]), "b": evaluation([[False]])}
    report = compare.compare(runs)
    assert report["datasets"]["gsm8k"]["pass@1"]["b"]["interval_95"] is None
    assert "difference -100.0 +- ?" in compare.table(report)


@pytest.mark.parametrize(
    "questions",
    [
        [{"prompt": "other", "answer": "1"}] + [{"prompt": str(i), "answer": "1"} for i in (1, 2)],
        [{"prompt": str(i), "answer": "2"} for i in range(3)],
        [{"prompt": str(i), "answer": "1"} for i in (1, 0, 2)],
        [{"prompt": str(i), "answer": "1"} for i in range(2)],
    ],
)
def test_other_questions_are_refused_with_the_way_out(questions, tmp_path, capsys):
    other = evaluation(BETTER[: len(questions)], questions=questions)
    files = [written(tmp_path / "a.json", evaluation(BASE)), written(tmp_path / "b.json", other)]
    assert compare.main(files) == 2
    said = capsys.readouterr().err
    assert "b.json" in said and "asked different questions of gsm8k" in said
    assert "the same --limit" in said and said.count("\n") == 1


def test_what_not_all_have_is_left_out_and_said():
    first, second = evaluation(BASE, seed=1), evaluation([row * 2 for row in BASE], seed=2)
    first["datasets"] |= evaluation(BASE, "amc23")["datasets"]
    report = compare.compare({"a": first, "b": second})
    assert list(report["datasets"]) == ["gsm8k"]
    assert list(report["datasets"]["gsm8k"]) == ["pass@1", "pass@2"]
    for note in ("amc23: not in b", "majority@2: not in b", "majority@4: not in a", "--seed"):
        assert note in compare.table(report)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["[]", "{}"], "is not what qerl.evaluate"),
        (["{", "{}"], "is not what qerl.evaluate"),
        (['{"datasets": {"gsm8k": {"accuracy": 1}}}'] * 2, "evaluate again"),
        (['{"datasets": {}}'] * 2, "share no data set"),
        (['{"datasets": {}}'], "name two files or more"),
    ],
)
def test_what_cannot_be_compared_is_said(texts, words, tmp_path, capsys):
    files = []
    for number, text in enumerate(texts):
        files.append(str(tmp_path / f"{number}.json"))
        (tmp_path / f"{number}.json").write_text(text)
    assert compare.main(files) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert compare.main([str(tmp_path / "absent.json")] * 2) == 2
    assert "absent.json" in capsys.readouterr().err
