"""The one door to checkpoint folders: find, describe, verify and read them.

`files` knows a folder by its config and its files' headers, `dialects` how other makers say the
same; `problems` checks every layer, shape and scale, and `whole` lets a new folder appear once it
is sound. Choosing its numbers is llm-compressor's business, and what they mean is qerl.nvfp4's.
"""

from qerl.checkpoint.files import (
    Checkpoint,
    Header,
    Problem,
    describe,
    require,
    require_context,
    require_linear_backend,
    require_nf4,
    resolve,
    tensors,
)
from qerl.checkpoint.problems import fused, problems
from qerl.checkpoint.whole import require_new, write

__all__ = [
    "Checkpoint",
    "Header",
    "Problem",
    "describe",
    "fused",
    "problems",
    "require",
    "require_context",
    "require_linear_backend",
    "require_new",
    "require_nf4",
    "resolve",
    "tensors",
    "write",
]
