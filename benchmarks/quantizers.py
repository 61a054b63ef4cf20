"""What each quantizer costs a model, on text that it was not calibrated on.

    python -m benchmarks.quantizers --model FOLDER [--methods bf16,rtn,mse,gptq,awq] [--seeds 0,1]
    python -m benchmarks.quantizers --model outliers

Every method runs as llm-compressor/quantize_nvfp4.py does for a user. Measured are the relative
error of the weights (the mean over layers; awq's against its own scaled weights) and, on held-out
tokens, in float32 with the weights that an engine would see: the error of the logits relative to
the 16-bit model's, the divergence KL(16-bit || quantized) in nats a token, and the perplexity. The
text is the docstrings of Python's standard library: half of the modules to calibrate on, the other
half held out.

`--model outliers` makes a small random Llama some of whose channels are far larger than the rest,
which is what AWQ and GPTQ are for. It knows no language: its perplexity means nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks import harness
from benchmarks.checkpoint import byte_tokenizer
from benchmarks.harness import Column, Report
from qerl import checkpoint, nvfp4

PROGRAM = harness.ROOT / "llm-compressor" / "quantize_nvfp4.py"
METHODS = ("bf16", "rtn", "mse", "gptq", "awq")
CALIBRATED = ("gptq", "awq")
OUTLIERS = "outliers"
COLUMNS = [
    Column("method", "method", 6),
    Column("seed", "seed", 4, "d"),
    Column("weight_error", "weights", 8, ".4f"),
    Column("better_than_rtn", "layers better", 13, "d"),
    Column("logit_error", "logits", 7, ".4f"),
    Column("divergence", "KL", 7, ".4f"),
    Column("perplexity", "perplexity", 10, ".3f"),
    Column("seconds", "seconds", 7, ".0f"),
    Column("ram_gb", "RAM, GB", 7, ".1f"),
]


def docstrings(half: int) -> list[str]:
    """The paragraphs of the docstrings of every second standard module, from number `half` on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[half::2]
    trees = [ast.parse(file.read_bytes()) for file in files]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))).split("\n\n")


