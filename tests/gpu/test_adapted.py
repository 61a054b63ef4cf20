"""A frozen linear with its adapter in bf16 on a GPU, against float64 and against PEFT's layers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from qerl.linear import LoRALinear

DEVICE = "cuda"
SHAPES = [(3584, 3584, True), (512, 3584, True), (3584, 18944, False), (33, 80, True)]  # N, K, bias


def results(kind, rows, columns, bias, dtype, tokens=777):
    """Output and gradients of x, A and B, in float64; kind None: PEFT's own layer."""
    torch.manual_seed(rows + columns)
    base = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).to(DEVICE, dtype)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=["0"])
    if kind is not None:
        config._register_custom_module({nn.Linear: kind})
    model = get_peft_model(nn.Sequential(base), config)
    layer = model.base_model.model[0]
    layer.cast_input_dtype_enabled = False  # as qerl.policy.adapt leaves it
    for name, factor in model.named_parameters():
        if "lora_" in name:  # the factors learn in float32
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            values = torch.randn(factor.shape) / factor.shape[1] ** 0.5
            factor.data = values.to(DEVICE, wide)
    x = torch.randn(tokens, columns).to(torch.bfloat16).to(DEVICE, dtype).requires_grad_()
    given = torch.randn(tokens, rows).to(torch.bfloat16).to(DEVICE, dtype)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = model(x)
    y.backward(given)
    learned = [p.grad for p in model.parameters() if p.requires_grad]
    return [tensor.detach().double() for tensor in (y, x.grad, *learned)]


@pytest.mark.parametrize(("rows", "columns", "bias"), SHAPES)
def test_two_nodes_are_as_near_to_float64_as_pefts_five(rows, columns, bias):
    shape = rows, columns, bias
    exact = results(None, *shape, torch.float64)
    ours, theirs = (results(kind, *shape, torch.bfloat16) for kind in (LoRALinear, None))
    for name, mine, other, right in zip(("y", "dx", "dA", "dB"), ours, theirs, exact, strict=True):
        error, usual = ((found - right).norm() / right.norm() for found in (mine, other))
        assert error < 0.01 and error < 1.1 * usual, (name, error, usual)
