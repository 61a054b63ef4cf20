"""The quantizer writes a sound folder through llm-compressor, or nothing, and says why."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qerl import checkpoint, nvfp4

SCRIPTS = Path(__file__).parent.parent / "llm-compressor"


def load(name: str):
    """A program of llm-compressor/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quantize_nvfp4 = load("quantize_nvfp4")
smollm2 = load("smollm2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Llama of 2 layers with tied embeddings and a tokenizer of 10 words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=10,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    return folder


@pytest.fixture(scope="module")
def quantized(tiny: Path) -> Path:
    output = tiny.parent / "out" / "tiny-NVFP4A16-rtn"
    arguments = ["--model", str(tiny), "--output", str(output), "--skip-generation"]
    assert quantize_nvfp4.main(arguments) == 0
    return output


def test_every_linear_but_the_head_is_quantized_and_the_folder_is_sound(quantized):
    found = checkpoint.require(quantized, nvfp4=True)
    assert len(found.quantized) == 2 * 7
    assert "lm_head" not in found.quantized and found.tie_word_embeddings
    assert checkpoint.problems(quantized) == []


def test_the_weights_are_the_nearest_values_under_the_shared_scale(quantized, tiny):
    stored, dense = dict(checkpoint.tensors(quantized)), dict(checkpoint.tensors(tiny))
    for layer in checkpoint.describe(quantized).quantized:
        scale = stored[layer + ".weight_global_scale"]
        again = nvfp4.quantize(dense[layer + ".weight"], scale)
        assert torch.equal(again.packed, stored[layer + ".weight_packed"]), layer
        assert torch.equal(again.scale.float(), stored[layer + ".weight_scale"].float()), layer


def test_what_is_not_quantized_is_unchanged(quantized, tiny):
    stored, dense = dict(checkpoint.tensors(quantized)), dict(checkpoint.tensors(tiny))
    unquantized = [name for name in dense if "norm" in name or "embed" in name]
    assert len(unquantized) == 6
    for name in unquantized:
        assert torch.equal(stored[name], dense[name]), name


def test_tokenizer_template_and_generation_settings_are_kept(quantized, tiny):
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (quantized / file).read_bytes() == (tiny / file).read_bytes()
    template = AutoTokenizer.from_pretrained(tiny).chat_template
    assert AutoTokenizer.from_pretrained(quantized).chat_template == template


def test_the_quantized_model_answers(quantized):
    assert isinstance(quantize_nvfp4.sample(quantized), str)


def test_nothing_is_left_beside_the_folder(quantized):
    assert [path.name for path in quantized.parent.iterdir()] == [quantized.name]


def test_an_unsound_result_is_not_kept(tiny, tmp_path, monkeypatch, capsys):
    def write_half(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())

    monkeypatch.setattr(quantize_nvfp4, "quantize", write_half)
    assert quantize_nvfp4.main(["--model", str(tiny), "--output", str(tmp_path / "out")]) == 1
    assert "model.safetensors: is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tiny, tmp_path, monkeypatch):
    def interrupted(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_nvfp4, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_nvfp4.main(["--model", str(tiny), "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_a_users_mistakes_are_told_before_any_weight_is_read(
    tiny, quantized, tmp_path, monkeypatch, capsys
):
    monkeypatch.delattr(quantize_nvfp4, "quantize")
    new = str(tmp_path / "new")
    mistakes = {
        "there is no folder": ["--model", str(tmp_path / "absent"), "--output", new],
        "quantized already": ["--model", str(quantized), "--output", new],
        "is there already": ["--model", str(tiny), "--output", str(quantized)],
    }
    for words, arguments in mistakes.items():
        assert quantize_nvfp4.main(arguments) == 2
        assert words in capsys.readouterr().err


def test_the_output_is_named_by_model_and_method():
    for model in ("Qwen/Qwen2.5-3B-Instruct", "/models/Qwen2.5-3B-Instruct/"):
        name = quantize_nvfp4.default_output(model)
        assert name == Path("Qwen2.5-3B-Instruct-NVFP4A16-rtn")


@pytest.mark.parametrize("program", ["quantize_nvfp4", "smollm2"])
def test_the_help_needs_no_heavy_library(program):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{program}.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPTS / program)!r} + '.py', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'llmcompressor'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_every_model_has_a_script_that_names_it():
    scripts = sorted(SCRIPTS.glob("quantize_*.sh"))
    assert len(scripts) == 5
    for script in scripts:
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines
        assert lines[-1].endswith('--model "$MODEL_PATH" "$@"')


@pytest.mark.slow
def test_smollm2_is_expanded_once_and_ends_its_turns_with_im_end(tmp_path, capsys):
    folder = tmp_path / "smollm2"
    assert smollm2.main([str(folder)]) == 0
    assert checkpoint.problems(folder) == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == config["eos_token_id"]
    assert "Apache-2.0" in (folder / "README.md").read_text()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.main([str(folder)]) == 0
    assert "already there" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
