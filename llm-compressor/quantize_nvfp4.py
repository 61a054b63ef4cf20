"""Quantizes a 16-bit model to an NVFP4A16 checkpoint folder.

Every Linear layer but lm_head goes to NVFP4. rtn and mse round each weight on its own, in one pass
over the files (stream.py); gptq and awq look at what calibration tokens make of the model
(calibrated.py). The folder appears under its name only once qerl.checkpoint finds it sound, so that
an interrupted run leaves nothing that looks finished; quantization.json in it says how it was made.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from calibration import Calibration

METHODS = {
    "rtn": "round to nearest",
    "mse": "round to nearest, under the block scales that leave the least error",
    "gptq": "each column makes up for the error of those before it, on calibration data",
    "awq": "scale moves from activations into weights, on calibration data",
}
CALIBRATED = ("gptq", "awq")
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors", "safetensors")
# Kept byte for byte: saving a tokenizer anew can change it.
KEPT = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
CARD = "README.original.md"  # the model card of the 16-bit model: it names the licence
RECORD = "quantization.json"
WORST = 5  # layers shown
WIDTH = {"F32": 4}  # bytes of a weight, where it is not 2


class Plan(NamedTuple):
    """What is to be done, checked."""

    model: str  # as the user named it
    source: Path  # its folder
    output: Path
    method: str
    layers: tuple[str, ...]  # names of the Linear layers to quantize
    calibration: Calibration | None

    @property
    def revision(self) -> str | None:
        """The hub's commit of the source, where it is a download of the hub's."""
        return self.source.name if self.source.parent.name == "snapshots" else None


def default_output(model: str, method: str) -> Path:
    """`<model>-NVFP4A16-<method>` in the current folder."""
    return Path(f"{Path(model).resolve().name}-NVFP4A16-{method}")


def find(args: argparse.Namespace) -> Plan:
    """The plan for these arguments.

    Raises ValueError, ahead of any work, for a model that is not there, is quantized already or
    cannot be quantized, for an output that exists or cannot be written, and for calibration data
    that cannot be used.
    """
    from qerl import checkpoint

    output = args.output or default_output(args.model, args.method)
    named = re.search(r"-NVFP4A16-(\w+)$", output.name)
    if named and named[1] in METHODS and named[1] != args.method:
        raise ValueError(
            f"--output {output} says {named[1]} and --method is {args.method}: a checkpoint's name "
            "says how it was made"
        )
    checkpoint.require_new(output)
    calibration = find_calibration(args)
    source = checkpoint.resolve(args.model)
    checkpoint.require(source, nvfp4=False)
    return Plan(args.model, source, output, args.method, find_layers(source), calibration)


def find_calibration(args: argparse.Namespace) -> Calibration | None:
    """What to calibrate on. Raises ValueError where the method needs it or has no use for it."""
    if args.method not in CALIBRATED:
        if args.calibration:
            raise ValueError(f"--method {args.method} takes no --calibration: leave it out")
        return None
    from calibration import Calibration, check

    if not args.calibration:
        raise ValueError(f"--method {args.method} needs --calibration: data like the rollouts")
    wanted = Calibration(args.calibration, args.num_samples, args.sequence_length, args.seed)
    check(wanted)
    return wanted


def find_layers(source: Path) -> tuple[str, ...]:
    """Names of the Linear layers but lm_head. Raises ValueError if one cannot be quantized."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from qerl import checkpoint, nvfp4

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linears.pop("lm_head", None)
    headers = checkpoint.describe(source).headers
    for name, module in linears.items():
        if f"{name}.weight" not in headers:
            raise ValueError(f"{source}: the files lack {name}.weight, which config.json asks for")
        if module.in_features % nvfp4.BLOCK:
            raise ValueError(
                f"{source}: {name} has {module.in_features} inputs, and NVFP4 needs a multiple of "
                f"{nvfp4.BLOCK}: this model cannot be quantized"
            )
    return tuple(linears)


def calibration_tokens(plan: Plan) -> torch.Tensor | None:
    """The sequences of the plan's calibration, int64 [samples, length]; None where it has none.

    Raises ValueError and ConnectionError as `calibration.sequences` does.
    """
    if plan.calibration is None:
        return None
    from transformers import AutoTokenizer

    import calibration

    return calibration.sequences(plan.calibration, AutoTokenizer.from_pretrained(plan.source))


def quantize(plan: Plan, tokens_ST: torch.Tensor | None, folder: Path) -> None:
    """Write the whole checkpoint of `plan` to `folder`."""
    folder.mkdir()
    for pattern in KEPT:
        for file in plan.source.glob(pattern):
            shutil.copy(file, folder)
    if (plan.source / "README.md").exists():
        shutil.copy(plan.source / "README.md", folder / CARD)
    if tokens_ST is None:
        errors = stream_through(plan, folder)
    else:
        import calibrated

        errors = calibrated.quantize(plan.source, folder, plan.method, tokens_ST)
    (folder / RECORD).write_text(json.dumps(record(plan, errors), indent=2) + "\n")
    print_errors(errors)


