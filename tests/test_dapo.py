"""DAPO: loss and gradients against a plain implementation, and what a rollout hands to the loss.

The reference is forty lines of torch on dense weights W + s B A in float64. It shares no code with
TRL, PEFT or qerl. Whole runs go through qerl.train on a random model of two layers (scripted.py).
"""

from __future__ import annotations

import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.func import functional_call

import scripted
import tiny
from qerl import groups, policy, run_folder
from qerl.arguments import grpo_config
from qerl.config import LOSS_TYPES, TrainConfig
from qerl.correction import MODES
from qerl.trainer import QeRLTrainer

ROWS, PROMPT, TOKENS, LONGEST = 8, 5, 6, 10  # completions of up to 6 tokens, of 10 allowed
RANK, ALPHA = 2, 6.0
TEMPERATURE = 0.7


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the reference


def dense(base: torch.nn.Module, factors: dict) -> dict[str, torch.Tensor]:
    """W + s B A of every adapted weight, by its name in the base model."""
    made, state = {}, base.state_dict()
    for name, A_RK in factors.items():
        if ".lora_A." in name:
            B_NR = factors[name.replace(".lora_A.", ".lora_B.")]
            plain = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
            made[plain] = state[plain] + ALPHA / RANK * B_NR @ A_RK
    return made


def reference_logps(base, factors, rows: dict) -> torch.Tensor:
    """log pi of each completion token [B, T] at the temperature."""
    # Positions count from the first token of the longest prompt: RoPE rounds them in float32.
    start = int(rows["prompt_mask"].any(0).int().argmax())
    ids_BT = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)[:, start:]
    attention_BT = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)[:, start:]
    inputs = {"input_ids": ids_BT, "attention_mask": attention_BT}
    logits_BTV = functional_call(base, dense(base, factors), kwargs=inputs).logits
    logps_BTV = (logits_BTV / TEMPERATURE).log_softmax(-1)[:, PROMPT - 1 - start : -1]
    return logps_BTV.gather(2, rows["completion_ids"][..., None])[..., 0]


