"""The linear layers that train: 4 bits compute as their dense values, two nodes as PEFT's five."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from qerl import nvfp4
from qerl.linear import LoRALinear, NVFP4Linear
from qerl.rollout.lora import add_adapter

SHAPES = [(1, 16), (17, 48), (64, 96), (33, 576)]  # rows, columns
TOKENS = [(5,), (2, 3), (0,)]


def packed_linear(rows: int, columns: int, bias: bool) -> tuple[NVFP4Linear, nn.Linear]:
    """An NVFP4 layer and the dense one with the values that it stores."""
    torch.manual_seed(rows + columns)
    dense = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    packed = NVFP4Linear(dense)
    stored = nvfp4.quantize(dense.weight)
    for name, tensor in stored._asdict().items():
        setattr(packed, f"weight_{name}", nn.Parameter(tensor, requires_grad=False))
    dense.weight.data.copy_(nvfp4.dequantize(*stored))
    return packed, dense


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_packed_layer_computes_as_the_dense_one_forward_and_backward(rows, columns, bias, tokens):
    packed, dense = packed_linear(rows, columns, bias)
    results = []
    for layer in (packed, dense):
        torch.manual_seed(1)
        x = torch.randn(*tokens, columns, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn_like(y))
        results.append((y.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs)


def test_a_packed_layer_takes_float32_under_autocast_as_a_linear_does():
    packed, dense = packed_linear(64, 96, bias=True)
    x = torch.randn(3, 96)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = packed(x), dense(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)


# The layer on its kernel, which Triton interprets: float32, since it cuts bf16 off (test_kernels).
INTERPRET = """
import copy, torch
from qerl import kernels, linear, nvfp4
kernels.available = lambda device: True
layers = []
for rows, columns in ((48, 64), (16, 32)):
    layer = linear.NVFP4Linear(torch.nn.Linear(columns, rows, bias=False))
    for name, tensor in nvfp4.quantize(torch.randn(rows, columns))._asdict().items():
        setattr(layer, f"weight_{name}", torch.nn.Parameter(tensor, requires_grad=False))
    layers.append(layer)
def check(layer):
    stored = layer.weight_packed, layer.weight_scale, layer.weight_global_scale
    for _ in range(2):
        assert torch.equal(layer.dense(torch.float32), nvfp4.dequantize(*stored, torch.float32))
for layer in layers:
    check(layer)
layer = layers[0]
check(layer)  # the larger buffer serves the smaller weight and the larger again
twin = copy.deepcopy(layer)
twin.weight_packed.data.fill_(0x23)
check(twin), check(layer)
layer.weight_packed.data = torch.full_like(layer.weight_packed, 0x51)  # as a move leaves it
check(layer)
scale = torch.full(layer.weight_scale.shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
check(layer)
assert layer._rebuild[0] != twin._rebuild[0]
assert layer.to("meta")._rebuild == (None, None)  # the memory is given back
"""


def test_the_kernel_follows_a_weight_that_was_moved_or_copied():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- with an adapter


def adapted(base: nn.Module, rank: int, kind: type[nn.Module] | None, **options):
    """`base` alone in a model under PEFT, with B filled; kind None: PEFT's own LoRA layer."""
    config = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=["0"], **options)
    if kind is not None:
        config._register_custom_module({type(base): kind})
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.3
    return model


def results(model, tokens, columns, dtype=torch.float64) -> list[torch.Tensor]:
    """Output, and the gradients of the input and of both factors."""
    torch.manual_seed(1)
    x = torch.randn(*tokens, columns, dtype=dtype, requires_grad=True)
    y = model(x)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def plain_linear(rows: int, columns: int, bias: bool) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, bias=bias, dtype=torch.float64).requires_grad_(False)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("bias", "rank"), [(True, 1), (False, 5)])
def test_two_nodes_compute_what_pefts_layer_does(rows, columns, tokens, bias, rank):
    ours, theirs = (
        results(adapted(plain_linear(rows, columns, bias), rank, kind), tokens, columns)
        for kind in (LoRALinear, None)
    )
    assert len(ours) == 4
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("bias", [True, False])
def test_an_adapter_on_4_bits_computes_as_one_on_their_dense_values(bias):
    packed, dense = packed_linear(33, 96, bias)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            results(adapted(base, 4, LoRALinear), (2, 7), 96, torch.float32)
            for base in (packed, dense)
        )
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


