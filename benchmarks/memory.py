"""The peak memory of a command: the whole GPU's, by NVML, and the host's.

    python -m benchmarks.memory [--limit-gib 79] [--output FILE] -- bash training/LAUNCHER.sh
    python -m benchmarks.memory --metrics RUN/metrics.jsonl -- bash training/LAUNCHER.sh

GPU: what NVML calls used on the device: torch, vLLM, CUDA contexts, and anything that another
program holds there (the line "before" says how much). Host: resident memory summed over the command
and its descendants, so a page that two of them share counts twice. Samples are 0.5 s apart: a
shorter peak can be missed. --limit-gib kills the command at the first sample above the limit, and
the exit status is 3: so a run proves that it fits a smaller GPU. An 80 GB card has about 79 GiB.
--metrics names the file in which the command counts its steps, and prints the peak of every ten of
them: a leak shows. `Sampler` measures the process that it runs in, for other benchmarks.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from qerl.run_folder import write_json

GIB = 2**30
EVERY = 0.5  # seconds between samples
SAVE_EVERY = 20  # samples between writes of the JSON file
SLICES = 10  # lines of the printed time series
STEPS = 10  # training steps a line with --metrics
OVER_LIMIT = 3  # exit status


class Sample(NamedTuple):
    """Memory at one moment; gpu_gib is None without a GPU."""

    seconds: float
    gpu_gib: float | None
    host_gib: float
    step: int = 0  # training steps finished by then, when they are counted


def open_gpu(index: int = 0):
    """NVML's handle of a GPU, or None on a machine without one. CUDA is not started.

    Raises ValueError when there are GPUs, but not this one.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    count = pynvml.nvmlDeviceGetCount()
    if count and index >= count:
        raise ValueError(f"GPU {index}: expected 0 to {count - 1}")
    return pynvml.nvmlDeviceGetHandleByIndex(index) if count else None


def gpu_name() -> str:
    """The name of GPU 0, or "none"."""
    import pynvml

    gpu = open_gpu()
    return pynvml.nvmlDeviceGetName(gpu) if gpu is not None else "none"


def gpu_used(gpu) -> int:
    """Bytes in use on the device, whoever holds them."""
    import pynvml

    return pynvml.nvmlDeviceGetMemoryInfo(gpu).used


