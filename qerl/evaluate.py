"""`python -m qerl.evaluate`: accuracy of a model, with or without an adapter, on data sets.

Prompts and verdicts are the training's own (qerl.data): one template a data set. Sampling is the
engine's, without noise. `--completions` scores existing text and loads no model. The JSON keeps
every question's own values, which `python -m qerl.compare` pairs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from pathlib import Path

from qerl import data, rewards, run_folder, statistics
from qerl.config import LINEAR_BACKENDS, LORA_SLOTS, kebab


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        _check(arguments)
        (_score_file if arguments.completions else _evaluate)(arguments)
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:  # of the engine: no mistake of the user's
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _check(arguments) -> None:
    """Raise ValueError now rather than after hours of sampling."""
    path, top_p, temperature = Path(arguments.output), arguments.top_p, arguments.temperature
    share, seed = arguments.vllm_gpu_memory_utilization, arguments.seed
    if arguments.output and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(f"--output {path} cannot be written: no such folder, or read-only")
    if arguments.output and path.is_dir():
        raise ValueError(f"--output {path} is a folder: name a .json file in it")
    for name in ("samples", "max_prompt_length", "max_completion_length", "max_num_seqs"):
        value = getattr(arguments, name)
        if value < 1:
            raise ValueError(f"--{kebab(name)} {value}: expected at least 1")
    for name, holds, expected in (
        ("temperature", 0 <= temperature < math.inf, "0 (always the likeliest token) or more"),
        ("top_p", 0 < top_p <= 1, "more than 0 and at most 1"),
        ("vllm_gpu_memory_utilization", 0 < share < 1, "between 0 and 1, such as 0.8"),
        ("seed", 0 <= seed < 2**32, "at least 0 and below 2**32"),
    ):
        if not holds:
            raise ValueError(f"--{kebab(name)} {getattr(arguments, name)}: expected {expected}")


def _publish(arguments, report: dict, name: str, result: dict) -> None:
    """Report a data set as soon as it is done, so that a failure in a later one loses nothing."""
    report["datasets"][name] = result
    said = ", ".join(f"{key} {_percent(value)}" for key, value in result["metrics"].items())
    print(
        f"{name}: {said} ({result['questions']} questions x {result['samples']} samples)",
        flush=True,
    )
    if arguments.output:
        run_folder.write_json(arguments.output, report)


def _percent(metric: dict) -> str:
    """ "61.2% +- 1.3" of a metric's mean and standard error."""
    mean, error = metric["mean"], metric["standard_error"]
    return f"{100 * mean:.1f}%" + ("" if error is None else f" +- {100 * error:.1f}")


def summary(
    rows: list[dict], verdicts: list[list[bool]], majorities: list[float | None] | None = None
) -> dict:
    """The metrics of a data set, each with its clustered error, and every question's own values.

    rows: what the questions are told apart by; verdicts: a list of k samples for each question;
    majorities: what each question's majority is worth (statistics.majority), None where answers
    cannot be compared. accuracy is pass@1, the mean over questions of the share of right samples.
    """
    samples = len(verdicts[0])
    values = {
        f"pass@{k}": [statistics.pass_at_k(samples, sum(row), k) for row in verdicts]
        for k in _ks(samples)
    }
    if samples > 1 and majorities and None not in majorities:
        values[f"majority@{samples}"] = majorities
    pairs = {name: statistics.mean_and_error(each) for name, each in values.items()}
    ids = [_question_id(number, row) for number, row in enumerate(rows)]
    return {
        "accuracy": pairs["pass@1"][0],
        "standard_error": pairs["pass@1"][1],
        "questions": len(rows),
        "samples": samples,
        "metrics": {n: {"mean": mean, "standard_error": e} for n, (mean, e) in pairs.items()},
        "by_question": {"id": ids} | values,
    }


