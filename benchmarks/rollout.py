"""How fast the engine samples, by how the base model is held, adapter rank and batch size.

    python -m benchmarks.rollout --shapes qwen2.5-7b --arms nvfp4,bf16 --ranks 0,32 --batches 1,64

    nvfp4, bf16   qerl.rollout.Engine, as the trainer builds it
    nf4           the same engine on the bf16 checkpoint, held by bitsandbytes in NF4
    NAME-stock    the same weights as vLLM's users have them today: its own choice of linear kernel,
                  its own LoRA kernels, the adapter loaded from a PEFT folder

Every (shape, arm, rank) has an engine of its own in a process of its own, on random weights and a
random adapter on all projections. Rank 0, no adapter, is measured in the engine of the first other
rank (one that knows no adapters when --ranks is 0 alone). With --no-compile, all ranks share an
engine: its slots are made anew for each rank, and its CUDA graphs captured again. CUDA graphs are
captured for the batches that are asked for, in every arm. Prompts are distinct random tokens, no
two with the same first one, so no prefix is cached; the end of text is ignored, so every completion
has the length asked for; log-probabilities are returned, temperature is 1. Each batch is sampled at
two lengths, 16 and --output-tokens, after a warm-up; the difference is decoding alone. Decode
tokens/s is batch * (long - 16) / (time of long - time of 16), the median of the repeats; prefill is
the rest of the short time; "all" is every sampled token by the whole long time. Batches go up; one
that is foreseen to end beyond --seconds of sampling is skipped, and the table says so.

Starting an engine takes longer than measuring it, and one that starts disturbs what is measured
beside it. With --lock FILE several of these programs share a GPU, each with the cache that --kv-gib
gives it: an engine that has started adds a line to FILE and waits for its lock to measure alone.
Hold the lock (flock) of an empty FILE until all lines are there, and nobody starts while another
measures; --start-seconds has to last for the wait, too.
--start-only fills vLLM's and Humming's caches, for measuring later.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import (
    ChildFailed,
    Column,
    Report,
    add_cpu_flag,
    checkpoint,
    device_of,
    integers,
    run_child,
    send,
    several,
    spread,
    workplace,
)
from benchmarks.memory import GIB
from benchmarks.shapes import SHAPES, fused_groups

PRECISIONS = {"nvfp4": "nvfp4", "bf16": "bf16", "nf4": "bf16"}  # arm -> checkpoint
STOCK = "-stock"
ARMS = [*PRECISIONS, *(f"{arm}{STOCK}" for arm in PRECISIONS)]
SHORT = 16  # tokens of the short completions
SIGMA = 1e-2  # of --noise
GRACE = 60  # seconds that an engine may overrun before it is killed
COLUMNS = [
    Column("shape", "shape", 12),
    Column("arm", "arm", 11),
    Column("rank", "rank", 4, "d"),
    Column("batch", "batch", 5, "d"),
    Column("decode_tokens_per_s", "decode tok/s", 12, ".0f"),
    Column("spread_percent", "spread %", 8, ".1f"),
    Column("step_ms", "ms a step", 9, ".2f"),
    Column("prefill_tokens_per_s", "prefill tok/s", 13, ".0f"),
    Column("tokens_per_s", "all tok/s", 9, ".0f"),
    Column("weights_gib", "weights GiB", 11, ".2f"),
    Column("start_s", "start s", 7, ".0f"),
    Column("note", "", 0),
]
# Token ids of the completions of a batch of prompts, at a length.
Generate = Callable[[list[list[int]], int], list[list[int]]]
Switch = Callable[[int], None]  # to an adapter of a rank, or off (0)


class Prompts:
    """Random prompts; no two begin with the same token."""

    def __init__(self, vocabulary: int, length: int, seed: int = 0):
        import torch

        self.vocabulary, self.length = vocabulary, length
        self.generator = torch.Generator().manual_seed(seed)
        self.first = torch.randperm(vocabulary, generator=self.generator).tolist()

    def take(self, count: int) -> list[list[int]]:
        import torch

        if count > len(self.first):
            raise ValueError(f"no first tokens left of {self.vocabulary}: use fewer batches")
        shape = (count, self.length - 1)
        rest = torch.randint(self.vocabulary, shape, generator=self.generator).tolist()
        return [[self.first.pop(), *tokens] for tokens in rest]


def timed(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of one call; RuntimeError when a completion has another length."""
    started = time.perf_counter()
    made = generate(prompts, tokens)
    seconds = time.perf_counter() - started
    lengths = {len(ids) for ids in made}
    if len(made) != len(prompts) or lengths != {tokens}:
        raise RuntimeError(f"{len(made)} completions of {lengths} tokens: expected {tokens} each")
    return seconds


