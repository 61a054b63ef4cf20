"""Token sequences to calibrate on: a data set of qerl.data, a text file, or random tokens.

gptq and awq keep best what the model computes on these tokens, so the best are those that it will
meet: prompts in its own chat template with their answers, or a run's samples.jsonl. Documents are
shuffled by the seed, laid end to end and cut into sequences of one length.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qerl import data

if TYPE_CHECKING:
    import torch

RANDOM = "random"
ROW = "expected an object with text, or messages, or prompt and completion (or answer)"


class Calibration(NamedTuple):
    """What to calibrate on."""

    name: str  # a name of qerl.data, the path of a .jsonl or .txt file, or "random"
    samples: int  # sequences
    sequence_length: int  # tokens
    seed: int  # of the shuffle, or of the random tokens

    def __str__(self) -> str:
        size = f"{self.samples} sequences of {self.sequence_length} tokens"
        return f"{size} of {self.name}, seed {self.seed}"


def check(wanted: Calibration) -> None:
    """Raise ValueError if `sequences` could not work, as far as can be told without the hub."""
    for what in ("samples", "sequence_length"):
        if getattr(wanted, what) < 1:
            raise ValueError(f"{what} is {getattr(wanted, what)}: expected 1 or more")
    if wanted.name.endswith((".jsonl", ".txt")):
        if not Path(wanted.name).is_file():
            raise ValueError(f"calibration file {wanted.name} does not exist")
    elif wanted.name not in (*data.names(), RANDOM):
        raise ValueError(
            f"calibration data {wanted.name!r} is not known. Known are {', '.join(data.names())}; "
            f"or give a .jsonl or .txt file, or as a last resort {RANDOM!r}"
        )


def sequences(wanted: Calibration, tokenizer) -> torch.Tensor:
    """The calibration tokens, int64 [samples, sequence_length].

    Raises ValueError when the data holds too few, and ConnectionError as `data.load` does.
    """
    import torch

    shape, needed = wanted[1:3], wanted.samples * wanted.sequence_length
    if wanted.name == RANDOM:
        print(
            "calibrating on random tokens, which no model will meet: a last resort", file=sys.stderr
        )
        generator = torch.Generator().manual_seed(wanted.seed)
        return torch.randint(len(tokenizer), shape, generator=generator)
    tokens: list[int] = []
    for document in _documents(wanted, tokenizer):
        tokens += document
        if len(tokens) >= needed:
            return torch.tensor(tokens[:needed]).view(shape)
    raise ValueError(
        f"{wanted.name} holds {len(tokens)} tokens, and {wanted.samples} sequences of "
        f"{wanted.sequence_length} need {needed}: "
        f"give --num-samples {len(tokens) // wanted.sequence_length}, or more data"
    )


def _documents(wanted: Calibration, tokenizer) -> Iterator[list[int]]:
    """The token ids of each document, shuffled by the seed, with the end of text after each."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = list(_read(wanted))
    random.Random(wanted.seed).shuffle(documents)
    for where, document in documents:
        text = document if isinstance(document, str) else _text(document, where, tokenizer)
        yield tokenizer(text, add_special_tokens=False)["input_ids"] + end


def _read(wanted: Calibration) -> Iterator[tuple[str, str | dict]]:
    """Where each document stands, and its text or row."""
    path = Path(wanted.name)
    if path.suffix == ".txt":
        text, size = path.read_text(), 8 * wanted.sequence_length  # some sequences each
        yield from ((wanted.name, text[at : at + size]) for at in range(0, len(text), size))
    elif path.suffix == ".jsonl":
        yield from data.files.read_jsonl(path)
    else:
        yield from ((wanted.name, row) for row in data.load(wanted.name, seed=wanted.seed).rows)


def _text(row: object, where: str, tokenizer) -> str:
    """The text of a row: as it stands, or its conversation as the model is prompted with it."""
    match row:
        case {"text": str(text)}:
            return text
        case {"messages": list(messages)}:
            return _conversation(messages, tokenizer)
        case {"prompt": list(messages), "completion": list(reply)}:  # of a run's samples.jsonl
            return _conversation([*messages, *reply], tokenizer)
        case {"prompt": prompt, "completion": str(answer)} | {"prompt": prompt, "answer": answer}:
            if isinstance(prompt, str):
                return f"{prompt}{answer}"
            if isinstance(prompt, list):
                said = {"role": "assistant", "content": str(answer)}
                return _conversation([*prompt, said], tokenizer)
    raise ValueError(f"{where}: {ROW}, not {row!r:.80}")


def _conversation(messages: list[dict], tokenizer) -> str:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "\n".join(message["content"] for message in messages)
