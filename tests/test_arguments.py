"""What TRL and transformers are asked for: every name that a flag takes is one they can serve."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, get_scheduler
from trl import GRPOConfig

from qerl import arguments
from qerl.config import CPU_OPTIMIZERS, GPU_OPTIMIZERS, LR_SCHEDULES, parse


def asked_for(*flags: str) -> GRPOConfig:
    usual = ["--model-name", "m", "--output-dir", "o", "--optim", "adamw_torch"]
    return arguments.grpo_config(parse([*usual, *flags]), 4)


def stepped(optim: str, schedule: str) -> list[float]:
    """The learning rates of four steps of an optimizer of these names on one parameter."""
    asked = asked_for("--optim", optim, "--lr-scheduler-type", schedule, "--learning-rate", "1e-8")
    made, settings = Trainer.get_optimizer_cls_and_kwargs(asked)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameter = torch.nn.Parameter(torch.ones(2, 2, device=device))
    optimizer = made([parameter], **settings)
    scheduler = get_scheduler(asked.lr_scheduler_type, optimizer, 1, 4)
    rates = []
    for _ in range(4):
        parameter.square().sum().backward()
        optimizer.step(), scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


@pytest.mark.parametrize(
    "optim", CPU_OPTIMIZERS + (GPU_OPTIMIZERS if torch.cuda.is_available() else ())
)
def test_an_optimizer_that_is_accepted_needs_nothing_more(optim):
    assert len(stepped(optim, "cosine")) == 4


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
def test_a_learning_rate_schedule_that_is_accepted_needs_nothing_more(schedule):
    assert stepped("adamw_torch", schedule)[0] == pytest.approx(1e-8)


def test_of_several_gpus_the_first_is_taken(capsys):
    """transformers would wrap the model in DataParallel, which TRL refuses."""
    made = asked_for()
    made._n_gpu = 4  # what transformers finds in a process that sees four
    arguments._take_one_gpu(made)
    assert made.n_gpu == 1 and made.train_batch_size == made.per_device_train_batch_size
    assert "4 GPUs are visible: training on the first" in capsys.readouterr().out
    arguments._take_one_gpu(made)
    assert not capsys.readouterr().out
