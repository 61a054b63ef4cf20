"""Accuracy and its error by hand, verdicts on given text, and a real evaluation of an adapter."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import test_data_rewards as hub_sets
from qerl import adapter, compare, data, evaluate, policy, rewards
from qerl.rollout import Completion, Sampling

# --- numbers


def summary(verdicts, majorities=None) -> dict:
    return evaluate.summary([{"prompt": "?"}] * len(verdicts), verdicts, majorities)


@pytest.mark.parametrize(
    ("verdicts", "mean", "error"),
    [
        ([[True, True], [False, False]], 0.5, 0.5),
        ([[True, False], [True, False]], 0.5, 0.0),  # every question alike
        ([[True], [True], [False], [False]], 0.5, math.sqrt(1 / 3) / 2),
        ([[True, True, False, False], [True] * 4, [False] * 4], 0.5, 0.5 / math.sqrt(3)),
        ([[True, False]], 0.5, None),  # one question: no spread to measure
        ([[False]] * 3, 0.0, 0.0),
    ],
)
def test_accuracy_and_its_clustered_error_are_those_worked_out_by_hand(verdicts, mean, error):
    found = summary(verdicts)
    assert found["accuracy"] == pytest.approx(mean)
    assert found["standard_error"] == pytest.approx(error)
    assert (found["questions"], found["samples"]) == (len(verdicts), len(verdicts[0]))
    assert found["metrics"]["pass@1"] == {
        "mean": found["accuracy"],
        "standard_error": found["standard_error"],
    }


def test_samples_of_one_question_do_not_count_as_questions():
    """Two questions asked a thousand times are still two."""
    few, many = ([[True] * n, [False] * n] for n in (1, 1000))
    assert summary(many)["standard_error"] == summary(few)["standard_error"] == 0.5


@pytest.mark.parametrize(
    ("samples", "names"),
    [
        (1, ["pass@1"]),
        (2, ["pass@1", "pass@2", "majority@2"]),
        (6, ["pass@1", "pass@2", "pass@4", "pass@6", "majority@6"]),
        (8, ["pass@1", "pass@2", "pass@4", "pass@8", "majority@8"]),
    ],
)
def test_every_metric_has_a_value_a_question(samples, names):
    found = summary([[True] * samples, [False] * samples], [1.0, 0.0])
    assert list(found["metrics"]) == names
    assert list(found["by_question"]) == ["id", *names]
    assert all(values == [1.0, 0.0] for values in list(found["by_question"].values())[1:])
    assert len(set(found["by_question"]["id"])) == 2  # though both ask "?"


VOTES = [  # of math_correct, the right answer being 3/4
    (["\\boxed{3/4}", "\\boxed{0.75}", "\\boxed{4/3}"], 1.0),  # two forms, one answer
    (["\\boxed{3/4}", "\\boxed{4/3}", "\\boxed{\\frac{8}{6}}"], 0.0),
    (["\\boxed{3/4}", "\\boxed{4/3}"], 0.5),  # a tie
    (["\\boxed{3/4}", "\\boxed{4/3}", "\\boxed{x+1}", "\\boxed{1+x}"], 0.0),
    (["\\boxed{3/4}", "no idea", "none", "\\boxed{}", "$$"], 1.0),  # no answer, no vote
    (["no idea", ""], 0.0),
]


@pytest.mark.parametrize(("texts", "worth"), VOTES)
def test_samples_vote_by_the_equality_of_the_verdict(texts, worth):
    correct = data.verdict("math500")
    verdicts = [correct(text, "\\frac{3}{4}") for text in texts]
    assert evaluate.majority(correct, texts, verdicts) == worth


def test_integers_vote_by_their_value_and_programs_do_not_vote():
    correct = data.verdict("arithmetic")
    assert evaluate.majority(correct, ["18.0", "It is 018!", "19"], [True, True, False]) == 1.0
    assert evaluate.majority(data.verdict("code"), ["a", "b"], [True, False]) is None


@pytest.mark.parametrize("name", data.names())
def test_every_verdict_but_that_on_programs_says_which_answer_it_read(name):
    assert (data.verdict(name) in rewards.STATED) == (name != "code")


# --- verdicts on given text


def written(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_given_completions_get_the_verdicts_of_the_data_set_in_their_order(tmp_path, capsys):
    said = ["<answer>18</answer>", "<answer>199</answer>", "The answer is 18.", "<answer></answer>"]
    rows = [{"completion": text, "answer": "18"} for text in said]
    file, output = written(tmp_path / "said.jsonl", rows), tmp_path / "eval.json"
    arguments = ["--dataset", "gsm8k", "--completions", file, "--output", str(output)]
    assert evaluate.main(arguments) == 0
    report = json.loads(output.read_text())
    verdict = data.verdict("gsm8k")
    assert report["verdicts"] == [verdict(text, "18") for text in said]
    assert report["verdicts"][:2] == [True, False] and report["verdicts"][3] is False
    assert report["datasets"]["gsm8k"]["accuracy"] == sum(report["verdicts"]) / 4
    assert "gsm8k: pass@1 50.0% +- 28.9 (4 questions x 1 samples)" in capsys.readouterr().out


def test_a_disk_that_takes_no_json_does_not_lose_the_result(tmp_path, capsys):
    file = written(tmp_path / "said.jsonl", [{"completion": "18", "answer": "18"}])
    (tmp_path / ".eval.json.partial").mkdir()  # where the JSON is written first
    with pytest.raises(OSError):
        evaluate.main(["--completions", file, "--output", str(tmp_path / "eval.json")])
    assert "gsm8k: pass@1 100.0%" in capsys.readouterr().out


def test_more_tokens_than_the_model_knows_are_refused(smollm2, capsys):
    flags = ["--model", str(smollm2), "--dataset", "arithmetic"]
    assert evaluate.main([*flags, "--max-completion-length", "100000"]) == 2
    assert "knows 8192: lower --max-completion-length" in capsys.readouterr().err


def test_an_output_that_is_a_folder_is_refused_before_anything_is_scored(tmp_path, capsys):
    file = written(tmp_path / "said.jsonl", [{"completion": "1", "answer": "1"}])
    flags = ["--dataset", "gsm8k", "--completions", file, "--output", str(tmp_path)]
    assert evaluate.main(flags) == 2
    assert "is a folder: name a .json file in it" in capsys.readouterr().err


def test_a_line_ends_at_its_line_feed_alone_and_blank_ones_are_passed_over(tmp_path):
    rows = [{"completion": "It is\u2028\x85 4", "answer": "4"}, {"completion": "", "answer": 4}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file, output = tmp_path / "said.jsonl", tmp_path / "eval.json"
    file.write_text(f"\n{lines[0]}\r\n  \n{lines[1]}\n\n", encoding="utf-8", newline="")
    flags = ["--dataset", "arithmetic", "--completions", str(file), "--output", str(output)]
    assert evaluate.main(flags) == 0
    assert json.loads(output.read_text())["verdicts"] == [True, False]


GOOD = '{"completion": "4", "answer": "4"}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "not json\n", "line 2 is not JSON"),
        (GOOD + '{"completion": "4"}\n', "line 2: the answer must be text or a number"),
        (GOOD + '{"completion": "4", "answer": null}\n', "line 2: the answer must be"),
        (GOOD + '{"completion": "4", "answer": "four"}\n', "'four' is not a number"),
        (GOOD + '{"completion": null, "answer": "4"}\n', "line 2: expected"),
        ("null\n", "line 1: expected"),
        (GOOD + '["4", "4"]\n', "line 2: expected"),
        ("", "has no lines"),
        ("\n\n", "has no lines"),
        (None, "does not exist"),
    ],
)
def test_a_bad_line_of_completions_is_named(tmp_path, capsys, text, words):
    file = tmp_path / "said.jsonl"
    if text is not None:
        file.write_text(text)
    assert evaluate.main(["--dataset", "arithmetic", "--completions", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


# --- mistakes, before an engine is started


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model {model} --dataset gsm9k", "data set 'gsm9k' is not known"),
        ("--model {model} --dataset arithmetic,gsm9k", "data set 'gsm9k' is not known"),
        ("--completions {lines} --dataset gsm9k", "data set 'gsm9k' is not known"),
        ("--dataset arithmetic", "--model is missing"),
        ("--model ./absent --dataset arithmetic", "there is no folder"),
        ("--model {model} --dataset arithmetic --adapter {lines}", "is missing: expected a PEFT"),
        ("--model {model} --dataset arithmetic --limit 0", "give at least 1"),
        ("--model {model} --dataset bigmath", "has no test split"),
        ("--model {model} --dataset arithmetic --output {lines}/eval.json", "cannot be written"),
        ("--model {model} --dataset arithmetic --output {absent}/eval.json", "cannot be written"),
        ("--samples 0", "--samples 0: expected at least 1"),
        ("--max-completion-length 0", "--max-completion-length 0: expected at least 1"),
        ("--max-num-seqs 0", "--max-num-seqs 0: expected at least 1"),
        ("--top-p 0", "--top-p 0.0: expected more than 0 and at most 1"),
        ("--top-p 1.1", "--top-p 1.1: expected"),
        ("--top-p nan", "--top-p nan: expected"),
        ("--temperature -0.1", "--temperature -0.1: expected 0"),
        ("--temperature inf", "--temperature inf: expected 0"),
        ("--temperature nan", "--temperature nan: expected 0"),
        ("--vllm-gpu-memory-utilization 80", "between 0 and 1, such as 0.8"),
        ("--seed -1", "--seed -1: expected at least 0"),
        pytest.param(
            "--model {model} --dataset arithmetic --linear-backend marlin",
            "--linear-backend marlin is about GPUs",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        (
            "--model {model} --dataset arithmetic,arithmetic-2 --limit 2 --max-prompt-length 22",
            "arithmetic-2 has a prompt of",
        ),
    ],
)
def test_a_mistake_ends_with_status_2_before_an_engine_starts(
    smollm2_nvfp4, tmp_path, capsys, monkeypatch, arguments, words
):
    monkeypatch.setattr(evaluate, "_engine", lambda *a: pytest.fail("an engine was started"))
    lines = tmp_path / "lines.jsonl"
    lines.write_text(GOOD)
    given = arguments.format(model=smollm2_nvfp4, lines=lines, absent=tmp_path / "absent")
    assert evaluate.main(given.split()) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--no-such-flag 1", "--limit many"])
def test_a_flag_that_is_not_known_ends_with_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(arguments.split())
    assert ended.value.code == 2


# --- with the engine


@pytest.fixture(scope="module")
def adapters(smollm2_nvfp4, tmp_path_factory) -> dict[str, str]:
    """Two adapter folders: one as PEFT makes it (B = 0), one that changes the model."""
    base = tmp_path_factory.mktemp("adapters")
    model = policy.adapt(policy.load(smollm2_nvfp4), 16, 32.0, seed=1)
    model.save_pretrained(base / "fresh")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(base / "trained")
    return {name: str(base / name) for name in ("fresh", "trained")}


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def of_rank_513(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 513}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "adapter_model.safetensors is not whole"),
        (lambda f: (f / "adapter_model.safetensors").write_text(""), "is not whole"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda f: (f / "adapter_config.json").write_text('{"r": 1'), "is not the configuration"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "is not the configuration"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "is not the configuration"),
        (of_rank_513, "has rank 513: vLLM's largest slot is 512"),
    ],
)
def test_an_adapter_folder_that_is_not_sound_ends_with_status_2_before_an_engine_starts(
    adapters, smollm2_nvfp4, tmp_path, capsys, monkeypatch, spoil, words
):
    monkeypatch.setattr(evaluate, "_engine", lambda *a: pytest.fail("an engine was started"))
    folder = Path(shutil.copytree(adapters["fresh"], tmp_path / "adapter"))
    spoil(folder)
    flags = ["--model", str(smollm2_nvfp4), "--dataset", "arithmetic", "--adapter", str(folder)]
    assert evaluate.main(flags) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


@pytest.fixture
def shared(engine, monkeypatch):
    """Makes evaluate.main use the shared engine."""
    monkeypatch.setattr(evaluate, "_engine", lambda *a: engine)
    return engine


def run(model, output, *more: str) -> dict:
    arguments = f"""--model {model} --dataset arithmetic --limit 6 --samples 3
        --max-completion-length 8 --max-prompt-length 64 --output {output}"""
    assert evaluate.main([*arguments.split(), *more]) == 0
    return json.loads(output.read_text())


@pytest.mark.slow
def test_an_evaluation_samples_every_question_and_repeats_itself(shared, smollm2_nvfp4, tmp_path):
    first = run(smollm2_nvfp4, tmp_path / "first.json")
    result = first["datasets"]["arithmetic"]
    assert (result["questions"], result["samples"]) == (6, 3)
    assert 0 <= result["accuracy"] <= result["metrics"]["pass@3"]["mean"] <= 1
    assert list(result["metrics"]) == ["pass@1", "pass@2", "pass@3", "majority@3"]
    assert 0 < result["completion_length"] <= 8 and 0 <= result["truncated_fraction"] <= 1
    assert (first["samples"], first["seed"]) == (3, 0)
    assert (first["temperature"], first["top_p"]) == (0.6, 0.95)
    assert first["adapter_logp_change"] is None
    assert run(smollm2_nvfp4, tmp_path / "again.json") == first
    other = run(smollm2_nvfp4, tmp_path / "other.json", "--seed", "1")
    assert other["datasets"]["arithmetic"] != result or other["seed"] == 1


@pytest.mark.slow
def test_an_adapter_is_applied_and_the_report_says_how_much_it_changes(
    shared, adapters, smollm2_nvfp4, tmp_path
):
    report = run(smollm2_nvfp4, tmp_path / "e.json", "--adapter", adapters["trained"])
    assert report["adapter"] == adapters["trained"]
    assert report["adapter_logp_change"] > 0.1
    assert len(shared.adapters()) == 1


@pytest.mark.slow
def test_a_trained_adapter_is_told_from_the_base_question_by_question(
    shared, adapters, smollm2_nvfp4, tmp_path, capsys
):
    more = "--limit 25 --samples 1 --temperature 0 --max-completion-length 16".split()
    base = run(smollm2_nvfp4, tmp_path / "base.json", *more)
    shared.sync(None)
    run(smollm2_nvfp4, tmp_path / "other.json", *more, "--adapter", adapters["trained"])
    capsys.readouterr()
    files = [str(tmp_path / name) for name in ("base.json", "other.json")]
    assert compare.main([*files, "--output", str(tmp_path / "compare.json")]) == 0
    found = json.loads((tmp_path / "compare.json").read_text())["datasets"]["arithmetic"]["pass@1"]
    assert found[files[0]]["mean"] == base["datasets"]["arithmetic"]["accuracy"] > 0
    assert found[files[1]]["difference_error"] > 0  # some question was answered otherwise
    assert "difference" in capsys.readouterr().out


@pytest.mark.slow
def test_an_untrained_adapter_does_not_pass_for_one(
    shared, adapters, smollm2_nvfp4, tmp_path, capsys
):
    flags = ["--model", str(smollm2_nvfp4), "--dataset", "arithmetic", "--limit", "2"]
    assert evaluate.main([*flags, "--adapter", adapters["fresh"]]) == 2
    assert "changes no log-probability" in capsys.readouterr().err


def test_an_adapter_under_which_the_engine_scores_nan_is_refused():
    class Engine:
        value = -1.0

        def score(self, tokens):
            return [[self.value] * (len(ids) - 1) for ids in tokens]

        def sync(self, adapter):
            self.value = math.nan

    with pytest.raises(ValueError, match="by nan on average"):
        evaluate._sync(Engine(), object(), [[1, 2, 3]])


def test_an_engine_that_samples_nan_ends_the_evaluation_with_one_line(monkeypatch, capsys):
    def sampled(arguments):
        raise FloatingPointError("the engine sampled a token")

    monkeypatch.setattr(evaluate, "_evaluate", sampled)
    assert evaluate.main(["--model", "none", "--dataset", "arithmetic"]) == 1
    assert capsys.readouterr().err == "error: the engine sampled a token\n"


@pytest.mark.slow
def test_several_data_sets_are_reported_apart(shared, smollm2_nvfp4, tmp_path):
    report = run(smollm2_nvfp4, tmp_path / "e.json", "--dataset", "arithmetic,arithmetic-2")
    assert list(report["datasets"]) == ["arithmetic", "arithmetic-2"]


FIVE = ("gsm8k", "math500", "aime24", "aime25", "amc23")
FIVE_FLAGS = f"""--dataset {",".join(FIVE)} --limit 2 --samples 2 --max-prompt-length 300
    --max-completion-length 4""".split()


@pytest.fixture
def five_sets(tmp_path, monkeypatch):
    """The evaluation sets, of two questions each, read by `datasets` in the hub's own layout."""
    for name in FIVE:
        hub_sets.stand_in(name, ["25", "70"], tmp_path, monkeypatch)


