"""Time and memory of one optimizer step of the real trainer, by how the base model is held.

    python -m benchmarks.train_step --shape qwen2.5-7b --folder /tmp/checkpoints

    nvfp4       qerl.policy: 4-bit weights, rebuilt by the kernel in both passes
    bf16        qerl.policy on the bf16 checkpoint: the control
    bf16-stock  the bf16 checkpoint as its users have it: TRL's own trainer, PEFT's own LoRA layers,
                and norms, SwiGLU and rotary embeddings by transformers, where the arms above take
                Liger's kernels
    nf4         QLoRA: bitsandbytes NF4 by transformers, double quantization, bf16 arithmetic,
                PEFT's own LoRA layers for it, Liger's kernels
    decompress  4-bit weights decompressed in PyTorch on every forward and kept by autograd, as the
                first implementation did (benchmarks/original.py)

Each arm has a process of its own, so that peaks are clean. It trains LoRA adapters on a checkpoint
of random weights with qerl.trainer.QeRLTrainer, whose sampler is replaced by random tokens: forward
pass, TRL's chunked log-probabilities and entropy, DAPO loss, correction, backward pass, clipping,
8-bit AdamW (AdamW on a CPU). All completions have full length and nothing is padded; with --ragged
they have every length up to it, evenly spread, so that what is done about padding shows. A time
runs from the trainer's on_step_begin to its on_step_end, the GPU waited for; the first step is not
counted. Allocated and reserved are torch's peaks over all steps; used is the whole device's (NVML,
sampled), with CUDA's own memory; base is what the loaded model allocates before the adapter.
--micro-batch is the launchers' --per-device-train-batch-size, here as there 2: a step takes
completions / micro-batch passes. Set it to 1 where the bf16 control runs out of memory, for all
arms: the fewer tokens a pass has, the more rebuilding the weights costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import (
    ChildFailed,
    Column,
    Report,
    add_cpu_flag,
    checkpoint,
    device_of,
    run_child,
    send,
    several,
    spread,
    workplace,
)
from benchmarks.memory import GIB, Sampler, open_gpu
from benchmarks.shapes import SHAPES

ARMS = {  # arm -> checkpoint
    "nvfp4": "nvfp4",
    "bf16": "bf16",
    "bf16-stock": "bf16",
    "nf4": "bf16",
    "decompress": "nvfp4",
}
ALPHA = 32.0  # of the adapter; no effect on speed
WARM_UP = 1  # steps
SETTINGS = ("completions", "tokens", "ragged", "prompt", "micro_batch", "rank")  # of a step
COLUMNS = [
    Column("arm", "base", 10),
    Column("step_s", "step s", 8, ".3f"),
    Column("spread_percent", "spread %", 8, ".1f"),
    Column("tokens_per_s", "tokens/s", 9, ".0f"),
    Column("times_first", "x first", 8, ".2f"),
    Column("base_gib", "base GiB", 9, ".2f"),
    Column("allocated_gib", "allocated", 9, ".2f"),
    Column("reserved_gib", "reserved", 9, ".2f"),
    Column("used_gib", "used GiB", 9, ".2f"),
    Column("load_s", "load s", 7, ".0f"),
    Column("note", "", 0),
]


def load(job: dict):
    """The frozen base model of an arm, on its device."""
    from qerl import policy

    arm = job["arm"]
    ours = arm in ("nvfp4", "bf16", "nf4")
    model = policy.load(job["folder"], job["device"], use_kernels=ours, nf4=arm == "nf4")
    if arm == "decompress":
        from benchmarks.original import decompress_everywhere

        decompress_everywhere(model)
    return model


def adapt(job: dict, model):
    """The model of an arm under a fresh adapter."""
    from qerl import policy

    if job["arm"] != "bf16-stock":
        return policy.adapt(model, job["rank"], ALPHA, seed=0)
    from peft import LoraConfig, get_peft_model

    targets = list(policy.TARGETS)
    return get_peft_model(
        model, LoraConfig(r=job["rank"], lora_alpha=ALPHA, target_modules=targets)
    )


def model_gib(model, device: str) -> float:
    """What the model takes: everything allocated on a GPU, the sum of its tensors on a CPU."""
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() / GIB
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) / GIB


def train_config(job: dict, output_dir: str):
    """The settings of a run of WARM_UP + repeats steps."""
    from qerl.config import TrainConfig

    return TrainConfig(
        model_name=job["folder"],
        output_dir=output_dir,
        max_steps=WARM_UP + job["repeats"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["completions"] // job["micro_batch"],
        num_generations=job["completions"],
        max_prompt_length=job["prompt"],
        max_completion_length=job["tokens"],
        optim="adamw_8bit" if job["device"] == "cuda" else "adamw_torch",
        ln=False,
        gradient_checkpointing=job["gradient_checkpointing"],
        save_strategy="no",
        logging_steps=0,
    )


def build_trainer(job: dict, model, output_dir: str):
    """The trainer, with random tokens in place of samples, and the clock it carries."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    from qerl.arguments import grpo_config
    from qerl.trainer import QeRLTrainer

    config, clock = train_config(job, output_dir), step_clock(job["device"])
    given = {
        "model": model,
        "reward_funcs": [no_reward],
        "args": grpo_config(config, config.max_steps),
        "train_dataset": Dataset.from_list([{"prompt": "none"}] * config.max_steps),
        "processing_class": AutoTokenizer.from_pretrained(job["folder"]),
        "callbacks": [clock],
    }
    if job["arm"] == "bf16-stock":
        return on_random_tokens(GRPOTrainer, job)(**given), clock
    engine = object()  # that the loss may count on one; never asked for samples
    return on_random_tokens(QeRLTrainer, job)(config, engine, None, **given), clock


