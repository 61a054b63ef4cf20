"""Data sets: a name becomes prompts, answers, a verdict and reward functions.

hub.py knows the sets of the Hugging Face hub; arithmetic.py makes problems without a download;
files.py reads a user's own file. Prompts are chat messages, tokenized by the model's template.
"""

import importlib
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError

from qerl.rewards import as_reward, last_integer_correct, math_correct

from . import arithmetic, files, hub

# What TRL calls a reward function with; the rows here have no other columns.
REWARD_ARGUMENTS = """
prompts completions completion_ids answer trainer_state log_extra log_metric
""".split()


@dataclass(frozen=True)
class Task:
    """A data set ready to use."""

    name: str
    rows: list[dict]  # {"prompt": chat messages, "answer": str}, at least one
    correct: Callable[[str, str], bool]  # (completion, answer): the verdict that evaluation uses
    reward_functions: tuple[Callable, ...]  # TRL's signature; the reward is their sum


def names() -> tuple[str, ...]:
    """Every data set name that `load` knows; a path to a .jsonl or .parquet file works too."""
    return (*arithmetic.LEVELS, *hub.SOURCES)


def check_name(name: str, split: str | None = None) -> None:
    """Raise ValueError if `load(name, split)` could not work, within seconds and without the hub.

    A local file is read and checked in full.
    """
    if split not in (None, "train", "test"):
        raise ValueError(f"split {split!r} is not known: it is 'train' or 'test'")
    if name.endswith(files.FILE_TYPES):
        files.rows(Path(name))
    elif name not in names():
        raise ValueError(
            f"data set {name!r} is not known. Known are {', '.join(names())}; "
            "or give the path of a .jsonl or .parquet file with the columns prompt and answer"
        )
    elif name in hub.SOURCES and split and split not in hub.SOURCES[name].splits:
        has = " and ".join(hub.SOURCES[name].splits)
        others = ", ".join(
            n for n in names() if n not in hub.SOURCES or split in hub.SOURCES[n].splits
        )
        raise ValueError(f"data set {name!r} has no {split} split, only {has}. {split}: {others}")


def load(name: str, split: str = "train", seed: int = 0, limit: int | None = None) -> Task:
    """Load `split` ("train" or "test") of a known data set, or a local file, which has no splits.

    At most `limit` rows, drawn by `seed` and in the order of the set. Raises ValueError for a
    mistake in the name, the split or the file, and ConnectionError when the hub cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of rows is limited to {limit}; give at least 1, or no limit")
    check_name(name, split)
    correct = verdict(name)
    rewards = (as_reward(correct, "correctness"),)
    if name.endswith(files.FILE_TYPES):
        return Task(name, _draw(files.rows(Path(name)), seed, limit), correct, rewards)
    if name in arithmetic.LEVELS:
        return Task(name, arithmetic.rows(name, split, seed, limit), correct, rewards)
    rows = _draw(hub.rows(name, split), seed, limit)
    return Task(name, rows, correct, rewards + hub.SOURCES[name].kind.extra_rewards)


def verdict(name: str) -> Callable[[str, str], bool]:
    """The function (completion, answer) -> bool that decides for a data set; loads nothing."""
    if name in arithmetic.LEVELS:
        return last_integer_correct
    return hub.SOURCES[name].kind.correct if name in hub.SOURCES else math_correct


def _draw(rows: list, seed: int, limit: int | None) -> list:
    if limit is None or limit >= len(rows):
        return rows
    kept = random.Random(seed).sample(range(len(rows)), limit)
    return [rows[index] for index in sorted(kept)]


def tokenizer_of(folder: Path):
    """The tokenizer of a model folder; ValueError when it or its chat template is missing."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, padding_side="left")
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder} has no tokenizer that can be read ({reason})") from error
    if found.chat_template is None:
        raise ValueError(
            f"{folder} has no chat template: expected an instruct model; save one with "
            "tokenizer.chat_template = ... and save_pretrained"
        )
    return found


def prompt_ids(tokenizer, row: dict) -> list[int]:
    """The token ids of a row's prompt under the tokenizer's chat template, ready to be answered."""
    try:
        return tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in row["prompt"])
        raise ValueError(
            f"the model's chat template refuses a prompt of {roles}: {error}. Take an instruct "
            "model whose template knows these roles"
        ) from error


def order(count: int, rows: int, seed: int) -> list[int]:
    """The row index of each of `count` prompts: every epoch is a permutation of range(rows).

    Epoch e is shuffled by (seed, e) alone, so position i holds the same row whatever `count` is:
    a resumed or longer run continues the same list.
    """
    if rows < 1:
        raise ValueError(f"cannot order {count} prompts out of {rows} rows: at least one is needed")
    epochs = range(-(-count // rows))
    return [index for epoch in epochs for index in _permutation(rows, seed, epoch)][:count]


def in_order(task: Task, count: int, seed: int):
    """The `count` prompts of a run, in `order`, as the datasets.Dataset that TRL takes."""
    from datasets import Dataset

    return Dataset.from_list([task.rows[i] for i in order(count, len(task.rows), seed)])


def _permutation(rows: int, seed: int, epoch: int) -> list[int]:
    indices = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices


def load_reward(path: str) -> Callable:
    """Import a reward function of the user's own, named "module:function".

    It must have TRL's signature: (completions, answer, **kwargs) -> list of float. Raises
    ValueError with the reason when it cannot be imported or called.
    """
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"reward {path!r} must be written module:function")
    try:
        reward = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does while it runs
        said = " ".join(f"{type(error).__name__}: {error}".split())
        hint = ". It must be on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"reward {path!r} cannot be imported: {said}{hint}") from error
    if not callable(reward):
        raise ValueError(f"reward {path!r} is a {type(reward).__name__}, which cannot be called")
    _check_signature(reward, path)
    return reward


def _check_signature(reward: Callable, path: str) -> None:
    """Raise ValueError when TRL's call of a reward function would be refused."""
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**dict.fromkeys(REWARD_ARGUMENTS))
    except TypeError as error:
        raise ValueError(
            f"reward {path!r} cannot be called as TRL calls it: {error}. It is given "
            f"{', '.join(REWARD_ARGUMENTS)}: write it as (completions, answer, **kwargs)"
        ) from error
