"""GPU kernels: fast versions of functions whose reference is plain torch in qerl/nvfp4.py.

One module a kernel, with a test and a benchmark of the same name. Importing this package loads
no kernel and needs no GPU; ask `available` before importing one of its modules.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

# bf16 arithmetic and 16-byte stores: Ampere and later.
OLDEST_CAPABILITY = (8, 0)


@cache  # a training step asks thousands of times
def available(device: torch.device | str) -> bool:
    """Whether the kernels run on `device`: a CUDA GPU, Ampere or later, with Triton installed."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
