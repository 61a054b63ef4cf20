"""Every setting of a training run: one frozen dataclass, and what follows from its values alone.

Which values cannot work is said in qerl.config.rules; how a shell writes them is
qerl.config.command_line's matter.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qerl.config.rules import rules
from qerl.correction import MODES as CORRECTIONS
from qerl.noise import SCHEDULES, TARGETS, Schedule

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
# Of transformers' names, those that need no argument that is not a flag here.
CPU_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd")
GPU_OPTIMIZERS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
LINEAR_BACKENDS = ("auto", "humming", "marlin")  # of vLLM, for NVFP4 on a GPU
LR_SCHEDULES = (
    "cosine",
    "cosine_with_restarts",
    "linear",
    "inverse_sqrt",
    "constant",
    "constant_with_warmup",
)


def _flag(default, text: str, choices: tuple | None = None):
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class TrainConfig:
    """Every flag of `python -m qerl.train`, in the order of --help."""

    # What is trained, on what, and where it goes
    model_name: str = _flag("", "checkpoint folder (or hub id) of the base model")
    dataset: str = _flag("gsm8k", "data set name, or a .jsonl or .parquet file")
    output_dir: str = _flag("", "run folder; an unfinished run in it is continued")
    precision: str = _flag(
        "nvfp4",
        "kind of weights --model-name must hold; nf4: bf16, held by bitsandbytes in NF4 (QLoRA)",
        ("nvfp4", "bf16", "nf4"),
    )
    reward: str = _flag("", "your own reward as module:function; empty: the data set's")
    random_state: int = _flag(3407, "seed of the adapter, data order, sampling and noise")
    # How long
    num_train_epochs: float = _flag(1.0, "passes over the data set, when --max-steps is 0")
    max_steps: int = _flag(0, "optimizer steps; 0: from --num-train-epochs")
    # The batch of a step
    per_device_train_batch_size: int = _flag(2, "completions in one forward and backward pass")
    gradient_accumulation_steps: int = _flag(1, "passes a step; batch x passes = completions")
    num_generations: int = _flag(2, "group size: completions sampled for each prompt")
    num_iterations: int = _flag(1, "updates on each batch of rollouts")
    max_prompt_length: int = _flag(256, "tokens; longer prompts are left out, and counted")
    max_completion_length: int = _flag(2048, "tokens; sampling stops there")
    max_seq_length: int = _flag(0, "engine's context in tokens; 0: prompt + completion")
    # Sampling
    use_vllm: bool = _flag(True, "sample with vLLM; False: with transformers, slowly, no noise")
    vllm_gpu_memory_utilization: float = _flag(
        0.3, "share of the GPU's memory for the sampler, its weights and KV cache, in (0, 1)"
    )
    temperature: float = _flag(1.0, "of sampling; log-probabilities are taken at it")
    linear_backend: str = _flag(
        "auto", "vLLM's kernel for NVFP4 linears; auto: the fastest installed", LINEAR_BACKENDS
    )
    compile: bool = _flag(
        True,
        "torch.compile in the engine before its CUDA graphs are captured; False: the graphs alone",
    )
    enforce_eager: bool = _flag(False, "neither CUDA graphs nor torch.compile in the engine")
    # Optimizer
    learning_rate: float = _flag(1e-5, "peak learning rate (paper: 1e-5 NVFP4, 5e-6 bf16)")
    lr_scheduler_type: str = _flag("cosine", "transformers' name of the schedule", LR_SCHEDULES)
    warmup_ratio: float = _flag(0.1, "share of the steps spent warming up")
    optim: str = _flag(
        "adamw_8bit",
        "transformers' optimizer name; adamw_torch on a CPU",
        GPU_OPTIMIZERS + CPU_OPTIMIZERS,
    )
    adam_beta1: float = _flag(0.9, "AdamW")
    adam_beta2: float = _flag(0.99, "AdamW")
    weight_decay: float = _flag(0.1, "AdamW")
    max_grad_norm: float = _flag(0.2, "gradients are clipped to this norm; 0: not clipped")
    # Loss
    loss_type: str = _flag("dapo", "how token losses are averaged, TRL's names", LOSS_TYPES)
    beta: float = _flag(0.0, "weight of the KL to the base model; 0: none, as in DAPO")
    epsilon: float = _flag(0.2, "lower clip of the ratio")
    epsilon_high: float = _flag(0.28, "upper clip of the ratio (clip-higher)")
    mask_truncated_completions: bool = _flag(
        True, "leave completions cut by length out of the loss"
    )
    sampler_correction: str = _flag(
        "token_truncate", "importance weights for the sampler's own policy", CORRECTIONS
    )
    sampler_correction_cap: float = _flag(2.0, "largest importance weight")
    dynamic_sampling: int = _flag(
        0, "rounds a step that sample groups without variance again, with new prompts; 0: none"
    )
    overlong_buffer: int = _flag(
        0, "tokens up to --max-completion-length over which a punishment grows to -1; 0: none"
    )
    # Adapter
    lora_rank: int = _flag(16, "rank of the LoRA adapters")
    lora_alpha: float = _flag(16.0, "LoRA scale is alpha / rank")
    # Adaptive quantization noise
    ln: bool = _flag(True, "noise in the norms that feed quantized linears while sampling (AQN)")
    sigma_start: float = _flag(1e-2, "noise of the first noisy stage")
    sigma_end: float = _flag(1e-4, "noise towards the end")
    num_stages: int = _flag(10, "equal stages of the run; the first has no noise")
    noise_target: str = _flag(
        "norm", "where noise goes; linear: also the inputs of o_proj and down_proj", TARGETS
    )
    noise_schedule: str = _flag("exponential", "how sigma decays over the stages", SCHEDULES)
    # Machine
    gradient_checkpointing: bool = _flag(True, "recompute activations: less memory, more time")
    parity_limit: float = _flag(
        0.15, "mean gap in nats between sampler and trainer above which no run starts"
    )
    kernels: bool = _flag(True, "Triton kernels and Liger on a GPU; --no-kernels: plain torch")
    # Bookkeeping
    save_strategy: str = _flag("steps", "when to save checkpoints", ("steps", "no"))
    save_steps: int = _flag(50, "optimizer steps between checkpoints")
    save_total_limit: int = _flag(2, "checkpoints kept")
    logging_steps: int = _flag(1, "optimizer steps between lines on the terminal; 0: bar only")
    report_to: str = _flag("none", "tracker", ("none", "tensorboard", "wandb", "trackio"))
    run_name: str = _flag("", "name in the tracker; empty: the run folder's")
    dry_run: bool = _flag(False, "check everything, print the plan, load no weights")

    @property
    def completions_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_step(self) -> int:
        return self.completions_per_step // self.num_generations

    @property
    def max_model_len(self) -> int:
        return self.max_seq_length or self.max_prompt_length + self.max_completion_length

    @property
    def has_noise(self) -> bool:
        return self.ln and self.sigma_start > 0

    def steps(self, rows: int) -> int:
        """Optimizer steps over a data set of `rows` prompts."""
        if self.max_steps:
            return self.max_steps
        batches = int(self.num_train_epochs * rows) // self.prompts_per_step
        if batches == 0:
            raise ValueError(
                f"{rows} prompts x {self.num_train_epochs} epochs do not fill one step of "
                f"{self.prompts_per_step} prompts: expected more data, epochs or --max-steps"
            )
        return batches * self.num_iterations

    def schedule(self, steps: int) -> Schedule | None:
        """The noise schedule of a run of `steps`, or None without noise."""
        if not self.has_noise:
            return None
        return Schedule(
            self.sigma_start, self.sigma_end, self.num_stages, steps, self.noise_schedule
        )

    def stages_left_out(self, steps: int) -> int:
        """The number of stages in which a run of `steps` samples nothing."""
        schedule = self.schedule(steps)
        if schedule is None:
            return 0
        every = self.num_iterations  # steps 1, 1 + every, .. sample
        sampled = (span[0] + (1 - span[0]) % every in span for span in schedule.spans())
        return self.num_stages - sum(sampled)

    def check(self) -> None:
        """Raise ValueError for the first setting that cannot work, with the way out."""
        for holds, message in rules(self):
            if not holds:
                raise ValueError(message)
        self.schedule(1)  # raises for a sigma that does not fall
