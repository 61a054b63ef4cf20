"""Both loaders read what we, and others, made as one policy, and a broken folder as two."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import foreign
import quantize_nvfp4
import repair
import tiny
import verify
from qerl import checkpoint

pytestmark = pytest.mark.slow

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def let_it_read(folder: Path) -> None:
    """A tokenizer of a token a byte, without a chat template, and room for the text's bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bytes_).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))


def shard(folder: Path) -> None:
    """Lay the tensors into two files, fused layers apart."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    where = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for file in SHARDS:
        save_file(
            {n: stored[n] for n in names if where[n] == file}, folder / file, {"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Biases, an odd vocabulary and K of no multiple of 128; untied, in one file."""
    made = tiny.write_nvfp4(tmp_path / "qwen2-NVFP4A16-rtn", "qwen2", tied=False)
    let_it_read(made)
    return made


def test_both_loaders_and_the_original_are_compared_and_recorded(folder, tmp_path, capfd):
    original = tiny.write_dense(tmp_path / "qwen2", "qwen2", tied=False)
    (folder / "quantization.json").write_text('{"method": "rtn"}')
    assert verify.main([str(folder), "--original", str(original)]) == 0
    record = json.loads((folder / "quantization.json").read_text())
    found = record["verified"]
    assert record["method"] == "rtn" and found["tokens"] == len(verify.TEXT.encode())
    assert found["trainer_engine"]["mean"] < 0.05 < found["trainer_original"]["mean"]
    assert found["trainer_engine"]["mean"] <= found["trainer_engine"]["max"]
    assert set(found["perplexity"]) == {"trainer", "engine", "original"}
    said = capfd.readouterr().out  # vLLM wants a stdout that is a file
    assert f"mean gap {found['trainer_engine']['mean']:.4f}" in said
    assert f"original {found['perplexity']['original']:.3f}" in said


def test_a_folder_that_takes_no_note_does_not_lose_the_result(folder, capfd):
    (folder / "quantization.json").mkdir()
    assert verify.main([str(folder)]) == 0
    said = capfd.readouterr()
    assert "trainer and vLLM: mean gap" in said.out and "not noted" in said.err


@pytest.mark.parametrize("dialect", ["W4A4", "NVFP4", "W4A16_NVFP4"])
def test_what_others_made_is_one_policy_to_both(folder, dialect):
    before = verify._trainer(folder, list(range(200)))
    foreign.w4a4(folder) if dialect == "W4A4" else foreign.modelopt(folder, dialect)
    assert verify.main([str(folder)]) == 0
    after = verify._trainer(folder, list(range(200)))
    assert torch.allclose(after, before, atol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_broken_folder_is_two_policies_and_its_repair_is_one(tmp_path, tied):
    folder = tiny.write_nvfp4(tmp_path / "llama-NVFP4A16-rtn", "llama", tied=tied)
    let_it_read(folder)
    stored = load_file(folder / "model.safetensors")
    for layer in checkpoint.describe(folder).quantized:
        if layer.endswith(("q_proj", "up_proj")):
            stored[layer + ".weight_global_scale"] *= 2.14
            wanted = stored[layer + ".weight_scale"].float() * 2.14
            stored[layer + ".weight_scale"] = wanted.clamp(max=448).to(torch.float8_e4m3fn)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    shard(folder)
    broken = verify.verify(folder)
    assert not verify.agree(broken) and len(checkpoint.problems(folder)) == 4
    assert verify.main([str(folder)]) == 1
    assert repair.main([str(folder), "--output", str(tmp_path / "repaired")]) == 0
    mended = verify.verify(tmp_path / "repaired")
    assert verify.agree(mended) and mended["trainer_engine"]["mean"] < 0.05
    trainer = mended["perplexity"]["trainer"]
    assert trainer == pytest.approx(broken["perplexity"]["trainer"], rel=0.05)


def test_the_quantizer_repairs_and_verifies_by_flag(folder, tmp_path, capfd):
    original = tiny.write_dense(tmp_path / "qwen2", "qwen2", tied=False)
    let_it_read(original)
    made, mended = tmp_path / "made", tmp_path / "mended"
    flags = ["--model", str(original), "--output", str(made), "--skip-generation", "--verify"]
    assert quantize_nvfp4.main(flags) == 0
    record = json.loads((made / "quantization.json").read_text())
    assert record["method"] == "rtn" and "trainer_original" in record["verified"]
    assert (
        quantize_nvfp4.main(["--repair", str(foreign.w4a4(folder)), "--output", str(mended)]) == 0
    )
    assert quantize_nvfp4.main([f"--verify={mended}"]) == 0
    record = json.loads((mended / "quantization.json").read_text())
    assert set(record) == {"repaired", "verified"} and not record["repaired"]["layers"]
    with pytest.raises(SystemExit):
        quantize_nvfp4.main(["--repair", str(folder), "--method", "rtn"])
    assert "unrecognized arguments: --method rtn" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        quantize_nvfp4.main(["--repair", str(folder), "--verify"])
    assert "--verify: not allowed with argument --repair" in capfd.readouterr().err


def test_nan_is_no_agreement():
    assert not verify.agree({"trainer_engine": {"mean": math.nan}})


def test_a_users_mistakes_are_told(folder, tmp_path, capsys):
    dense = tiny.write_dense(tmp_path / "dense", "qwen2", tied=False)
    mistakes = {
        "there is no folder": [str(tmp_path / "absent")],
        "is not quantized": [str(dense)],
        "16-bit weights are needed": [str(folder), "--original", str(folder)],
    }
    for words, arguments in mistakes.items():
        assert verify.main(arguments) == 2
        assert words in capsys.readouterr().err
