"""What must hold between the settings of a training run, each with the way out.

Only values are looked at: what a model, a data set or a machine allows, qerl.train finds out.
`config` is a TrainConfig throughout; a rule is (holds, message).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

Rules = Iterator[tuple[object, str]]

LORA_SLOTS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's ranks of an adapter slot
AT_LEAST_1 = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "max_prompt_length",
    "max_completion_length",
    "lora_rank",
    "num_stages",
    "save_steps",
    "save_total_limit",
)
MORE_THAN_0 = (
    "learning_rate",
    "temperature",
    "num_train_epochs",
    "lora_alpha",
    "epsilon",
    "parity_limit",
)
AT_LEAST_0 = (
    "max_steps",
    "beta",
    "sigma_start",
    "logging_steps",
    "max_grad_norm",
    "weight_decay",
    "dynamic_sampling",
    "overlong_buffer",
)


def rules(config) -> Rules:
    """Every rule in turn. Stop at the first that does not hold: the later ones build on it."""
    groups = _names, _counts, _finite, _limits, _batch, _shares, _lengths, _loss, _sampling
    for group in groups:
        yield from group(config)


def kebab(name: str) -> str:
    """The command line's spelling of a setting's name."""
    return name.replace("_", "-")


def _names(config) -> Rules:
    yield config.model_name, "--model-name is missing: expected a checkpoint folder or a hub id"
    yield config.output_dir, "--output-dir is missing: expected a folder for the run"


def _counts(config) -> Rules:
    for name in AT_LEAST_1:
        value = getattr(config, name)
        yield value >= 1, f"--{kebab(name)} {value}: expected at least 1"


def _finite(config) -> Rules:
    for name, value in dataclasses.asdict(config).items():
        holds = not isinstance(value, float) or math.isfinite(value)
        yield holds, f"--{kebab(name)} {value}: expected a finite number"


def _limits(config) -> Rules:
    rank, largest = config.lora_rank, LORA_SLOTS[-1]
    yield rank <= largest, f"--lora-rank {rank}: vLLM's largest adapter slot is {largest}"
    for name in MORE_THAN_0:
        value = getattr(config, name)
        yield value > 0, f"--{kebab(name)} {value}: expected more than 0"
    for name in AT_LEAST_0:
        value = getattr(config, name)
        yield value >= 0, f"--{kebab(name)} {value}: expected 0 or more"
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(config, name)
        yield 0 <= value < 1, f"--{kebab(name)} {value}: expected at least 0 and below 1"
    seed = config.random_state
    yield 0 <= seed < 2**32, f"--random-state {seed}: expected at least 0 and below 2**32"


def _batch(config) -> Rules:
    size = config.num_generations
    yield (
        size >= 2,
        f"--num-generations {size}: a group needs at least 2 completions, since the advantage "
        "compares them",
    )
    yield (
        config.completions_per_step % size == 0,
        f"--num-generations {size} does not divide the batch of {config.completions_per_step} "
        f"completions (--per-device-train-batch-size {config.per_device_train_batch_size} x "
        f"--gradient-accumulation-steps {config.gradient_accumulation_steps}): change one of the "
        "three",
    )


def _shares(config) -> Rules:
    share, warmup = config.vllm_gpu_memory_utilization, config.warmup_ratio
    yield (
        0 < share < 1,
        f"--vllm-gpu-memory-utilization {share}: expected a share of the GPU's memory between 0 "
        "and 1, such as 0.3",
    )
    yield 0 <= warmup < 1, f"--warmup-ratio {warmup}: expected at least 0 and below 1"


def _lengths(config) -> Rules:
    longest = config.max_completion_length
    needed = config.max_prompt_length + longest
    yield (
        config.max_model_len >= needed,
        f"--max-seq-length {config.max_seq_length} is shorter than prompt + completion ({needed} "
        "tokens): raise it or set it to 0",
    )
    yield (
        config.overlong_buffer <= longest,
        f"--overlong-buffer {config.overlong_buffer} is longer than --max-completion-length "
        f"{longest}: expected a part of it",
    )


def _loss(config) -> Rules:
    low, high, cap = config.epsilon, config.epsilon_high, config.sampler_correction_cap
    yield high >= low, f"--epsilon-high {high} is below --epsilon {low}"
    yield (
        cap >= 1,
        f"--sampler-correction-cap {cap}: expected at least 1, the weight of a token on which "
        "sampler and trainer agree",
    )


def _sampling(config) -> Rules:
    yield (
        config.num_stages >= 2 or not config.has_noise,
        f"--num-stages {config.num_stages} is the stage without noise alone: take 2 or more, or "
        "--no-ln",
    )
    yield (
        config.use_vllm or not config.has_noise,
        "--use-vllm False samples from the clean policy; noise needs the engine: add --no-ln",
    )
    yield (
        config.use_vllm or config.sampler_correction == "none",
        "--use-vllm False gives no sampler log-probabilities to correct with; add "
        "--sampler-correction none",
    )