def on_random_tokens(trainer: type, job: dict) -> type:
    class Trainer(trainer):
        def _generate_and_score_completions(self, inputs):
            return random_batch(job, self.model.config.vocab_size)

    return Trainer


def lengths(job: dict) -> list[int]:
    """Tokens of each completion."""
    count, tokens = job["completions"], job["tokens"]
    return [tokens * (i + 1) // count if job["ragged"] else tokens for i in range(count)]


def random_batch(job: dict, vocabulary: int) -> dict:
    """What TRL's sampling returns, for one optimizer step: random tokens."""
    import torch

    count, prompt, tokens = job["completions"], job["prompt"], job["tokens"]
    ids_BT = torch.randint(0, vocabulary, (count, prompt + tokens), device=job["device"])
    ends_B1 = torch.tensor(lengths(job), device=job["device"])[:, None]
    mask_BT = (torch.arange(tokens, device=job["device"]) < ends_B1).int()
    return {
        "prompt_ids": ids_BT[:, :prompt],
        "prompt_mask": torch.ones_like(ids_BT[:, :prompt]),
        "completion_ids": ids_BT[:, prompt:],
        "completion_mask": mask_BT,
        "advantages": torch.randn(count, device=job["device"]),
        "num_items_in_batch": mask_BT.sum(),
        "sampling_per_token_logps": torch.full_like(mask_BT, -12, dtype=torch.float32),
    }


def no_reward(completions, **kwargs) -> list[float]:
    return [0.0] * len(completions)


def step_clock(device: str):
    """A callback that keeps the seconds of every optimizer step."""
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):
        def __init__(self):
            self.seconds = []

        def on_step_begin(self, args, state, control, **kwargs):
            self.started = now()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds.append(now() - self.started)

    return Clock()


def child(job: dict) -> None:
    """One arm: load, train, send a row."""
    started = time.perf_counter()
    model = load(job)
    row = {"load_s": time.perf_counter() - started, "base_gib": model_gib(model, job["device"])}
    model = adapt(job, model)
    gpu = open_gpu() if job["device"] == "cuda" else None
    with tempfile.TemporaryDirectory() as output_dir, Sampler(gpu=gpu) as sampler:
        trainer, clock = build_trainer(job, model, output_dir)
        reset_peaks(job["device"])
        trainer.train()
    check_learned(model)
    row |= {"used_gib": sampler.gpu_peak(), "host_gib": sampler.host_peak()}
    send(job, row | torch_peaks(job["device"]) | timing(job, clock.seconds[WARM_UP:]))