def measure_batch(generate: Generate, prompts: Prompts, batch: int, job: dict) -> dict:
    """One row: the warm-up, then the short and the long completions `repeats` times."""
    timed(generate, prompts.take(batch), SHORT)
    pairs = [
        tuple(timed(generate, prompts.take(batch), tokens) for tokens in (SHORT, job["output"]))
        for _ in range(job["repeats"])
    ]
    return speeds(pairs, batch, job["prompt"], job["output"])


def speeds(pairs: list[tuple[float, float]], batch: int, prompt: int, output: int) -> dict:
    """Speeds from (seconds of the short, seconds of the long completions), one pair a repeat."""
    steps = [(long - short) / (output - SHORT) for short, long in pairs]
    if min(steps) <= 0:
        return {"batch": batch, "note": "too fast to tell from noise: raise --output-tokens"}
    decode = [batch / step for step in steps]
    # The prompts' pass gives the first token, SHORT - 1 steps the others.
    shorts = statistics.median(short for short, _ in pairs)
    prefill = shorts - (SHORT - 1) * statistics.median(steps)
    return {
        "batch": batch,
        "decode_tokens_per_s": statistics.median(decode),
        "spread_percent": spread(decode),
        "step_ms": statistics.median(steps) * 1e3,
        "prefill_tokens_per_s": batch * prompt / prefill if prefill > 0 else None,
        "tokens_per_s": batch * output / statistics.median(long for _, long in pairs),
        "seconds_short_long": pairs,
    }


def foreseen(batch: int, done: list[tuple[int, float]]) -> float:
    """Seconds that a batch will take, from the (batch, seconds) before it: a line through two."""
    if len(done) < 2:
        return done[-1][1] if done else 0.0
    (b0, t0), (b1, t1) = done[-2:]
    return t1 + max(t1 - t0, 0.0) / (b1 - b0) * (batch - b1)


def measure_batches(generate: Generate, prompts: Prompts, job: dict):
    """Rows of all batches, in order; a skipped one has a note instead of speeds."""
    started, done = time.perf_counter(), []
    for batch in sorted(set(job["batches"])):
        spent, needed = time.perf_counter() - started, foreseen(batch, done)
        if spent + needed > job["seconds"]:
            times = f"{spent:.0f} s spent, about {needed:.0f} s more, limit {job['seconds']:g} s"
            yield {"batch": batch, "note": f"skipped: {times}"}
            continue
        yield measure_batch(generate, prompts, batch, job)
        done.append((batch, time.perf_counter() - started - spent))


def random_adapter(job: dict, rank: int):
    """A LoRA adapter on every projection of the job's model."""
    import torch

    from qerl.adapter import Adapter

    shape = model_shape(job)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for linear in (li for group in fused_groups(shape) for li in group):
            name = f"base_model.model.model.layers.{layer}.{linear.name}"
            for factor, size in (("A", (rank, linear.columns)), ("B", (linear.rows, rank))):
                drawn = torch.empty(size, dtype=torch.bfloat16, device=job["device"])
                tensors[f"{name}.lora_{factor}.weight"] = drawn.normal_(0, 0.01)
    return Adapter(tensors, rank, rank)


def model_shape(job: dict) -> dict:
    shape = dict(SHAPES[job["shape"]])
    shape["num_hidden_layers"] = job["layers"] or shape["num_hidden_layers"]
    return shape


def build_ours(job: dict) -> tuple[Generate, Switch, object]:
    """The trainer's engine: its sampling, its adapter's switch, and vLLM's LLM inside it."""
    from qerl.noise import Noise
    from qerl.policy import TARGETS
    from qerl.rollout import EngineSettings, Sampling

    settings = EngineSettings(
        model=job["folder"],
        max_model_len=job["prompt"] + job["output"],
        max_num_seqs=max(job["batches"]),
        lora_rank=job["rank"],
        lora_modules=TARGETS,
        nf4=job["arm"] == "nf4",
        noise=job["noise"],
        gpu_memory_utilization=job["gpu_memory"],
        kv_cache_gib=job["kv_gib"] or 0.0,
        linear_backend=job["linear_backend"],
        compile=not job["no_compile"],
    )
    engine = patched_engine(settings, job)
    noise = Noise(seed=0, step=1, sigma=SIGMA) if job["noise"] else None

    held = job["rank"]

    def switch(rank: int):
        nonlocal held
        engine.sync(None, noise)
        if rank not in (0, held):
            resize_slots(engine.llm, rank)
            held = rank
        engine.sync(random_adapter(job, rank) if rank else None, noise)

    def generate(prompts, tokens):
        return [c.token_ids for c in engine.generate(prompts, Sampling(tokens), seed=0)]

    return generate, switch, engine.llm


