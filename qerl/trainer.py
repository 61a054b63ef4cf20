"""TRL's GRPOTrainer with QeRL's sampler behind it, and a record of every step.

TRL owns the algorithm (advantages, DAPO loss, clipping, correction by the sampler's
log-probabilities). This subclass hands its two seams, weight sync and generation, to
qerl.rollout, saves checkpoints whole or not at all, and writes metrics.jsonl and samples.jsonl.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig, GRPOTrainer

from qerl import adapter, correction
from qerl.config import TrainConfig
from qerl.noise import Noise
from qerl.rollout import Applied, Engine, Sampling
from qerl.run_folder import PARTIAL, append

# metrics.jsonl key <- TRL's name for it
TRL_METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "logp_gap_mean": "sampling/sampling_logp_difference/mean",
    "logp_gap_max": "sampling/sampling_logp_difference/max",
    "clip_ratio_low": "clip_ratio/low_mean",
    "clip_ratio_high": "clip_ratio/high_mean",
    "completion_length": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "zero_variance_fraction": "frac_reward_zero_std",
}
# Means over the tokens in the loss: without a token they have no value.
TOKEN_METRICS = ("entropy", "logp_gap_mean", "logp_gap_max", "clip_ratio_low", "clip_ratio_high")
SHOWN = {"loss": "loss", "grad_norm": "grad_norm", **TRL_METRICS}  # on the terminal
SAMPLES_A_STEP = 4


def grpo_config(config: TrainConfig, steps: int) -> GRPOConfig:
    """TRL's arguments of a run. `use_vllm` is off: the engine is ours (see QeRLTrainer)."""
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
        vllm_importance_sampling_correction=config.sampler_correction != "none",
        vllm_importance_sampling_mode=_correction_mode(config),
        vllm_importance_sampling_clip_max=config.sampler_correction_cap,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_ratio,
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
    """Keep transformers from DataParallel over all the GPUs it sees, which TRL refuses.

    Under accelerate's launcher every process has one already.
    """
    if arguments.n_gpu > 1:
        print(f"{arguments.n_gpu} GPUs are visible: training on the first, {arguments.device}")
        arguments._n_gpu = 1  # as transformers.Trainer does for a model split over devices


def _correction_mode(config: TrainConfig) -> str:
    return "token_truncate" if config.sampler_correction == "none" else config.sampler_correction


class Sampler:
    """The engine in the shape TRL calls it: sync_weights() and generate()."""

    def __init__(self, trainer: QeRLTrainer, engine: Engine, config: TrainConfig, schedule):
        self.trainer, self.engine, self.schedule = trainer, engine, schedule
        self.seed = config.random_state
        self.sampling = Sampling(config.max_completion_length, config.temperature)
        self.applied = Applied(0.0, 0.0, 0)

    def sync_weights(self) -> None:
        """Hand the adapter and this step's noise to the engine."""
        with self.trainer.timed("time_sync_s"):
            self.applied = self.engine.sync(adapter.of_model(self.trainer.model), self._noise())

    def generate(self, prompts, images, num_generations, profiler=None):
        """TRL's contract: (prompt ids, completion ids, log-probabilities, their token ids)."""
        with self.trainer.timed("time_rollout_s"):
            drawn = self.engine.generate(prompts, self.sampling, seed=self._draw_seed())
            self.engine.sleep()
        ids = [completion.token_ids for completion in drawn]
        logprobs = [[[value] for value in completion.logprobs] for completion in drawn]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]

    def _step(self) -> int:
        return self.trainer.state.global_step + 1

    def _draw_seed(self) -> int:
        """A function of (seed, step), so that a resumed run draws what it would have drawn."""
        return (self.seed * 1_000_003 + self._step()) % 2**63

    def _noise(self) -> Noise | None:
        if self.schedule is None:
            return None
        return Noise(self.seed, self._step(), self.schedule.sigma(self._step()))


