"""The real engine: noise that arrives and goes, adapters that arrive and go, true probabilities.

One engine of SmolLM2 in NVFP4 (conftest.py) and a tiny one in bf16, and the trainer's model beside
them as the second opinion.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from shared_engine import CONTEXT, RANK

from qerl import adapter, policy
from qerl.adapter import Adapter
from qerl.noise import Noise
from qerl.rollout import Applied, Sampling
from qerl.rollout.engine import seeded
from qerl.rollout.worker import FEEDS, NoisyLinear, QeRLWorker, noisy_norms, scaled

pytestmark = pytest.mark.slow

LAYERS = 30
# Sampler and trainer differ by the order of their bf16 sums: about 0.03 on this model.
CLOSE = 0.08
TEXTS = ("What is 2 + 3?", "The capital of France is Paris, and that of Italy", "1, 2, 3, 4, 5, 6")


@pytest.fixture(scope="module")
def base(smollm2_nvfp4):
    """The trainer's frozen model, for adapters of several ranks."""
    return policy.load(smollm2_nvfp4)


@pytest.fixture
def tokens(tokenizer) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def adapted(base, rank: int = 16, seed: int = 0, size: float = 0.05):
    """The trainer's model with an adapter that is no longer zero; unload() before the next one."""
    model = policy.adapt(base, rank, 2.0 * rank, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


@pytest.fixture
def two(base) -> tuple[Adapter, Adapter]:
    """Two different adapters of rank 16, as plain tensors."""
    made = []
    for seed in (1, 2):
        model = adapted(base, seed=seed)
        made.append(adapter.of_model(model))
        model.unload()
    return tuple(made)


def flat(rows) -> torch.Tensor:
    return torch.tensor(sum(rows, []), dtype=torch.float64)


def gap(a, b) -> float:
    return (flat(a) - flat(b)).abs().mean().item()


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


# --- adapters


def test_an_adapter_moves_the_engine_as_it_moves_the_trainer_and_then_goes(engine, base, tokens):
    clean = engine.score(tokens)
    assert gap(clean, policy.score(base, tokens)) < CLOSE
    model = adapted(base)
    engine.sync(adapter.of_model(model))
    moved, theirs = engine.score(tokens), policy.score(model, tokens)
    model.unload()
    assert gap(moved, clean) > 3 * CLOSE
    assert gap(moved, theirs) < CLOSE
    engine.sync(None)
    assert engine.score(tokens) == clean
    assert engine.adapters() == set()


def test_a_new_adapter_takes_the_place_of_the_old_one(engine, tokens, two):
    engine.sync(two[1])
    fresh = engine.score(tokens)
    held = engine.adapters()
    engine.sync(two[0])
    assert gap(engine.score(tokens), fresh) > CLOSE
    engine.sync(two[1])
    assert engine.score(tokens) == fresh
    assert len(engine.adapters()) == len(held) == 1
    assert engine.adapters() != held  # a new id: nothing cached under the old one is found


def test_many_syncs_leave_one_adapter_in_the_engine(engine, two):
    before = torch.tensor([p.numel() for p in engine._runner.model.parameters()]).sum()
    for turn in range(10):
        engine.sync(two[turn % 2])
        assert len(engine.adapters()) == 1
    assert torch.tensor([p.numel() for p in engine._runner.model.parameters()]).sum() == before


def test_an_adapter_in_the_engines_own_type_is_not_scaled_again_by_each_sync(engine, tokens, two):
    narrow = {name: tensor.bfloat16() for name, tensor in two[0].tensors.items()}
    kept = {name: tensor.clone() for name, tensor in narrow.items()}
    engine.sync(dataclasses.replace(two[0], tensors=narrow))
    once = engine.score(tokens)
    engine.sync(dataclasses.replace(two[0], tensors=narrow))
    assert engine.score(tokens) == once
    assert all(torch.equal(narrow[name], kept[name]) for name in kept)


@pytest.mark.parametrize("rank", [1, 5, 24, RANK])
def test_an_adapter_of_any_rank_up_to_the_engines_is_applied(engine, base, tokens, rank):
    model = adapted(base, rank, size=0.1)
    engine.sync(adapter.of_model(model))
    theirs = policy.score(model, tokens)
    model.unload()
    assert gap(engine.score(tokens), theirs) < CLOSE
    assert gap(theirs, policy.score(base, tokens)) > CLOSE


def test_a_small_adapter_after_a_large_one_finds_nothing_of_it_in_the_slot(engine, base, tokens):
    model = adapted(base, RANK)
    large = adapter.of_model(model)
    model.unload()
    model = adapted(base, 4)
    small = adapter.of_model(model)
    model.unload()
    engine.sync(small)
    alone = engine.score(tokens)
    engine.sync(large), engine.sync(small)
    assert engine.score(tokens) == alone


def test_a_rank_above_the_engines_is_refused_with_the_way_out(engine, two):
    large = dataclasses.replace(two[0], rank=RANK + 1)
    with pytest.raises(ValueError, match=f"build it with lora_rank={RANK + 1}"):
        engine.sync(large)


def test_modules_that_the_engine_lacks_are_named_not_left_out(engine, tokens, two):
    """vLLM alone would apply the rest, or a corner of the slot, and say nothing."""
    engine.sync(two[0])
    before, held = engine.score(tokens), engine.adapters()
    absent = {n.replace(".layers.3.", ".layers.30."): t for n, t in two[1].tensors.items()}
    narrow = {
        n: t[:, :64] if n.endswith("layers.2.mlp.up_proj.lora_A.weight") else t
        for n, t in two[1].tensors.items()
    }
    for tensors, words in (
        (absent, "7 of the adapter's 210 modules .*: model.layers.30.mlp.down_proj, "),
        (narrow, "1 of the adapter's 210 modules .*: model.layers.2.mlp.up_proj. "),
    ):
        with pytest.raises(ValueError, match=words):
            engine.sync(dataclasses.replace(two[1], tensors=tensors))
    assert (engine.score(tokens), engine.adapters()) == (before, held)


# --- prefix cache


def cached_tokens(engine, prompt: list[int]) -> int:
    """How many tokens of a prompt the engine took from its cache in a generation of one token."""
    from vllm import SamplingParams

    [output] = engine._run([prompt], SamplingParams(max_tokens=1, temperature=0))
    return output.num_cached_tokens


def test_going_to_sleep_does_not_ask_what_neighbours_on_the_gpu_take(monkeypatch):
    """vLLM's own asserts that the whole GPU has more free memory then."""
    levels = []
    backend = SimpleNamespace(suspend=levels.append)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *a: pytest.fail("asked"))
    QeRLWorker.sleep(SimpleNamespace(_get_sleep_mode_backend=lambda: backend))
    assert levels == [1]