def reference_loss(logps_BT, rows: dict, config: TrainConfig, passes: int) -> torch.Tensor:
    """DAPO (arXiv 2503.14476, eq. 8) and the other averages, of one of `passes` passes."""
    mask_BT, advantages_B1 = rows["completion_mask"], rows["advantages"][:, None]
    old_BT = rows.get("old_per_token_logps", logps_BT.detach())
    ratio_BT = (logps_BT - old_BT).exp()
    clipped_BT = ratio_BT.clip(1 - config.epsilon, 1 + config.epsilon_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    drift_BT = (old_BT - rows["sampling_per_token_logps"]) * mask_BT
    if config.sampler_correction.startswith("sequence"):
        drift_BT = drift_BT.sum(1, keepdim=True)
    weight, cap = drift_BT.exp(), config.sampler_correction_cap
    if config.sampler_correction.endswith("truncate"):
        loss_BT = loss_BT * weight.clip(max=cap)
    elif config.sampler_correction.endswith("mask"):
        loss_BT = loss_BT * torch.where(weight > cap, 0, weight)
    if config.beta:
        away_BT = rows["ref_per_token_logps"] - logps_BT
        # weighted as TRL does by default (DeepSeek-V3.2): the tokens are the old policy's
        loss_BT = loss_BT + config.beta * ratio_BT * (away_BT.exp() - away_BT - 1)
    summed_B, tokens_B = (loss_BT * mask_BT).sum(1), mask_BT.sum(1)
    match config.loss_type:
        case "dapo":  # over all tokens of the step, whichever pass they are in
            return summed_B.sum() / max(rows["all_tokens"], 1)
        case "bnpo":  # over the tokens of the pass
            return summed_B.sum() / max(tokens_B.sum(), 1) / passes
        case "grpo":  # over the tokens of each completion, then over completions
            return (summed_B / tokens_B.clip(min=1)).mean() / passes
        case "dr_grpo":  # over a constant
            return summed_B.sum() / (len(summed_B) * LONGEST) / passes


# --- the trainer, in float64


def batch(masked: int, old: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """A rollout of random tokens, the last `masked` completions left out; sampler and old policy
    differ from the policy, so that both clips and the cap are at work."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(TOKENS) < lengths).int()
    mask[ROWS - masked :] = 0
    padding = torch.arange(PROMPT) >= torch.randint(0, PROMPT - 1, (ROWS, 1), generator=draw)
    made = {
        "prompt_ids": torch.randint(3, tiny.VOCABULARY, (ROWS, PROMPT), generator=draw),
        "prompt_mask": padding.int(),
        "completion_ids": torch.randint(3, tiny.VOCABULARY, (ROWS, TOKENS), generator=draw),
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=draw, dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
    }
    logps_BT = reference_logps(base(), scripted.factors(adapted()), made).detach()
    away = [torch.randn(ROWS, TOKENS, generator=draw, dtype=torch.float64) for _ in range(3)]
    made["sampling_per_token_logps"] = logps_BT + 0.6 * away[0]
    made["ref_per_token_logps"] = logps_BT + 0.4 * away[1]
    if old:
        made["old_per_token_logps"] = logps_BT + 0.3 * away[2]
    return made


@functools.cache
def base() -> torch.nn.Module:
    return tiny.model("llama", False).double()


def adapted() -> torch.nn.Module:
    """The same under the same adapter every time, with a B that is not 0."""
    model = policy.adapt(tiny.model("llama", False).double(), RANK, ALPHA, seed=0).double()
    torch.manual_seed(1)
    for factor in scripted.factors(model).values():
        factor.data.normal_(std=0.1)
    return model


class FixedRollout(QeRLTrainer):
    """Takes `rollout` for what was sampled."""

    def _generate_and_score_completions(self, inputs):
        return dict(self.rollout)


def plain_head(model):
    """What TRL's fused head returns, but in float64: it computes in float32 whatever the model."""

    def forward(input_ids, attention_mask, **kwargs):
        logits = type(model).forward(model, input_ids=input_ids, attention_mask=attention_mask)
        logps_BTV = (logits.logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        logps_BT = logps_BTV.gather(2, input_ids[:, 1:, None])[..., 0]
        entropy_BT = -(logps_BTV.exp() * logps_BTV).sum(-1)
        return SimpleNamespace(log_probs=logps_BT, entropy=entropy_BT)

    return forward


def trainer_of(output_dir, passes: int, own_head=False, **flags) -> QeRLTrainer:
    config = TrainConfig(
        model_name="none",
        output_dir=str(output_dir),
        per_device_train_batch_size=ROWS // passes,
        gradient_accumulation_steps=passes,
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        optim="adamw_torch",
        ln=False,
        gradient_checkpointing=False,
        **flags,
    )
    trainer = FixedRollout(
        config,
        scripted.Engine(None),
        None,
        model=adapted(),
        reward_funcs=[lambda completions, **kwargs: [0.0] * len(completions)],
        args=grpo_config(config, 4),
        train_dataset=Dataset.from_list([{"prompt": "none"}] * ROWS),
        processing_class=scripted.tokenizer(),
    )
    trainer.config = config
    trainer.accelerator.native_amp = False  # no autocast to bf16
    trainer.current_gradient_accumulation_steps = passes
    if not own_head:
        trainer.model.get_base_model().forward = plain_head(trainer.model.get_base_model())
    return trainer


def step(trainer: QeRLTrainer) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients that transformers' training step leaves after all passes."""
    trainer.model.zero_grad()
    passes = range(trainer.current_gradient_accumulation_steps)
    losses = [trainer.training_step(trainer.model, [], None).item() for _ in passes]
    return sum(losses), {n: p.grad for n, p in scripted.factors(trainer.model).items()}


def compare(trainer: QeRLTrainer, rollout: dict, within: float = 1e-9) -> None:
    """Hold every update on a rollout against the reference, on the very passes that TRL made."""
    factors = scripted.factors(trainer.model)
    leaves = {name: factor.detach().clone().requires_grad_() for name, factor in factors.items()}
    trainer.rollout, trainer._buffered_inputs = rollout, None
    for _ in range(trainer.num_iterations):
        loss, gradients = step(trainer)
        expected, passes = 0, trainer._buffered_inputs
        for rows in passes:
            rows = rows | {"all_tokens": rollout["completion_mask"].sum()}
            logps_BT = reference_logps(base(), leaves, rows)
            expected = expected + reference_loss(logps_BT, rows, trainer.config, len(passes))
        assert loss == pytest.approx(expected.item(), rel=within, abs=within)
        wanted = torch.autograd.grad(expected, list(leaves.values()))
        largest = float(max(gradient.abs().max() for gradient in wanted))
        assert (largest > 1e-3) == bool(rollout["completion_mask"].any())
        for name, gradient in zip(leaves, wanted, strict=True):
            near = {"rtol": within, "atol": within * largest}
            torch.testing.assert_close(gradients[name], gradient, **near)


def widths(trainer: QeRLTrainer) -> list[int]:
    """The columns of each pass that went through the model since `trainer` was made."""
    seen, model = [], trainer.model.get_base_model()
    forward = model.forward
    model.forward = lambda input_ids, **kwargs: (
        seen.append(input_ids.shape[1]) or forward(input_ids=input_ids, **kwargs)
    )
    return seen


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_pass_is_as_wide_as_its_own_longest_row(loss_type, tmp_path):
    """And cut-off completions, which are left out of the loss, cost their prompts alone."""
    trainer, rollout = trainer_of(tmp_path, 4, loss_type=loss_type), batch(3, old=False)
    seen = widths(trainer)
    compare(trainer, rollout)
    lengths = rollout["completion_mask"].sum(1).tolist()
    for width, rows in zip(seen, trainer._buffered_inputs, strict=True):
        prompt, completion = (int(rows[f"{n}_mask"].sum(1).max()) for n in ("prompt", "completion"))
        assert width == prompt + max(completion, 1)
    dealt = torch.cat([rows["completion_mask"].sum(1) for rows in trainer._buffered_inputs])
    assert dealt.sort()[0].tolist() == sorted(lengths) and min(lengths) == 0
    assert (dealt.tolist() == sorted(lengths)) == (loss_type != "bnpo")  # which averages in a pass


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_only_passes_with_a_gradient_are_gone_back_through(passes, beta, tmp_path):
    """Of 8 rows 2 have no tokens in the loss and 3 more no advantage, but a KL if asked for."""
    trainer, rollout = trainer_of(tmp_path, passes, beta=beta, num_iterations=2), batch(2, old=True)
    rollout["advantages"][1:4] = 0
    backwards = []
    model = trainer.model.get_base_model()
    model.model.norm.register_full_backward_hook(lambda *a: backwards.append(1))
    compare(trainer, rollout)
    without = 2 if beta else 5
    assert len(backwards) == 2 * (passes - without * passes // ROWS)


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("correction", MODES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradients_are_the_references(loss_type, correction, passes, tmp_path):
    flags = {"loss_type": loss_type, "sampler_correction": correction}
    trainer = trainer_of(tmp_path, passes, **flags)
    for masked in (0, 5, ROWS):  # 5 of 8: of four passes, one at least is empty
        compare(trainer, batch(masked, old=False))


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_several_updates_on_a_rollout_are_the_references_too(loss_type, passes, beta, tmp_path):
    """The old policy is another one here, so that clip-higher is at work on both sides."""
    flags = {"loss_type": loss_type, "beta": beta, "num_iterations": 2}
    compare(trainer_of(tmp_path, passes, **flags), batch(2, old=True))


def test_trls_own_head_gives_the_same_as_far_as_float32_goes(tmp_path):
    compare(trainer_of(tmp_path, 4, own_head=True), batch(2, old=False), within=1e-4)


def test_a_sequence_whose_ratio_explodes_does_not_dominate(tmp_path):
    """faults.md, 8: with the cap it moves the gradient by its fair share."""
    calm, wild = batch(0, old=False), batch(0, old=False)
    wild["sampling_per_token_logps"][0] -= 12  # a ratio of 160,000 on each of its tokens
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        trainer, norms = trainer_of(tmp_path, 1, sampler_correction=mode), []
        for trainer.rollout in (calm, wild):
            trainer._buffered_inputs = None
            _, gradients = step(trainer)
            norms.append(torch.cat([g.flatten() for g in gradients.values()]).norm())
        assert norms[1] < 3 * norms[0], mode


# --- groups


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 0.6, 0.7, 1.0, 100.1])
def test_equal_rewards_are_no_variance_whatever_rounding_says(reward, size):
    rewards = torch.full((2 * size, 1), reward)
    assert groups.without_variance(rewards, size).tolist() == [True, True]
    rewards[-1] += 1e-3
    assert groups.without_variance(rewards, size).tolist() == [True, False]


def test_a_verdict_that_is_missing_is_no_reward_of_0():
    nan = torch.nan
    rewards = torch.tensor([[nan], [nan], [1.0], [nan], [0.0], [1.0]])
    assert groups.without_variance(rewards, 2).tolist() == [True, True, False]
    both = torch.tensor([[nan, 1.0], [0.5, 0.5], [nan, 1.0], [1.0, nan]])
    assert groups.without_variance(both, 2).tolist() == [True, True]


def test_a_group_is_put_in_the_place_of_another_and_the_tokens_are_counted():
    def rollout(prompt: int, tokens: int, start: int) -> dict:
        rows = torch.arange(4)[:, None] + start
        made = {f"prompt_{n}": rows.expand(4, prompt).clone() for n in ("ids", "mask")}
        made |= {f"completion_{n}": rows.expand(4, tokens).clone() for n in ("ids", "mask")}
        return made | {"advantages": rows[:, 0].float(), "num_items_in_batch": torch.tensor(0)}

    for prompt in (1, 2, 3):
        for tokens in (1, 2, 3):
            mine, other = rollout(2, 2, start=1), rollout(prompt, tokens, start=11)
            groups.replace(mine, other, groups.rows_of(torch.tensor([1]), 2), torch.tensor([0, 1]))
            assert mine["advantages"].tolist() == [1, 2, 11, 12]
            wide, long = max(prompt, 2), max(tokens, 2)
            assert mine["prompt_ids"][0].tolist() == [0] * (wide - 2) + [1, 1]
            assert mine["prompt_ids"][2].tolist() == [0] * (wide - prompt) + [11] * prompt
            assert mine["completion_ids"][1].tolist() == [2, 2] + [0] * (long - 2)
            assert mine["completion_ids"][3].tolist() == [12] * tokens + [0] * (long - tokens)
            assert mine["num_items_in_batch"] == mine["completion_mask"].sum()


# --- whole runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scripted.folder(tmp_path_factory.mktemp("models") / "tiny")


def varied(call: int, row: int) -> str:
    return "1" * (row % 2)


def dull_at_first(call: int, row: int) -> str:
    """Prompt 0 earns 0.2 and 0, prompt 1 the same 0.3 twice; new prompts earn as prompt 0."""
    return "333" if call == 0 and row >= 2 else "22" * (row % 2)


def test_a_dull_group_is_sampled_again_with_a_new_prompt(model, tmp_path, monkeypatch):
    engine = scripted.Engine(dull_at_first)
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, "--dynamic-sampling", "3")
    (row,) = scripted.rows(tmp_path)
    assert (row["sampling_rounds"], row["resampled_groups"]) == (2, 1)
    assert row["zero_variance_fraction"] == 0 and row["alarms"] == []
    first, second = engine.prompts
    assert len(set(first)) == 2 and len(second) == 2 and set(second).isdisjoint(first)
    assert len(set(engine.seeds)) == 2
    taught = sum((list(rows["completion_ids"]) for rows in trainer._buffered_inputs), [])
    words = scripted.tokenizer()
    assert sorted(words.decode(ids, skip_special_tokens=True) for ids in taught) == [
        "", "", "22", "22",
    ]  # fmt: skip
    assert row["loss_tokens"] == row["signal_tokens"] == 1 + 1 + 3 + 3
    assert row["reward"] == pytest.approx((0.2 + 0 + 0.3 + 0.3) / 4)  # the first round's
    assert row["completion_length"] == (1 + 3 + 4 + 4) / 4


def test_what_dynamic_sampling_draws_is_a_function_of_the_step(model, tmp_path, monkeypatch):
    def asked(run):
        engine = scripted.Engine(lambda call, row: "1")
        flags = ["--dynamic-sampling", "2", "--max-steps", "2"]
        scripted.run(monkeypatch, model, tmp_path / run, engine, *flags)
        return engine.prompts, engine.seeds

    (prompts, seeds), again = asked("one"), asked("two")
    assert (prompts, seeds) == again
    assert len(set(map(tuple, prompts))) == len(set(seeds)) == 2 * 3


@pytest.mark.parametrize(
    "flags", [["--max-steps", "2", "--dynamic-sampling", "1"], ["--num-iterations", "2"]]
)
def test_a_run_killed_before_its_adapter_was_written_does_no_step_more(
    model, tmp_path, monkeypatch, flags
):
    """The rows go on after its last step: prompts to draw from, or the rest of a rollout."""

    def weights():
        more = [*flags, "--save-strategy", "steps"]
        trainer = scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *more)
        return trainer.state.max_steps, load_file(tmp_path / "adapter/adapter_model.safetensors")

    steps, whole = weights()
    shutil.rmtree(tmp_path / "adapter")
    _, continued = weights()
    assert [row["step"] for row in scripted.rows(tmp_path)] == list(range(1, steps + 1))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_without_success_the_rounds_end_and_the_rest_is_reported(model, tmp_path, monkeypatch):
    engine = scripted.Engine(lambda call, row: "333")
    scripted.run(monkeypatch, model, tmp_path, engine, "--dynamic-sampling", "3")
    (row,) = scripted.rows(tmp_path)
    assert (row["sampling_rounds"], row["resampled_groups"], engine.calls) == (4, 6, 4)
    assert row["zero_variance_fraction"] == 1 and row["alarms"] == ["no_signal"]


def test_without_the_flag_nothing_is_sampled_again(model, tmp_path, monkeypatch):
    engine = scripted.Engine(dull_at_first)
    scripted.run(monkeypatch, model, tmp_path, engine)
    (row,) = scripted.rows(tmp_path)
    assert (row["sampling_rounds"], row["resampled_groups"], engine.calls) == (1, 0, 1)
    assert row["zero_variance_fraction"] == 0.5
    assert (row["loss_tokens"], row["signal_tokens"]) == (1 + 3 + 4 + 4, 1 + 3)


def test_a_group_without_variance_moves_nothing(model, tmp_path, monkeypatch):
    """faults.md, 10. In TRL eight rewards of 0.3 have an advantage of 3e-4, and Adam takes it."""
    engine = scripted.Engine(lambda call, row: "333")
    flags = ["--per-device-train-batch-size", "8", "--num-generations", "8", "--weight-decay", "0"]
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, *flags)
    (row,) = scripted.rows(tmp_path)
    assert (row["zero_variance_fraction"], row["grad_norm"]) == (1, 0)
    assert {sample["advantage"] for sample in scripted.rows(tmp_path, "samples.jsonl")} == {0}
    moved = [n for n, p in scripted.factors(trainer.model).items() if ".lora_B." in n and p.any()]
    assert not moved