class QeRLTrainer(GRPOTrainer):
    """A GRPOTrainer that samples from `engine` under the noise of `schedule`."""

    def __init__(self, config: TrainConfig, engine: Engine | None, schedule, **kwargs):
        self._times = defaultdict(float)
        self._saving = False
        self._entropies = []  # of this step's tokens, a tensor a pass
        self._gaps = []  # |sampler - trainer| of this step's tokens, a tensor a pass
        self._tokens_in_loss = 0  # of this step
        self._empty_steps = 0  # steps without any
        self._last_rollout = {}  # what TRL measured when it last sampled: num_iterations steps ago
        super().__init__(**kwargs)
        self.run_dir = Path(config.output_dir)
        self.add_callback(_StepClock(self))
        self.remove_callback(PrinterCallback)  # Progress shows what it would print
        if engine is not None:
            # TRL reads these when it samples; setting them here keeps it from building an engine.
            self.use_vllm, self.vllm_mode = True, "colocate"
            self.vllm_generation = Sampler(self, engine, config, schedule)
            self._last_loaded_step = -1
        # With one update a rollout, TRL's extra forward pass for the log-probabilities "before the
        # update" would return what the loss computes anyway: the weights are made there instead.
        self._fused = engine is not None and self.num_iterations == 1
        self._correction = config.sampler_correction
        if self._fused:
            self.vllm_importance_sampling_correction = False
        self._pending = None

    @contextmanager
    def timed(self, key: str):
        """Add the wall time of the block to metrics.jsonl's `key` of this step."""
        start = time.perf_counter()
        yield
        self._times[key] += time.perf_counter() - start

    def _generate_single_turn(self, *args, **kwargs):
        """TRL's sampling; without an engine it runs the policy, which needs autocast."""
        if self.use_vllm:
            return super()._generate_single_turn(*args, **kwargs)
        with self.accelerator.autocast():
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        with self.timed("time_reward_s"):
            return super()._calculate_rewards(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        """TRL's loss, weighted by qerl.correction with this very forward's log-probabilities."""
        self._tokens_in_loss += int(inputs["completion_mask"].sum())
        if not self._fused:
            return super()._compute_loss(model, inputs)
        sampler_logps_BT = inputs["sampling_per_token_logps"]
        width = 1 if self._correction.startswith("sequence") else None
        weights = torch.ones_like(sampler_logps_BT[:, :width])
        self._pending = weights, sampler_logps_BT, inputs["completion_mask"]
        self.vllm_importance_sampling_correction = True
        try:
            return super()._compute_loss(model, inputs | {"importance_sampling_ratio": weights})
        finally:
            self.vllm_importance_sampling_correction, self._pending = False, None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        """TRL's forward pass; within the loss it also fills in the weights that are waiting."""
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._pending is not None:
            weights, sampler_logps_BT, mask_BT = self._pending
            logps_BT = result[0].detach()
            mode, cap = self._correction, self.vllm_importance_sampling_clip_max
            weights.copy_(correction.weights(logps_BT, sampler_logps_BT, mask_BT, mode, cap))
            self._entropies.append(result[1].detach()[mask_BT.bool()])
            self._gaps.append((logps_BT - sampler_logps_BT)[mask_BT.bool()].abs())
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, and one line in metrics.jsonl for each optimizer step."""
        if "loss" in logs:
            for key, value in self._token_metrics().items():
                self._metrics["train"][TRL_METRICS[key]] = [value]
        super().log(logs, start_time)
        if "loss" in logs:
            append(self.run_dir / "metrics.jsonl", [self._row(logs)])
            append(self.run_dir / "samples.jsonl", self._samples())

    def _row(self, logs: dict[str, float]) -> dict:
        row = {"step": self.state.global_step}
        row |= {key: _finite(logs.get(key)) for key in ("loss", "learning_rate", "grad_norm")}
        self._last_rollout |= {key: logs[name] for key, name in TRL_METRICS.items() if name in logs}
        row |= {key: _finite(self._last_rollout.get(key)) for key in TRL_METRICS}
        sampler = getattr(self, "vllm_generation", None)
        applied = sampler.applied if sampler else Applied(0.0, 0.0, 0)
        row |= {
            "sigma": applied.sigma,
            "noise_std": applied.noise_std,
            "noise_modules": applied.noise_modules,
        }
        return row | self._time_row(row) | {"peak_memory_gib": _peak_memory_gib()}

    def _token_metrics(self) -> dict[str, float]:
        """Entropy and |sampler - trainer| over all tokens of the step that are in the loss.

        Without any, NaN (which TRL logs as null) for these and the clip ratios, where TRL averages
        its passes and counts an empty one as 0.
        """
        if not self._tokens_in_loss:
            self._warn_of_an_empty_step()
            return dict.fromkeys(TOKEN_METRICS, math.nan)
        if not self._gaps:
            return {}
        gaps, entropies = torch.cat(self._gaps), torch.cat(self._entropies)
        return {
            "entropy": entropies.mean().item(),
            "logp_gap_mean": gaps.mean().item(),
            "logp_gap_max": gaps.max().item(),
        }

    def _warn_of_an_empty_step(self) -> None:
        """Say it the first time, and every tenth."""
        self._empty_steps += 1
        if self._empty_steps % 10 == 1:
            tqdm.write(
                f"step {self.state.global_step}: every completion was cut off at "
                f"--max-completion-length {self.args.max_completion_length} and left out of the "
                f"loss, so that the step taught nothing ({self._empty_steps} such so far): raise "
                "it, or keep such completions with --mask-truncated-completions False"
            )

    def _time_row(self, row: dict) -> dict:
        parts = {
            key: self._times[key] for key in ("time_rollout_s", "time_reward_s", "time_sync_s")
        }
        train = time.perf_counter() - self._step_start - sum(parts.values())
        completions = self.args.generation_batch_size
        tokens = (row["completion_length"] or 0) * completions
        rate = tokens / parts["time_rollout_s"] if parts["time_rollout_s"] else None
        return {**parts, "time_train_s": train, "tokens_per_s": rate}

    def _samples(self) -> list[dict]:
        logs = self._logs
        rewards = [sum(column) for column in zip(*logs["rewards"].values(), strict=True)]
        rows = zip(logs["prompt"], logs["completion"], rewards, logs["advantages"], strict=True)
        return [
            {
                "step": self.state.global_step,
                "prompt": p,
                "completion": c,
                "reward": _finite(r),
                "advantage": a,
            }
            for p, c, r, a in list(rows)[:SAMPLES_A_STEP]
        ]

    def _get_output_dir(self, trial) -> str:
        run_dir = super()._get_output_dir(trial)
        return os.path.join(run_dir, PARTIAL) if self._saving else run_dir

    def _save_checkpoint(self, model, trial) -> None:
        """Write checkpoint-N beside the run, then rename it: a name means a whole checkpoint."""
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        name = f"checkpoint-{self.state.global_step}"
        shutil.rmtree(self.run_dir / name, ignore_errors=True)
        (self.run_dir / PARTIAL / name).replace(self.run_dir / name)
        shutil.rmtree(self.run_dir / PARTIAL)
        rotate_checkpoints(
            output_dir=str(self.run_dir),
            save_total_limit=self.args.save_total_limit,
            use_mtime=False,
        )


class _StepClock(TrainerCallback):
    """Starts each step's clock; after a resume, restores TRL's count of passes too.

    TRL samples anew when that count is a multiple of its rhythm, and starts it at 0.
    """

    def __init__(self, trainer: QeRLTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._step = state.global_step * args.gradient_accumulation_steps

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._times.clear()
        self.trainer._gaps.clear()
        self.trainer._entropies.clear()
        self.trainer._tokens_in_loss = 0
        self.trainer._step_start = time.perf_counter()


class Progress(TrainerCallback):
    """A bar with reward and time left, and a line every `every` steps (0: the bar alone)."""

    def __init__(self, every: int):
        self.every = every

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}):
            return
        if "reward" in logs:  # absent from the later updates on a rollout
            self.bar.set_postfix({key: _short(logs[key], ".2f") for key in ("reward", "entropy")})
        self.bar.update(state.global_step - self.bar.n)
        if self.every and state.global_step % self.every == 0:
            shown = {key: logs[name] for key, name in SHOWN.items() if name in logs}
            line = "  ".join(f"{key} {_short(value, '.4g')}" for key, value in shown.items())
            self.bar.write(f"step {state.global_step}  {line}")

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def _short(value: float | None, form: str) -> str:
    """A number on the terminal; a dash for what TRL could not measure."""
    return "-" if value is None else format(value, form)


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what TRL could not measure is null."""
    return value if value is not None and math.isfinite(value) else None


def _peak_memory_gib() -> float:
    """Peak of torch's memory on the GPU, of the process on a CPU, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
