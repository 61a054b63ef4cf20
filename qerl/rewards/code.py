"""The verdict on programs: run the last ```python block against tests, in a process of its own.

What a test run is kept from: sandbox.py sets limits on CPU time, memory, the size of a file and how
often one is opened to write; it refuses the network, other processes and writes outside its own
folder, as far as Python announces them (PEP 578). This side adds a time limit, an environment
without this process's variables, a folder of its own that is deleted afterwards, and, where the
machine lets an ordinary user have them, a network and a process namespace of its own (`unshare`),
so that nothing the program started survives it. This stops accidents and lazy cheating. It is no
boundary against a program that means harm: os.mkfifo, sqlite3's ATTACH, dir_fd and C libraries
write unannounced wherever this user may, and a program can read the tests in its own source. Train
on code inside a container.

Tests are one JSON list, every case of which must pass:
- {"input": str, "output": str}: what the program reads from stdin and what it must print; compared
  line by line, word by word, so that spacing and closing blank lines do not matter;
- {"assert": str}: Python source that runs after the program and must not raise.
"""

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Wall-clock seconds for all the cases of one completion together.
TIME_LIMIT_S = 20.0
# What is read of a program's output; sandbox.py lets it write no more than this.
OUTPUT_BYTES = 16 << 20

_SANDBOX = Path(__file__).with_name("sandbox.py")
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]


def code_correct(completion: str, tests: str) -> bool:
    """True when the last ```python block of `completion` passes every case of `tests`.

    A missing or unfinished block, an error, a wrong output and a run past a limit are all False.
    Raises ValueError when `tests` is not of the layout above: that is the data set's mistake.
    """
    cases = _cases(tests)
    program = last_python_block(completion)
    if program is None:
        return False
    deadline = time.monotonic() + TIME_LIMIT_S
    return all(_passes(program, case, deadline) for case in cases)


def last_python_block(text: str) -> str | None:
    """The source in the last ```python .. ``` block; None when there is none or it never closes."""
    start = text.rfind("```python")
    line_end = text.find("\n", start)
    if start < 0 or line_end < 0:
        return None
    end = text.find("```", line_end)
    return text[line_end + 1 : end] if end >= 0 else None


def _cases(tests: str) -> list[dict]:
    try:
        cases = json.loads(tests)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the tests of a program must be a JSON list: {error}: {tests[:80]!r}"
        ) from error
    if not isinstance(cases, list) or not cases or not all(map(_is_case, cases)):
        raise ValueError(
            'the tests of a program must be a JSON list, not empty, of {"input", "output"} or '
            f'{{"assert"}} objects, not {tests[:80]!r}'
        )
    return cases


def _is_case(case) -> bool:
    shaped = isinstance(case, dict) and set(case) in ({"input", "output"}, {"assert"})
    return shaped and all(isinstance(text, str) for text in case.values())


def _passes(program: str, case: dict, deadline: float) -> bool:
    if "assert" in case:
        # Without the word at its end a run did not reach the asserts, or did not pass them.
        word = secrets.token_hex(16)
        source = f"{program}\n{case['assert']}\nprint('\\n{word}')\n"
        output = _run(source, "", "program", deadline)
        return output is not None and output.split()[-1:] == [word]
    output = _run(program, case["input"], "__main__", deadline)
    return output is not None and _words(output) == _words(case["output"])


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _run(source: str, stdin: str, name: str, deadline: float) -> str | None:
    """Run `source` with `__name__` == `name`; its output, or None unless it ended well in time."""
    with _folder() as folder:
        inside = Path(folder, "run")
        inside.mkdir()
        (inside / "program.py").write_text(source, encoding="utf-8", errors="replace")
        Path(folder, "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        with open(Path(folder, "stdin")) as read, open(Path(folder, "stdout"), "w+b") as written:
            code = _wait(_start(inside, name, read, written), deadline)
            written.seek(0)
            output = written.read(OUTPUT_BYTES).decode(errors="replace")
    return output if code == 0 else None


@contextlib.contextmanager
def _folder():
    """A temporary folder, removed whatever the program left in it."""
    folder = tempfile.mkdtemp(prefix="qerl-code-")
    try:
        yield folder
    finally:
        # By programs: a thousand folders in one another are a RecursionError in shutil.rmtree.
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, folder], stderr=subprocess.DEVNULL, check=False)


def _start(folder: Path, name: str, stdin, stdout) -> subprocess.Popen:
    python = [sys.executable, "-I", "-B", str(_SANDBOX), name, str(OUTPUT_BYTES)]
    return subprocess.Popen(
        (_NAMESPACES if _has_namespaces() else []) + python,
        cwd=folder,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath, "HOME": str(folder), "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _wait(process: subprocess.Popen, deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The whole group, also after a good end: what it started must not live on.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


@functools.cache
def _has_namespaces() -> bool:
    """Whether this machine lets this user make namespaces; containers often forbid it."""
    try:
        subprocess.run([*_NAMESPACES, "true"], check=True, capture_output=True, timeout=10)
    except (FileNotFoundError, subprocess.SubprocessError):
        return False
    return True