def stream_through(plan: Plan, folder: Path) -> dict[str, float]:
    from tqdm import tqdm

    import stream
    from qerl import checkpoint

    with tqdm(total=len(plan.layers), unit="layer", desc=plan.method) as bar:
        source = checkpoint.describe(plan.source)
        return stream.quantize(source, plan.layers, plan.method, folder, bar.update)


def record(plan: Plan, errors: dict[str, float]) -> dict:
    """What quantization.json holds: enough to make the folder again, and what it cost."""
    return {
        "method": plan.method,
        "model": plan.model,
        "revision": plan.revision,
        "calibration": plan.calibration and plan.calibration._asdict(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "weight_error": errors,
    }


def print_errors(errors: dict[str, float]) -> None:
    mean = sum(errors.values()) / len(errors)
    print(
        f"relative weight error ||W - Q|| / ||W||: mean of {len(errors)} layers {mean:.4f}, worst"
    )
    for layer in sorted(errors, key=errors.get, reverse=True)[:WORST]:
        print(f"  {errors[layer]:.4f}  {layer}")


def describe(plan: Plan) -> str:
    """What would be done, from the files' headers alone."""
    from qerl import checkpoint

    headers = checkpoint.describe(plan.source).headers
    before = sum((plan.source / file).stat().st_size for file in {h.file for h in headers.values()})
    weights = [headers[f"{layer}.weight"] for layer in plan.layers]
    saved = sum(math.prod(w.shape) * (WIDTH.get(w.dtype, 2) - 4.5 / 8) for w in weights)
    lines = {
        "model": f"{plan.source}, {before / 1e9:.2f} GB",
        "revision": plan.revision or "not known: no download of the hub's",
        "method": f"{plan.method}: {METHODS[plan.method]}",
        "calibration": plan.calibration or "none",
        "layers": f"{len(weights)} in 4 bits, {sum(math.prod(w.shape) for w in weights):,} weights",
        "output": f"{plan.output}, about {(before - saved) / 1e9:.2f} GB",
    }
    return "\n".join(f"{name:12} {value}" for name, value in lines.items())


def sample(folder: Path) -> str:
    """A greedy answer of the quantized model, at most 32 tokens, through plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="auto")
    question = "What is the capital of France?"
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": question}]
        question = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(question, return_tensors="pt", return_token_type_ids=False).to(model.device)
    answer = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def modes() -> argparse.ArgumentParser:
    """The flags that can do without --model, for a finished checkpoint."""
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    one = made.add_mutually_exclusive_group()
    one.add_argument(
        "--repair",
        metavar="FOLDER",
        help="instead of quantizing: write this NVFP4 checkpoint anew, fused layers under one "
        "scale and in the standard form, to --output [FOLDER-repaired]",
    )
    one.add_argument(
        "--verify",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="compare vLLM's log-probabilities with the trainer's: after quantizing, with --model; "
        "instead of it, for this FOLDER (and its --original)",
    )
    return made


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[modes()])
    made.add_argument("--model", required=True, help="Hugging Face id or folder of a 16-bit model")
    made.add_argument("--output", type=Path, help="folder to write [./<model>-NVFP4A16-<method>]")
    made.add_argument(
        "--method",
        choices=METHODS,
        default="rtn",
        help="; ".join(f"{name}: {what}" for name, what in METHODS.items()) + " [rtn]",
    )
    made.add_argument(
        "--calibration",
        metavar="DATA",
        help="for gptq and awq: a data set of qerl.train's --dataset, a .jsonl or .txt file, or "
        "'random' for random tokens as a last resort",
    )
    made.add_argument("--num-samples", type=int, default=256, help="calibration sequences [256]")
    made.add_argument("--sequence-length", type=int, default=512, help="tokens in each [512]")
    made.add_argument("--seed", type=int, default=0, help="of the choice of sequences [0]")
    made.add_argument("--dry-run", action="store_true", help="check, and say what would be done")
    made.add_argument(
        "--skip-generation", action="store_true", help="do not let the result answer a question"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: written and sound, 1: what was written was not sound, 2: nothing to do."""
    mode, rest = modes().parse_known_args(argv)
    if mode.repair:
        import repair

        return repair.main([mode.repair, *rest])
    if mode.verify:
        import verify

        return verify.main([mode.verify, *rest])
    args = parser().parse_args(argv)
    try:
        plan = find(args)
        print(describe(plan), flush=True)
        if args.dry_run:
            return 0
        tokens_ST = calibration_tokens(plan)
    except (ConnectionError, ValueError) as error:
        print(f"quantize_nvfp4.py: {error}", file=sys.stderr)
        return 2
    return make(plan, tokens_ST, args)


def make(plan: Plan, tokens_ST: torch.Tensor | None, args: argparse.Namespace) -> int:
    """Write the checkpoint, then sample from it and verify it where asked; the exit status."""
    from qerl import checkpoint

    faults = checkpoint.write(plan.output, lambda folder: quantize(plan, tokens_ST, folder))
    for fault in faults:
        print(f"quantize_nvfp4.py: not written, {fault}", file=sys.stderr)
    if faults:
        return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{plan.output}: written and sound; peak RAM {peak / 1e9:.1f} GB, mapped files included")
    if not args.skip_generation:
        print(f"a sample of it: {sample(plan.output)!r}")
    if args.verify is not None:
        import verify

        return verify.main([str(plan.output), "--original", str(plan.source)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
