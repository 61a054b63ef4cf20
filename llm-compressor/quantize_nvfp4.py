"""Quantizes a 16-bit model to an NVFP4A16 checkpoint folder.

Every Linear layer but lm_head goes to NVFP4 by round to nearest (rtn: no calibration data), with
llm-compressor. The folder appears under its name only once qerl.checkpoint finds it sound, so that
an interrupted run leaves nothing that looks finished. The paper calibrates with AWQ (arXiv
2510.11696); this does not, and says so in the folder's name.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

METHOD = "rtn"
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
)


def default_output(model: str) -> Path:
    """`<model>-NVFP4A16-rtn` in the current folder."""
    return Path(f"{Path(model).resolve().name}-NVFP4A16-{METHOD}")


def find(model: str, output: Path) -> Path:
    """The folder of a 16-bit model whose quantized form can be written to `output`.

    Raises ValueError, ahead of any work, when there is no such model, when it is quantized
    already, or when `output` exists.
    """
    from qerl import checkpoint

    if output.exists():
        raise ValueError(f"{output} is there already: remove it, or give another --output")
    source = checkpoint.resolve(model)
    checkpoint.require(source, nvfp4=False)
    return source


def quantize(source: Path, folder: Path) -> None:
    """Write the NVFP4A16 form of the 16-bit model in `source` to `folder`."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    # compressed-tensors compiles its rounding, for 10 s and the same bits.
    with torch.compiler.set_stance("force_eager"):
        oneshot(model=model, recipe=recipe)
        model.save_pretrained(folder, save_compressed=True)
    for pattern in KEPT:
        for file in source.glob(pattern):
            shutil.copy(file, folder)


def write(source: Path, output: Path) -> list[str]:
    """Make `output` by one rename; else return what is wrong with what was written."""
    from qerl import checkpoint

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        whole = Path(temporary) / output.name
        quantize(source, whole)
        faults = [str(problem) for problem in checkpoint.problems(whole)]
        if not faults:
            whole.rename(output)
    return faults


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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--model", required=True, help="Hugging Face id or folder of a 16-bit model")
    made.add_argument("--output", type=Path, help="folder to write [./<model>-NVFP4A16-rtn]")
    made.add_argument(
        "--skip-generation", action="store_true", help="do not let the result answer a question"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: written and sound, 1: what was written was not sound, 2: nothing to do."""
    args = parser().parse_args(argv)
    output = args.output or default_output(args.model)
    try:
        source = find(args.model, output)
    except ValueError as error:
        print(f"quantize_nvfp4.py: {error}", file=sys.stderr)
        return 2
    faults = write(source, output)
    for fault in faults:
        print(f"quantize_nvfp4.py: not written, {fault}", file=sys.stderr)
    if faults:
        return 1
    print(f"{output}: written and sound")
    if not args.skip_generation:
        print(f"a sample of it: {sample(output)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
