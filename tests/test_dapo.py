"""DAPO: loss and gradients against a plain implementation, and what a pass through the model costs.

The reference is forty lines of torch on dense weights W + s B A in float64. It shares no code with
TRL, PEFT or qerl.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.func import functional_call

import scripted
import tiny
from qerl import policy
from qerl.arguments import grpo_config
from qerl.config import LOSS_TYPES, TrainConfig
from qerl.correction import MODES
from qerl.trainer import QeRLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, PROMPT, TOKENS, LONGEST = 8, 5, 6, 10  # completions of up to 6 tokens, of 10 allowed
RANK, ALPHA = 2, 6.0
TEMPERATURE = 0.7


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
