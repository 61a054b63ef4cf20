"""The settings of a training run, and the one door to them.

`flags` is the dataclass of every setting, `rules` what must hold between them, and `command_line`
how they are written in a shell. Flags carry the names of the original trainer where it had them.
Values only: nothing here loads a model, a data set or a heavy library.
"""

from qerl.config.command_line import parse
from qerl.config.flags import (
    CPU_OPTIMIZERS,
    GPU_OPTIMIZERS,
    LINEAR_BACKENDS,
    LOSS_TYPES,
    LR_SCHEDULES,
    TrainConfig,
)
from qerl.config.rules import LORA_SLOTS, kebab

__all__ = [
    "CPU_OPTIMIZERS",
    "GPU_OPTIMIZERS",
    "LINEAR_BACKENDS",
    "LORA_SLOTS",
    "LOSS_TYPES",
    "LR_SCHEDULES",
    "TrainConfig",
    "kebab",
    "parse",
]