def _ks(samples: int) -> list[int]:
    """1, 2, 4, .. and `samples` itself."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


def _question_id(number: int, row: dict) -> str:
    """The same in every evaluation of the same question at the same place of the same data."""
    text = json.dumps([number, row], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def majority(correct, texts: list[str], verdicts: list[bool]) -> float | None:
    """What the majority of one question's completions is worth, by the verdict's own equality.

    A completion that states no answer has no vote. None for a verdict on programs: which of them
    are the same is not known.
    """
    stated = rewards.STATED.get(correct)
    if stated is None:
        return None
    answers = [stated(text) for text in texts]

    def same(i: int, j: int) -> bool:
        return answers[i] == answers[j] or correct(texts[i], answers[j])

    groups = statistics.grouped([i for i, answer in enumerate(answers) if answer], same)
    return statistics.majority([[verdicts[i] for i in group] for group in groups])


def _evaluate(arguments) -> None:
    """Sample and score every data set with one engine."""
    from qerl import checkpoint
    from qerl.rollout import Sampling

    names = arguments.dataset.split(",")
    for name in names:
        data.check_name(name, "test")
    if arguments.nf4:
        checkpoint.require_nf4()
    checkpoint.require_linear_backend(arguments.linear_backend)
    if not arguments.model:
        raise ValueError("--model is missing: expected a checkpoint folder, or --completions FILE")
    folder = checkpoint.resolve(arguments.model)
    found = checkpoint.require(folder, nvfp4=False if arguments.nf4 else None)
    checkpoint.require_context(found, _context(arguments))
    loaded = _adapter(arguments.adapter) if arguments.adapter else None
    tokenizer = data.tokenizer_of(folder)
    tasks = {name: data.load(name, "test", limit=arguments.limit) for name in names}
    prompts = {name: _prompts(tokenizer, task, arguments) for name, task in tasks.items()}
    engine = _engine(arguments, folder, loaded)
    report = {"model": str(folder), "adapter": arguments.adapter, **_sampling_record(arguments)}
    report["adapter_logp_change"] = _sync(engine, loaded, prompts[names[0]][:8])
    report["datasets"] = {}
    sampling = Sampling(arguments.max_completion_length, arguments.temperature, arguments.top_p)
    for name, task in tasks.items():
        result = run_task(
            engine, tokenizer, task, prompts[name], sampling, arguments.samples, arguments.seed
        )
        _publish(arguments, report, name, result)


def _adapter(folder: str):
    """The adapter of a folder, of a rank that vLLM can hold."""
    from qerl import adapter

    loaded = adapter.of_folder(folder)
    if loaded.rank > LORA_SLOTS[-1]:
        raise ValueError(
            f"--adapter {folder} has rank {loaded.rank}: vLLM's largest slot is {LORA_SLOTS[-1]}"
        )
    return loaded


def _prompts(tokenizer, task, arguments) -> list[list[int]]:
    """The token ids of each prompt of a task, none of which may be too long."""
    prompts = [data.prompt_ids(tokenizer, row) for row in task.rows]
    longest = max(map(len, prompts))
    if longest > arguments.max_prompt_length:
        raise ValueError(
            f"{task.name} has a prompt of {longest} tokens: raise --max-prompt-length "
            f"({arguments.max_prompt_length})"
        )
    return prompts


def _sampling_record(arguments) -> dict:
    names = ("samples", "temperature", "top_p", "max_completion_length", "seed")
    return {name: getattr(arguments, name) for name in names}


def _context(arguments) -> int:
    """Tokens that a prompt and its completion may have together."""
    return arguments.max_prompt_length + arguments.max_completion_length


def _engine(arguments, folder, loaded):
    from qerl.rollout import EngineSettings, start

    return start(
        EngineSettings(
            model=str(folder),
            nf4=arguments.nf4,
            max_model_len=_context(arguments),
            max_num_seqs=arguments.max_num_seqs,
            lora_rank=loaded.rank if loaded else 0,
            lora_modules=loaded.modules if loaded else (),
            gpu_memory_utilization=arguments.vllm_gpu_memory_utilization,
            seed=arguments.seed,
            linear_backend=arguments.linear_backend,
        )
    )


def _sync(engine, loaded, tokens) -> float | None:
    """Apply the adapter; the mean |change| it makes to log-probabilities of the prompts `tokens`.

    Raises ValueError when that is no more than two scorings of one model differ by: an adapter that
    is not applied must not pass for one that is.
    """
    if loaded is None:
        return None
    before, again = engine.score(tokens), engine.score(tokens)
    engine.sync(loaded)
    change, noise = _distance(before, engine.score(tokens)), _distance(before, again)
    if not change > noise:  # NaN is not above it
        raise ValueError(
            f"the adapter changes no log-probability (by {change:.2g} on average, and scoring "
            f"twice without it by {noise:.2g}): is it an untrained one?"
        )
    return change


def _distance(a: list[list[float]], b: list[list[float]]) -> float:
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def run_task(engine, tokenizer, task, prompts, sampling, samples: int, seed: int) -> dict:
    """`summary` and lengths of `samples` completions of every prompt, from `engine` as it is.

    prompts: token ids, one list a row of the task; sampling: a qerl.rollout.Sampling.
    """
    repeated = [ids for ids in prompts for _ in range(samples)]
    drawn = engine.generate(repeated, sampling, seed=seed)
    flat = tokenizer.batch_decode([c.token_ids for c in drawn], skip_special_tokens=True)
    texts = [flat[i : i + samples] for i in range(0, len(flat), samples)]
    asked = list(zip(texts, task.rows, strict=True))
    verdicts = [[task.correct(text, row["answer"]) for text in said] for said, row in asked]
    pairs = zip(texts, verdicts, strict=True)
    majorities = [majority(task.correct, *pair) for pair in pairs] if samples > 1 else None
    lengths = [len(completion.token_ids) for completion in drawn]
    finished = sum(completion.finished for completion in drawn) / len(drawn)
    return summary(task.rows, verdicts, majorities) | {
        "completion_length": sum(lengths) / len(lengths),
        "truncated_fraction": 1 - finished,
    }


def _score_file(arguments) -> None:
    """Verdicts on {"completion", "answer"} lines, by the data set's own rule."""
    data.check_name(arguments.dataset)
    rows = _read_completions(Path(arguments.completions))
    correct = data.verdict(arguments.dataset)
    verdicts = [bool(correct(completion, answer)) for completion, answer in rows]
    report = {"completions": arguments.completions, "verdicts": verdicts, "datasets": {}}
    asked = [{"answer": answer} for _, answer in rows]
    _publish(arguments, report, arguments.dataset, summary(asked, [[right] for right in verdicts]))


