"""Compares an NVFP4 checkpoint in vLLM with the same in the trainer, and with its original.

All score one fixed English text. Where the two loaders disagree (mean |difference| of their
log-probabilities above qerl.parity's LIMIT), sampler and trainer would be two policies. The
distance from the 16-bit model is what quantizing cost on this one text: a sign of life, no
benchmark.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from qerl import checkpoint, policy
from qerl.parity import LIMIT
from qerl.rollout import Engine, EngineSettings
from repair import note

TEXT = """The water in the glass was still, and on the table beside it lay two letters, one open and
one sealed. If a train leaves the city at noon and travels 60 miles an hour, it has gone 90 miles by
half past one; the second train, which leaves an hour later and is twice as fast, has by then gone
60. She counted the stamps again: 12 on the first page, 15 on the second, 27 in all. Nobody had told
her that the shop would close at five, so she walked back along the river, past the mill and the old
bridge, and thought about what she would say. "Of course," he answered, "the sum of two odd numbers
is even, and you knew that before you asked me." """


def verify(folder: Path, original: Path | None = None) -> dict:
    """Score TEXT by the trainer, by vLLM and, if given, by the 16-bit model in `original`.

    The gaps are of log-probabilities, in nats a token. Raises ValueError as `checkpoint.require`.
    """
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    scores = {"original": _trainer(original, ids)} if original is not None else {}
    # The engine last: it keeps its share of the GPU.
    scores |= {"trainer": _trainer(folder, ids), "engine": _engine(folder, ids)}
    perplexity = {name: logps_T.mean().neg().exp().item() for name, logps_T in scores.items()}
    found = {"tokens": len(ids), "limit": LIMIT, "perplexity": perplexity}
    for other in scores.keys() - {"trainer"}:
        found[f"trainer_{other}"] = _gap(scores["trainer"], scores[other])
    return found


def agree(found: dict) -> bool:
    """Whether the two loaders do; NaN does not agree."""
    return found["trainer_engine"]["mean"] <= LIMIT


def report(found: dict) -> str:
    """The gaps as lines to print."""
    names = {"trainer_engine": "trainer and vLLM", "trainer_original": "trainer and 16-bit model"}
    lines = [
        f"{name}: mean gap {found[key]['mean']:.4f}, largest {found[key]['max']:.3f}"
        for key, name in names.items()
        if key in found
    ]
    perplexity = ", ".join(f"{name} {value:.3f}" for name, value in found["perplexity"].items())
    return "\n".join([*lines, f"perplexity of {found['tokens']} tokens: {perplexity}"])


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: the loaders agree, 1: they do not or the folder is unsound, 2: no such one."""
    parser = argparse.ArgumentParser("verify", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="NVFP4 checkpoint folder")
    parser.add_argument("--original", help="Hugging Face id or folder of its 16-bit model")
    args = parser.parse_args(argv)
    try:
        checkpoint.require(args.folder, nvfp4=True)
        original = args.original and checkpoint.resolve(args.original)
        if original:
            checkpoint.require(original, nvfp4=False)
    except ValueError as problem:
        print(f"verify: {problem}", file=sys.stderr)
        return 2
    faults = checkpoint.problems(args.folder)
    for fault in faults:
        print(f"verify: {fault}", file=sys.stderr)
    if faults:
        return 1
    found = verify(args.folder, original)
    print(report(found), flush=True)
    try:
        note(args.folder, "verified", found)
    except OSError as error:  # another user's folder, or a full disk
        print(f"verify: not noted in the folder: {error}", file=sys.stderr)
    if not agree(found):
        print(f"verify: the two loaders disagree (limit {LIMIT})", file=sys.stderr)
        return 1
    return 0


def _trainer(folder: Path, ids: list[int]) -> torch.Tensor:
    """log p of every token but the first [T-1], float64, as the trainer computes it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (logps,) = policy.score(policy.load(str(folder), device), [ids])
    torch.cuda.empty_cache()
    return torch.tensor(logps, dtype=torch.float64)


def _engine(folder: Path, ids: list[int]) -> torch.Tensor:
    """The same as vLLM computes it."""
    settings = EngineSettings(
        str(folder), len(ids) + 1, max_num_seqs=1, gpu_memory_utilization=0.8, enforce_eager=True
    )
    (logps,) = Engine(settings).score([ids])
    return torch.tensor(logps, dtype=torch.float64)


def _gap(ours_T: torch.Tensor, theirs_T: torch.Tensor) -> dict[str, float]:
    gaps_T = (ours_T - theirs_T).abs()
    return {"mean": gaps_T.mean().item(), "max": gaps_T.max().item()}


if __name__ == "__main__":
    sys.exit(main())
