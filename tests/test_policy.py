"""The frozen 4-bit policy equals its dense twin, keeps nothing dense and lets an adapter learn."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

import tiny
from qerl import adapter, linear, policy

MODELS = list(itertools.product(tiny.FAMILIES, (True, False)))  # family, tied embeddings
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
SMALL |= {"word_embed_proj_dim": 8, "intermediate_size": 8}
RANK = 8
TOKENS = [[5, 9, 300, 7, 7, 12, 1], [44, 3, 8]]
IDS = torch.tensor([TOKENS[0], TOKENS[0][::-1]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple, Path]:
    """Checkpoint folders by (family, tied, precision)."""
    base, made = tmp_path_factory.mktemp("tiny"), {}
    for family, tied in MODELS:
        name = f"{family}-{'tied' if tied else 'untied'}"
        made[family, tied, "bf16"] = tiny.write_dense(base / name, family, tied)
        made[family, tied, "nvfp4"] = tiny.write_nvfp4(base / f"{name}-NVFP4A16-rtn", family, tied)
    return made


def logits(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


# --- the model


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_the_logits_are_those_of_the_dense_model_with_the_stored_values(folders, family, tied):
    ours = logits(policy.load(folders[family, tied, "nvfp4"]))
    theirs = logits(tiny.dequantized(family, tied))
    assert ours.shape == (*IDS.shape, tiny.VOCABULARY)
    torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=0.02)
    quantized_away = logits(tiny.model(family, tied))
    assert (ours - quantized_away).abs().mean() > 10 * (ours - theirs).abs().mean()


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_a_bf16_folder_is_loaded_as_it_is(folders, family, tied):
    assert torch.equal(
        logits(policy.load(folders[family, tied, "bf16"])), logits(tiny.model(family, tied))
    )


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_every_stored_tensor_is_in_the_model_in_its_own_type(folders, family, tied):
    folder = folders[family, tied, "nvfp4"]
    model = policy.load(folder)
    state, stored = model.state_dict(), load_file(folder / "model.safetensors")
    assert set(state) - set(stored) == ({"lm_head.weight"} if tied else set())
    for name, tensor in stored.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not any(p.requires_grad for p in model.parameters())
    packed = [m for m in model.modules() if isinstance(m, linear.NVFP4Linear)]
    assert len(packed) == 14
    assert sum(layer.bias is not None for layer in packed) == (6 if family == "qwen2" else 0)


def test_a_folder_that_lacks_a_tensor_is_refused_by_its_name(folders, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(folders["qwen2", False, "nvfp4"], folder)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.self_attn.k_proj.bias"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing .*layers.1.self_attn.k_proj.bias"):
        policy.load(folder)


def test_score_is_the_log_probability_of_each_next_token_whatever_the_padding(folders):
    model = policy.load(folders["qwen2", False, "nvfp4"])
    together = policy.score(model, TOKENS)
    assert [len(row) for row in together] == [len(ids) - 1 for ids in TOKENS]
    for row, ids in zip(together, TOKENS, strict=True):
        logps = logits(model, torch.tensor([ids]))[0, :-1].float().log_softmax(-1)
        expected = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_liger_takes_the_layers_of_the_model_it_is_given_and_of_no_other(family):
    """What it computes needs a GPU: tests/gpu/test_fused.py."""
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP

    fused, before = tiny.model(family, False), logits(tiny.model(family, False))
    policy.fuse_layers(fused)
    for layer in fused.model.layers:
        assert layer.mlp.forward.__func__ is LigerSwiGLUMLP.forward
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            assert norm.forward.__func__ is LigerRMSNorm.forward
    assert fused.model.norm.forward.__func__ is LigerRMSNorm.forward
    assert torch.equal(logits(tiny.model(family, False)), before)


@pytest.mark.parametrize("config", [OPTConfig(**SMALL), LlamaConfig(**SMALL, hidden_act="relu")])
def test_a_model_that_liger_would_not_compute_rightly_stays_and_is_named(config):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match=f"Liger is not used for {type(model).__name__}"):
        policy.fuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())


# --- the adapter


def adapted(folder: Path, checkpointing: bool = False, seed: int = 3):
    model = policy.adapt(policy.load(folder), RANK, 2.0 * RANK, seed)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def fill_lora_B(model, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def gradients(model) -> dict[str, torch.Tensor]:
    """The gradient of each trainable tensor after one backward pass of a loss on IDS."""
    with torch.autocast("cpu", torch.bfloat16):
        logps = model(input_ids=IDS).logits.float().log_softmax(-1)
    (logps[:, :-1].gather(2, IDS[:, 1:, None]).mean()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


EVERY = list(itertools.product(tiny.FAMILIES, (True, False), ("nvfp4", "bf16"), (True, False)))


@pytest.mark.parametrize(("family", "tied", "precision", "checkpointing"), EVERY)
def test_a_gradient_reaches_every_factor_and_nothing_else(
    folders, family, tied, precision, checkpointing
):
    model = adapted(folders[family, tied, precision], checkpointing)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = gradients(model)
    assert len(first) == 2 * 2 * len(policy.TARGETS)  # A and B, two layers
    for name, gradient in first.items():  # B = 0: nothing reaches A yet
        assert gradient.abs().max() > 0 if ".lora_B." in name else not gradient.any(), name
    fill_lora_B(model)
    model.zero_grad()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert parameter.grad is None, name
            assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_gradient_checkpointing_does_not_change_a_gradient(folders, precision):
    both = []
    for checkpointing in (False, True):
        model = adapted(folders["qwen2", True, precision], checkpointing)
        fill_lora_B(model)
        both.append(gradients(model))
    for name, gradient in both[0].items():
        torch.testing.assert_close(gradient, both[1][name], msg=name)


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_gradients_over_4_bits_are_those_over_the_dense_values(folders, family, tied):
    packed = adapted(folders[family, tied, "nvfp4"])
    dense = policy.adapt(tiny.dequantized(family, tied), RANK, 2.0 * RANK, seed=3).train()
    fill_lora_B(packed), fill_lora_B(dense)
    ours, theirs = gradients(packed), gradients(dense)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < 0.03 * gradient.norm(), name


def saved_for_backward(model) -> set[int]:
    """The number of elements of each tensor that autograd keeps in one forward pass."""
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.numel()) or t, lambda t: t):
        gradients(model)
    return kept


def test_autograd_keeps_no_dense_weight(folders):
    weights = {64 * 64, 32 * 64, 96 * 64}  # q and o; k and v; gate, up and down
    stock = LoraConfig(r=RANK, target_modules=list(policy.TARGETS))
    as_peft_does = get_peft_model(policy.load(folders["llama", False, "bf16"]), stock)
    assert weights <= saved_for_backward(as_peft_does)
    assert not weights & saved_for_backward(adapted(folders["llama", False, "nvfp4"]))


def test_a_fresh_adapter_changes_nothing_and_depends_on_its_seed_alone(folders):
    folder = folders["llama", True, "nvfp4"]
    state = torch.get_rng_state()
    model = adapted(folder).eval()
    assert torch.equal(state, torch.get_rng_state())
    assert policy.score(model, TOKENS) == policy.score(policy.load(folder), TOKENS)
    first = adapter.of_model(model)
    torch.randn(5)
    again = adapter.of_model(adapted(folder)).tensors
    other = adapter.of_model(adapted(folder, seed=4)).tensors
    bf16 = adapter.of_model(adapted(folders["llama", True, "bf16"])).tensors
    for name, tensor in first.tensors.items():
        assert tensor.dtype == bf16[name].dtype == torch.float32
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, other[name]) == (".lora_B." in name)
        # Over a bf16 base PEFT rounds what it draws to bf16: the control starts that close.
        assert torch.equal(tensor.bfloat16(), bf16[name].bfloat16())


def test_the_adapter_of_a_model_is_that_of_its_saved_folder(folders, tmp_path):
    model = adapted(folders["qwen2", True, "nvfp4"])
    fill_lora_B(model)
    model.save_pretrained(tmp_path)
    ours, read = adapter.of_model(model), adapter.of_folder(tmp_path)
    assert (read.rank, read.alpha, read.modules) == (RANK, 2.0 * RANK, ours.modules)
    assert set(read.modules) == set(policy.TARGETS)
    assert ours.tensors.keys() == read.tensors.keys()
    assert all(torch.equal(ours.tensors[name], read.tensors[name]) for name in ours.tensors)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_half_an_adapter_folder_is_refused(folders, tmp_path, file):
    adapted(folders["llama", True, "nvfp4"]).save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=f"{file} is missing: expected a PEFT adapter folder"):
        adapter.of_folder(tmp_path)


@pytest.mark.parametrize(
    "kind", [{"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}]
)
def test_an_adapter_that_is_not_plain_lora_is_refused(folders, tmp_path, kind):
    """Read as plain LoRA it would be applied with another scale, or without its magnitudes."""
    adapted(folders["llama", True, "nvfp4"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | kind))
    with pytest.raises(ValueError, match=next(iter(kind))):
        adapter.of_folder(tmp_path)


def test_a_model_without_an_adapter_has_none_to_give(folders):
    with pytest.raises((ValueError, AttributeError)):
        adapter.of_model(policy.load(folders["llama", True, "nvfp4"]))


def test_a_model_without_known_projections_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=1, vocab_size=10))
    with pytest.raises(ValueError, match="q_proj"):
        policy.adapt(model, RANK, 16.0, seed=0)
