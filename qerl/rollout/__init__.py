"""The rollout engine: vLLM in this process, the only door to it in the package."""

import sys

from qerl.rollout.build import EngineSettings
from qerl.rollout.engine import Applied, Completion, Engine, Sampling
from qerl.rollout.proof import WrongLinears

__all__ = ["Applied", "Completion", "Engine", "EngineSettings", "Sampling", "WrongLinears", "start"]


def start(settings: EngineSettings) -> Engine:
    """Build the engine, or end the program with one line and status 1 if its kernels are wrong."""
    try:
        return Engine(settings)
    except WrongLinears as error:
        sys.exit(f"error: {error}")