def check_learned(model) -> None:
    """RuntimeError when an adapter's B, which starts at 0, did not move: nothing was measured."""
    factors = {n: p for n, p in model.named_parameters() if ".lora_B." in n}
    still = [name for name, factor in factors.items() if not factor.any()]
    if still or not factors:
        raise RuntimeError(f"{len(still)} of {len(factors)} adapters did not learn: {still[:3]}")


def reset_peaks(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def torch_peaks(device: str) -> dict:
    import torch

    if device == "cpu":
        return {"allocated_gib": None, "reserved_gib": None}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def timing(job: dict, seconds: list[float]) -> dict:
    median = statistics.median(seconds)
    tokens = job["completions"] * job["prompt"] + sum(lengths(job))
    return {
        "seconds": seconds,
        "step_s": median,
        "spread_percent": spread(seconds),
        "tokens_per_s": tokens / median,
    }


def measure(args: argparse.Namespace, arm: str, place: Path) -> dict:
    """The row of an arm; one that fails says so in its note."""
    names = (*SETTINGS, "repeats", "device")
    job = {"arm": arm} | {name: getattr(args, name) for name in names}
    job["gradient_checkpointing"] = not args.no_gradient_checkpointing
    try:
        folder = checkpoint(place, args.shape, ARMS[arm], args.layers)
        (row,) = run_child("benchmarks.train_step", job | {"folder": str(folder)}, args.seconds)
    except ChildFailed as failure:
        return {"arm": arm, "note": str(failure)}
    return {"arm": arm} | row


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen2.5-7b", help="model to imitate (qwen2.5-7b)")
    add("--layers", type=int, help="number of layers (default: the model's)")
    add("--arms", type=several(*ARMS), default=list(ARMS), help=f"default: {','.join(ARMS)}")
    add("--completions", type=int, default=8, help="completions a step (8)")
    add("--tokens", type=int, default=2048, help="tokens a completion (2048)")
    add("--ragged", action="store_true", help="completions of every length up to --tokens")
    add("--prompt", type=int, default=256, help="tokens a prompt (256)")
    add("--micro-batch", type=int, default=2, help="completions a pass (2, as the 7B launchers)")
    add("--repeats", type=int, default=3, help="counted steps, after one that is not (3)")
    add("--rank", type=int, default=16, help="of the adapter (16)")
    add("--no-gradient-checkpointing", action="store_true", help="keep all activations")
    add("--seconds", type=float, default=180, help="an arm is stopped after these (180)")
    add("--folder", type=Path, help="keep checkpoints here and use those that are there")
    add("--output", type=Path, help="write every row to this JSON file")
    add("--child", help=argparse.SUPPRESS)
    add_cpu_flag(parser)
    args = parser.parse_args(argv)
    if args.child is None:
        args.device = device_of(args, parser)
        if args.completions < 2 or args.completions % args.micro_batch:
            parser.error("--completions: expected at least 2 and a multiple of --micro-batch")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.child is not None:
        child(json.loads(args.child))
        return 0
    settings = {name: getattr(args, name) for name in ("shape", "layers", *SETTINGS)}
    settings["gradient_checkpointing"] = not args.no_gradient_checkpointing
    report, first = Report(COLUMNS, args.output, settings), None
    with workplace(args.folder) as place:
        for arm in args.arms:
            row = measure(args, arm, place)
            first = first or row.get("step_s")
            report.add(row | {"times_first": row["step_s"] / first if "step_s" in row else None})
    return int(any("note" in row for row in report.data["rows"]))


if __name__ == "__main__":
    sys.exit(main())
