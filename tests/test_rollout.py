"""The real engine: noise that arrives and goes, adapters that arrive and go, true probabilities.

One engine of SmolLM2 in NVFP4 (conftest.py) and a tiny one in bf16, and the trainer's model beside
them as the second opinion.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qerl import adapter, policy
from qerl.noise import Noise
from qerl.rollout import Sampling
from qerl.rollout.engine import seeded
from qerl.rollout.worker import QeRLWorker
from shared_engine import CONTEXT, RANK, adapted, gap

pytestmark = pytest.mark.slow

LAYERS = 30
# Sampler and trainer differ by the order of their bf16 sums: about 0.03 on this model.
CLOSE = 0.08


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