def test_the_punishment_for_length_teaches_and_is_logged_apart(model, tmp_path, monkeypatch):
    """8 tokens at most and a buffer of 4: 7 tokens with their end cost 3/4, 3 tokens nothing."""
    engine = scripted.Engine(lambda call, row: "11xxxx" if row % 2 else "11")
    trainer = scripted.run(monkeypatch, model, tmp_path, engine, "--overlong-buffer", "4")
    (row,) = scripted.rows(tmp_path)
    assert row["overlong_punishment"] == pytest.approx(-0.75 / 2)
    assert (row["reward"], row["reward_std"]) == (pytest.approx(0.2), pytest.approx(0, abs=1e-6))
    assert row["zero_variance_fraction"] == 0 and row["grad_norm"] > 0
    samples = scripted.rows(tmp_path, "samples.jsonl")
    assert [sample["reward"] for sample in samples] == pytest.approx([0.2] * 4)
    short, long = samples[0]["advantage"], samples[1]["advantage"]
    assert short == pytest.approx(-long) and short > 0.5
    assert trainer.reward_func_names == ["digits", "overlong_punishment"]


def test_no_verdict_is_still_none_under_a_punishment(model, tmp_path, monkeypatch):
    engine = scripted.Engine(lambda call, row: "1" * (3 + 4 * (row % 2)))
    flags = ["--overlong-buffer", "4", "--reward", "digit_reward:nothing"]
    scripted.run(monkeypatch, model, tmp_path, engine, *flags)
    (row,) = scripted.rows(tmp_path)
    assert (row["reward"], row["overlong_punishment"], row["grad_norm"]) == (None, None, 0)


