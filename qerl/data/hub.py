"""The data sets on the Hugging Face hub: ids, columns, and ONE prompt template for each.

Training and evaluation use the same template, and it asks for the format that the verdict reads.
`convert` is pure: a row in the hub's own columns in, a prompt and an answer out. Only `rows`
touches the network.

Rewards of a completion: 1 for a right answer, nothing for a wrong one. GSM8K alone asks for tags
(the paper's format), and there up to FORMAT_WEIGHT is added for keeping to them, so that a wrong
answer in perfect format still earns far less than a right one in none.
"""

import functools
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from qerl.rewards import as_reward, code_correct, format_score, math_correct, says_something

logger = logging.getLogger(__name__)

FORMAT_WEIGHT = 0.2

MATH_PROMPT = "{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}."
TAGS_PROMPT = (
    "Solve the math problem step by step. Write your reasoning between <think> and </think>, then "
    "only the final number between <answer> and </answer>, like this:\n"
    "<think>reasoning</think>\n<answer>number</answer>"
)
CODE_PROMPT = (
    "{problem}\n\nWrite a complete Python program that reads standard input and prints to standard "
    "output. Put it in one ```python block at the end of your reply."
)


@dataclass(frozen=True)
class Kind:
    """What sets of one sort share: the prompt, how to read the answer, the verdict, the rewards."""

    messages: Callable[[str], list[dict]]  # problem -> chat messages
    answer: Callable[[object], str | None]  # the hub's answer column -> answer, None if unusable
    correct: Callable[[str, str], bool]
    extra_rewards: tuple[Callable, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a hub set is, and which of its columns and splits are ours."""

    hub_id: str
    config: str | None
    splits: dict[str, str]  # our split -> the hub's
    columns: tuple[str, str]  # problem, answer
    kind: Kind


def _user(template: str, problem: str) -> list[dict]:
    return [{"role": "user", "content": template.format(problem=problem)}]


def _tags(problem: str) -> list[dict]:
    return [
        {"role": "system", "content": TAGS_PROMPT},
        {"role": "user", "content": problem},
    ]


# The wrapper that DAPO-Math-17k puts around a problem asks for a line "Answer: x": another format.
_DAPO_START = "Solve the following math problem step by step."
_DAPO_END = 'Remember to put your answer on its own line after "Answer:".'


def _dapo(problem: str) -> list[dict]:
    if problem.startswith(_DAPO_START):
        problem = problem.partition("\n\n")[2]
    return _user(MATH_PROMPT, problem.strip().removesuffix(_DAPO_END).strip())


def _text(value: object) -> str | None:
    """An answer as text; None when there is none, or nothing but signs or empty macros."""
    text = str(value).strip() if value is not None else ""
    return text if re.search(r"\w", text) and says_something(text) else None


def _after_hashes(solution: str) -> str | None:
    """GSM8K writes the solution, then a line `#### 1,234`."""
    return _text(solution.rpartition("####")[2].replace(",", "")) if "####" in solution else None


def _code_cases(info: dict | str) -> str | None:
    """The test cases of open-r1's verifiable problems as code_correct reads them."""
    cases = (json.loads(info) if isinstance(info, str) else info)["test_cases"]
    if not cases or any(case["type"] != "stdin_stdout" for case in cases):
        return None
    return json.dumps([{"input": case["input"], "output": case["output"]} for case in cases])


def _format_reward(completion: str, _answer: str) -> float:
    return FORMAT_WEIGHT * format_score(completion)


_MATH = Kind(functools.partial(_user, MATH_PROMPT), _text, math_correct)
_GSM8K = Kind(_tags, _after_hashes, math_correct, (as_reward(_format_reward, "format"),))
_DAPO = Kind(_dapo, _text, math_correct)
_CODE = Kind(functools.partial(_user, CODE_PROMPT), _code_cases, code_correct)

_TRAIN, _TEST = {"train": "train"}, {"test": "test"}
_BIGMATH = "open-r1/Big-Math-RL-Verified-Processed"
_PYTHON = "open-r1/verifiable-coding-problems-python_decontaminated-tested-shuffled"
_PROMPT, _PROBLEM, _QUESTION = ("prompt", "solution"), ("problem", "answer"), ("question", "answer")

SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main", _TRAIN | _TEST, _QUESTION, _GSM8K),
    "bigmath": Source(_BIGMATH, "level_3_4_5", _TRAIN, _PROMPT, _MATH),
    "bigmath_hard": Source(_BIGMATH, "level_4_5", _TRAIN, _PROMPT, _MATH),
    "dapomath": Source("open-r1/DAPO-Math-17k-Processed", "en", _TRAIN, _PROMPT, _DAPO),
    "miromind": Source(
        "miromind-ai/MiroMind-M1-RL-62K", None, _TRAIN, ("problem", "clean_answer"), _MATH
    ),
    # The set whose reference programs were run against their tests, and passed.
    "code": Source(_PYTHON, None, _TRAIN, ("problem", "verification_info"), _CODE),
    "math500": Source("HuggingFaceH4/MATH-500", None, _TEST, _PROBLEM, _MATH),
    "aime24": Source("HuggingFaceH4/aime_2024", None, {"test": "train"}, _PROBLEM, _MATH),
    "aime25": Source("math-ai/aime25", None, _TEST, _PROBLEM, _MATH),
    "amc23": Source("math-ai/amc23", None, _TEST, _QUESTION, _MATH),
}


def convert(name: str, row: dict) -> dict | None:
    """One row in the hub's own columns -> {"prompt", "answer"}; None when it cannot be scored.

    Raises ValueError when a column is missing.
    """
    source = SOURCES[name]
    missing = [column for column in source.columns if column not in row]
    if missing:
        raise ValueError(
            f"data set {name!r} ({source.hub_id}) has no column {', '.join(missing)}; it has "
            f"{', '.join(row)}. The hub's layout changed: use a local file (--dataset PATH)"
        )
    problem, answer = (row[column] for column in source.columns)
    answer = source.kind.answer(answer)
    if answer is None or not problem:
        return None
    return {"prompt": source.kind.messages(problem.strip()), "answer": answer}


def rows(name: str, split: str) -> list[dict]:
    """Download `split` of a hub set and convert it, saying how many rows cannot be used."""
    raw = _download(SOURCES[name], split)
    usable = [converted for row in raw if (converted := convert(name, row))]
    if left_out := len(raw) - len(usable):
        message = "%s: left out %d of %d rows, which lack a problem or an answer to check"
        logger.warning(message, name, left_out, len(raw))
    if not usable:
        raise ValueError(f"data set {name!r} has no row whose answer can be checked")
    return usable


def _download(source: Source, split: str):
    import datasets  # here, because it is slow and only hub sets need it

    try:
        return datasets.load_dataset(source.hub_id, source.config, split=source.splits[split])
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"could not load {source.hub_id} from the Hugging Face hub: {error}. Either load it "
            "once on a machine with network and copy its cache here (HF_HOME, HF_HUB_OFFLINE=1), "
            "or give a local .jsonl or .parquet file with the columns prompt and answer "
            "(--dataset PATH)"
        ) from error