def test_what_an_earlier_policy_left_in_the_prefix_cache_is_not_used(engine, two):
    prompt = list(range(100, 100 + CONTEXT - 20))
    assert cached_tokens(engine, prompt) == 0
    assert cached_tokens(engine, prompt) > 0  # within one policy it is: the test can fail
    for change in ((None, Noise(1, 1, 1e-2)), (two[0],), (two[1],), (None,)):
        engine.sync(*change)
        assert cached_tokens(engine, prompt) == 0
        assert cached_tokens(engine, prompt) > 0


def test_a_generation_after_other_policies_is_that_of_a_fresh_start(engine, two):
    prompts, sampling = [list(range(100, 100 + CONTEXT - 20))] * 2, Sampling(4)
    engine.sync(two[0], Noise(1, 1, 1e-2))
    fresh = engine.generate(prompts, sampling, seed=1)
    engine.sync(two[1], Noise(1, 2, 0.1))
    assert engine.generate(prompts, sampling, seed=1) != fresh
    engine.sync(two[0], Noise(1, 1, 1e-2))
    assert engine.generate(prompts, sampling, seed=1) == fresh


# --- sampling


def test_a_seed_repeats_its_completions_and_another_does_not(engine, tokens):
    sampling = Sampling(8)
    first = engine.generate(tokens * 2, sampling, seed=7)
    assert engine.generate(tokens * 2, sampling, seed=7) == first
    assert engine.generate(tokens * 2, sampling, seed=8) != first
    assert first[: len(tokens)] != first[len(tokens) :]  # one prompt, several completions


