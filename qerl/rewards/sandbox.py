"""Child process of code.py: runs ./program.py under limits. Standard library only.

Called as `python -I -B sandbox.py NAME OUTPUT_BYTES` in the folder that holds program.py, which
runs with __name__ == NAME. An audit hook (PEP 578), which Python code cannot take off again,
refuses what is announced to it of the network, of other processes and of changes to files outside
the folder. What it is not told of, it does not stop (code.py names some).
"""

import itertools
import os
import resource
import runpy
import sys

CPU_SECONDS = 10
MEMORY_BYTES = 2 << 30
# Times that a file may be opened for writing: with the limit on each file's size, a limit on disk.
MOST_WRITES = 100

_REFUSED = ("socket.", "subprocess.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn")
_REFUSED += ("os.system", "pty.", "ctypes.dlsym", "signal.pthread_kill")
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod"}
_CHANGES |= {
    "os.chown",
    "os.truncate",
    "os.utime",
    "shutil.rmtree",
    "shutil.move",
    "sqlite3.connect",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _limit(output_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _guard(folder: str):
    writes = itertools.count(1)

    def outside(path) -> bool:
        if not isinstance(path, (str, bytes)):
            return False  # an open file, or no path at all
        real = os.path.realpath(os.fsdecode(path))
        return real != os.devnull and not real.startswith(folder + os.sep)

    def hook(event: str, args: tuple) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"a program under test may not use {event}")
        if event == "open":
            paths = args[:1] if args[2] & _WRITING else ()
            if paths and next(writes) > MOST_WRITES:
                raise PermissionError(f"a program under test may open {MOST_WRITES} files to write")
        else:
            paths = args[:2] if event in _CHANGES else ()
        if any(outside(path) for path in paths):
            raise PermissionError(f"a program under test may not change {paths}")

    return hook


if __name__ == "__main__":
    _limit(int(sys.argv[2]))
    sys.addaudithook(_guard(os.getcwd()))
    runpy.run_path("program.py", run_name=sys.argv[1])
