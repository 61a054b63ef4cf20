"""The start-up check passes on one policy, and refuses when engine and trainer are two."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import tiny
from qerl import adapter, linear, parity, policy
from qerl.config import TrainConfig
from qerl.noise import Noise

pytestmark = pytest.mark.slow

TEXTS = ("What is 2 + 3?", "The capital of France is Paris, and that of Italy")


@pytest.fixture(scope="module")
def model(smollm2_nvfp4):
    return policy.adapt(policy.load(smollm2_nvfp4), 16, 32.0, seed=1)


@pytest.fixture
def tokens(tokenizer) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def projections(model, name: str) -> list[linear.NVFP4Linear]:
    return [m.base_layer for n, m in model.named_modules() if n.endswith(f".{name}")]


def test_engine_and_trainer_of_one_checkpoint_agree(engine, model, tokens):
    found = parity.check(engine, model, tokens, seed=1)
    assert found.gap_mean < 0.08
    assert found.moved_engine > parity.MOVE and found.moved_trainer > parity.MOVE
    assert "agree: mean gap 0.0" in str(found)


def test_the_limit_is_the_flags_and_may_be_raised(engine, model, tokens):
    assert parity.LIMIT == TrainConfig().parity_limit
    assert parity.check(engine, model, tokens, seed=1, limit=0.08).gap_mean < 0.08
    with pytest.raises(parity.NotOnePolicy, match="expected below 0.001.*raise --parity-limit"):
        parity.check(engine, model, tokens, seed=1, limit=0.001)


def test_the_check_leaves_the_adapter_as_it_was(engine, model, tokens):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.sync(adapter.of_model(model))
    scores = engine.score(tokens)
    parity.check(engine, model, tokens, seed=1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert engine.score(tokens) == scores
    assert len(engine.adapters()) == 1


def test_an_engine_that_ignores_the_adapter_is_refused(engine, model, tokens, monkeypatch):
    sync = engine.sync
    monkeypatch.setattr(engine, "sync", lambda adapter, noise=None: sync(None, noise))
    with pytest.raises(parity.NotOnePolicy, match="the engine does not apply the adapter"):
        parity.check(engine, model, tokens, seed=1)


def test_an_engine_that_keeps_its_first_adapter_is_refused(engine, model, tokens, monkeypatch):
    sync, first = engine.sync, adapter.of_model(model)
    kept = dataclasses.replace(first, tensors={n: t.clone() for n, t in first.tensors.items()})
    monkeypatch.setattr(engine, "sync", lambda adapter, noise=None: sync(kept, noise))
    with pytest.raises(parity.NotOnePolicy, match="the engine does not apply the adapter"):
        parity.check(engine, model, tokens, seed=1)


@pytest.mark.parametrize("fault", ["another weight", "fused scales differ", "nibbles swapped"])
def test_a_trainer_on_another_base_is_refused(engine, model, tokens, fault):
    """Fused scales that differ are what vLLM reads with one of them, and only warns."""
    changed = []
    match fault:
        case "another weight":
            changed = [(projections(model, "down_proj")[0].weight_packed, lambda t: t ^ 0x88)]
        case "fused scales differ":
            scales = [layer.weight_global_scale for layer in projections(model, "k_proj")]
            changed = [(scale, lambda t: t / 2.14) for scale in scales]
        case "nibbles swapped":
            packed = [layer.weight_packed for layer in projections(model, "up_proj")]
            changed = [(tensor, lambda t: (t >> 4) | (t << 4)) for tensor in packed]
    kept = [tensor.data.clone() for tensor, _ in changed]
    try:
        for tensor, change in changed:
            tensor.data.copy_(change(tensor.data))
        with pytest.raises(parity.NotOnePolicy, match="are not the same policy: mean gap"):
            parity.check(engine, model, tokens, seed=1)
    finally:
        for (tensor, _), value in zip(changed, kept, strict=True):
            tensor.data.copy_(value)


@pytest.mark.parametrize("good_calls", [0, 1])
def test_an_engine_whose_scores_are_nan_is_refused(engine, model, tokens, monkeypatch, good_calls):
    """At once, or as soon as the adapter does something."""
    engine.sync(adapter.of_model(model))
    good = engine.score(tokens)
    nan, answers = [[math.nan] * len(row) for row in good], iter([good] * good_calls)
    monkeypatch.setattr(engine, "score", lambda ids: next(answers, nan))
    with pytest.raises(parity.NotOnePolicy, match="are not the same policy: mean gap nan"):
        parity.check(engine, model, tokens, seed=1)


def test_an_engine_that_is_still_noisy_is_refused(engine, model, tokens, monkeypatch):
    sync, noise = engine.sync, Noise(1, 1, 0.05)
    monkeypatch.setattr(engine, "sync", lambda adapter: sync(adapter, noise))
    with pytest.raises(parity.NotOnePolicy, match="are not the same policy: mean gap"):
        parity.check(engine, model, tokens, seed=1)


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory):
    """A second engine: Qwen2 with biases and an odd vocabulary, without noise."""
    from qerl.rollout import Engine, EngineSettings

    folder = tmp_path_factory.mktemp("tiny") / "qwen2-NVFP4A16-rtn"
    tiny.write_nvfp4(folder, "qwen2", tied=False)
    settings = EngineSettings(
        str(folder), max_model_len=64, max_num_seqs=4, lora_rank=12, lora_modules=policy.TARGETS
    )
    return Engine(settings)


def test_biases_odd_vocabularies_and_odd_ranks_agree_too(tiny_engine):
    model = policy.adapt(policy.load(tiny_engine.settings.model), 12, 24.0, seed=1)
    found = parity.check(tiny_engine, model, [[5, 9, 300, 7, 7, 12, 1], [44, 3, 8]], seed=1)
    assert found.gap_mean < 0.08


def test_noise_for_an_engine_without_float_gains_is_refused(tiny_engine):
    with pytest.raises(ValueError, match="built with noise=False"):
        tiny_engine.sync(None, Noise(1, 1, 1e-2))


def test_an_untied_model_whose_embeddings_are_untied_is_not_its_tied_twin(tiny_engine, tmp_path):
    twin = tiny.write_nvfp4(tmp_path / "twin", "qwen2", tied=True)
    model = policy.adapt(policy.load(twin), 12, 24.0, seed=1)
    with pytest.raises(parity.NotOnePolicy, match="are not the same policy"):
        parity.check(tiny_engine, model, [[5, 9, 300, 7, 7, 12, 1]], seed=1)