def test_sampling_leaves_the_random_state_of_torch_and_numpy_alone(engine, tokens):
    before, numpys = torch.get_rng_state(), np.random.get_state()[1]
    engine.generate(tokens, Sampling(2), seed=7)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpys, np.random.get_state()[1])


def drawn_seeds(requests: int = 4) -> list[int]:
    """Those that vLLM's GPU runner gives to requests without one; its arrays are plain here."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    states = SamplingStates.__new__(SamplingStates)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        setattr(states, name, SimpleNamespace(np=np.zeros(requests, dtype=np.int64)))
    states.vocab_size, states.seeds_set, states.num_logprobs = 10, [0] * requests, [0] * requests
    for index in range(requests):
        states.add_request(index, SamplingParams())
    return states.seeds.np.tolist()


def test_a_seed_decides_what_vllms_gpu_runner_draws_too():
    drawn = []
    for seed in (7, 7, 8, 7 + 2**56):  # the last: a second draw of one step (qerl.sampler)
        with seeded(seed):
            drawn.append(drawn_seeds())
    assert drawn[0] == drawn[1]
    assert len({seed for seeds in drawn for seed in seeds}) == 3 * 4


def completions_under(engine, tokens, sampling) -> tuple[list, list]:
    """Whole sequences (prompt + completion) and the sampler's log-probabilities."""
    drawn = engine.generate(tokens, sampling, seed=3)
    sequences = [ids + c.token_ids for ids, c in zip(tokens, drawn, strict=True)]
    assert all(len(c.token_ids) == len(c.logprobs) for c in drawn)
    return sequences, [c.logprobs for c in drawn]


def test_log_probabilities_of_sampled_tokens_are_the_scores_of_their_text(engine, tokens, two):
    engine.sync(two[0], Noise(1, 1, 1e-2))
    sequences, logprobs = completions_under(engine, tokens, Sampling(16))
    scores = [s[len(i) - 1 :] for s, i in zip(engine.score(sequences), tokens, strict=True)]
    assert gap(logprobs, scores) < CLOSE


def test_log_probabilities_are_taken_at_the_temperature(engine, base, tokens):
    sequences, logprobs = completions_under(engine, tokens, Sampling(16, temperature=0.7))
    expected = {}
    for temperature in (0.7, 1.0):
        rows = []
        for ids, prompt in zip(sequences, tokens, strict=True):
            with torch.no_grad():
                logits = base(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
            logps = (logits.float() / temperature).log_softmax(-1)
            rows.append(logps.gather(1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0].tolist())
        expected[temperature] = rows
    assert gap(logprobs, expected[0.7]) < CLOSE
    assert gap(logprobs, expected[1.0]) > 2 * CLOSE


def test_log_probabilities_are_those_of_the_nucleus_they_were_drawn_from(engine, tokens):
    """In a nucleus of one token it was certain; over the whole vocabulary it was not."""
    drawn = engine.generate(tokens, Sampling(8, top_p=1e-6), seed=1)
    assert all(value == 0.0 for completion in drawn for value in completion.logprobs)


def test_a_completion_says_whether_it_ended_by_itself(engine, tokenizer):
    chat = [{"role": "user", "content": "Say hi."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    long = engine.generate([prompt] * 4, Sampling(200, temperature=0.01), seed=1)
    assert all(c.finished for c in long)
    assert all(c.token_ids[-1] == tokenizer.eos_token_id for c in long)
    short = engine.generate([prompt] * 4, Sampling(2, temperature=0.01), seed=1)
    assert not any(c.finished for c in short)
    assert all(len(c.token_ids) == 2 for c in short)
