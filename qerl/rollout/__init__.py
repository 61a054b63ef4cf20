"""The rollout engine: vLLM in this process, the only door to it in the package."""

from qerl.rollout.engine import Applied, Completion, Engine, EngineSettings, Sampling, require_nf4

__all__ = ["Applied", "Completion", "Engine", "EngineSettings", "Sampling", "require_nf4"]
