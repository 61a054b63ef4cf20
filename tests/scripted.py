"""Whole runs of qerl.train in seconds: real TRL on a random model of two layers, no vLLM.

The engine says what a script tells it to, and gives each token the probability that the policy in
training gives it, so that sampler and trainer agree as well as bf16 lets them. Completions are
what a test is about here; how they come about is test_rollout.py's and test_trainer.py's matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from qerl import parity, policy, train
from qerl.rollout import Applied, Completion

PAD, BOS, EOS = 0, 1, 2  # EOS is tiny.model's
FLAGS = """
--precision bf16 --dataset arithmetic --reward digit_reward:digits --no-ln --max-steps 1
--per-device-train-batch-size 4 --num-generations 2 --max-prompt-length 200
--max-completion-length 8 --learning-rate 1e-3 --warmup-ratio 0 --optim adamw_torch
--gradient-checkpointing False --save-strategy no
""".split()


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, for tiny.model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocabulary |= {letter: index + 3 for index, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )


def folder(path: Path) -> Path:
    """The bf16 checkpoint folder of tiny.model, with the tokenizer."""
    tiny.write_dense(path, "llama", tied=False)
    tokenizer().save_pretrained(path)
    return path


class Engine:
    """Says what `script(call, row)` tells it to: a text, which ends unless it ends with "..."."""

    def __init__(self, script: Callable[[int, int], str], gap: float = 0.0):
        self.script, self.gap = script, gap  # gap: added to every log-probability of a row 0, nats
        self.model = None  # the policy in training
        self.calls = 0
        self.prompts = []  # of each call, as text
        self.seeds = []  # of each call

    def sync(self, adapter, noise=None) -> Applied:
        return Applied(0.0, 0.0, 0)

    def generate(self, prompts, sampling, seed) -> list[Completion]:
        words = tokenizer()
        texts = [self.script(self.calls, row) for row in range(len(prompts))]
        self.prompts.append([words.decode(ids) for ids in prompts])
        self.seeds.append(seed)
        self.calls += 1
        ended = [not text.endswith("...") for text in texts]
        ids = [
            words(text)["input_ids"] + [EOS] * end for text, end in zip(texts, ended, strict=True)
        ]
        scores = policy.score(self.model, [p + c for p, c in zip(prompts, ids, strict=True)])
        rows = zip(ids, scores, ended, strict=True)
        return [
            Completion(c, [s + self.gap * (not row) for s in score[-len(c) :]], end)
            for row, (c, score, end) in enumerate(rows)
        ]

    def sleep(self) -> None:
        pass


def run(monkeypatch, model: Path, output: Path, engine: Engine, *flags: str):
    """`python -m qerl.train` with this engine: its trainer; SystemExit and OSError come through."""
    trainers, build = [], train._build

    def build_and_tell(*args):
        trainers.append(build(*args))
        engine.model = trainers[0].model
        return trainers[0]

    with monkeypatch.context() as patched:
        patched.setattr(parity, "check", lambda *a: "not checked")
        patched.setattr(train, "_engine", lambda config, plan: engine)
        patched.setattr(train, "_build", build_and_tell)
        names = ["--model-name", str(model), "--output-dir", str(output)]
        assert train.main([*names, *FLAGS, *flags]) == 0
    return trainers[0]


def rows(output: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def factors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's A and B by name."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}