def halves(file: Path | None) -> tuple[str, str]:
    """The text to calibrate on and the text held out: the two halves of a file, or `docstrings`."""
    if file:
        text = file.read_text()
        return text[: len(text) // 2], text[len(text) // 2 :]
    calibrate_on, hold_out = docstrings(0), docstrings(1)
    seen = set(calibrate_on)
    return "\n\n".join(calibrate_on), "\n\n".join(p for p in hold_out if p not in seen)


def make_outliers(folder: Path) -> Path:
    """A random Llama of 4 layers, with one channel in 32 of each norm 30 times the others."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        initializer_range=0.05,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data[torch.randperm(len(parameter))[: len(parameter) // 32]] *= 30
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantize(model: Path, method: str, output: Path, calibration: list[str]) -> dict:
    """Run the quantizer. Its record's error by layer, the seconds and the peak RAM it took."""
    command = [sys.executable, PROGRAM, "--model", model, "--method", method, "--output", output]
    started, log = time.perf_counter(), output.with_suffix(".log")
    with log.open("w") as file:
        options = ["--skip-generation", *calibration]
        child = subprocess.Popen([*map(str, command), *options], stdout=file, stderr=file)
    _, status, usage = os.wait4(child.pid, 0)  # unlike wait(), it says what this child used
    if status:
        raise harness.ChildFailed(harness.last_word(log.read_text()))
    return {
        "errors": json.loads((output / "quantization.json").read_text())["weight_error"],
        "seconds": time.perf_counter() - started,
        "ram_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def load(folder: Path) -> torch.nn.Module:
    """The model in float32, its 4-bit layers with the bf16 values that an engine computes with."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = dict(checkpoint.tensors(folder))
    for layer in checkpoint.describe(folder).quantized:
        parts = [state.pop(f"{layer}.weight_{part}") for part in nvfp4.Quantized._fields]
        state[f"{layer}.weight"] = nvfp4.dequantize(*parts)
    absent, left_over = model.load_state_dict(state, strict=False)
    if left_over or set(absent) - {"lm_head.weight"}:
        raise ValueError(f"{folder}: absent {absent}, left over {left_over}")
    return model


@torch.no_grad()
def hidden(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The final hidden states, [B, T, hidden size]: small, where the logits would not be."""
    rows = [model.model(input_ids=row[None]).last_hidden_state for row in tokens_BT]
    return torch.cat(rows)


@torch.no_grad()
def compare(
    head: torch.nn.Module, exact_BTH: torch.Tensor, found_BTH: torch.Tensor, tokens_BT: torch.Tensor
) -> dict[str, float]:
    """Logit error, divergence and perplexity of `found` against `exact`, over all tokens."""
    missed = norm = divergence = loss = 0.0
    for exact_TH, found_TH, tokens_T in zip(exact_BTH, found_BTH, tokens_BT, strict=True):
        exact, found = head(exact_TH), head(found_TH)
        missed += (found - exact).square().sum().item()
        norm += exact.square().sum().item()
        p, q = exact.log_softmax(-1), found.log_softmax(-1)
        divergence += kl_div(q, p, log_target=True, reduction="sum").item()
        loss += cross_entropy(found[:-1], tokens_T[1:], reduction="sum").item()
    B, T = tokens_BT.shape
    return {
        "logit_error": (missed / norm) ** 0.5,
        "divergence": divergence / (B * T),
        "perplexity": torch.tensor(loss / (B * (T - 1))).exp().item(),
    }


def held_out(text: str, tokenizer, samples: int, length: int) -> torch.Tensor:
    """Tokens [B, T] from evenly spaced places of the text; ValueError where it is too short."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    if len(rows) < samples:
        raise ValueError(f"{len(tokens)} held-out tokens: {samples} x {length} are needed")
    return rows[torch.linspace(0, len(rows) - 1, samples).long()]


def measure(args: argparse.Namespace, place: Path, report: Report) -> None:
    model = make_outliers(place / OUTLIERS) if args.model == OUTLIERS else Path(args.model)
    calibrate_on, hold_out = halves(args.text)
    (place / "calibration.txt").write_text(calibrate_on)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens_BT = held_out(hold_out, tokenizer, args.held_out, args.sequence_length)
    head = load(model).lm_head
    exact_BTH, rtn = hidden(load(model), tokens_BT), {}
    for method in args.methods:
        for seed in args.seeds if method in CALIBRATED else [None]:
            row, folder = {"method": method, "seed": seed}, place / f"{method}-{seed}"
            if method == "bf16":
                row |= compare(head, exact_BTH, exact_BTH, tokens_BT)
                report.add(row)
                continue
            options = calibration_options(args, place, seed) if method in CALIBRATED else []
            made = quantize(model, method, folder, options)
            errors = made.pop("errors")
            rtn = errors if method == "rtn" else rtn
            row |= made | {"weight_error": sum(errors.values()) / len(errors)}
            if rtn:
                row["better_than_rtn"] = sum(errors[layer] < rtn[layer] for layer in rtn)
            row |= compare(head, exact_BTH, hidden(load(folder), tokens_BT), tokens_BT)
            report.add(row)


def calibration_options(args: argparse.Namespace, place: Path, seed: int) -> list[str]:
    options = {
        "calibration": args.calibration or place / "calibration.txt",
        "num-samples": args.num_samples,
        "sequence-length": args.sequence_length,
        "seed": seed,
    }
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help=f"16-bit folder, or {OUTLIERS!r}")
    parser.add_argument("--methods", type=harness.several(*METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=harness.integers, default=[0], help="of gptq and awq [0]")
    parser.add_argument("--text", type=Path, help="calibrate on one half, hold out the other")
    parser.add_argument("--calibration", help="calibrate on this instead (see quantize_nvfp4.py)")
    parser.add_argument("--num-samples", type=int, default=128, help="calibration sequences [128]")
    parser.add_argument("--held-out", type=int, default=32, help="held-out sequences [32]")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of both [512]")
    parser.add_argument("--work", type=Path, help="keep the checkpoints in this new folder")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    settings = {k: v for k, v in vars(args).items() if k not in ("work", "output")}
    report = Report(COLUMNS, args.output, {k: str(v) for k, v in settings.items()})
    with harness.workplace(args.work) as place:
        try:
            measure(args, place, report)
        except (ValueError, harness.ChildFailed) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