def resize_slots(llm, rank: int) -> None:
    """Turn an engine whose adapter is off into one built for adapters of another rank.

    Not one that torch.compile has seen: its code holds the old slots.
    """
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    from qerl.config import LORA_SLOTS
    from qerl.rollout.lora import join_factors

    rank = min(slot for slot in LORA_SLOTS if slot >= rank)
    runner = worker(llm).model_runner
    modules = runner.lora_manager._adapter_manager.modules.values()
    for module in modules:
        a_parts, b_parts = module.lora_a_stacked, module.lora_b_stacked
        module.lora_a_stacked = tuple(a.new_zeros(1, 1, rank, a.shape[-1]) for a in a_parts)
        module.lora_b_stacked = tuple(b.new_zeros(1, 1, b.shape[-2], rank) for b in b_parts)
    join_factors(modules)
    CUDAGraphWrapper.clear_all_graphs()  # they read the factors that were
    if manager := getattr(runner, "cudagraph_manager", None):  # of vLLM's second model runner
        manager.graphs.clear()
    runner.capture_model()


def patched_engine(settings, job: dict):
    """The Engine, with CUDA graphs of few sizes, and sampling past the end of text.

    Training has no use for either, so vllm.LLM and vllm.SamplingParams are replaced, which the
    Engine looks up at each call. SamplingParams comes last: vLLM needs its own while it starts.
    """
    import vllm

    from qerl.rollout import Engine

    vllm.LLM = functools.partial(with_options, vllm.LLM, vllm_options(job))
    engine = Engine(settings)
    vllm.SamplingParams = functools.partial(vllm.SamplingParams, ignore_eos=True)
    return engine


def with_options(build: Callable, options: dict, **named):
    """build(**named) with `options` added and both compilation configs merged."""
    both = [given.get("compilation_config") or {} for given in (options, named)]
    return build(**options | named | {"compilation_config": both[0] | both[1]})


def vllm_options(job: dict) -> dict:
    """What an arm asks of vLLM, whoever builds it."""
    sizes = {"cudagraph_capture_sizes": sorted(set(job["batches"]))}
    options = {} if job["device"] == "cpu" else {"compilation_config": sizes}
    if job["kv_gib"]:
        options["kv_cache_memory_bytes"] = int(job["kv_gib"] * GIB)
    return options


def build_stock(job: dict) -> tuple[Generate, Switch, object]:
    """vLLM as it comes, in the environment that qerl.rollout sets for training."""
    from qerl import rollout  # noqa: F401  for that environment

    llm = vllm_engine(job, lora_options(job["rank"]))
    wanted = None

    def switch(rank: int):
        nonlocal wanted
        wanted = adapter_request(job) if rank else None

    def generate(prompts, tokens):
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=wanted)
        return [output.outputs[0].token_ids for output in outputs]

    return generate, switch, llm


def lora_options(rank: int) -> dict:
    """vLLM's arguments for one adapter slot; none for rank 0."""
    from qerl.config import LORA_SLOTS

    if not rank:
        return {}
    slot = min(size for size in LORA_SLOTS if size >= rank)
    return {"enable_lora": True, "max_lora_rank": slot}


def vllm_engine(job: dict, lora: dict):
    """vLLM's LLM with the limits, seed and log-probabilities of the trainer's engine."""
    from vllm import LLM

    if job["device"] == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return LLM(
        model=job["folder"],
        dtype="bfloat16",
        max_model_len=job["prompt"] + job["output"],
        max_num_seqs=max(job["batches"]),
        gpu_memory_utilization=job["gpu_memory"],
        seed=0,
        enforce_eager=job["device"] == "cpu",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        quantization="bitsandbytes" if job["arm"].startswith("nf4") else None,
        **vllm_options(job),
        **lora,
    )


def adapter_request(job: dict):
    """A random adapter in a PEFT folder, as vLLM's users name it."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    adapter, folder = random_adapter(job, job["rank"]), Path(job["adapter_folder"])
    tensors = {name: tensor.cpu() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("random", 1, str(folder))


def weights_gib(llm) -> float:
    """The memory of the engine's weights as vLLM measured it while it loaded them."""
    return worker(llm).model_runner.model_memory_usage / GIB