def test_the_trainer_rounds_as_the_engine_does():
    """To the last bit: how the same formula is rounded is what sampler and trainer differ by."""
    packed, dense = packed_linear(64, 96, bias=True)
    model = adapted(packed, 4, LoRALinear)
    x = torch.randn(50, 96, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(x)
    A_RK, B_NR = (p.detach().bfloat16() for n, p in model.named_parameters() if "lora_" in n)
    theirs, idle = dense(x), torch.tensor(False)
    add_adapter(theirs, x, idle, [A_RK[None, None]], [B_NR[None, None]], 3.0, True)
    assert torch.equal(ours, theirs) and not torch.equal(ours, dense(x))


def test_a_float32_bias_is_taken_under_autocast_as_a_linear_takes_it():
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            results(adapted(plain_linear(17, 48, True).float(), 4, kind), (5,), 48, torch.float32)
            for kind in (LoRALinear, None)
        )
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference.to(mine.dtype), rtol=0.05, atol=0.05)


def nodes(y: torch.Tensor) -> set[str]:
    """The names of the autograd nodes behind y."""
    found, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        found.add(node.name())
        left += [parent for parent, _ in node.next_functions if parent is not None]
    return found


def test_one_plain_adapter_is_two_nodes_and_anything_else_goes_pefts_way():
    x = torch.randn(3, 48, dtype=torch.float64, requires_grad=True)
    ours = {"_AdapterBackward", "_BaseBackward"}
    for options, two in [({}, True), ({"lora_dropout": 0.5}, False), ({"use_dora": True}, False)]:
        found = nodes(adapted(plain_linear(17, 48, True), 4, LoRALinear, **options)(x))
        assert (found == ours | {"torch::autograd::AccumulateGrad"}) == two, options
        assert bool(found & ours) == two, options


def test_an_adapter_that_is_switched_off_or_merged_computes_as_pefts_does():
    x = torch.randn(3, 48, dtype=torch.float64)
    model = adapted(plain_linear(17, 48, True), 4, LoRALinear)
    on = model(x)
    with model.disable_adapter():
        assert torch.equal(model(x), plain_linear(17, 48, True)(x))
    assert torch.equal(model(x), on)
    model.merge_adapter()
    torch.testing.assert_close(model(x), on)


def test_the_input_of_the_first_layer_needs_no_gradient_and_gets_none():
    packed, _ = packed_linear(64, 96, bias=False)
    model = adapted(packed, 4, LoRALinear)
    calls = []
    original = NVFP4Linear.dense
    packed.dense = lambda dtype: calls.append(dtype) or original(packed, dtype)
    model(torch.randn(3, 96, dtype=torch.float64)).sum().backward()
    assert len(calls) == 1  # the forward pass alone
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_checkpointing_does_not_recompute_the_last_product_of_a_block():
    """It recomputes up to the last saved tensor; the last linear saves before it multiplies."""
    torch.manual_seed(0)
    bases = [packed_linear(48, 48, bias=False)[0] for _ in range(3)]
    layers = [adapted(base, 4, LoRALinear) for base in bases]
    rebuilt = []
    for index, base in enumerate(bases):
        base.dense = lambda dtype, base=base, index=index: (
            rebuilt.append(index) or NVFP4Linear.dense(base, dtype)
        )
    grads = []
    for checkpointed in (False, True):
        rebuilt.clear()
        x = torch.linspace(-1, 1, 5 * 48, dtype=torch.float64).view(5, 48).requires_grad_()
        block = nn.Sequential(*layers)
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        y.square().sum().backward()
        grads.append([x.grad, *(p.grad for p in block.parameters() if p.requires_grad)])
        block.zero_grad()
    assert all(map(torch.equal, *grads)) and len(grads[0]) == 1 + 2 * 3
    # Forward; backward, for which the block runs again but for its last product.
    assert rebuilt == [0, 1, 2, 2, 0, 1, 1, 0]
