"""TrainConfig in TRL's words: the arguments of GRPOTrainer.

Values only; what TRL does not offer (noise, the sampler's correction, dynamic sampling) reaches
qerl.trainer in the TrainConfig itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from trl import GRPOConfig

from qerl.config import TrainConfig


def grpo_config(config: TrainConfig, steps: int) -> GRPOConfig:
    """TRL's arguments of a run. `use_vllm` is off: the engine is ours (see qerl.trainer)."""
    on_gpu = torch.cuda.is_available()
    made = GRPOConfig(
        output_dir=config.output_dir,
        max_steps=steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_generations=config.num_generations,
        num_iterations=config.num_iterations,
        max_completion_length=config.max_completion_length,
        temperature=config.temperature,
        use_vllm=False,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_ratio,  # below 1 it is a share of the steps
        optim=config.optim,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        loss_type=config.loss_type,
        beta=config.beta,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        mask_truncated_completions=config.mask_truncated_completions,
        shuffle_dataset=False,  # rows come in the order of data.order: a function of the seed
        seed=config.random_state,
        bf16=True,
        use_cpu=not on_gpu,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        save_strategy=config.save_strategy,
        save_steps=config.save_steps,
        save_total_limit=config.save_total_limit,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=config.report_to,
        run_name=config.run_name or Path(config.output_dir).name,
        disable_tqdm=True,
    )
    _take_one_gpu(made)
    return made


def _take_one_gpu(arguments: GRPOConfig) -> None:
    """Keep transformers from DataParallel over all the GPUs it sees, which TRL refuses."""
    if arguments.n_gpu > 1:
        print(f"{arguments.n_gpu} GPUs are visible: training on the first, {arguments.device}")
        arguments._n_gpu = 1  # as transformers.Trainer does for a model split over devices