def worker(llm):
    """vLLM's worker of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def child(job: dict) -> None:
    """One engine: start it, measure every batch without and with the adapter, send the rows."""
    started = time.perf_counter()
    build = build_stock if job["arm"].endswith(STOCK) else build_ours
    with tempfile.TemporaryDirectory() as folder:
        generate, switch, llm = build(job | {"adapter_folder": folder})
        start_s = time.perf_counter() - started
        weights = weights_gib(llm) if job["device"] == "cuda" else None
        if job["start_only"]:
            send(job, {"start_s": start_s, "weights_gib": weights, "note": "started"})
            return
        prompts = Prompts(SHAPES[job["shape"]]["vocab_size"], job["prompt"])
        with alone(job["lock"]):
            for rank in job["measured"]:
                switch(rank)
                for row in measure_batches(generate, prompts, job):
                    send(job, row | {"rank": rank, "start_s": start_s, "weights_gib": weights})


@contextmanager
def alone(lock: str | None):
    """Say in the lock file, if one is given, that this engine has started, and wait to hold it."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        file.write("started\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def engines(ranks: list[int], shared: bool = False) -> list[tuple[int, list[int]]]:
    """The rank that each engine is built for, and the ranks that are measured in it."""
    above = sorted(set(ranks) - {0})
    if shared:
        return [(max(ranks), sorted(set(ranks)))]
    if not above:
        return [(0, [0])]
    return [(rank, [0, rank] if rank == above[0] and 0 in ranks else [rank]) for rank in above]


def measure(args: argparse.Namespace, engine: dict, place: Path):
    """The rows of an engine; one that fails ends with a row that says so."""
    names = "batches prompt repeats seconds noise no_compile gpu_memory layers device".split()
    job = engine | {name: getattr(args, name) for name in names}
    job |= {"output": args.output_tokens, "linear_backend": args.linear_backend}
    job |= {"lock": args.lock, "kv_gib": args.kv_gib, "start_only": args.start_only}
    precision = PRECISIONS[engine["arm"].removesuffix(STOCK)]
    limit = args.start_seconds + args.seconds * len(engine["measured"]) + GRACE
    try:
        folder = checkpoint(place, engine["shape"], precision, args.layers)
        for row in run_child("benchmarks.rollout", job | {"folder": str(folder)}, limit):
            yield engine | row
    except ChildFailed as failure:
        yield engine | {"failed": True, "note": str(failure)}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--shapes", type=several(*SHAPES), default=["qwen2.5-7b"], help="default: qwen2.5-7b")
    add("--arms", type=several(*ARMS), default=list(PRECISIONS), help=f"of {','.join(ARMS)}")
    add("--ranks", type=integers, default=[0, 32], help="of the adapter, 0: none (0,32)")
    add("--batches", type=integers, default=[1, 8, 32, 64, 128, 256], help="sequences at once")
    add("--prompt", type=int, default=256, help="tokens a prompt (256)")
    add("--output-tokens", type=int, default=256, help="tokens a completion (256)")
    add("--repeats", type=int, default=2, help="of each batch (2)")
    add("--seconds", type=float, default=60, help="of sampling at one rank; more is skipped (60)")
    add("--start-seconds", type=float, default=240, help="an engine may take to start (240)")
    add("--gpu-memory", type=float, default=0.85, help="vLLM's share of the GPU's memory (0.85)")
    add("--kv-gib", type=float, help="memory of the KV cache, whatever --gpu-memory says")
    add("--start-only", action="store_true", help="fill the caches of a first start; no speeds")
    add("--lock", help="file to lock while measuring, one for each GPU")
    add("--noise", action="store_true", help=f"sample under AQN, sigma {SIGMA}; not the stock arms")
    add("--no-compile", action="store_true", help="as train's --compile False; not the stock arms")
    add("--linear-backend", default="auto", help="nvfp4: vLLM's name of a kernel (the engine's)")
    add("--layers", type=int, help="number of layers (default: the model's)")
    add("--folder", type=Path, help="keep checkpoints here and use those that are there")
    add("--output", type=Path, help="write every row to this JSON file")
    add("--child", help=argparse.SUPPRESS)
    add_cpu_flag(parser)
    args = parser.parse_args(argv)
    if args.output_tokens <= SHORT or args.prompt < 1 or min(args.batches) < 1:
        parser.error(f"expected --output-tokens above {SHORT}, --prompt and --batches from 1")
    if args.child is None:
        args.device = device_of(args, parser)
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.child is not None:
        child(json.loads(args.child))
        return 0
    names = "prompt output_tokens repeats noise no_compile linear_backend layers".split()
    report = Report(COLUMNS, args.output, {name: getattr(args, name) for name in names})
    for shape in args.shapes:
        with workplace(args.folder) as place:  # temporary checkpoints go before the next are made
            for arm in args.arms:
                shared = args.no_compile and not arm.endswith(STOCK)
                for rank, measured in engines(args.ranks, shared):
                    engine = {"shape": shape, "arm": arm, "rank": rank, "measured": measured}
                    for row in measure(args, engine, place):
                        report.add(row)
    return int(any(row.get("failed") for row in report.data["rows"]))


if __name__ == "__main__":
    sys.exit(main())
