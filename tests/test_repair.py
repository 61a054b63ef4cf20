"""A repaired checkpoint is sound, in the standard form, and as near to the broken one as can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import folders
import foreign
import repair
from qerl import checkpoint, nvfp4

GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"


def layer(divisor: float, seed: int = 0) -> nvfp4.Quantized:
    torch.manual_seed(seed)
    return nvfp4.quantize(torch.randn(32, 64), torch.tensor([divisor]))


def dense(stored: nvfp4.Quantized) -> torch.Tensor:
    return nvfp4.dequantize(*stored, torch.float32)


def under(member: nvfp4.Quantized, moved: repair.Moved) -> nvfp4.Quantized:
    return nvfp4.Quantized(member.packed, moved.scale, moved.divisor)


def break_folder(folder: Path, factor: float) -> None:
    """Give gate_proj of the first layer, in the first shard, a global scale of its own."""
    stored = dict(checkpoint.tensors(folder))
    scale = stored[GATE + ".weight_scale"].float() * factor
    folders.edit_shard(
        folder,
        {
            GATE + ".weight_global_scale": stored[GATE + ".weight_global_scale"] * factor,
            GATE + ".weight_scale": scale.to(torch.float8_e4m3fn),
        },
    )


def weight(folder: Path, name: str) -> torch.Tensor:
    stored = dict(checkpoint.tensors(folder, keep=lambda n: n.startswith(name)))
    return nvfp4.dequantize(*(stored[name + part] for part in repair.PARTS), torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write_folder(tmp_path / "tiny-NVFP4A16-rtn")


@pytest.mark.parametrize("exponent", range(-4, 5))
def test_a_ratio_that_is_a_power_of_two_costs_nothing(exponent):
    members = [layer(300.0), layer(300.0 * 2.0**exponent, seed=1)]
    moved = repair.together(members)
    assert moved[0].divisor == moved[1].divisor
    assert [m.missed for m in moved] == [0.0, 0.0]
    for member, choice in zip(members, moved, strict=True):
        assert torch.equal(dense(under(member, choice)), dense(member))


@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.14, 3.0])
def test_the_cost_that_is_reported_is_the_weights_own(ratio):
    members = [layer(200.0), layer(200.0 * ratio, seed=1), layer(500.0, seed=2)]
    moved = repair.together(members)
    assert len({m.divisor.item() for m in moved}) == 1
    for member, choice in zip(members, moved, strict=True):
        before, after = dense(member), dense(under(member, choice))
        cost = ((after - before).norm() / before.norm()).item()
        assert repair.error([choice]) == pytest.approx(cost, rel=1e-4, abs=1e-9)
        assert cost <= 1 / 16, "half a step of E4M3"
    assert sorted(m.missed for m in moved)[0] == 0, "one of them stays as it is"


def test_no_member_s_divisor_would_have_cost_less():
    """Full range: the smallest divisor, since under a larger one the largest scales overflow."""
    weights = [torch.randn(32, 64) * size for size in (1.0, 0.3, 0.7)]
    members = [nvfp4.quantize(weight) for weight in weights]
    moved = repair.together(members)
    assert moved[0].divisor == min(member.global_scale for member in members)
    chosen = sum(m.missed for m in moved)
    for divisor in (member.global_scale for member in members):
        assert chosen <= sum(repair._move(member, divisor).missed for member in members)


def test_small_scales_are_kept_from_going_subnormal():
    small, large = layer(0.03), layer(3.0, seed=1)  # scales of about 0.01 and 1
    assert repair.together([small, large])[0].divisor == 3.0


def test_every_scale_stays_positive():
    member = nvfp4.Quantized(
        torch.full((1, 8), 0x77, dtype=torch.uint8),
        torch.tensor([[2.0**-9]]).to(torch.float8_e4m3fn),
        torch.tensor([1000.0]),
    )
    moved = repair._move(member, torch.tensor([1.0]))
    assert moved.scale.float().item() == 2.0**-9
    assert moved.missed > 0


@pytest.mark.parametrize("factor", [0.5, 0.55])
def test_a_broken_folder_is_repaired_and_the_cost_is_told(folder, capsys, factor):
    (folder / "quantization.json").write_text('{"method": "rtn"}')
    break_folder(folder, factor)
    (problem,) = checkpoint.problems(folder)
    assert "--repair" in problem.how_to_mend
    assert repair.main([str(folder)]) == 0
    out, said = folder.with_name(f"{folder.name}-repaired"), capsys.readouterr().out
    assert checkpoint.problems(out) == []
    record = json.loads((out / "quantization.json").read_text())
    cost = record["repaired"]["layers"]
    assert record["method"] == "rtn" and cost.keys() == {GATE, UP}
    for name in (GATE, UP):
        before, after = weight(folder, name), weight(out, name)
        moved = ((after - before).norm() / before.norm()).item()
        assert cost[name] == pytest.approx(moved, rel=1e-4, abs=1e-9)
        assert f"{name}: relative error added {cost[name]:.2e}" in said
    assert (record["repaired"]["relative_error"] == 0) == (factor == 0.5)


def test_what_was_right_is_kept_where_it_was(folder):
    break_folder(folder, 0.55)
    out = folder.parent / "out"
    assert repair.main([str(folder), "--output", str(out)]) == 0
    names = {path.name for path in folder.iterdir()} | {"quantization.json"}
    assert {path.name for path in out.iterdir()} == names
    new, old = dict(checkpoint.tensors(out)), dict(checkpoint.tensors(folder))
    changed = {name for name, t in old.items() if not torch.equal(new[name].float(), t.float())}
    names = (GATE, UP)
    assert changed <= {
        n + part for n in names for part in (".weight_scale", ".weight_global_scale")
    }
    headers = checkpoint.describe(out).headers
    assert headers == checkpoint.describe(folder).headers


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_what_others_made_is_told_in_the_standard_form(folder, dialect):
    plain = dict(checkpoint.tensors(folder))
    foreign.DIALECTS[dialect](folder)
    assert repair.main([str(folder)]) == 0
    out = folder.with_name(f"{folder.name}-repaired")
    found = checkpoint.describe(out)
    assert checkpoint.problems(out) == [] and not found.quantizes_activations
    assert all(header.stored == name for name, header in found.headers.items())
    scheme = json.loads((out / "config.json").read_text())["quantization_config"]
    assert scheme["quant_method"] == "compressed-tensors"
    assert scheme["config_groups"]["group_0"]["input_activations"] is None
    assert not scheme["kv_cache_scheme"] and not (out / "hf_quant_config.json").exists()
    for name, tensor in checkpoint.tensors(out):
        assert torch.allclose(tensor.float(), plain[name].float(), rtol=2e-7), name


def test_a_mended_group_in_another_maker_s_names_is_told_in_ours(folder):
    break_folder(folder, 0.5)
    before = weight(folder, GATE)
    foreign.modelopt(folder, "NVFP4")
    assert repair.main([str(folder)]) == 0
    out = folder.with_name(f"{folder.name}-repaired")
    assert checkpoint.problems(out) == []
    assert torch.allclose(weight(out, GATE), before, rtol=1e-6)


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_what_needs_the_16_bit_model_is_beyond_repair(folder, capsys, bad):
    break_folder(folder, 0.5)
    scale = dict(checkpoint.tensors(folder))[UP + ".weight_scale"].float()
    scale[0, 0] = bad
    folders.edit_shard(folder, {UP + ".weight_scale": scale.to(torch.float8_e4m3fn)})
    assert repair.main([str(folder)]) == 1
    assert f"{UP}.weight_scale: 1 of" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == [folder]


def test_a_users_mistakes_are_told(folder, tmp_path, capsys):
    dense = folders.write_folder(tmp_path / "dense", quantized=False)
    mistakes = {
        "there is no folder": [str(tmp_path / "absent")],
        "is not quantized": [str(dense)],
        "is there already": [str(folder), "--output", str(dense)],
        "cannot be written": [str(folder), "--output", str(dense / "config.json" / "new")],
    }
    for words, arguments in mistakes.items():
        assert repair.main(arguments) == 2
        assert words in capsys.readouterr().err


def test_an_interrupted_repair_leaves_nothing(folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(repair, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repair.main([str(folder)])
    assert list(folder.parent.iterdir()) == [folder]
