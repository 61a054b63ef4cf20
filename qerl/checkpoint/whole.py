"""A checkpoint folder appears whole and sound, or not at all.

It is made under a hidden name beside its own and renamed once `problems` finds nothing, so that
neither a full disk nor a killed process leaves what looks finished. A kill may leave the hidden
folder `.<name>.*`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from qerl.checkpoint.files import Problem
from qerl.checkpoint.problems import problems


def write(output: Path, make: Callable[[Path], object]) -> list[Problem]:
    """Let `make` create a folder and give it the name `output`; else return what is wrong with it.

    Raises ValueError as `require_new` does.
    """
    require_new(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        whole = Path(temporary) / output.name
        make(whole)
        return problems(whole) or _named(whole, output)


def require_new(output: Path) -> None:
    """Raise ValueError when `output` exists, or its folder cannot be written."""
    if output.exists():
        raise ValueError(f"{output} is there already: remove it, or give another --output")
    there = next(path for path in output.absolute().parents if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{output} cannot be written ({there}): give another --output")


def _named(whole: Path, output: Path) -> list[Problem]:
    """Give the folder its name, unless another program has taken that meanwhile."""
    try:
        whole.rename(output)
    except OSError:
        if not output.exists():
            raise
        return [Problem(output.name, "made by another program meanwhile", "theirs stays")]
    return []
