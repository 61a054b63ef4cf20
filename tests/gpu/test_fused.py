"""The layers that Liger computes on a GPU, against transformers' own."""

import pytest
import torch

import tiny
from qerl import policy

IDS = torch.randint(tiny.VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(0))


def learned(folder, use_kernels: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities in float32, and the gradients of an adapter that is not zero."""
    model = policy.load(folder, "cuda", torch.float32, use_kernels)
    model = policy.adapt(model, rank=4, alpha=8, seed=0).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    logps = model(input_ids=IDS.cuda()).logits.log_softmax(-1)
    logps.gather(2, IDS.cuda()[..., None]).mean().backward()
    return logps.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("write", [tiny.write_nvfp4, tiny.write_dense])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fused_layers_compute_what_transformers_does(family, write, tmp_path):
    plain, expected = learned(write(tmp_path / "NVFP4A16-rtn", family, tied=False), False)
    fused, found = learned(tmp_path / "NVFP4A16-rtn", True)
    assert not torch.equal(fused, plain)  # other kernels, other rounding: they did run
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 1e-3 * gradient.norm(), name


def test_a_model_without_kernels_and_one_on_the_cpu_stay_as_they_are(tmp_path):
    folder = tiny.write_dense(tmp_path, "qwen2", tied=False)
    before = policy.load(folder)(input_ids=IDS).logits
    policy.load(folder, "cuda")
    assert torch.equal(policy.load(folder)(input_ids=IDS).logits, before)
