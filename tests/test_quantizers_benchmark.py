"""The quantizers' benchmark compares on text that nothing was calibrated on, and counts right."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from benchmarks import quantizers


def test_the_two_halves_of_the_docstrings_have_no_paragraph_in_common():
    calibration, held_out = (set(text.split("\n\n")) for text in quantizers.halves(None))
    assert len(calibration) > 1000 and len(held_out) > 1000
    assert not calibration & held_out


def test_a_text_file_is_halved(tmp_path):
    (tmp_path / "text").write_text("calibrate" + "held out.")
    assert quantizers.halves(tmp_path / "text") == ("calibrate", "held out.")


def test_the_exact_model_has_no_error_and_an_even_guess_the_perplexity_of_the_vocabulary():
    head = torch.nn.Linear(8, 50, bias=False)
    exact, tokens = torch.randn(2, 6, 8), torch.randint(50, (2, 6))
    same = quantizers.compare(head, exact, exact, tokens)
    assert same["logit_error"] == 0 and same["divergence"] == pytest.approx(0, abs=1e-6)
    even = quantizers.compare(head, exact, torch.zeros_like(exact), tokens)
    assert even["logit_error"] == 1
    assert even["perplexity"] == pytest.approx(50, rel=1e-4)
    p = head(exact).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean().item()
    assert even["divergence"] == pytest.approx(math.log(50) - entropy, rel=1e-4)


@pytest.mark.parametrize("tied", (True, False))
def test_a_quantized_folder_loads_as_the_values_it_stands_for(tied, tmp_path):
    folder = tiny.write_nvfp4(tmp_path, "qwen2", tied)
    loaded = quantizers.load(folder).state_dict()
    for name, tensor in tiny.dequantized("qwen2", tied).state_dict().items():
        assert torch.equal(loaded[name], tensor.float()), name


def test_the_random_model_has_outlier_channels(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(quantizers.make_outliers(tmp_path))
    gains = model.model.layers[0].input_layernorm.weight.float()
    assert gains.median() == 1 and (gains == 30).sum() == len(gains) // 32


@pytest.mark.slow
def test_the_program_prints_a_row_for_each_method(tmp_path, monkeypatch):
    output = tmp_path / "rows.json"
    arguments = ["--model", "outliers", "--methods", "bf16,rtn,mse,gptq", "--output", str(output)]
    small = ["--num-samples", "8", "--held-out", "4", "--sequence-length", "64"]
    monkeypatch.setattr(sys, "argv", ["quantizers", *arguments, *small])
    quantizers.main()
    rows = {row["method"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["bf16", "rtn", "mse", "gptq"]
    assert rows["bf16"]["logit_error"] == 0
    assert rows["mse"]["better_than_rtn"] == 28 and rows["mse"]["ram_gb"] > 0
    assert rows["gptq"]["logit_error"] < rows["mse"]["logit_error"]
