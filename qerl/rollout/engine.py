"""The engine: vLLM in this process samples from base + adapter + noise, and scores tokens.

The base is read once and never touched again. Each sync hands over the adapter as tensors under a
new id, frees the old one, writes clean + noise wherever noise goes and drops the prefix cache, so
that nothing of an earlier policy is left. It is not a trainer and holds no optimizer state.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from qerl.adapter import Adapter
from qerl.noise import Noise
from qerl.rollout.build import EngineSettings, build


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; vLLM's names."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Completion:
    """A sampled completion and the sampler's log-probability of each of its tokens."""

    token_ids: list[int]
    logprobs: list[float]  # at the sampling temperature
    finished: bool  # ended by itself rather than by the length limit


@dataclass(frozen=True)
class Applied:
    """What a sync really wrote."""

    sigma: float
    noise_std: float  # root mean square of (written - clean) over all norms and linears written
    noise_modules: int  # norms and linears written; 0 without noise


class Engine:
    """vLLM's LLM with the three things RL needs: sync, generate, score."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.llm = build(settings)
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self._runner = worker.model_runner
        self._clean = _clean(self._runner.model) if settings.noise else {}
        self._adapter_id = 0
        self._request = None
        self._asleep = False
        self.sync(None)

    def sync(self, adapter: Adapter | None, noise: Noise | None = None) -> Applied:
        """Sample from base + `adapter` + `noise` from now on; None means without."""
        self._swap_adapter(adapter)
        applied = self._write_noise(noise)
        self.llm.reset_prefix_cache()
        return applied

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Completion]:
        """One completion a prompt (token ids), in order; the same `seed` draws the same ones."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            logprobs=0,
            detokenize=False,
        )
        with seeded(seed):
            outputs = self._run(prompts, params)
        return [_completion(output.outputs[0]) for output in outputs]

    def score(self, token_ids: list[list[int]]) -> list[list[float]]:
        """log p(token | tokens before it) of every token but the first, at temperature 1."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = self._run(token_ids, params)
        return [
            [
                entry[token].logprob
                for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)
            ]
            for out, ids in zip(outputs, token_ids, strict=True)
        ]

    def sleep(self) -> None:
        """Free the KV cache until wake(); weights, adapter and noise stay."""
        if self.settings.sleep and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Take the KV cache's memory back, empty."""
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    def adapters(self) -> set[int]:
        """The ids of the adapters the engine holds: none, or the last sync's alone."""
        return set(self._runner.lora_manager.list_adapters()) if self.settings.lora_rank else set()

    def _run(self, prompts, params):
        self.wake()
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False, lora_request=self._request)

    def _swap_adapter(self, adapter: Adapter | None) -> None:
        rank = self.settings.lora_rank
        if adapter is not None and adapter.rank > rank:
            raise ValueError(
                f"an adapter of rank {adapter.rank} does not fit an engine built for rank {rank}: "
                f"build it with lora_rank={adapter.rank}"
            )
        if rank == 0:
            return
        manager = self._runner.lora_manager._adapter_manager
        if adapter is not None:
            _require_slots(adapter, manager)
        manager.remove_adapter(self._adapter_id)
        self._request = None
        for module in manager.modules.values():
            module.reset_lora(0)  # the dense wrapper reads the slot whatever a request asks for
        if adapter is not None:
            self._adapter_id += 1
            manager.add_adapter(self._lora_model(adapter))
            manager.activate_adapter(self._adapter_id)
            self._request = _request(self._adapter_id)

    def _lora_model(self, adapter: Adapter):
        """vLLM's form of the adapter."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        return LoRAModel.from_lora_tensors(
            self._adapter_id,
            # Copies: vLLM multiplies B by the adapter's scale in place.
            {name: tensor.clone() for name, tensor in adapter.tensors.items()},
            PEFTHelper(adapter.rank, adapter.alpha, list(adapter.modules)),
            device=str(self._runner.device),
            dtype=self._runner.lora_manager.lora_config.lora_dtype,
        )

    def _write_noise(self, noise: Noise | None) -> Applied:
        """Write clean + Z into every tensor that takes noise and measure what arrived."""
        if noise is not None and noise.sigma > 0 and not self._clean:
            raise ValueError("noise for an engine that was built with noise=False")
        sigma = noise.sigma if noise is not None else 0.0
        squares, count = 0.0, 0
        for name, (written, clean) in self._clean.items():
            wanted = clean
            if sigma > 0:
                wanted = clean + noise.vector(name, clean.numel()).to(clean.device)
            written.copy_(wanted)
            squares += (written.double() - clean.double()).square().sum()
            count += clean.numel()
        if sigma == 0:
            return Applied(0.0, math.sqrt(float(squares) / max(count, 1)), 0)
        return Applied(sigma, math.sqrt(float(squares) / count), len(self._clean))


@contextmanager
def seeded(seed: int):
    """Seed, within the block, the global generators that vLLM draws from; seed: below 2**64.

    On a CPU that is torch's; on a GPU, vLLM 0.26's model runner draws a seed for each request from
    numpy's.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    kept = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            np.random.seed(divmod(seed, 2**32))  # two words, as one may have 32 bits at most
            yield
    finally:
        np.random.set_state(kept)


def _require_slots(adapter: Adapter, manager) -> None:
    """Raise ValueError for modules that the engine lacks: vLLM would drop them silently."""
    slots = {}
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            slots[part] = a.shape[-1], b.shape[-2]
    absent = sorted(name for name, size in adapter.sizes.items() if slots.get(name) != size)
    if absent:
        raise ValueError(
            f"{len(absent)} of the adapter's {len(adapter.sizes)} modules do not exist in the "
            f"engine, or have another size there: {', '.join(absent[:4])}. Is the adapter of this "
            "model, and are its modules in the engine's lora_modules?"
        )


def _clean(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor that takes noise, with a copy of it as loaded."""
    from qerl.rollout.worker import noise_tensors

    return {name: (tensor, tensor.clone()) for name, tensor in noise_tensors(model).items()}


def _request(adapter_id: int):
    """A request for an adapter already in the engine; vLLM asks for a path but never opens it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"step-{adapter_id}", adapter_id, "in-memory")


def _completion(output) -> Completion:
    logprobs = [
        entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)
    ]
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            "the engine sampled a token whose log-probability is not finite: on Hopper this has "
            "been a LoRA kernel failing on long sequences; update vLLM or shorten the sequences"
        )
    return Completion(list(output.token_ids), logprobs, output.finish_reason == "stop")
