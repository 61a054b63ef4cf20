"""TRL's GRPOTrainer with QeRL's sampler behind it, and a record of every step.

TRL owns the algorithm (advantages, DAPO loss and its denominators, clipping, KL). This subclass
hands its two seams, weight sync and generation, to qerl.sampler, weights the loss by
qerl.correction, resamples groups that teach nothing, skips a step whose gradients are not finite,
saves checkpoints whole or not at all, and writes metrics.jsonl and samples.jsonl.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import shutil
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from qerl import correction, groups
from qerl.alarms import Alarms
from qerl.config import TrainConfig
from qerl.metrics import ROLLOUT_METRICS, TOKEN_METRICS, TRL_MEANS, Tally, finite, peak_memory_gib
from qerl.rewards import soft_overlong_punishment
from qerl.rollout import Applied, Engine
from qerl.run_folder import PARTIAL, append, checkpoints
from qerl.sampler import Sampler

OVERLONG = "overlong_punishment"  # the name of the reward function that punishes length
SAMPLES_A_STEP = 4


def _overlong_punishment(config: TrainConfig):
    """DAPO's punishment for length as one more reward function in TRL's signature."""

    def punish(completion_ids, **kwargs) -> list[float]:
        longest, buffer = config.max_completion_length, config.overlong_buffer
        return [soft_overlong_punishment(len(ids), longest, buffer) for ids in completion_ids]

    punish.__name__ = OVERLONG
    return punish


@contextmanager
def frozen_heap():
    """Keep the garbage collector off what exists already: libraries, models, the engine.

    A full collection took 0.34 s on two CPU cores, every few steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class QeRLTrainer(GRPOTrainer):
    """A GRPOTrainer that samples from `engine` under the noise of `schedule`."""

    def __init__(self, config: TrainConfig, engine: Engine | None, schedule, **kwargs):
        self._times = defaultdict(float)
        self._saving = False
        self._tally = Tally()  # of this step
        self._loss_inputs = None  # of the loss that is being computed, else None
        self._correction, self._cap = config.sampler_correction, config.sampler_correction_cap
        self._dynamic_sampling = config.dynamic_sampling
        self._overlong = config.overlong_buffer > 0
        self._task_rewards_B = torch.empty(0)  # of the last rollout
        self._last_rollout = {}  # what TRL measured when it last sampled: num_iterations steps ago
        self.alarms = Alarms(config.parity_limit)
        if self._overlong:
            kwargs["reward_funcs"] = [*kwargs["reward_funcs"], _overlong_punishment(config)]
        super().__init__(**kwargs)
        if "ref" in self.model.peft_config:
            # For the KL, TRL copies the adapter it is given. Ours is new (B = 0): the copy is the
            # base model at the price of a second adapter, saved with every checkpoint. Without the
            # copy TRL uses the base model itself.
            self.model.delete_adapter("ref")
        self.run_dir = Path(config.output_dir)
        self.add_callback(_StepClock(self))
        self.remove_callback(PrinterCallback)  # Progress shows what it would print
        # Left on, TRL would spend a forward pass on the log-probabilities before the update. With
        # one update a rollout they are those of the loss, so _compute_loss makes the weights.
        self.vllm_importance_sampling_correction = False
        if engine is not None:
            # TRL reads these when it samples; setting them here keeps it from building an engine.
            self.use_vllm, self.vllm_mode = True, "colocate"
            self.vllm_generation = Sampler(self, engine, config, schedule)
            self._last_loaded_step = -1

    def train(self, *args, **kwargs):
        """TRL's, with the garbage collector off what was there before."""
        with frozen_heap():
            return super().train(*args, **kwargs)

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
            rewards_BF = super()._calculate_rewards(*args, **kwargs)
        for name, infinite in zip(self.reward_func_names, rewards_BF.isinf().any(0), strict=True):
            if infinite:
                raise ValueError(
                    f"the reward {name} is infinite for a completion, and a group with it has no "
                    "mean: expected a finite number, or None for no verdict"
                )
        if self._overlong:  # no verdict on the task remains no verdict
            rewards_BF[rewards_BF[:, :-1].isnan().all(1), -1] = torch.nan
        self._rewards_BF = rewards_BF
        return rewards_BF

    def _generate_and_score_completions(self, inputs):
        """TRL's rollout, and dynamic sampling: new prompts in place of groups without variance.

        Rewards and lengths are logged for the first round alone: the policy on the data as it
        comes.
        """
        batch, dull = self._sample(inputs)
        self._task_rewards_B = self._log_task_reward()
        rounds, resampled = self._sample_again(batch, dull, [row["prompt"] for row in inputs])
        self._metrics["train"] |= {
            "frac_reward_zero_std": [dull.float().mean().item()],
            "sampling/rounds": [rounds],
            "sampling/resampled_groups": [resampled],
        }
        return batch

    def _sample(self, inputs) -> tuple[dict, torch.Tensor]:
        """A rollout, and which of its groups have no variance; their advantages are 0."""
        batch = super()._generate_and_score_completions(inputs)
        dull = groups.without_variance(self._rewards_BF, self.num_generations)
        batch["advantages"][groups.rows_of(dull.nonzero()[:, 0], self.num_generations)] = 0
        self._logs["advantages"].extend(batch["advantages"].tolist())  # in place of TRL's
        return batch, dull

    def _sample_again(self, batch: dict, dull: torch.Tensor, seen: list) -> tuple[int, int]:
        """Fill the places of dull groups and clear their marks; (rounds, groups sampled again).

        `seen`: the prompts of this step. The first round, which every step has, is counted.
        """
        size, rounds, resampled = self.num_generations, 1, 0
        while dull.any() and rounds <= self._dynamic_sampling:
            rows = self._new_rows(int(dull.sum()), seen, rounds)
            if not rows:
                break
            with self._unlogged():
                fresh, useless = self._sample([row for row in rows for _ in range(size)])
            rounds, resampled = rounds + 1, resampled + len(rows)
            good = (~useless).nonzero()[:, 0]
            places = dull.nonzero()[: len(good), 0]
            groups.replace(batch, fresh, groups.rows_of(places, size), groups.rows_of(good, size))
            dull[places] = False
        return rounds, resampled

    def _new_rows(self, count: int, seen: list, draw: int) -> list[dict]:
        """At most `count` rows of the data with prompts that are not in `seen`; they are added.

        A function of (seed, step, draw), so that a resumed run takes what it would have taken.
        """
        data, rows = self.train_dataset, []
        rng = random.Random(f"{self.args.seed}/{self.state.global_step}/{draw}")
        for index in rng.sample(range(len(data)), len(data)):
            if len(rows) == count:
                break
            if data[index]["prompt"] not in seen:
                rows.append(data[index])
                seen.append(data[index]["prompt"])
        return rows

    @contextmanager
    def _unlogged(self):
        """Keep what the block would add to TRL's metrics and samples out of them."""
        kept = self._metrics, self._logs
        self._metrics, self._logs = copy.deepcopy(kept)
        yield
        self._metrics, self._logs = kept

    def _log_task_reward(self) -> torch.Tensor:
        """What the completions earned by the task alone [B], NaN for no verdict; logged as such."""
        rewards_BF = self._rewards_BF[:, :-1] if self._overlong else self._rewards_BF
        rewards_B = rewards_BF.nansum(1).masked_fill(rewards_BF.isnan().all(1), torch.nan)
        if self._overlong:
            self._metrics["train"]["reward"] = [rewards_B.nanmean().item()]
            self._metrics["train"]["reward_std"] = [nanstd(rewards_B).item()]
        return rewards_B

    def _compute_loss(self, model, inputs):
        """TRL's loss, weighted by qerl.correction within its own forward pass."""
        self._loss_inputs = inputs
        if (sampler_logps_BT := inputs.get("sampling_per_token_logps")) is not None:
            width = 1 if self._correction.startswith("sequence") else None
            ones = torch.ones_like(sampler_logps_BT[:, :width])
            self._loss_inputs = inputs | {"importance_sampling_ratio": ones}
            self.vllm_importance_sampling_correction = True
        learns = bool(groups.teaches(inputs, self.beta != 0).any())
        try:
            with torch.set_grad_enabled(learns):
                loss = super()._compute_loss(model, self._loss_inputs)
        finally:
            self.vllm_importance_sampling_correction, self._loss_inputs = False, None
        return loss if learns else loss + self._nothing()

    def _nothing(self) -> torch.Tensor:
        """0, with the gradients of 0 that a backward pass through the model would find too."""
        return sum(0 * p.sum() for p in self.model.parameters() if p.requires_grad)

    def _prepare_inputs(self, generation_batch):
        """TRL's pass; the rows of a new rollout are dealt to its passes again (qerl.groups).

        Not for bnpo, which averages within a pass: short completions would weigh more.
        """
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or self.loss_type == "bnpo":
            return inputs
        self._buffered_inputs = groups.reordered(self._buffered_inputs, self.beta != 0)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(self, model, ids_BT, mask_BT, kept, *args, **kwargs):
        """TRL's forward pass, over the columns that some row attends to, with 0 for the others.

        TRL pads every pass to the longest completion of the rollout. Within the loss the pass is
        measured, and fills in the weights.
        """
        start, end = groups.span(mask_BT, kept)
        cut = mask_BT.shape[1] - end
        part = ids_BT[:, start:end], mask_BT[:, start:end], kept - cut
        result = super()._get_per_token_logps_and_entropies(model, *part, *args, **kwargs)
        logps_BT, entropies_BT = (x if x is None else pad(x, (0, cut)) for x in result[:2])
        if self._loss_inputs is not None:
            self._measure(self._loss_inputs, logps_BT.detach(), entropies_BT.detach())
        return logps_BT, entropies_BT, *result[2:]

    def _measure(self, inputs: dict, logps_BT: torch.Tensor, entropies_BT: torch.Tensor) -> None:
        mask_BT, tally = inputs["completion_mask"], self._tally
        tally.count(mask_BT, inputs["advantages"])
        tally.entropies.append(entropies_BT[mask_BT.bool()])
        if "importance_sampling_ratio" not in inputs:
            return
        before_BT = inputs.get("old_per_token_logps", logps_BT)  # later updates: the first one's
        ratio_BT = correction.log_ratio(before_BT, inputs["sampling_per_token_logps"], mask_BT)
        weights = correction.weights(ratio_BT, self._correction, self._cap)
        inputs["importance_sampling_ratio"].copy_(weights)
        tally.token_log_ratios.append(ratio_BT[mask_BT.bool()])
        weighted = correction.weighted(ratio_BT, mask_BT, self._correction)
        tally.weighted_log_ratios.append(weighted)

    def _get_grad_norm(self, model, grad_norm=None):
        """The norm. Gradients that are not finite become None, which an optimizer skips."""
        norm = super()._get_grad_norm(model, grad_norm)
        if not math.isfinite(norm):
            model.zero_grad()
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, and one line in metrics.jsonl for each optimizer step."""
        if "loss" in logs:
            measured, tally = self._metrics["train"], self._tally
            for name in (TOKEN_METRICS[key] for key in TRL_MEANS):
                if tally.tokens and measured.get(name):
                    measured[name] = [tally.mean(measured[name])]
            for key, value in tally.metrics(self._cap).items():
                measured[TOKEN_METRICS[key]] = [value]
        super().log(logs, start_time)
        if "loss" in logs:
            row = self._row(logs)
            row["alarms"] = self.alarms.check(row)
            append(self.run_dir / "metrics.jsonl", [row])
            append(self.run_dir / "samples.jsonl", self._samples())
            if self.alarms.hopeless:
                self.control.should_save = self.control.should_training_stop = True

    def _row(self, logs: dict[str, float]) -> dict:
        row = {"step": self.state.global_step}
        row |= {key: finite(logs.get(key)) for key in ("loss", "learning_rate", "grad_norm")}
        self._last_rollout |= {k: logs[name] for k, name in ROLLOUT_METRICS.items() if name in logs}
        row |= {key: finite(self._last_rollout.get(key)) for key in ROLLOUT_METRICS}
        row |= {key: finite(logs.get(name)) for key, name in TOKEN_METRICS.items()}
        row |= {"loss_tokens": self._tally.tokens, "signal_tokens": self._tally.signal}
        sampler = getattr(self, "vllm_generation", None)
        applied = sampler.applied if sampler else Applied(0.0, 0.0, 0)
        row |= {
            "sigma": applied.sigma,
            "noise_std": applied.noise_std,
            "noise_modules": applied.noise_modules,
        }
        return row | self._time_row() | {"peak_memory_gib": peak_memory_gib()}

    def _time_row(self) -> dict:
        parts = {
            key: self._times[key] for key in ("time_rollout_s", "time_reward_s", "time_sync_s")
        }
        train = time.perf_counter() - self._step_start - sum(parts.values())
        rollout = parts["time_rollout_s"]
        rate = self.vllm_generation.tokens / rollout if rollout else None
        return {**parts, "time_train_s": train, "tokens_per_s": rate}

    def _samples(self) -> list[dict]:
        logs = self._logs
        columns = logs["prompt"], logs["completion"], self._task_rewards_B.tolist()
        rows = zip(*columns, logs["advantages"], strict=True)
        return [
            {
                "step": self.state.global_step,
                "prompt": p,
                "completion": c,
                "reward": finite(r),
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
        for old in checkpoints(self.run_dir)[: -self.args.save_total_limit]:
            shutil.rmtree(old)


class _StepClock(TrainerCallback):
    """Starts each step's clock; after a resume, restores TRL's count of passes and --save-steps.

    TRL starts that count at 0 and samples whenever it is a multiple of the passes of a rollout;
    transformers would save as often as the run that is continued.
    """

    def __init__(self, trainer: QeRLTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._step = state.global_step * args.gradient_accumulation_steps
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._times.clear()
        self.trainer._tally = Tally()
        self.trainer._step_start = time.perf_counter()