def test_an_infinite_reward_ends_the_run_and_is_named(model, tmp_path, monkeypatch):
    """It left a group with advantages of NaN, which was told as one that earned the same."""
    with pytest.raises(ValueError, match="the reward endless is infinite"):
        flags = ["--reward", "digit_reward:endless"]
        scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *flags)


def test_the_kl_to_the_base_model_is_there_when_asked_for(model, tmp_path, monkeypatch):
    flags = ["--max-steps", "3", "--max-grad-norm", "0", "--learning-rate", "1e-2"]
    kls = {}
    for beta in ("0", "0.1"):
        output = tmp_path / beta
        scripted.run(monkeypatch, model, output, scripted.Engine(varied), *flags, "--beta", beta)
        kls[beta] = [row["kl"] for row in scripted.rows(output)]
        assert not (output / "adapter" / "ref").exists()
    assert kls["0"] == [None] * 3
    assert kls["0.1"][0] == pytest.approx(0, abs=1e-6) and kls["0.1"][2] > 1e-4


@pytest.mark.parametrize("iterations", ["1", "2"])
def test_the_ratios_are_those_of_sampler_and_trainer(model, tmp_path, monkeypatch, iterations):
    """One row of four is 1.5 nats more likely to the sampler than to the trainer."""
    for gap, capped in ((1.5, 0), (-1.5, 0.25)):
        engine = scripted.Engine(lambda call, row: "12" if row % 2 else "xy", gap)
        output = tmp_path / str(gap)
        scripted.run(monkeypatch, model, output, engine, "--num-iterations", iterations)
        (row,) = scripted.rows(output)
        assert row["logp_gap_mean"] == pytest.approx(1.5 / 4, abs=0.05)
        assert row["logp_gap_max"] == pytest.approx(1.5, abs=0.1)
        r = torch.tensor([-gap, 0, 0, 0]).exp()
        assert row["ratio_mean"] == pytest.approx(r.mean().item(), rel=0.05)
        assert row["ratio_max"] == pytest.approx(r.max().item(), rel=0.1)
        kish = (r.sum() ** 2 / (4 * r.square().sum())).item()
        assert row["effective_sample_share"] == pytest.approx(kish, abs=0.05)
        assert row["sampler_kl"] == pytest.approx((r - 1 - r.log()).mean().item(), rel=0.1)
        assert row["capped_fraction"] == capped