def asked(tokenizer, name: str, problem: str) -> list[int]:
    """The token ids of a problem under the one template of its set."""
    messages = [{"role": "user", "content": data.hub.MATH_PROMPT.format(problem=problem)}]
    if name == "gsm8k":
        system = {"role": "system", "content": data.hub.TAGS_PROMPT}
        messages = [system, {"role": "user", "content": problem}]
    return data.prompt_ids(tokenizer, {"prompt": messages})


@pytest.mark.slow
def test_the_five_sets_of_the_hub_run_through_the_engine_under_their_own_prompts(
    shared, five_sets, smollm2_nvfp4, tokenizer, tmp_path, monkeypatch
):
    given, generate = [], shared.generate
    with monkeypatch.context() as patched:
        patched.setattr(
            shared, "generate", lambda p, *a, **k: given.append(p) or generate(p, *a, **k)
        )
        results = run(smollm2_nvfp4, tmp_path / "e.json", *FIVE_FLAGS)["datasets"]
    assert tuple(results) == FIVE
    for name, prompts, result in zip(FIVE, given, results.values(), strict=True):
        expected = [asked(tokenizer, name, problem) for problem in ("Problem 0?", "Problem 1?")]
        assert sorted(prompts) == sorted(2 * expected)  # two samples each
        assert (result["questions"], result["samples"]) == (2, 2)
        assert list(result["metrics"]) == ["pass@1", "pass@2", "majority@2"]
        assert 0 < result["completion_length"] <= 4


