"""The verdict on programs: what passes, what a program is kept from, what it leaves behind."""

import json
import tempfile
import time
from pathlib import Path

import pytest

from qerl import rewards
from qerl.rewards import code

SUM = json.dumps([{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1\n", "output": "0\n"}])
ASSERT = json.dumps([{"assert": "assert add(2, 3) == 5"}])


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("completion", "tests", "right"),
    [
        (block("a, b = map(int, input().split())\nprint(a + b)"), SUM, True),
        (block("print(sum(map(int, open(0).read().split())), '\\n\\n')"), SUM, True),
        (block("print(5)"), SUM, False),  # passes the first case only
        (block("print(1)") + block("print(sum(map(int, input().split())))"), SUM, True),
        (block("print(sum(map(int, input().split())))") + block("print(1)"), SUM, False),
        ("print(sum(map(int, input().split())))", SUM, False),
        ("```python\nprint(sum(map(int, input().split())))", SUM, False),  # cut off
        (block("print(sum(map(int, input().split()"), SUM, False),
        (block("print(sum(map(int, input().split())))\nraise SystemExit(1)"), SUM, False),
        (block("def add(a, b):\n    return a + b"), ASSERT, True),
        (block("def add(a, b):\n    return a - b"), ASSERT, False),
        (block("import os\nos._exit(0)"), ASSERT, False),
        (block("raise SystemExit(0)"), ASSERT, False),
        (block('def add(a, b):\n    return 0\n"""'), ASSERT, False),
        (
            block("def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    1/0"),
            ASSERT,
            True,
        ),
    ],
)
def test_a_program_is_judged_by_its_tests(completion, tests, right):
    assert rewards.code_correct(completion, tests) is right


PRINTS_1 = json.dumps([{"input": "", "output": "1"}])


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.getaddrinfo('localhost', 80)",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 0)",
        "open('{outside}/left', 'w')",
        "import os\nos.mkdir('{outside}/left')",
        "import sqlite3\nsqlite3.connect('{outside}/left').execute('create table t (x)')",
        "import os\nos.symlink('{outside}/left', 'link')\nopen('link', 'w')",
        "x = bytearray(8 << 30)",
        "open('large', 'wb').write(bytes(32 << 20))",
        "for i in range(200): open(f'small{{i}}', 'wb')",
        "print('x' * (32 << 20))",
    ],
)
def test_a_program_is_kept_from(program, namespaces, tmp_path, monkeypatch):
    if namespaces and not code._has_namespaces():
        pytest.skip("this machine lets this user make no namespaces")
    monkeypatch.setattr(code, "_has_namespaces", lambda: namespaces)
    program = program.format(outside=tmp_path)
    assert rewards.code_correct(block("print(1)"), PRINTS_1)
    assert not rewards.code_correct(block(f"{program}\nprint(1)"), PRINTS_1)
    if "print('x'" not in program:  # refused by an exception, and not broken otherwise
        indented = program.replace("\n", "\n    ")
        guarded = f"try:\n    {indented}\nexcept (OSError, MemoryError):\n    print(1)"
        assert rewards.code_correct(block(guarded), PRINTS_1)
    assert not list(tmp_path.iterdir())


def test_a_program_may_write_in_its_own_folder_and_use_threads():
    program = (
        "import threading, pathlib\n"
        "t = threading.Thread(target=lambda: pathlib.Path('a').write_text('1'))\n"
        "t.start(); t.join(); print(open('a').read())"
    )
    assert rewards.code_correct(block(program), PRINTS_1)


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_that_never_ends_is_stopped(namespaces, monkeypatch):
    if namespaces and not code._has_namespaces():
        pytest.skip("this machine lets this user make no namespaces")
    monkeypatch.setattr(code, "_has_namespaces", lambda: namespaces)
    monkeypatch.setattr(code, "TIME_LIMIT_S", 1.0)
    started = []
    monkeypatch.setattr(
        code, "_start", lambda *a, f=code._start: started.append(f(*a)) or started[0]
    )
    start = time.monotonic()
    assert not rewards.code_correct(block("while True: pass"), PRINTS_1)
    assert time.monotonic() - start < 3.0
    until = time.monotonic() + 5  # the kernel may take a moment
    while _group(started[0].pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _group(started[0].pid)


def _group(leader: int) -> list[str]:
    """The processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(path.parent.name)
    return found


LEAVING = {
    "a folder that is closed": "os.mkdir('a')\nopen('a/b', 'w').write('c')\nos.chmod('a', 0)",
    "a pipe": "os.mkfifo('a')\nos.mkfifo('../b')",
    "a database": (
        "import sqlite3\nfile = sqlite3.connect('a.db')\nfile.execute('create table t (x)')\n"
        "file.execute('insert into t values (1)')"
    ),
    "a link": "os.symlink('program.py', 'a')",
    "folders too deep for shutil.rmtree": (
        "for _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
    ),
}


@pytest.mark.parametrize("left", LEAVING)
def test_nothing_is_left_in_the_temporary_folder(left, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert rewards.code_correct(block(f"import os\n{LEAVING[left]}\nprint(1)"), PRINTS_1)
    assert not list(tmp_path.iterdir())


def test_a_program_sees_none_of_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "1")
    assert rewards.code_correct(
        block("import os\nprint(1 - os.environ.get('SECRET_TOKEN', '').count('1'))"), PRINTS_1
    )


@pytest.mark.parametrize("tests", ["", "[]", "{}", "assert f()", '[{"input": "1"}]', "[1]"])
def test_tests_of_another_layout_are_refused(tests):
    with pytest.raises(ValueError, match="JSON list"):
        rewards.code_correct(block("print(1)"), tests)
