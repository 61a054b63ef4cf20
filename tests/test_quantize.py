"""The quantizer writes a sound folder through llm-compressor, or nothing, and says why."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import calibration
import quantize_nvfp4
import smollm2
from qerl import checkpoint, nvfp4

SCRIPTS = Path(__file__).parent.parent / "llm-compressor"


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
    (folder / "LICENSE").write_text("anyone may use it")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
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


def test_the_record_says_how_it_was_made_and_the_licence_travels_along(quantized, tiny):
    record = json.loads((quantized / "quantization.json").read_text())
    assert record["method"] == "rtn" and record["model"] == str(tiny)
    assert record["revision"] is None and record["calibration"] is None
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert set(record["weight_error"]) == set(checkpoint.describe(quantized).quantized)
    assert (quantized / "LICENSE").read_text() == "anyone may use it"
    assert "license: mit" in (quantized / "README.original.md").read_text()


def test_the_revision_of_a_hub_download_is_its_commit(tiny, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    shutil.copytree(tiny, snapshot)
    arguments = ["--model", str(snapshot), "--output", str(tmp_path / "out")]
    plan = quantize_nvfp4.find(quantize_nvfp4.parser().parse_args(arguments))
    assert plan.revision == "0123abc"


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(quantize_nvfp4, "quantize")
    output = tmp_path / "out"
    arguments = ["--model", str(tiny), "--output", str(output), "--dry-run"]
    assert quantize_nvfp4.main([*arguments, "--method", "gptq", "--calibration", "random"]) == 0
    said = capsys.readouterr().out
    for words in (str(tiny), str(output), "gptq", "random", "256", "14 in 4 bits"):
        assert words in said
    assert list(tmp_path.iterdir()) == []


def test_the_worst_layers_are_shown_first(capsys):
    quantize_nvfp4.print_errors({f"layer{i}": i / 100 for i in range(10)})
    lines = capsys.readouterr().out.splitlines()
    assert "mean of 10 layers 0.0450" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == [f"layer{i}" for i in (9, 8, 7, 6, 5)]


def test_the_quantized_model_answers(quantized):
    assert isinstance(quantize_nvfp4.sample(quantized), str)


def test_nothing_is_left_beside_the_folder(quantized):
    assert [path.name for path in quantized.parent.iterdir()] == [quantized.name]


def test_an_unsound_result_is_not_kept(tiny, tmp_path, monkeypatch, capsys):
    def write_half(plan: quantize_nvfp4.Plan, tokens_ST: None, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes((plan.source / "config.json").read_bytes())

    monkeypatch.setattr(quantize_nvfp4, "quantize", write_half)
    assert quantize_nvfp4.main(["--model", str(tiny), "--output", str(tmp_path / "out")]) == 1
    assert "model.safetensors: is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tiny, tmp_path, monkeypatch):
    def interrupted(plan: quantize_nvfp4.Plan, tokens_ST: None, folder: Path) -> None:
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
    good = ["--model", str(tiny), "--output", new]
    mistakes = {
        "gptq needs --calibration": [*good, "--method", "gptq"],
        "mse takes no --calibration": [*good, "--method", "mse", "--calibration", "random"],
        "'nonsense' is not known": [*good, "--method", "awq", "--calibration", "nonsense"],
        "absent.txt does not exist": [*good, "--method", "awq", "--calibration", "absent.txt"],
        "samples is 0": [*good, *"--method awq --calibration random --num-samples 0".split()],
        "there is no folder": ["--model", str(tmp_path / "absent"), "--output", new],
        "quantized already": ["--model", str(quantized), "--output", new],
        "says rtn and --method is mse": [
            *("--model", str(tiny), "--method", "mse", "--output", f"{new}-NVFP4A16-rtn")
        ],
        "is there already": ["--model", str(tiny), "--output", str(quantized)],
        "cannot be written": ["--model", str(tiny), "--output", str(tiny / "LICENSE" / "new")],
    }
    for words, arguments in mistakes.items():
        assert quantize_nvfp4.main(arguments) == 2
        assert words in capsys.readouterr().err


def test_a_layer_whose_width_has_no_blocks_is_told_before_any_work(tmp_path, capsys):
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=10,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "odd")
    arguments = ["--model", str(tmp_path / "odd"), "--output", str(tmp_path / "out")]
    assert quantize_nvfp4.main(arguments) == 2
    assert "mlp.down_proj has 100 inputs" in capsys.readouterr().err


@pytest.mark.parametrize("method", quantize_nvfp4.METHODS)
def test_the_output_is_named_by_model_and_method(method):
    for model in ("Qwen/Qwen2.5-3B-Instruct", "/models/Qwen2.5-3B-Instruct/"):
        name = quantize_nvfp4.default_output(model, method)
        assert name == Path(f"Qwen2.5-3B-Instruct-NVFP4A16-{method}")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def sequences(file: Path, lines: list, tokenizer, samples: int = 1, length: int = 4, seed: int = 0):
    file.write_text("\n".join(json.dumps(line) for line in lines))
    wanted = calibration.Calibration(str(file), samples, length, seed)
    calibration.check(wanted)
    return calibration.sequences(wanted, tokenizer).tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"text": "w2 w3 w4"},
        {"messages": [{"role": "user", "content": "w2 w3 w4"}]},
        {"prompt": "w2 w3", "completion": " w4"},
        {"prompt": [{"role": "user", "content": "w2 w3 "}], "answer": "w4"},
        {  # of a run's samples.jsonl
            "prompt": [{"role": "user", "content": "w2 w3 "}],
            "completion": [{"role": "assistant", "content": "w4"}],
        },
    ],
    ids=lambda row: " ".join(row),
)
def test_each_kind_of_row_becomes_its_text_and_an_end(row, tmp_path, tokenizer):
    assert sequences(tmp_path / "a.jsonl", [row], tokenizer) == [[2, 3, 4, 1]]


@pytest.mark.parametrize("row", [{"txt": "w2"}, {"prompt": None, "answer": "w2"}])
def test_a_row_of_another_kind_is_told_by_its_line(row, tmp_path, tokenizer):
    with pytest.raises(ValueError, match="a.jsonl, line 1: expected an object with text"):
        sequences(tmp_path / "a.jsonl", [row], tokenizer)


def test_a_line_ends_at_its_line_feed_alone_and_blank_ones_are_passed_over(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "w2\u2028"}\n\n{"text": "w2\u2028"}\n\n')
    wanted = calibration.Calibration(str(file), samples=2, sequence_length=2, seed=0)
    assert calibration.sequences(wanted, tokenizer).tolist() == [[2, 1], [2, 1]]


def test_documents_are_drawn_by_the_seed_and_cut_to_length(tmp_path, tokenizer):
    rows = [{"text": f"w{i} w{i} w{i}"} for i in range(2, 10)]
    drawn = [sequences(tmp_path / "a.jsonl", rows, tokenizer, 4, 6, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(sequence) for sequence in drawn[0]] == [6] * 4


def test_too_little_data_is_told_with_what_there_is(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="holds 12 tokens, .* give --num-samples 3"):
        sequences(tmp_path / "a.jsonl", [{"text": "w2 w3 w4"}] * 3, tokenizer, 8)


def test_a_text_file_and_a_data_set_can_be_calibrated_on(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("w2 w3 " * 100)
    for name in (str(tmp_path / "a.txt"), "arithmetic"):
        wanted = calibration.Calibration(name, 3, 8, 0)
        assert calibration.sequences(wanted, tokenizer).shape == (3, 8)


def test_random_tokens_come_with_a_warning(tokenizer, capsys):
    wanted = calibration.Calibration("random", 50, 20, 0)
    tokens = calibration.sequences(wanted, tokenizer)
    assert tokens.shape == (50, 20) and set(tokens.flatten().tolist()) == set(range(10))
    assert "a last resort" in capsys.readouterr().err


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