def test_an_answer_in_the_asked_form_counts_in_each_of_the_five_sets(
    five_sets, smollm2_nvfp4, tokenizer, tmp_path, monkeypatch
):
    """The engine says the first question's answer to both: right, and wrong."""
    forms = iter([hub_sets.TAGS] + [hub_sets.BOXED] * 4)

    class Scripted:
        def generate(self, prompts, sampling, seed):
            said = tokenizer(next(forms).format("25"))["input_ids"] + [tokenizer.eos_token_id]
            return [Completion(said, [0.0] * len(said), True) for _ in prompts]

    monkeypatch.setattr(evaluate, "_engine", lambda *a: Scripted())
    results = run(smollm2_nvfp4, tmp_path / "e.json", *FIVE_FLAGS)["datasets"]
    for result in results.values():
        values = dict(result["by_question"])
        del values["id"]
        assert values == dict.fromkeys(("pass@1", "pass@2", "majority@2"), [1.0, 0.0])


@pytest.mark.slow
def test_a_failure_in_the_second_data_set_does_not_lose_the_first(
    shared, smollm2_nvfp4, tmp_path, monkeypatch
):
    whole, generate = run(smollm2_nvfp4, tmp_path / "whole.json"), shared.generate
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        calls = iter([1, 0])
        patched.setattr(shared, "generate", lambda *a, **k: 1 / next(calls) and generate(*a, **k))
        run(smollm2_nvfp4, tmp_path / "e.json", "--dataset", "arithmetic,arithmetic-2")
    assert json.loads((tmp_path / "e.json").read_text()) == whole


