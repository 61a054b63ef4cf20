"""The policy that trains: a base model frozen in NVFP4 (or bf16, NF4) with LoRA adapters on it.

The only module that builds PEFT models. qerl.linear computes their layers, over 4-bit weights and
over bf16 ones alike: a bf16 checkpoint is the control, and differs in the base alone. NF4 is the
QLoRA baseline as its users have it: bitsandbytes' linears under PEFT's own layers for them.
"""

from __future__ import annotations

import warnings

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from qerl import _compat, checkpoint, kernels
from qerl.linear import LoRALinear, NVFP4Linear

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load(
    folder: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    use_kernels: bool = True,
    nf4: bool = False,
) -> nn.Module:
    """The frozen model of an NVFP4 or 16-bit checkpoint folder, on `device`.

    16-bit tensors take `dtype`; packed weights and their scales keep their own types (casting an
    fp8 or fp32 scale to bf16 changes the weights). use_kernels: where they run, rebuild packed
    weights with qerl.kernels and compute norms, SwiGLU and rotary embeddings with Liger's; else
    qerl.nvfp4 and transformers do both. nf4: quantize a 16-bit checkpoint to NF4 on loading.
    """
    found = checkpoint.describe(folder)
    if found.is_nvfp4:
        model = _load_nvfp4(found, device, dtype, use_kernels)
    elif nf4:
        model = _load_nf4(folder, device, dtype)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    if use_kernels and kernels.available(device):
        fuse_layers(model)
    return model.requires_grad_(False)


def fuse_layers(model: nn.Module) -> None:
    """Let Liger's kernels compute the norms, SwiGLU and rotary embeddings of a model on a GPU."""
    if not _compat.let_liger_compute_layers_of(model):
        kind = type(model).__name__
        warnings.warn(f"Liger is not used for {kind}: transformers computes it", stacklevel=2)


def adapt(model: nn.Module, rank: int, alpha: float, seed: int):
    """A PEFT model with fresh LoRA factors (float32, B = 0) on every projection of `model`.

    Run it under autocast to bf16, as the trainer and `score` do. PEFT raises ValueError when no
    module has a name of TARGETS.
    """
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    # PEFT's hook for new layers. It asks isinstance, and bitsandbytes' layers are nn.Linears too.
    plain = {type(m) for name, m in model.named_modules() if name.endswith(TARGETS)} == {nn.Linear}
    config._register_custom_module({nn.Linear if plain else NVFP4Linear: LoRALinear})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            # PEFT would widen every input to the factors' float32, for autocast to narrow it again.
            module.cast_input_dtype_enabled = False
    # PEFT puts the factors beside a base layer's `weight`, which a packed layer does not have.
    return adapted.to(next(model.parameters()).device)


@torch.no_grad()
def score(model: nn.Module, token_ids: list[list[int]]) -> list[list[float]]:
    """log p(token | tokens before it) of every token but the first, at temperature 1.

    The trainer's side of the parity check, in the precision it trains in. One padded batch: keep
    the tokens few, since the whole [B, T, vocabulary] is held.
    """
    device = next(model.parameters()).device
    rows = [torch.tensor(ids) for ids in token_ids]
    ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    mask_BT = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.autocast(device.type, torch.bfloat16):
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT.to(device)).logits[:, :-1]
    logps_BTV = logits_BTV.float().log_softmax(-1)
    logps_BT = logps_BTV.gather(2, ids_BT[:, 1:, None])[..., 0]
    return [row[: len(ids) - 1].tolist() for row, ids in zip(logps_BT, token_ids, strict=True)]


def _load_nf4(folder, device, dtype) -> nn.Module:
    """QLoRA's base (arXiv 2305.14314): NF4 in blocks of 64, double quantization, lm_head 16-bit.

    vLLM's bitsandbytes loader quantizes the same folder in the same way for the engine.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    place = torch.empty(0, device=device).device  # with its index, which accelerate compares
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=dtype, device_map={"": place}
    )


def _load_nvfp4(found, device, dtype, use_kernels) -> nn.Module:
    """Build the architecture without weights, swap its linears, then read the files into it."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(found.folder)
    if hasattr(config, "quantization_config"):  # some of ModelOpt's lie in a file of their own
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name in found.quantized:
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        setattr(model.get_submodule(parent), child, NVFP4Linear(linear, use_kernels))
    _read_weights(model, found, device, dtype)
    if (found.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(found.folder)
    return model.to(device).eval()


def _read_weights(model, found, device, dtype) -> None:
    """Fill the model; everything but packed weights and their scales takes `dtype`."""
    quantized = set(found.quantized)
    state = {}
    for name, tensor in checkpoint.tensors(found.folder, device):
        stored = name.rpartition(".")[0] in quantized and not name.endswith(".bias")
        state[name] = tensor if stored or not tensor.is_floating_point() else tensor.to(dtype)
    unexpected = model.load_state_dict(state, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing or unexpected:
        raise ValueError(
            f"{found.folder} does not fit {type(model).__name__}: missing {missing[:5]}, "
            f"unexpected {unexpected[:5]}; see python -m qerl.check {found.folder}"
        )
