"""Noise in the real engine: it arrives, as large as asked for, and leaves nothing behind.

In the norms of SmolLM2 in NVFP4 (conftest.py), and in the linears of a tiny model in bf16.
"""

from __future__ import annotations

import pytest
import torch

import tiny
from qerl import adapter, policy
from qerl.noise import Noise
from qerl.rollout import Applied
from qerl.rollout.worker import FEEDS, NoisyLinear, noisy_norms, scaled
from shared_engine import adapted, gap

pytestmark = pytest.mark.slow

LAYERS = 30
# Sampler and trainer differ by the order of their bf16 sums: about 0.03 on this model.
CLOSE = 0.08


def gains(engine) -> dict[str, torch.Tensor]:
    """A copy of the gain of every norm in the engine's model."""
    named = engine._runner.model.named_modules()
    return {n: m.weight.data.clone() for n, m in named if type(m).__name__.endswith("Norm")}


# --- noise


@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_noise_of_the_asked_for_size_is_in_the_norms_that_feed_quantized_linears(engine, sigma):
    clean = gains(engine)
    noise = Noise(3407, 5, sigma)
    applied = engine.sync(None, noise)
    assert (applied.sigma, applied.noise_modules) == (sigma, 2 * LAYERS)
    assert applied.noise_std == pytest.approx(sigma, rel=0.05)
    touched = 0
    for name, gain in gains(engine).items():
        if "layers." not in name:
            assert torch.equal(gain, clean[name]), name  # the final norm
            continue
        assert gain.dtype == torch.float32
        # exactly what was drawn for this name, up to float32 at 1
        torch.testing.assert_close(
            gain - clean[name], noise.vector(name, gain.numel()), rtol=0, atol=1e-6
        )
        touched += 1
    assert touched == applied.noise_modules


@pytest.mark.parametrize(("sigma", "least"), [(1e-2, 0.05), (1e-3, 0.005)])
def test_noise_moves_probabilities_repeats_itself_and_leaves_nothing_behind(
    engine, tokens, sigma, least
):
    clean = engine.score(tokens)
    engine.sync(None, Noise(1, 2, sigma))
    noisy = engine.score(tokens)
    assert gap(noisy, clean) > least
    assert engine.sync(None) == Applied(0.0, 0.0, 0)
    assert engine.score(tokens) == clean
    engine.sync(None, Noise(1, 2, sigma))
    assert engine.score(tokens) == noisy
    engine.sync(None, Noise(1, 3, sigma))
    assert engine.score(tokens) != noisy


def test_noise_does_not_add_up_over_many_syncs(engine, tokens):
    clean, before = engine.score(tokens), gains(engine)
    for step in range(1, 21):
        applied = engine.sync(None, Noise(1, step, 1e-2))
        assert applied.noise_std == pytest.approx(1e-2, rel=0.05)
    engine.sync(None)
    assert all(torch.equal(gain, before[name]) for name, gain in gains(engine).items())
    assert engine.score(tokens) == clean


def test_noise_of_zero_is_no_noise(engine, tokens):
    clean = engine.score(tokens)
    assert engine.sync(None, Noise(1, 1, 0.0)) == Applied(0.0, 0.0, 0)
    assert engine.score(tokens) == clean


def test_noise_does_not_disturb_the_adapter(engine, tokens, two):
    engine.sync(two[0])
    clean = engine.score(tokens)
    engine.sync(two[0], Noise(1, 1, 1e-2))
    assert engine.score(tokens) != clean
    engine.sync(two[0])
    assert engine.score(tokens) == clean


@pytest.mark.parametrize("present", [(), ("input_layernorm",), ("post_attention_layernorm",)])
def test_a_model_whose_norms_are_not_known_is_refused(present):
    layer = torch.nn.ModuleDict({"self_attn": torch.nn.Module(), "mlp": torch.nn.Module()})
    for name in FEEDS.values():
        parent, child = name.split(".")
        layer[parent].add_module(child, torch.nn.Linear(4, 4))
    layer.update({name: torch.nn.LayerNorm(4) for name in present})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    with pytest.raises(ValueError, match=f"found {len(present)} norms .*--ln False"):
        noisy_norms(model)


# --- noise in the linears that no norm feeds, and in a bf16 base


