"""The rollout engine: vLLM in this process, the only door to it in the package."""

from qerl.rollout.build import EngineSettings
from qerl.rollout.engine import Applied, Completion, Engine, Sampling

__all__ = ["Applied", "Completion", "Engine", "EngineSettings", "Sampling"]
