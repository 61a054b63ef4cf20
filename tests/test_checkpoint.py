"""Every way in which a checkpoint folder can be broken is named, and a sound one passes.

The folders are synthetic (folders.py).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from folders import (
    LINEARS,
    SCHEME,
    SHARDS,
    WEIGHTS,
    Q,
    edit_config,
    edit_shard,
    edit_weights_scheme,
    said,
    write_folder,
)
from qerl import check, checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny-NVFP4A16-rtn")


def test_a_sound_folder_has_no_problems(folder):
    assert checkpoint.problems(folder) == []


def test_a_sound_16_bit_folder_has_no_problems(tmp_path):
    assert checkpoint.problems(write_folder(tmp_path / "dense", quantized=False)) == []


def test_describe_reads_the_kind_and_the_shapes(folder):
    found = checkpoint.describe(folder)
    assert found.is_nvfp4 and found.tie_word_embeddings and not found.quantizes_activations
    assert sorted(found.quantized) == sorted(
        f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS
    )
    down = found.headers["model.layers.1.mlp.down_proj.weight_packed"]
    assert (down.file, down.dtype, down.shape) == (SHARDS[1], "U8", (64, 48))


def test_a_missing_shard_is_named(folder):
    (folder / SHARDS[1]).unlink()
    assert said(folder) == {SHARDS[1]: "is missing"}


def test_a_file_cut_short_is_named(folder):
    whole = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(whole[:-100])
    assert list(said(folder)) == [SHARDS[0]]
    assert "cut short" in said(folder)[SHARDS[0]]


def test_an_index_that_names_an_absent_tensor_is_named(folder):
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] | {"model.ghost": SHARDS[0]}
    index.write_text(json.dumps({"weight_map": where}))
    assert list(said(folder)) == ["model.ghost"]


@pytest.mark.parametrize(
    "text", ["[]", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_of_another_form_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in said(folder)


@pytest.mark.parametrize("text", [None, "{"])
def test_a_config_that_is_missing_or_cut_short_is_named(folder, text):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert list(said(folder)) == ["config.json"]


def test_a_config_that_cannot_be_read_is_named(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()  # not readable to root either
    assert list(said(folder)) == ["config.json"]


def test_a_missing_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    assert list(said(folder)) == ["tokenizer"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_cut_short_is_named(folder, name):
    (folder / name).write_text('{"version": "1.')
    assert list(said(folder)) == [name]


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0])
def test_a_block_scale_that_is_not_positive_is_named(folder, bad):
    scale = load_file(folder / SHARDS[0])[Q + ".weight_scale"].float()
    scale[3, 2] = bad
    edit_shard(folder, {Q + ".weight_scale": scale.to(torch.float8_e4m3fn)})
    assert said(folder) == {
        Q + ".weight_scale": "1 of 256 scales are not finite and positive",
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -600.0])
def test_a_global_scale_that_is_not_positive_is_named(folder, bad):
    edit_shard(folder, {Q + ".weight_global_scale": torch.tensor([bad])})
    assert list(said(folder)) == [Q + ".weight_global_scale"]


@pytest.mark.parametrize(
    "layer", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"]
)
def test_fused_layers_with_their_own_global_scales_are_named(folder, layer):
    name = f"model.layers.0.{layer}"
    edit_shard(folder, {name + ".weight_global_scale": torch.tensor([500.0])})
    (block,) = said(folder)
    assert block == name.rpartition(".")[0]
    assert f"{layer.rpartition('.')[2]} 500" in said(folder)[block]


def test_layers_that_are_not_fused_may_have_their_own_global_scales(folder):
    apart = ("self_attn.o_proj", "mlp.down_proj")
    edit_shard(
        folder,
        {f"model.layers.0.{n}.weight_global_scale": torch.tensor([500.0]) for n in apart},
    )
    assert said(folder) == {}


@pytest.mark.parametrize(
    "change",
    [{"group_size": 32}, {"num_bits": 8}, {"type": "int"}, {"strategy": "group"}],
)
def test_another_scheme_is_named(folder, change):
    edit_weights_scheme(folder, **change)
    ((key, value),) = change.items()
    assert said(folder) == {
        "config.json": f"group_0: {key} is {value!r}, expected {WEIGHTS[key]!r}"
    }


def test_another_format_is_named(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    assert said(folder) == {"config.json": "format is gptq, not nvfp4-pack-quantized"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"symmetric": False}, "symmetric is False, expected True"),
        ({"group_size": None}, "group_size is None, expected 16"),
    ],
)
def test_a_scheme_that_an_engine_reads_otherwise_is_named(folder, change, words):
    edit_weights_scheme(folder, **change)
    assert said(folder) == {"config.json": f"group_0: {words}"}


def test_a_rotation_that_only_the_engine_would_apply_is_named(folder):
    rotation = {"config_groups": {"R1": {"type": "hadamard"}}}
    edit_config(folder, quantization_config=SCHEME | {"transform_config": rotation})
    assert "rotates" in said(folder)["config.json"]


@pytest.mark.parametrize(
    "scheme",
    ["nvfp4", ["nvfp4"], {"config_groups": [1]}, {"config_groups": {"group_0": ["Linear"]}}]
    + [{"config_groups": {"group_0": {"weights": 4}}}, {"quantization": "NVFP4"}],
)
def test_a_quantization_config_of_another_structure_is_named(folder, scheme):
    edit_config(folder, quantization_config=scheme)
    assert "where an object belongs" in said(folder)["config.json"]
    assert check.main([str(folder)]) == 1


@pytest.mark.parametrize(
    ("ignored", "dense"), [("q_proj", "q_proj"), ("[kv]_proj", "k_proj, v_proj"), ("up_proj", "up")]
)
def test_a_fused_layer_that_is_dense_in_part_is_named(folder, ignored, dense):
    ignore = ["lm_head", rf"re:.*layers\.0.*{ignored}"]
    edit_config(folder, quantization_config=SCHEME | {"ignore": ignore})
    stored = load_file(folder / SHARDS[0])
    layers = [
        n.removesuffix(".weight_packed") for n in stored if re.search(f"{ignored}.*packed", n)
    ]
    changes = {f"{n}.weight_{p}": None for n in layers for p in ("packed", "scale", "global_scale")}
    for layer in layers:
        shape = LINEARS[layer.removeprefix("model.layers.0.")]
        changes[layer + ".weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    edit_shard(folder, changes)
    (what,) = said(folder).values()
    assert what.startswith(dense) and "the rest in 4 bits" in what


@pytest.mark.parametrize("key", ["format", "kv_cache_scheme", "group format", "weights' extras"])
def test_configs_of_other_versions_are_read(folder, key):
    scheme = json.loads(json.dumps(SCHEME))
    group = scheme["config_groups"]["group_0"]
    match key:
        case "format":
            scheme["format"], group["format"] = "mixed-precision", "nvfp4-pack-quantized"
        case "kv_cache_scheme":
            scheme["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
            edit_shard(folder, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
        case "group format":
            del scheme["format"]
            group["format"] = "nvfp4-pack-quantized"
        case "weights' extras":
            group["weights"] = WEIGHTS | {
                "observer": "minmax",
                "actorder": None,
                "scale_dtype": None,
            }
            scheme |= {"version": "0.12.2", "sparsity_config": {}, "transform_config": {}}
    edit_config(folder, quantization_config=scheme)
    assert said(folder) == {}


def test_a_global_scale_without_a_dimension_is_read(folder):
    edit_shard(folder, {Q + ".weight_global_scale": torch.tensor(600.0)})
    assert said(folder) == {}
    assert dict(checkpoint.tensors(folder))[Q + ".weight_global_scale"].shape == (1,)


def test_a_dense_layer_that_should_be_quantized_is_named_once(folder):
    stored = dict.fromkeys((Q + ".weight_packed", Q + ".weight_scale"))
    stored[Q + ".weight_global_scale"] = None
    edit_shard(folder, stored | {Q + ".weight": torch.randn(64, 64)})
    assert said(folder) == {Q: "is dense, and the config says that it is in 4 bits"}


def test_a_quantized_layer_on_the_ignore_list_is_named_once(folder):
    ignore = ["lm_head", r"re:.*layers\.0.*q_proj"]
    edit_config(folder, quantization_config=SCHEME | {"ignore": ignore})
    assert said(folder) == {Q: "is in 4 bits, and the config says that it is dense"}


def test_a_dense_layer_on_the_ignore_list_is_sound(folder):
    edit_config(
        folder, quantization_config=SCHEME | {"ignore": ["lm_head", "re:.*layers.0.*down_proj"]}
    )
    down = "model.layers.0.mlp.down_proj"
    stored = [f"{down}.weight_{part}" for part in ("packed", "scale", "global_scale")]
    dense = torch.randn(64, 96, dtype=torch.bfloat16)
    edit_shard(folder, dict.fromkeys(stored) | {down + ".weight": dense})
    assert said(folder) == {}


@pytest.mark.parametrize(
    ("suffix", "wrong", "words"),
    [
        (".weight_packed", torch.zeros(64, 64, dtype=torch.uint8), "[64, 64]; config.json makes"),
        (".weight_packed", torch.zeros(64, 32), "dtype F32, expected U8"),
        (".weight_scale", torch.ones(64, 2).to(torch.float8_e4m3fn), "makes it [64, 4]"),
        (".weight_scale", torch.ones(64, 4, dtype=torch.bfloat16), "dtype BF16, expected F8_E4M3"),
        (".weight_global_scale", torch.full((4,), 600.0), "makes it [1]"),
        (".weight_global_scale", torch.full((1,), 600.0).half(), "dtype F16, expected F32"),
        (".weight_scale", None, "is missing"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(folder, suffix, wrong, words):
    edit_shard(folder, {Q + suffix: wrong})
    assert list(said(folder)) == [Q + suffix]
    assert words in said(folder)[Q + suffix]


def test_a_config_of_another_vocabulary_is_named(folder):
    edit_config(folder, vocab_size=51)
    assert said(folder) == {
        "model.embed_tokens.weight": "has shape [50, 64]; config.json makes it [51, 64]"
    }


def test_a_config_of_another_intermediate_size_is_named(folder):
    edit_config(folder, intermediate_size=128)
    found = said(folder)
    assert {name.split(".")[4] for name in found} == {"gate_proj", "up_proj", "down_proj"}


def test_a_config_of_fewer_layers_is_named(folder):
    edit_config(folder, num_hidden_layers=1)
    found = said(folder)
    assert len(found) == 2 + 3 * len(LINEARS)
    assert all(name.startswith("model.layers.1.") for name in found)


def test_a_width_that_is_no_multiple_of_16_is_named(folder):
    edit_config(folder, intermediate_size=100)
    assert said(folder)["model.layers.0.mlp.down_proj"] == "100 inputs, not a multiple of 16"


def test_a_missing_head_is_named_unless_it_is_tied(folder):
    edit_config(folder, tie_word_embeddings=False)
    assert said(folder) == {"lm_head.weight": "is missing"}


def test_a_config_that_makes_no_model_is_named(folder):
    edit_config(folder, model_type="no-such-model")
    assert list(said(folder)) == ["config.json"]


def test_require_gives_the_way_out(folder, tmp_path):
    dense = write_folder(tmp_path / "dense", quantized=False)
    assert checkpoint.require(folder, nvfp4=True).is_nvfp4
    assert not checkpoint.require(dense, nvfp4=False).is_nvfp4
    checkpoint.require(folder), checkpoint.require(dense)
    with pytest.raises(ValueError, match=f"quantize_nvfp4.py --model {dense}"):
        checkpoint.require(dense, nvfp4=True)
    with pytest.raises(ValueError, match="16-bit model that it was made from"):
        checkpoint.require(folder, nvfp4=False)
    with pytest.raises(ValueError, match="there is no folder"):
        checkpoint.require(tmp_path / "absent")


def test_resolve_takes_folders_and_refuses_what_cannot_be_a_hub_id(folder, tmp_path):
    assert checkpoint.resolve(folder) == folder
    for name in (tmp_path / "absent", "./absent", "a/b/c", "~/absent"):
        with pytest.raises(ValueError, match="there is no folder"):
            checkpoint.resolve(name)


def test_resolve_says_why_the_hub_gave_nothing(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="the hub did not give it"):
        checkpoint.resolve("qerl-tests/absent")


def test_tensors_come_as_stored_from_every_shard(folder):
    stored = load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])
    read = dict(checkpoint.tensors(folder))
    assert read.keys() == stored.keys()
    for name, tensor in stored.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)), name
    norms = dict(checkpoint.tensors(folder, keep=lambda name: "norm" in name))
    assert len(norms) == 5


def test_check_ends_with_the_exit_status_of_its_verdict(folder, tmp_path, capsys):
    assert check.main([str(folder)]) == 0
    assert "sound (NVFP4, weight-only; 14 layers in 4 bits" in capsys.readouterr().out
    (folder / "tokenizer.json").unlink()
    assert check.main([str(folder)]) == 1
    assert "to mend it: copy the tokenizer files" in capsys.readouterr().out
    assert check.main([str(tmp_path / "absent")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_folder_that_another_program_made_meanwhile_stays(folder, tmp_path):
    output = tmp_path / "out" / "tiny-NVFP4A16-rtn"

    def make(whole):
        shutil.copytree(folder, whole)
        shutil.copytree(folder, output)
        (output / "theirs").touch()

    [fault] = checkpoint.write(output, make)
    assert "made by another program meanwhile" in str(fault)
    assert (output / "theirs").exists() and len(list(output.parent.iterdir())) == 1