def inputs(sigma: float):
    """(bf16 inputs [T, K], 1 + Z [K])."""
    x_TK = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    return x_TK, 1 + Noise(1, 2, sigma).vector("o_proj", 256)


def arrived(result_TK, x_TK, scale_K) -> float:
    """The share of the exact change that is in a result, over all its entries."""
    exact = x_TK.double() * (scale_K.double() - 1)
    return float(((result_TK.double() - x_TK.double()) * exact).sum() / exact.square().sum())


@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_noise_on_an_input_arrives_whole_where_rounding_to_nearest_would_lose_it(sigma):
    x_TK, scale_K = inputs(sigma)
    assert arrived(scaled(x_TK, scale_K), x_TK, scale_K) == pytest.approx(1, abs=0.05)
    if sigma < 1e-2:
        assert arrived((x_TK * scale_K).bfloat16(), x_TK, scale_K) < 0.2


@pytest.mark.parametrize("sigma", [1e-2, 1e-3])
def test_every_channel_is_scaled_by_its_own_factor_on_average_over_tokens(sigma):
    x_TK, scale_K = inputs(sigma)
    result_TK = scaled(x_TK, scale_K).double()
    mean_K = (result_TK * x_TK.double()).sum(0) / x_TK.double().square().sum(0) - 1
    torch.testing.assert_close(mean_K.float(), scale_K - 1, rtol=0, atol=5e-4)


def test_no_value_is_further_from_the_exact_one_than_the_next_of_bf16():
    x_TK, scale_K = inputs(1e-2)
    exact = x_TK.double() * scale_K.double()
    assert ((scaled(x_TK, scale_K).double() - exact).abs() <= exact.abs() * 2**-7).all()


def test_a_factor_of_one_leaves_every_bf16_number_as_it_is():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    result = scaled(every, torch.ones(every.numel()))
    assert torch.equal(result.view(torch.int16), every.view(torch.int16))


def test_a_factor_written_in_place_reaches_a_compiled_linear():
    plain = torch.nn.Linear(256, 32, dtype=torch.bfloat16)
    plain.input_size_per_partition = 256
    noisy, (x_TK, _) = NoisyLinear(plain).requires_grad_(False), inputs(0)
    compiled = torch.compile(noisy, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x_TK), plain(x_TK))
    noisy.scale_K.fill_(2.0)
    assert torch.equal(compiled(x_TK), plain(2 * x_TK))


@pytest.fixture(scope="module")
def bf16_engine(tmp_path_factory):
    """A second engine: a tiny bf16 model, noise in all its linears."""
    from qerl.rollout import Engine, EngineSettings

    folder = tiny.write_dense(tmp_path_factory.mktemp("tiny") / "qwen2", "qwen2", tied=False)
    settings = EngineSettings(
        str(folder),
        max_model_len=64,
        max_num_seqs=4,
        lora_rank=8,
        lora_modules=policy.TARGETS,
        noise=True,
        noise_target="linear",
    )
    return Engine(settings)


def with_noise(model, noise: Noise, names):
    """transformers' model with Z added to its gains and its weights' columns scaled by 1 + Z."""
    for name in names:
        weight = model.get_submodule(name).weight.data
        z = noise.vector(name, weight.shape[-1])
        weight.add_(z) if weight.dim() == 1 else weight.mul_(1 + z)
    return model


def test_noise_on_linears_is_that_of_scaled_columns_in_a_bf16_base_and_its_adapter(bf16_engine):
    tokens = [[5, 9, 300, 7, 7, 12, 1, 44, 3, 8], list(range(40, 80))]
    model = adapted(policy.load(bf16_engine.settings.model).float(), rank=8, size=0.1)
    learned, noise = adapter.of_model(model), Noise(3407, 5, 0.2)
    bf16_engine.sync(learned)
    clean = bf16_engine.score(tokens)
    applied = bf16_engine.sync(learned, noise)
    assert applied.noise_modules == 2 * 4  # layers x (2 norms + 2 linears)
    assert applied.noise_std == pytest.approx(0.2, rel=0.1)
    noisy = bf16_engine.score(tokens)
    theirs = policy.score(with_noise(model.merge_and_unload(), noise, bf16_engine._clean), tokens)
    assert gap(noisy, theirs) < gap(noisy, clean) / 4
    bf16_engine.sync(learned)
    assert bf16_engine.score(tokens) == clean
