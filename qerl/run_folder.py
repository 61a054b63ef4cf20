"""The files of a run: what may be continued, what a killed run left behind, how files stay whole.

.lock            held by the process that trains here, as long as it lives
config.json      every flag, every version, the seed, the git commit
metrics.jsonl    a line a step          samples.jsonl    some completions of each step
checkpoint-N/    written under .partial/, then renamed: the name means it is whole
adapter/         the last adapter, there once the run is finished
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path

from qerl.config import TrainConfig, kebab

# Flags that a restart of the same run may change: they do not alter what is learned.
FREE_ON_RESUME = (
    "output_dir",
    "report_to",
    "run_name",
    "logging_steps",
    "save_total_limit",
    "save_steps",
    "save_strategy",
    "vllm_gpu_memory_utilization",
    "linear_backend",
    "compile",
    "enforce_eager",
    "gradient_checkpointing",
    "parity_limit",
    "dry_run",
)
PARTIAL = ".partial"  # checkpoints are written here, then renamed
_LOCKS = {}  # the open lock files of this process; the kernel releases them when it ends


def check_output_dir(config: TrainConfig) -> bool:
    """Whether the run folder holds this very run, to be continued. Creates nothing.

    Raises ValueError when it cannot be a folder, or holds steps of other or unknown settings.
    """
    folder = Path(config.output_dir)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output-dir {folder} is not writable ({there}): choose another folder")
    saved, made = folder / "config.json", _made(folder)
    if not saved.is_file():
        if made:
            raise ValueError(
                f"--output-dir {folder} holds {', '.join(made)} but no config.json that says of "
                "which run: choose another folder, or move them away"
            )
        return False
    changed = changed_flags(config, _saved_flags(saved))
    if changed and made:
        listed = "; ".join(f"--{kebab(k)} was {old!r}, now {new!r}" for k, old, new in changed)
        raise ValueError(
            f"--output-dir {folder} holds a run with other settings ({listed}): choose another "
            "folder, or repeat that run's settings to continue it"
        )
    return not changed


def _made(folder: Path) -> list[str]:
    """The names of what the steps of a run have left in its folder."""
    found = [folder / "metrics.jsonl", folder / "adapter", *sorted(folder.glob("checkpoint-*"))]
    return [path.name for path in found if path.is_dir() or path.is_file() and path.stat().st_size]


def make_output_dir(config: TrainConfig) -> None:
    """Make the run folder and hold it for this process, or raise ValueError."""
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _hold(folder.resolve() / ".lock")
    except BlockingIOError as error:
        raise ValueError(
            f"--output-dir {folder} is in use: another process is training there; end it, or "
            "choose another folder"
        ) from error
    except OSError as error:
        raise ValueError(
            f"--output-dir {folder} cannot be written and locked ({error.strerror}): choose "
            "another folder"
        ) from error


def _hold(path: Path) -> None:
    """Lock a file until this process ends; raises BlockingIOError if another one has it."""
    if path not in _LOCKS:
        file = path.open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _LOCKS[path] = file


def _saved_flags(path: Path) -> dict:
    try:
        return json.loads(path.read_text())["flags"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a training run's: choose another --output-dir") from error


def changed_flags(config: TrainConfig, flags: dict) -> list[tuple[str, object, object]]:
    """(name, old, new) of each flag that alters learning and differs from a saved run's."""
    now = dataclasses.asdict(config)
    return [
        (name, flags.get(name), value)
        for name, value in now.items()
        if name not in FREE_ON_RESUME and flags.get(name) != value
    ]


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write a whole JSON file or none: a reader never sees a half-written one."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run; what a killed save left behind is removed."""
    shutil.rmtree(run_dir / PARTIAL, ignore_errors=True)
    return next(reversed(checkpoints(run_dir)), None)


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, by step; a user's checkpoint-100-mine is none of them."""
    steps = [p.name.removeprefix("checkpoint-") for p in run_dir.glob("checkpoint-*")]
    return [run_dir / f"checkpoint-{step}" for step in sorted(filter(str.isdigit, steps), key=int)]


def forget_after(run_dir: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will do again, and a half-written last line."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = run_dir / name
        if not path.is_file():
            continue
        kept = [row for row in _rows(path) if row["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(path)


def _rows(path: Path):
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # the line being written when the run died: nothing follows it


def append(path: Path, rows: list[dict]) -> None:
    """Add a JSON line a row."""
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