def tree(root: int) -> list[int]:
    """The process and its descendants, by id."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since it was listed
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found


def host_used(root: int) -> int:
    """Resident bytes of a process and its descendants."""
    pages = 0
    for pid in tree(root):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak(values: list[float | None]) -> float | None:
    """The largest, or None when there is none."""
    return max((v for v in values if v is not None), default=None)


class Sampler:
    """Samples a process and a GPU: by hand with take(), or in a thread as a context manager."""

    def __init__(self, pid: int | None = None, gpu=None, every: float = EVERY, metrics=None):
        self.pid, self.gpu, self.every = pid or os.getpid(), gpu, every
        self.metrics = metrics  # a file that grows by a line a step, or None
        self.samples: list[Sample] = []
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()
        self.take()

    def take(self) -> Sample:
        used = None if self.gpu is None else gpu_used(self.gpu) / GIB
        seconds = time.perf_counter() - self._start
        self.samples.append(Sample(seconds, used, host_used(self.pid) / GIB, lines(self.metrics)))
        return self.samples[-1]

    def gpu_peak(self) -> float | None:
        return peak([s.gpu_gib for s in self.samples])

    def host_peak(self) -> float | None:
        return peak([s.host_gib for s in self.samples])

    def _run(self) -> None:
        while not self._stop.is_set():
            self.take()
            self._stop.wait(self.every)


def lines(file: Path | None) -> int:
    """How many a file has; 0 for none that is there."""
    return file.read_bytes().count(b"\n") if file is not None and file.exists() else 0


def watch(command: list[str], sampler: Sampler, limit_gib: float | None, save) -> int:
    """Run the command to its end or to the limit; return its exit status, or OVER_LIMIT."""
    child = subprocess.Popen(command)
    sampler.pid = child.pid
    try:
        ended = False
        while not ended:  # sampled before it is asked, so that the quickest command has one sample
            used = sampler.take().gpu_gib
            ended = child.poll() is not None
            if limit_gib is not None and used > limit_gib:
                return OVER_LIMIT
            if len(sampler.samples) % SAVE_EVERY == 0:
                save(None)
            _wait(child, sampler.every)
    finally:
        kill_tree(child)
    # A command ended by signal n gives -n; a shell would say 128 + n.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _wait(child: subprocess.Popen, seconds: float) -> None:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        pass  # time for the next sample


def kill_tree(child: subprocess.Popen) -> None:
    """End a child of this process and its descendants, at once; nothing if it has ended."""
    if child.poll() is not None:
        return
    for pid in tree(child.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()


def result(sampler: Sampler, before: float | None, settings: dict, status: int | None) -> dict:
    """What is written as JSON; exit_status is null while the command runs."""
    return {
        **settings,
        "exit_status": status,
        "gpu_before_gib": before,
        "gpu_peak_gib": sampler.gpu_peak(),
        "host_peak_gib": sampler.host_peak(),
        "samples": [sample._asdict() for sample in sampler.samples],
    }


def slices(samples: list[Sample], count: int = SLICES) -> list[Sample]:
    """The peaks of up to `count` equal parts of the samples, each at the second it ends."""
    size = -(-len(samples) // count)
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    return [
        Sample(part[-1].seconds, peak([s.gpu_gib for s in part]), peak([s.host_gib for s in part]))
        for part in parts
    ]


def by_steps(samples: list[Sample]) -> list[tuple[str, Sample]]:
    """The peaks while steps 2 to 10 ran, 11 to 20, ...: without loading, step 1 and the end."""
    last, rows = samples[-1].step, []
    for first in range(0, last, STEPS):
        begin, end = max(first, 1), min(first + STEPS, last)
        part = [sample for sample in samples if begin <= sample.step < end]
        rows += [(f"{begin + 1}-{end}", peaks) for peaks in slices(part, 1)] if part else []
    return rows


def print_summary(sampler: Sampler, before: float | None) -> None:
    rows = [("before", Sample(0.0, before, 0.0))]
    if sampler.metrics is None:
        rows += [(f"to {part.seconds:.0f} s", part) for part in slices(sampler.samples)]
    else:
        rows += [(f"steps {name}", part) for name, part in by_steps(sampler.samples)]
    last = sampler.samples[-1].seconds
    rows.append(("peak", Sample(last, sampler.gpu_peak(), sampler.host_peak())))
    print(f"\n{'':14}{'GPU GiB':>10}{'host GiB':>10}")
    for name, sample in rows:
        used = "-" if sample.gpu_gib is None else f"{sample.gpu_gib:.2f}"
        print(f"{name:14}{used:>10}{sample.host_gib:>10.2f}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--limit-gib", type=float, help="kill the command above this, GiB used")
    parser.add_argument("--gpu", type=int, default=0, help="NVML's number of the GPU (default: 0)")
    parser.add_argument("--every", type=float, default=EVERY, help="seconds between samples (0.5)")
    parser.add_argument("--metrics", type=Path, help="the command's file with a line a step")
    parser.add_argument("--output", type=Path, help="write every sample to this JSON file")
    parser.add_argument("command", nargs="+", help="after --: the command and its arguments")
    args = parser.parse_args(argv)
    try:
        args.handle = open_gpu(args.gpu)
    except ValueError as error:
        parser.error(f"--gpu: {error}")
    if args.limit_gib is not None and args.handle is None:
        parser.error("--limit-gib limits a GPU's memory, and NVML finds none here: leave it out")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    before = None if args.handle is None else gpu_used(args.handle) / GIB
    sampler = Sampler(gpu=args.handle, every=args.every, metrics=args.metrics)
    settings = {"command": args.command, "gpu": gpu_name(), "limit_gib": args.limit_gib}

    def save(status: int | None) -> None:
        if args.output:
            write_json(args.output, result(sampler, before, settings, status))

    status = watch(args.command, sampler, args.limit_gib, save)
    save(status)
    print_summary(sampler, before)
    if args.limit_gib is not None and sampler.gpu_peak() > args.limit_gib:
        used = f"{sampler.gpu_peak():.2f} GiB"
        print(f"killed: {used} in use on the GPU, limit {args.limit_gib} GiB", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
