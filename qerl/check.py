"""`python -m qerl.check FOLDER`: is this checkpoint folder sound?

Prints every problem with the way to mend it. Exit status 0: sound, 1: not, 2: no such folder.
It judges the folder, not the model's answers: that is qerl.evaluate.
"""

from __future__ import annotations

import argparse
import sys

from qerl.checkpoint import Checkpoint, describe, problems


def summary(found: Checkpoint) -> str:
    """One line on a sound checkpoint."""
    made_for = ", made for 4-bit activations too" if found.quantizes_activations else ""
    kind = f"NVFP4, weight-only{made_for}" if found.is_nvfp4 else "16-bit"
    files = {header.file for header in found.headers.values()}
    size = sum((found.folder / file).stat().st_size for file in files)
    return (
        f"{found.folder}: sound ({kind}; {len(found.quantized)} layers in 4 bits, "
        f"{len(found.headers)} tensors, {size / 1e9:.2f} GB)"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="qerl.check", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="checkpoint folder, NVFP4 or 16-bit")
    folder = parser.parse_args(argv).folder
    try:
        faults = problems(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for fault in faults:
        print(f"{fault.name}: {fault.what}\n    to mend it: {fault.how_to_mend}")
    if faults:
        print(f"{folder}: {len(faults)} problem{'s' * (len(faults) > 1)}")
        return 1
    print(summary(describe(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
