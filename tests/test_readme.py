"""The README's file tree and its commands are those of the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def text() -> str:
    return README.read_text()


def fenced() -> list[str]:
    """The contents of each fenced block."""
    return re.findall(r"(?ms)^```[^\n]*\n(.*?)^```", text())


def tree() -> dict[str, str]:
    """path -> comment: the fenced block whose lines are all a path, a # and a comment."""
    line = re.compile(r"\s*(\S+)\s+# (\S.*)")
    blocks = [[line.fullmatch(found) for found in block.splitlines()] for block in fenced()]
    trees = [block for block in blocks if len(block) > 5 and all(block)]
    assert len(trees) == 1, "expected one fenced block with a path and a comment on each line"
    return {found[1]: found[2] for found in trees[0]}


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files are tracked is not known")
    return listed.stdout.split()


def test_every_path_of_the_file_tree_exists():
    missing = [path for path in tree() if not (ROOT / path).exists()]
    assert not missing


def test_every_folder_and_program_at_the_top_is_in_the_file_tree():
    named = {path.rstrip("/") for path in tree()}
    parts = {path.split("/")[0] for path in named}
    for path in tracked():
        top, _, below = path.partition("/")
        if top.startswith("."):
            continue
        assert top in parts or not (below or top.endswith((".py", ".sh"))), path


def test_every_module_of_the_package_is_in_the_file_tree():
    named = {path.rstrip("/") for path in tree()}
    modules = {f"qerl/{path.name}" for path in (ROOT / "qerl").iterdir()}
    assert modules - named <= {"qerl/__init__.py", "qerl/__pycache__"}


def test_every_program_that_is_named_exists():
    modules = set(re.findall(r"python -m ([\w.]+)", text()))
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        known = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        assert known or module in ("pytest", "pip", "venv"), module


def test_every_script_that_is_named_exists():
    scripts = set(re.findall(r"(?:bash |python |\./|`)([\w./-]+\.(?:sh|py))\b", text()))
    assert scripts
    folders = ("", "training", "llm-compressor", "tests", "qerl", "benchmarks")
    missing = [s for s in scripts if not any((ROOT / folder / s).is_file() for folder in folders)]
    assert not missing


def test_every_link_within_the_repository_leads_somewhere():
    targets = re.findall(r"\]\(([^)#\s]+)\)", text())
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert not missing


def test_every_flag_of_a_command_is_known():
    """In lines that call qerl.train or a launcher, of fenced and indented blocks."""
    from qerl.config import TrainConfig

    known = {name.replace("_", "-") for name in TrainConfig.__dataclass_fields__}
    joined = text().replace("\\\n", " ")
    for line in joined.splitlines():
        if "qerl.train" in line or re.search(r"training/\w.*\.sh", line):
            flags = set(re.findall(r"(?<!\S)--(?:no-)?([a-z][\w-]*)", line))
            assert flags <= known | {"help"}, line
