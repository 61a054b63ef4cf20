"""The linear layers that train: a frozen base in NVFP4 or bf16 with a LoRA adapter on it.

    y = x W^T + b + s (x A^T) B^T        W [N, K] frozen, A [R, K] and B [N, R] learn, s = alpha / R

PEFT owns the adapter (its names, its files, its switches); this module computes it. Two autograd
nodes do what PEFT does with five, and write the adapter's part into the base's output instead of
adding three tensors of its size. A packed W is rebuilt from its 4 bits for each matmul, in the
forward and again in the backward pass, so that autograd never holds a dense copy (the original
decompressed every weight in PyTorch on every forward and, without gradient checkpointing, kept
them all). Building a model out of these layers is qerl.policy's business.
"""

from __future__ import annotations

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import nn
from torch.nn import functional as F

from qerl import kernels, nvfp4


class _Adapter(torch.autograd.Function):
    """What _Base multiplies (x, x A^T, B in x's type), and a stand-in for y, to get its gradient.

    Saves all that the backward pass needs, and before the base multiplies. So gradient
    checkpointing, which recomputes a block up to its last saved tensor, never recomputes the
    products of the block's last linear: down_proj's, 29% of the weights of a 7B model.
    """

    @staticmethod
    def forward(ctx, x, A_RK, B_NR, scale):
        ctx.scale, ctx.learned = scale, A_RK.dtype
        A_RK, B_NR = A_RK.to(x.dtype), B_NR.to(x.dtype)
        x_TK = x.reshape(-1, x.shape[-1])
        t_TR = x_TK @ A_RK.T
        ctx.save_for_backward(x_TK, t_TR, A_RK, B_NR)
        ctx.mark_non_differentiable(t_TR, B_NR, *([] if ctx.needs_input_grad[0] else [x]))
        stand_in = x.new_empty(()).expand(*x.shape[:-1], B_NR.shape[0])  # y's shape, no memory
        return x, t_TR, B_NR, stand_in

    @staticmethod
    def backward(ctx, dx, _t, _B, grad):
        x_TK, t_TR, A_RK, B_NR = ctx.saved_tensors
        grad_TN = grad.reshape(-1, grad.shape[-1])
        dt_TR = scaled(grad_TN @ B_NR, ctx.scale)
        dA_RK = product(dt_TR.T, x_TK, ctx.learned)
        dB_NR = scaled(product(grad_TN.T, t_TR, ctx.learned), ctx.scale)
        if dx is not None:  # _Base made it for this node alone, which may therefore add to it
            dx.view(-1, dx.shape[-1]).addmm_(dt_TR, A_RK)
        return dx, dA_RK, dB_NR, None


class _Base(torch.autograd.Function):
    """x W^T + b, rounded, and then s (x A^T) B^T on top, as the engine does it.

    Adding in one matmul would round less, but not alike: the gap between sampler and trainer
    (SmolLM2 in bf16) grew from 0.04 to 0.06 nats. Saves nothing: the backward pass rebuilds W.
    """

    @staticmethod
    def forward(ctx, base, x, t_TR=None, B_NR=None, stand_in=None, scale=1.0):
        ctx.base = base
        y = F.linear(x, dense(base, x.dtype), base.bias)
        if t_TR is not None:
            y.view(-1, y.shape[-1]).addmm_(t_TR, B_NR.T, alpha=scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        dx = grad @ dense(ctx.base, grad.dtype) if ctx.needs_input_grad[1] else None
        if len(ctx.needs_input_grad) == 2:  # no adapter
            return None, dx
        return None, dx, None, None, grad, None


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b in `dtype`; on a GPU the matmul kernel itself writes that type."""
    if a.is_cuda and dtype != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x * scale, in place; nothing to do for the launchers' alpha = R."""
    return x if scale == 1 else x.mul_(scale)


def dense(base: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of a frozen layer; a packed one's is valid until the next call."""
    return base.dense(dtype) if isinstance(base, NVFP4Linear) else base.weight.to(dtype)


_BUFFERS: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


def _scratch(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A view of the one buffer that every dense weight is rebuilt into, as large as the largest."""
    size = shape[0] * shape[1]
    buffer = _BUFFERS.get((device, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = _BUFFERS[device, dtype] = torch.empty(size, dtype=dtype, device=device)
    return buffer.as_strided(shape, (shape[1], 1))


class NVFP4Linear(nn.Module):
    """A frozen linear [N, K] held in NVFP4 (qerl.nvfp4 has the format).

    Its tensors carry the checkpoint's names, so that a state dict loads straight into it.
    """

    def __init__(self, linear: nn.Linear, use_kernels: bool = True):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.use_kernels = use_kernels
        rows, columns = linear.out_features, linear.in_features
        self.weight_packed = _unread(rows, columns // 2)
        self.weight_scale = _unread(rows, columns // nvfp4.BLOCK)
        self.weight_global_scale = _unread(1)
        self.bias = linear.bias
        self._rebuild = None, None  # where the stored tensors lie, and what rebuilds the weight

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, valid until the next call of any layer's dense."""
        stored = self.weight_packed, self.weight_scale, self.weight_global_scale
        device = stored[0].device
        if not (self.use_kernels and kernels.available(device)):
            return nvfp4.dequantize(*stored, dtype)
        places = [tensor.data_ptr() for tensor in stored]
        if self._rebuild[0] != places:
            from qerl.kernels.dequantize import Rebuild  # needs Triton

            self._rebuild = places, Rebuild(*stored)
        shape = self.out_features, self.in_features
        return self._rebuild[1](_scratch(shape, dtype, device))

    def _apply(self, *args, **kwargs):
        self._rebuild = None, None  # else it would keep the old tensors alive
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict:
        """What a copy is made from: its tensors are new, so it prepares a kernel of its own."""
        return self.__dict__ | {"_rebuild": (None, None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype (bf16 under autocast)."""
        return _Base.apply(self, autocast(x))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, nvfp4"


class LoRALinear(PeftLinear):
    """PEFT's LoRA layer over an NVFP4Linear or a plain nn.Linear, computed by the nodes above.

    Anything but one plain adapter (switched off, merged, mixed in a batch, dropout) is left to
    PEFT's own forward, and so is a base layer of any other type.
    """

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype (bf16 under autocast)."""
        if args or kwargs or self.disable_adapters or self.merged or not self._is_plain():
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        A_RK, B_NR = self.lora_A[name].weight, self.lora_B[name].weight
        scale = self.scaling[name]
        adapted = _Adapter.apply(autocast(x), A_RK, B_NR, scale)
        return _Base.apply(self.base_layer, *adapted, scale)

    def _is_plain(self) -> bool:
        names = self.active_adapters
        return (
            type(self.base_layer) in BASES
            and len(names) == 1
            and names[0] not in self.lora_variant
            and isinstance(self.lora_dropout[names[0]], nn.Identity)
        )

    def _get_in_out_features(self, module):
        return module.in_features, module.out_features  # PEFT does not know our type


BASES = (NVFP4Linear, nn.Linear)  # exactly these: bitsandbytes' layers are nn.Linear's children


def autocast(x: torch.Tensor) -> torch.Tensor:
    """x in autocast's type where that is on, as torch does for its own linear."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _unread(*shape: int) -> nn.Parameter:
    """A place for a stored tensor, without memory until the checkpoint is read into it."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)
