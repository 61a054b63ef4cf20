"""The rollout engine: vLLM in this process, the only door to it in the package."""

from qerl.rollout.engine import Applied, Completion, Engine, EngineSettings, Sampling

__all__ = ["Applied", "Completion", "Engine", "EngineSettings", "Sampling"]
