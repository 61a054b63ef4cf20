"""A folder in another maker's words reads as ours; what is more than NVFP4 weights is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import foreign
from folders import edit_config, edit_shard, said, write_folder
from qerl import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny-NVFP4A16-rtn")


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_what_others_made_is_sound_and_reads_as_ours(folder, dialect):
    ours = dict(checkpoint.tensors(folder))
    quantized = checkpoint.describe(folder).quantized
    foreign.DIALECTS[dialect](folder)
    found = checkpoint.describe(folder)
    assert said(folder) == {}
    assert found.is_nvfp4 and sorted(found.quantized) == sorted(quantized)
    assert found.quantizes_activations == (dialect != "ModelOpt W4A16")
    theirs = dict(checkpoint.tensors(folder))
    assert theirs.keys() == ours.keys() == found.headers.keys()
    for name, tensor in ours.items():
        assert theirs[name].shape == tensor.shape and theirs[name].dtype == tensor.dtype
        assert torch.allclose(theirs[name].float(), tensor.float(), rtol=2e-7), name


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_4_bit_activations_are_left_out_with_a_line(folder, dialect, capsys):
    foreign.DIALECTS[dialect](folder)
    checkpoint.require(folder, nvfp4=True)
    warned = capsys.readouterr().err
    assert ("weight-only" in warned) == (dialect != "ModelOpt W4A16")
    assert warned.count("\n") == (dialect != "ModelOpt W4A16")


@pytest.mark.parametrize("pattern", ["*layers.0*down_proj*", "model.layers.0.mlp.down_proj"])
def test_layers_that_modelopt_leaves_out_are_sound(folder, pattern):
    down = "model.layers.0.mlp.down_proj"
    stored = [f"{down}.weight_{part}" for part in ("packed", "scale", "global_scale")]
    dense = torch.randn(64, 96, dtype=torch.bfloat16)
    edit_shard(folder, dict.fromkeys(stored) | {down + ".weight": dense})
    foreign.modelopt(folder, "NVFP4")
    assert said(folder) == {down: "is dense, and the config says that it is in 4 bits"}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=config | {"ignore": ["lm_head", pattern]})
    assert said(folder) == {}


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4_AWQ", "MIXED_PRECISION"])
def test_what_is_more_than_nvfp4_weights_is_refused_by_name(folder, algorithm):
    foreign.modelopt(folder, algorithm)
    expected = f"format is ModelOpt's {algorithm}, not nvfp4-pack-quantized"
    assert said(folder) == {"config.json": expected}
    with pytest.raises(ValueError, match=algorithm):
        checkpoint.require(folder, nvfp4=True)


def test_modelopts_group_size_is_read_wherever_it_stands(folder):
    foreign.modelopt(folder, "NVFP4")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    del config["group_size"]
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}
    edit_config(folder, quantization_config=config | {"config_groups": {"group_0": group}})
    assert said(folder) == {"config.json": "group_0: group_size is 32, expected 16"}
