"""The one door to checkpoint folders: find, describe, verify and read them.

`files` knows a folder by its config and its files' headers; `problems` holds every layer, shape
and scale against what they must be. Making a folder is llm-compressor/quantize_nvfp4.py's
business, and what the numbers mean is qerl.nvfp4's.
"""

from qerl.checkpoint.files import Checkpoint, Header, Problem, describe, require, resolve, tensors
from qerl.checkpoint.problems import problems

__all__ = [
    "Checkpoint",
    "Header",
    "Problem",
    "describe",
    "problems",
    "require",
    "resolve",
    "tensors",
]
