"""What several test files share, each made once: SmolLM2's two folders and one vLLM engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared_engine import CONTEXT, RANK, adapted

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "llm-compressor"
TEXTS = ("What is 2 + 3?", "The capital of France is Paris, and that of Italy", "1, 2, 3, 4, 5, 6")
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"  # as training/quickstart.sh names them


def pytest_collection_modifyitems(items):
    """Quantizing comes first: an engine leaves torch.distributed on, which it would use."""
    items.sort(key=lambda item: "quantize" not in item.path.name)


def _make(script: str, *arguments: object) -> None:
    subprocess.run([sys.executable, SCRIPTS / script, *map(str, arguments)], check=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bf16."""
    if not SMOLLM2.is_dir():
        _make("smollm2.py", SMOLLM2)
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2_nvfp4(smollm2: Path) -> Path:
    """SmolLM2-135M-Instruct in NVFP4."""
    folder = smollm2.with_name(f"{smollm2.name}-NVFP4A16-rtn")
    if not folder.is_dir():
        _make("quantize_nvfp4.py", "--model", smollm2, "--output", folder, "--skip-generation")
    return folder


@pytest.fixture(scope="session")
def _engine(smollm2_nvfp4: Path):
    from qerl.policy import TARGETS
    from qerl.rollout import Engine, EngineSettings

    settings = EngineSettings(
        model=str(smollm2_nvfp4),
        max_model_len=CONTEXT,
        max_num_seqs=16,
        lora_rank=RANK,
        lora_modules=TARGETS,
        noise=True,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
    )
    return Engine(settings)


@pytest.fixture
def engine(_engine):
    """The shared engine of SmolLM2 in NVFP4, without adapter and noise."""
    _engine.sync(None)
    return _engine


@pytest.fixture
def tokenizer(smollm2_nvfp4: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_nvfp4)


@pytest.fixture(scope="session")
def base(smollm2_nvfp4: Path):
    """The trainer's frozen model, for adapters of several ranks."""
    from qerl import policy

    return policy.load(smollm2_nvfp4)


@pytest.fixture
def tokens(tokenizer) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture
def two(base) -> tuple:
    """Two different adapters of rank 16, as plain tensors."""
    from qerl import adapter

    made = []
    for seed in (1, 2):
        model = adapted(base, seed=seed)
        made.append(adapter.of_model(model))
        model.unload()
    return tuple(made)


@pytest.fixture(scope="module")
def one_thread():
    """On tensors this small, threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
