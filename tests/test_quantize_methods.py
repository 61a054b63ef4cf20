"""Each method writes a sound checkpoint of what it says, from every kind of 16-bit model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.offload import load
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import quantize_nvfp4
import stream
import tiny
from qerl import checkpoint, nvfp4

MODELS = {"llama, tied": ("llama", True), "qwen2, biases": ("qwen2", False)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CALIBRATION = ["--num-samples", "8", "--sequence-length", "32"]


def write_model(folder: Path, family: str, tied: bool, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A dense tiny model with a tokenizer of one word a token and no chat template."""
    tiny.model(family, tied).to(dtype).save_pretrained(folder)
    words = {f"w{i}": i for i in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(folder)
    return folder


def run(model: Path, output: Path, *arguments: str) -> Path:
    fixed = ["--model", str(model), "--output", str(output), "--skip-generation"]
    assert quantize_nvfp4.main([*fixed, *arguments]) == 0
    assert checkpoint.problems(output) == []
    return output


def calibration_file(folder: Path) -> Path:
    """Words in an order that repeats, so that the layers' inputs are correlated."""
    file = folder / "words.txt"
    file.write_text(" ".join(f"w{i * i % 97}" for i in range(4000)))
    return file


def weight_errors(folder: Path) -> dict[str, float]:
    return json.loads((folder / "quantization.json").read_text())["weight_error"]


def dense(folder: Path) -> torch.nn.Module:
    """The model that the folder stands for, with the values of its 4-bit layers."""
    model = tiny.model("llama", True)
    state = dict(checkpoint.tensors(folder))
    for layer in checkpoint.describe(folder).quantized:
        parts = [state.pop(f"{layer}.weight_{part}") for part in nvfp4.Quantized._fields]
        state[f"{layer}.weight"] = nvfp4.dequantize(*parts)
    assert model.load_state_dict(state, strict=False).unexpected_keys == []
    return model.float()


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def source(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", *request.param)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_rtn_is_what_llmcompressors_oneshot_writes_byte_for_byte(dtype, tmp_path):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    folder = write_model(tmp_path / "model", "qwen2", False, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    with torch.compiler.set_stance("force_eager"):
        oneshot(model=model, recipe=recipe)
        model.save_pretrained(tmp_path / "theirs", save_compressed=True)
    ours = dict(checkpoint.tensors(run(folder, tmp_path / "ours")))
    theirs = dict(checkpoint.tensors(tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name


def test_mse_leaves_less_error_than_rtn_on_every_layer(source, tmp_path):
    rtn = weight_errors(run(source, tmp_path / "rtn"))
    mse = weight_errors(run(source, tmp_path / "mse", "--method", "mse"))
    assert len(rtn) == 14 and rtn.keys() == mse.keys()
    assert all(mse[layer] < 0.95 * rtn[layer] for layer in rtn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", ("rtn", "mse"))
def test_the_recorded_error_is_that_of_the_files(dtype, method, tmp_path):
    folder = write_model(tmp_path / "model", "llama", True, dtype)
    made = run(folder, tmp_path / "made", "--method", method)
    before, after = dict(checkpoint.tensors(folder)), dict(checkpoint.tensors(made))
    for layer, recorded in weight_errors(made).items():
        exact = before[f"{layer}.weight"].float()
        parts = [after[f"{layer}.weight_{part}"] for part in nvfp4.Quantized._fields]
        missed = nvfp4.dequantize(*parts, torch.float32) - exact
        assert recorded == pytest.approx((missed.norm() / exact.norm()).item(), rel=1e-4)
        assert 0.05 < recorded < 0.12
    for name in before.keys() & after.keys():
        assert torch.equal(before[name], after[name]), name


def test_a_fused_group_in_several_files_shares_its_scale(source, tmp_path):
    whole = load_file(source / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (split / file.name).write_bytes(file.read_bytes())
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(whole))}
    for file in set(files.values()):
        save_file({n: whole[n] for n in whole if files[n] == file}, split / file, {"format": "pt"})
    (split / stream.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    one = dict(checkpoint.tensors(run(source, tmp_path / "one", "--method", "mse")))
    several = dict(checkpoint.tensors(run(split, tmp_path / "several", "--method", "mse")))
    assert one.keys() == several.keys()
    assert all(torch.equal(one[n].view(torch.uint8), several[n].view(torch.uint8)) for n in one)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) == 3


@pytest.mark.parametrize("method", ("gptq", "awq"))
def test_calibrated_methods_write_sound_folders(method, source, tmp_path):
    """`run` holds the folder against qerl.checkpoint: shared scales, every layer in 4 bits."""
    text = str(calibration_file(tmp_path))
    made = run(source, tmp_path / "made", "--method", method, "--calibration", text, *CALIBRATION)
    record = json.loads((made / "quantization.json").read_text())
    assert record["method"] == method
    assert record["calibration"] == {"name": text, "samples": 8, "sequence_length": 32, "seed": 0}
    assert len(record["weight_error"]) == 14
    assert all(0.05 < error < 0.3 for error in record["weight_error"].values())
    before, after = dict(checkpoint.tensors(source)), dict(checkpoint.tensors(made))
    changed = {n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n])}
    assert all("layernorm" in n or n.endswith("v_proj.bias") for n in changed)
    assert bool(changed) == (method == "awq")


def test_gptq_is_nearer_to_the_model_on_its_calibration_data_than_mse(tmp_path):
    source = write_model(tmp_path / "model", "llama", True)
    text = str(calibration_file(tmp_path))
    many = ["--calibration", text, "--num-samples", "16", "--sequence-length", "64"]
    made = {"mse": run(source, tmp_path / "mse", "--method", "mse")}
    made["gptq"] = run(source, tmp_path / "gptq", "--method", "gptq", *many)
    exact, tokens = dense_source(source), torch.tensor([[i * i % 97 for i in range(64)]])
    errors = {m: (dense(made[m])(tokens).logits - exact(tokens).logits).norm() for m in made}
    assert errors["gptq"] < errors["mse"]


def dense_source(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("method", ("gptq", "awq"))
def test_a_float16_model_can_be_calibrated(method, tmp_path):
    source = write_model(tmp_path / "model", "llama", True, torch.float16)
    arguments = ["--method", method, "--calibration", "random", *CALIBRATION]
    made = run(source, tmp_path / "made", *arguments)
    assert all(error < 0.3 for error in weight_errors(made).values())


@pytest.mark.parametrize("method", ("gptq", "awq"))
def test_a_model_that_does_not_fit_into_RAM_waits_on_disk_and_comes_out_the_same(
    method, tmp_path, monkeypatch
):
    source = write_model(tmp_path / "model", "llama", False)
    arguments = ["--method", method, "--calibration", "random", *CALIBRATION]
    in_ram = dict(checkpoint.tensors(run(source, tmp_path / "in_ram", *arguments)))
    monkeypatch.setattr(load, "_get_cpu_memory", lambda reserved: {"cpu": 140_000})
    on_disk = dict(checkpoint.tensors(run(source, tmp_path / "on_disk", *arguments)))
    assert in_ram.keys() == on_disk.keys()
    for name, tensor in in_ram.items():
        assert torch.equal(tensor.view(torch.uint8), on_disk[name].view(torch.uint8)), name
    assert {path.name for path in tmp_path.iterdir()} == {"model", "in_ram", "on_disk"}
