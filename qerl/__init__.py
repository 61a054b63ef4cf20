"""QeRL: reinforcement learning of LoRA adapters on a model that stays in NVFP4."""

__version__ = "0.1.0"
