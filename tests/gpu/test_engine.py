"""The engine on a GPU: CUDA graphs, Humming, the sleep that frees the KV cache, no leak."""

import pytest
import torch

from qerl import adapter, parity, policy
from qerl.noise import Noise

# "What is 1 + 23?" in SmolLM2's chat form, each with an end of its own: on tokens that mean nothing
# the model's logits are large, and bf16 rounds them by 0.1 and more.
CHAT = [1, 4093, 198, 1780, 314, 216, 33, 1232, 216, 34, 35, 47, 2, 198, 1, 520, 9531, 198]
PROMPTS = [[*CHAT, 504, 2988, 282, 300 + 37 * i] for i in range(16)]


def build(folder, **more):
    """An engine with CUDA graphs, room for an adapter of rank 24 and for noise."""
    from qerl.rollout import Engine, EngineSettings

    settings = EngineSettings(
        model=str(folder),
        max_model_len=256,
        max_num_seqs=16,
        lora_rank=24,
        lora_modules=policy.TARGETS,
        noise=True,
        gpu_memory_utilization=0.2,
        **more,
    )
    return Engine(settings)


@pytest.fixture(scope="module")
def pair(smollm2_nvfp4):
    """The engine with CUDA graphs and sleep, and the policy, on one GPU."""
    engine = build(smollm2_nvfp4, sleep=True)
    model = policy.adapt(policy.load(smollm2_nvfp4, "cuda"), rank=24, alpha=48, seed=0)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return engine, model


def change(a, b) -> float:
    """Mean |difference| of two lists of scores."""
    flat = [abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return sum(flat) / len(flat)


def test_sampler_and_trainer_are_one_policy_at_an_odd_rank(pair):
    engine, model = pair
    found = parity.check(engine, model, PROMPTS, seed=0)
    assert found.moved_engine > parity.MOVE / 2


def test_sleep_frees_the_cache_and_the_adapter_is_applied_after_waking(pair):
    from qerl.rollout import Sampling

    engine, model = pair
    engine.sync(None)
    without = engine.score(PROMPTS)
    engine.sync(adapter.of_model(model))
    before = engine.score(PROMPTS)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free > 2**30
    engine.generate(PROMPTS, Sampling(8), seed=0)  # wakes it
    after = engine.score(PROMPTS)
    assert change(after, before) < change(after, without) / 4
    assert change(after, policy.score(model, PROMPTS)) < parity.LIMIT


def test_a_seed_repeats_its_completions_and_another_does_not(pair):
    """One token at a high temperature: many are likely, and rounding decides between few."""
    from qerl.rollout import Sampling

    engine, _ = pair
    engine.sync(None)
    seeds = (7, 7, 8)
    drawn = [engine.generate(PROMPTS, Sampling(1, temperature=5.0), seed=seed) for seed in seeds]
    first, again, other = [[completion.token_ids for completion in made] for made in drawn]
    assert first == again != other


def test_a_sync_while_asleep_is_what_wakes(pair):
    engine, model = pair
    engine.sync(None)
    engine.sleep()
    engine.sync(adapter.of_model(model))
    assert change(engine.score(PROMPTS), policy.score(model, PROMPTS)) < parity.LIMIT


@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_noise_reaches_the_graphs_and_leaves_no_trace(pair, sigma):
    engine, _ = pair
    engine.sync(None)
    clean = engine.score(PROMPTS)
    applied = engine.sync(None, Noise(seed=0, step=1, sigma=sigma))
    assert applied.noise_modules == 60
    assert applied.noise_std == pytest.approx(sigma, rel=0.05)
    assert change(engine.score(PROMPTS), clean) > 0
    assert engine.sync(None).noise_std == 0


def test_syncs_and_rollouts_do_not_grow_the_memory(pair):
    from qerl.rollout import Sampling

    engine, model = pair

    def round_trip(step):
        engine.sync(adapter.of_model(model), Noise(seed=0, step=step, sigma=1e-3))
        engine.generate(PROMPTS, Sampling(16), seed=step)
        engine.sleep()

    for step in range(1, 4):
        round_trip(step)
    held = torch.cuda.memory_allocated()
    for step in range(4, 24):
        round_trip(step)
    assert torch.cuda.memory_allocated() <= held
    assert len(engine.adapters()) == 1


def test_slots_of_another_rank_are_what_the_graphs_captured_anew_read(pair, smollm2_nvfp4):
    from benchmarks.rollout import resize_slots
    from qerl.rollout import Sampling

    model, engine = pair[1], build(smollm2_nvfp4, compile=False)
    resize_slots(engine.llm, 64)
    engine.sync(adapter.of_model(model))
    made = engine.generate(PROMPTS, Sampling(8), seed=0)
    texts = [[*prompt, *c.token_ids] for prompt, c in zip(PROMPTS, made, strict=True)]
    sampled = [c.logprobs for c in made]

    def ends(rows):
        return [row[-len(own) :] for row, own in zip(rows, sampled, strict=True)]

    assert change(sampled, ends(policy.score(model, texts))) < parity.LIMIT
    engine.sync(None)
    assert change(sampled, ends(engine.score(texts))) > 2 * parity.LIMIT


def test_noise_on_the_linears_of_a_bf16_base_reaches_the_graphs_and_leaves_no_trace(smollm2):
    engine = build(smollm2, noise_target="linear")
    clean = engine.score(PROMPTS)
    for sigma in (1e-2, 1e-4):
        applied = engine.sync(None, Noise(seed=0, step=1, sigma=sigma))
        assert applied.noise_modules == 120
        assert applied.noise_std == pytest.approx(sigma, rel=0.05)
        assert change(engine.score(PROMPTS), clean) > 0
    engine.sync(None)
    assert change(engine.score(PROMPTS), clean) == 0


def test_an_nf4_base_is_one_policy_in_sampler_and_trainer(smollm2):
    pytest.importorskip("bitsandbytes", reason="NOT TESTED: bitsandbytes is missing")
    engine = build(smollm2, nf4=True)
    model = policy.adapt(policy.load(smollm2, "cuda", nf4=True), rank=24, alpha=48, seed=0)
    found = parity.check(engine, model, PROMPTS, seed=0)
    assert found.moved_engine > parity.MOVE / 2
