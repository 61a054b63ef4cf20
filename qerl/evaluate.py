"""`python -m qerl.evaluate`: accuracy of a model, with or without an adapter, on data sets.

Prompts and verdicts are the training's own (qerl.data): one template a data set. Sampling is the
engine's, without noise. `--completions` scores existing text and loads no model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

from qerl import data, run_folder


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        _check_output(arguments.output)
        report = _score_file(arguments) if arguments.completions else _evaluate(arguments)
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.output:
        run_folder.write_json(arguments.output, report)
    for name, result in report["datasets"].items():
        print(
            f"{name}: accuracy {100 * result['accuracy']:.1f}% +- "
            f"{100 * result['standard_error']:.1f} ({result['questions']} questions x "
            f"{result['samples']} samples)"
        )
    return 0


def _check_output(path: str) -> None:
    """Raise ValueError now rather than after hours of sampling."""
    folder = Path(path).parent
    if path and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"--output {path} cannot be written: {folder} is no folder, or read-only")


def accuracy(verdicts: list[list[bool]]) -> dict:
    """Mean over questions of each one's share of right samples, and its standard error.

    verdicts: a list of samples for each question. The error is clustered by question: samples of
    one question are not independent (Miller 2024, arXiv 2411.00640, equation 4).
    """
    means = [sum(row) / len(row) for row in verdicts]
    mean = sum(means) / len(means)
    spread = sum((value - mean) ** 2 for value in means)
    error = math.sqrt(spread / (len(means) - 1) / len(means)) if len(means) > 1 else 0.0
    return {
        "accuracy": mean,
        "standard_error": error,
        "questions": len(means),
        "samples": len(verdicts[0]),
    }


def _evaluate(arguments) -> dict:
    """Sample and score every data set with one engine."""
    from qerl import adapter, checkpoint

    names = arguments.dataset.split(",")
    for name in names:
        data.check_name(name, "test")
    if not arguments.model:
        raise ValueError("--model is missing: expected a checkpoint folder, or --completions FILE")
    folder = checkpoint.resolve(arguments.model)
    checkpoint.require(folder)
    loaded = adapter.of_folder(arguments.adapter) if arguments.adapter else None
    tasks = {name: data.load(name, "test", limit=arguments.limit) for name in names}
    engine, tokenizer = _engine(arguments, folder, loaded)
    report = {"model": str(folder), "adapter": arguments.adapter, **_sampling_record(arguments)}
    report["adapter_logp_change"] = _sync(engine, loaded, tokenizer, tasks)
    report["datasets"] = {
        name: _run_task(engine, tokenizer, task, arguments) for name, task in tasks.items()
    }
    return report


def _sampling_record(arguments) -> dict:
    names = ("samples", "temperature", "top_p", "max_completion_length", "seed")
    return {name: getattr(arguments, name) for name in names}


def _engine(arguments, folder, loaded):
    from transformers import AutoTokenizer

    from qerl.rollout import Engine, EngineSettings

    engine = Engine(
        EngineSettings(
            model=str(folder),
            max_model_len=arguments.max_prompt_length + arguments.max_completion_length,
            max_num_seqs=arguments.max_num_seqs,
            lora_rank=loaded.rank if loaded else 0,
            lora_modules=loaded.modules if loaded else (),
            gpu_memory_utilization=arguments.vllm_gpu_memory_utilization,
            seed=arguments.seed,
        )
    )
    return engine, AutoTokenizer.from_pretrained(folder)


def _sync(engine, loaded, tokenizer, tasks) -> float | None:
    """Apply the adapter; the mean |change| it makes to log-probabilities of the first prompts.

    Raises ValueError when there is none: an adapter that is not applied must not pass for one.
    """
    if loaded is None:
        return None
    tokens = [data.prompt_ids(tokenizer, row) for row in next(iter(tasks.values())).rows[:8]]
    before = engine.score(tokens)
    engine.sync(loaded)
    after = engine.score(tokens)
    changes = [
        abs(a - b) for x, y in zip(after, before, strict=True) for a, b in zip(x, y, strict=True)
    ]
    change = sum(changes) / len(changes)
    if change == 0:
        raise ValueError("the adapter changes no log-probability: is it an untrained one?")
    return change


def _run_task(engine, tokenizer, task, arguments) -> dict:
    from qerl.rollout import Sampling

    prompts = [data.prompt_ids(tokenizer, row) for row in task.rows]
    longest = max(map(len, prompts))
    if longest > arguments.max_prompt_length:
        raise ValueError(
            f"{task.name} has a prompt of {longest} tokens: raise --max-prompt-length "
            f"({arguments.max_prompt_length})"
        )
    repeated = [ids for ids in prompts for _ in range(arguments.samples)]
    sampling = Sampling(arguments.max_completion_length, arguments.temperature, arguments.top_p)
    drawn = engine.generate(repeated, sampling, seed=arguments.seed)
    texts = tokenizer.batch_decode([c.token_ids for c in drawn], skip_special_tokens=True)
    answers = [row["answer"] for row in task.rows for _ in range(arguments.samples)]
    flat = [task.correct(text, answer) for text, answer in zip(texts, answers, strict=True)]
    rows = [flat[i : i + arguments.samples] for i in range(0, len(flat), arguments.samples)]
    lengths = [len(completion.token_ids) for completion in drawn]
    finished = sum(completion.finished for completion in drawn) / len(drawn)
    return accuracy(rows) | {
        "completion_length": sum(lengths) / len(lengths),
        "truncated_fraction": 1 - finished,
    }


def _score_file(arguments) -> dict:
    """Verdicts on {"completion", "answer"} lines, by the data set's own rule."""
    data.check_name(arguments.dataset)
    rows = _read_completions(Path(arguments.completions))
    correct = data.verdict(arguments.dataset)
    verdicts = [bool(correct(row["completion"], row["answer"])) for row in rows]
    return {
        "completions": arguments.completions,
        "verdicts": verdicts,
        "datasets": {arguments.dataset: accuracy([[verdict] for verdict in verdicts])},
    }


def _read_completions(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(f"--completions {path} does not exist: expected a .jsonl file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"completion": str(row["completion"]), "answer": str(row["answer"])})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"completion": ..., "answer": ...}}'
            ) from error
    if not rows:
        raise ValueError(f"{path} has no lines")
    return rows


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m qerl.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or hub id")
    add("--adapter", default="", help="PEFT folder, such as <output-dir>/adapter; empty: none")
    add("--dataset", default="gsm8k", help="names separated by commas, or a file")
    add("--samples", type=int, default=1, help="completions for each question")
    add("--limit", type=int, default=None, help="questions of each data set; default: all")
    add("--temperature", type=float, default=0.6, help="of sampling (the paper's 0.6)")
    add("--top-p", type=float, default=0.95, help="nucleus (the paper's 0.95); 1: all")
    add("--max-prompt-length", type=int, default=1024, help="tokens")
    add("--max-completion-length", type=int, default=4096, help="tokens")
    add("--max-num-seqs", type=int, default=128, help="sequences sampled at once")
    add("--vllm-gpu-memory-utilization", type=float, default=0.8, help="share of GPU memory")
    add("--seed", type=int, default=0, help="of sampling")
    add("--completions", default="", help='score a .jsonl of "completion", "answer"; no model')
    add("--output", default="", help="JSON file to write")
    arguments = parser.parse_args(argv)
    for name in ("samples", "max_completion_length"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