def test_save_steps_of_a_second_start_count(model, tmp_path, monkeypatch):
    """trainer_state.json holds those of the first, which transformers would take."""

    def saved(*flags):
        more = ["--max-steps", "4", "--save-strategy", "steps", "--save-total-limit", "9", *flags]
        scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *more)
        return sorted(path.name for path in tmp_path.glob("checkpoint-*"))

    assert saved("--save-steps", "2") == ["checkpoint-2", "checkpoint-4"]
    for name in ("adapter", "checkpoint-4"):
        shutil.rmtree(tmp_path / name)
    assert saved("--save-steps", "1") == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_a_users_copy_of_a_checkpoint_is_neither_removed_nor_taken_for_one(
    model, tmp_path, monkeypatch
):
    def copying(call, row):
        for name in ("checkpoint-1-mine", "checkpoint-9-mine"):
            (tmp_path / name).mkdir(exist_ok=True)
        return varied(call, row)

    flags = "--max-steps 3 --save-strategy steps --save-steps 1 --save-total-limit 1".split()
    scripted.run(monkeypatch, model, tmp_path, scripted.Engine(copying), *flags)
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == ["checkpoint-1-mine", "checkpoint-3", "checkpoint-9-mine"]
    assert run_folder.last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_a_start_from_the_first_step_says_so_and_records_its_own_versions(
    model, tmp_path, monkeypatch, capsys
):
    def record(*flags):
        scripted.run(monkeypatch, model, tmp_path, scripted.Engine(varied), *flags)
        return json.loads((tmp_path / "config.json").read_text())

    said = record()
    shutil.rmtree(tmp_path / "adapter")  # as a run that was killed before it saved a checkpoint
    (tmp_path / "config.json").write_text(
        json.dumps(said | {"git_commit": "another", "versions": {}})
    )
    again = "has no checkpoint: starting again at step 1"
    assert again not in capsys.readouterr().out
    assert record("--parity-limit", "0.3") == said | {
        "flags": said["flags"] | {"parity_limit": 0.3}
    }
    assert again in capsys.readouterr().out