def _read_completions(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise ValueError(f"--completions {path} does not exist: expected a .jsonl file")
    rows = []
    for where, row in data.files.read_jsonl(path):
        if not isinstance(row, dict) or not isinstance(row.get("completion"), str):
            raise ValueError(f'{where}: expected {{"completion": text, "answer": text or number}}')
        rows.append((row["completion"], data.files.answer_text(row.get("answer"), where)))
    if not rows:
        raise ValueError(f"{path} has no lines")
    return rows


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m qerl.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or hub id")
    add("--nf4", action="store_true", help="hold a bf16 model in NF4, as train --precision nf4")
    add("--adapter", default="", help="PEFT folder, such as <output-dir>/adapter; empty: none")
    add("--dataset", default="gsm8k", help="names separated by commas, or a file")
    add("--samples", type=int, default=1, help="completions for each question")
    add("--limit", type=int, default=None, help="questions of each data set; default: all")
    add("--temperature", type=float, default=0.6, help="of sampling (the paper's 0.6); 0: greedy")
    add("--top-p", type=float, default=0.95, help="nucleus (the paper's 0.95); 1: all")
    add("--max-prompt-length", type=int, default=1024, help="tokens")
    add("--max-completion-length", type=int, default=4096, help="tokens")
    add("--max-num-seqs", type=int, default=128, help="sequences sampled at once")
    add("--vllm-gpu-memory-utilization", type=float, default=0.8, help="share of GPU memory")
    add("--linear-backend", choices=LINEAR_BACKENDS, default="auto", help="as train's")
    add("--seed", type=int, default=0, help="of sampling")
    add("--completions", default="", help='score a .jsonl of "completion", "answer"; no model')
    add("--output", default="", help="JSON file to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
