"""A user's own data set: a .jsonl or .parquet file with the columns `prompt` and `answer`.

A prompt is text (one user message) or a list of chat messages, and is used as it stands: ask in it
for \\boxed{} or another form that qerl.rewards.math reads. An answer is text or a number.
"""

import json
import math
import re
from decimal import Decimal
from pathlib import Path

from qerl.rewards import says_something

FILE_TYPES = (".jsonl", ".parquet")


def rows(path: Path) -> list[dict]:
    """Read and check a local file; every ValueError names the file and the row."""
    if not path.is_file():
        raise ValueError(f"data set file {path} does not exist")
    raw = read_jsonl(path) if path.suffix == ".jsonl" else _parquet(path)
    found = [_row(row, where) for where, row in raw]
    if not found:
        raise ValueError(f"data set file {path} is empty: it needs a row with prompt and answer")
    return found


def read_jsonl(path: Path) -> list[tuple[str, object]]:
    """(where it stands, value) of each line that is not blank; ValueError for one not JSON."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                found.append((where, json.loads(line.decode("utf-8-sig"))))
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
    return found


def _parquet(path: Path) -> list[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:  # OSError: damaged inside
        raise ValueError(f"{path} is not a parquet file, or not whole: {error}") from error
    return [(f"{path}, row {number}", row) for number, row in enumerate(table, start=1)]


def _row(row: object, where: str) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object with prompt and answer, not {row!r:.80}")
    missing = [column for column in ("prompt", "answer") if column not in row]
    if missing:
        raise ValueError(f"{where} lacks {' and '.join(missing)}; it has {', '.join(row)}")
    made = {"prompt": _messages(row["prompt"], where), "answer": answer_text(row["answer"], where)}
    try:
        json.dumps(made, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds text that is not Unicode: {error}") from error
    return made


def _messages(prompt: object, where: str) -> list[dict]:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return [{"role": message["role"], "content": message["content"]} for message in prompt]
    raise ValueError(
        f'{where}: the prompt must be text or a list of {{"role", "content"}} messages, '
        f"not {prompt!r:.80}"
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def answer_text(answer: object, where: str) -> str:
    """An answer as text. Numbers are written out, since no verdict reads 1e-05 or nan."""
    if isinstance(answer, (float, Decimal)) and math.isfinite(answer):
        return format(Decimal(str(answer)), "f")
    is_value = isinstance(answer, (str, int)) and not isinstance(answer, bool)
    if is_value and re.search(r"\w", str(answer)) and says_something(str(answer)):
        return str(answer).strip()
    raise ValueError(f"{where}: the answer must be text or a number, not {answer!r:.80}")
