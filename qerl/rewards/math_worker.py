"""math-verify behind a time limit: one long-lived child process, usable from any thread.

math-verify's own time limit is SIGALRM: off the main thread it raises, or calls a right answer
wrong. And some formulas never return (9^{9^{9^{9}}}). So its time limits are switched off and it
runs in a child that the parent kills. Both ends of the pipe are in this file: `judge` is the
parent's, `serve` the child's. The child is started by the path of this file, so that it imports
math-verify and nothing else of this program.

Protocol: the child writes R when ready; for each line {"gold": .., "candidate": ..} it writes
1 or 0. The child ends at the end of its input, so it cannot outlive its parent for long.
"""

import atexit
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading

TIME_LIMIT_S = 5.0
START_LIMIT_S = 120.0
MEMORY_LIMIT_BYTES = 4 << 30

logger = logging.getLogger(__name__)


class Judge:
    """The parent's end. Starts the child at the first question, again after it was killed."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S):
        self.time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None

    def equal(self, gold: str, candidate: str) -> bool:
        """math-verify's verdict; False, with a warning, when it fails or runs past the limit."""
        with self._lock:
            reply = self._ask(json.dumps({"gold": gold, "candidate": candidate}))
            if reply in (b"0", b"1"):
                return reply == b"1"
            self._stop()
        reason = f"took over {self.time_limit_s} s" if reply is None else "ended its process"
        logger.warning(
            "counted as wrong, math-verify %s: %.80r against %.80r", reason, candidate, gold
        )
        return False

    def stop(self) -> None:
        """End the child, if there is one. The next question starts another."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """For a process that was forked: the child and the lock belong to the parent."""
        self._lock, self._child = threading.Lock(), None

    def _ask(self, line: str) -> bytes | None:
        if self._child is None or self._child.poll() is not None:
            self._start()
        try:
            self._child.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:  # it ended since it was last looked at
            return b""
        return self._read(self.time_limit_s)

    def _start(self) -> None:
        # -P: this folder has a math.py, which must not hide the standard one.
        self._child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        if self._read(START_LIMIT_S) != b"R":
            self._stop()
            raise RuntimeError(
                f"the math-verify process did not start within {START_LIMIT_S} s; its error is "
                "above. Check that `python -c 'import math_verify'` works"
            )

    def _read(self, limit_s: float) -> bytes | None:
        """One byte; None past the limit; an empty string when the child has ended."""
        poller = select.poll()
        poller.register(self._child.stdout, select.POLLIN)
        return self._child.stdout.read(1) if poller.poll(limit_s * 1000) else None

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child.stdin.close()
            self._child.stdout.close()
            self._child = None


judge = Judge()
atexit.register(judge.stop)
os.register_at_fork(after_in_child=judge.forget)


def serve() -> None:
    """The child's end: answer until the input ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not reach the pipe
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off

    def read(text: str) -> list:
        return parse(f"${text}$", parsing_timeout=None)

    replies.write(b"R")
    for line in sys.stdin:
        signal.alarm(60)  # ends a hanging child whose parent was killed
        asked = json.loads(line)
        same = verify(read(asked["gold"]), read(asked["candidate"]), timeout_seconds=None)
        signal.alarm(0)
        replies.write(b"1" if same else b"0")


if __name__ == "__main__":
    serve()