@pytest.mark.slow
def test_temperature_zero_always_draws_the_likeliest(shared, smollm2_nvfp4, tmp_path):
    first = run(smollm2_nvfp4, tmp_path / "1.json", "--temperature", "0")["datasets"]
    assert (
        run(smollm2_nvfp4, tmp_path / "2.json", "--temperature", "0", "--seed", "5")["datasets"]
        == first
    )


@pytest.mark.slow
def test_the_verdict_is_that_of_the_text_that_was_sampled(shared, tokenizer):
    """The engine is real, the verdict is made to answer what only the right text gives."""
    task = data.load("arithmetic", "test", limit=4)
    seen = []
    asked = dataclasses.replace(task, correct=lambda *pair: seen.append(pair) or True)
    prompts = [data.prompt_ids(tokenizer, row) for row in task.rows]
    result = evaluate.run_task(shared, tokenizer, asked, prompts, Sampling(6), samples=2, seed=0)
    assert (result["accuracy"], result["metrics"].keys()) == (1.0, {"pass@1", "pass@2"})
    assert len(seen) == 8
    assert [answer for _, answer in seen[::2]] == [row["answer"] for row in task.rows]
    assert [answer for _, answer in seen[1::2]] == [row["answer"] for row in task.rows]
    assert all(text and "<|im_end|>" not in text for text, _ in seen)


def test_the_adapter_folder_of_a_run_is_read_as_peft_wrote_it(adapters):
    read = adapter.of_folder(adapters["trained"])
    assert (read.rank, read.alpha, set(read.modules)) == (16, 32, set(policy.TARGETS))
