"""The start-up proof of the engine's linears, on kernels that are right and some that are not."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qerl import _compat, rollout
from qerl.rollout.proof import WrongLinears, require_right_linears, wrong_sizes

WEIGHT_NK = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def right(x_TK: torch.Tensor) -> torch.Tensor:
    return x_TK @ WEIGHT_NK.T


def test_a_right_kernel_is_wrong_at_no_size():
    assert wrong_sizes(right, 32, [*range(1, 130), 500], "cpu") == []


@pytest.mark.parametrize("wrong", [0.0, 1.1, math.nan])
def test_one_wrong_row_in_a_range_of_sizes_is_found_at_just_those(wrong):
    """As Humming's tile of 56 rows: the last rows of batches of 49 to 56."""

    def kernel(x_TK):
        y_TN = right(x_TK).clone()
        if 48 < len(x_TK) <= 56:
            y_TN[-1] *= wrong
        return y_TN

    assert wrong_sizes(kernel, 32, range(1, 65), "cpu") == list(range(49, 57))


def test_a_kernel_that_is_wrong_where_it_is_compared_is_wrong_everywhere_else():
    def kernel(x_TK):
        return right(x_TK) * (2 if len(x_TK) == 32 else 1)

    assert wrong_sizes(kernel, 32, [1, 31, 32], "cpu") == [1, 31]


class Right:
    """A quant_method of vLLM's linears."""

    def apply(self, linear, x_TK):
        return right(x_TK)


class WrongAt50(Right):
    def apply(self, linear, x_TK):
        return right(x_TK) * (1 + (len(x_TK) == 50))


def model_of(*methods: Right) -> torch.nn.Module:
    """vLLM's linears of one shape, one for each method."""
    from vllm.model_executor.layers.linear import LinearBase

    class Linear(LinearBase):
        def __init__(self, method):
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(WEIGHT_NK)
            self.output_partition_sizes, self.input_size = [48], 32
            self.quant_method = method

    return torch.nn.ModuleList(map(Linear, methods))


def test_a_model_is_tried_at_the_sizes_of_short_prompts_too():
    require_right_linears(model_of(Right()), 2)
    with pytest.raises(WrongLinears, match="linears of 48 x 32 is wrong for batches of 50 rows"):
        require_right_linears(model_of(WrongAt50()), 2)


def test_a_layer_left_in_16_bits_does_not_stand_for_the_others_of_its_shape():
    with pytest.raises(WrongLinears, match="wrong for batches of 50 rows"):
        require_right_linears(model_of(WrongAt50(), Right()), 64)


def test_a_program_with_a_wrong_kernel_ends_with_one_line(monkeypatch):
    def build(settings):
        require_right_linears(model_of(WrongAt50()), 64)

    monkeypatch.setattr(rollout, "Engine", build)
    with pytest.raises(SystemExit, match="error: .* 50 rows: .*--linear-backend marlin"):
        rollout.start(rollout.EngineSettings(model="m", max_model_len=8))


class Hopper:
    """As Humming's heuristics for Hopper answer: the rows of a tile, and blocks that share it."""

    @classmethod
    def get_config(cls, meta, shape_m, *flags):
        return {"block_shape": (-(-shape_m // 8) * 8, *flags), "multi_cast_size_a": 2}


def test_humming_is_kept_from_its_two_wrong_tilings_and_from_nothing_else(monkeypatch):
    tune = ModuleType("humming.tune")
    tune.heuristics_map = {80: object, 90: Hopper}
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace(tune=tune))
    monkeypatch.setitem(sys.modules, "humming.tune", tune)
    _compat.let_humming_tile_soundly()
    mended = tune.heuristics_map[90]
    for rows in range(1, 400):
        config = mended.get_config(None, rows, 128)
        expected = 64 if 49 <= rows <= 56 else -(-rows // 8) * 8
        assert config == {"block_shape": (expected, 128), "multi_cast_size_a": 1}
    _compat.let_humming_tile_soundly()
    assert tune.heuristics_map == {80: object, 90: mended}
