"""The shapes of published models: the values of their config.json that decide speed and memory.

Names and numbers only, importing nothing, so that every benchmark can start from them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
QWEN = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
LLAMA = {
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}
SMOL = {**LLAMA, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}


def _shape(family: dict[str, Any], *values: int | bool) -> dict[str, Any]:
    return {**family, **dict(zip(FIELDS, values, strict=True))}


SHAPES = {
    "smollm2-135m": _shape(SMOL, 576, 1536, 30, 9, 3, 49152, True),
    "qwen2.5-3b": _shape(QWEN, 2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": _shape(QWEN, 3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": _shape(QWEN, 5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": _shape(QWEN, 5120, 27648, 64, 40, 8, 152064, False),
    "llama3-70b": _shape(LLAMA, 8192, 28672, 80, 64, 8, 128256, False),
}


class Linear(NamedTuple):
    """A projection of every layer; its weight is [rows, columns] = [N, K]."""

    name: str
    rows: int
    columns: int


def fused_groups(shape: dict[str, Any]) -> list[list[Linear]]:
    """The projections of one layer; those that an engine fuses stand together."""
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return [
        [
            Linear("self_attn.q_proj", hidden, hidden),
            Linear("self_attn.k_proj", key_value, hidden),
            Linear("self_attn.v_proj", key_value, hidden),
        ],
        [Linear("self_attn.o_proj", hidden, hidden)],
        [
            Linear("mlp.gate_proj", intermediate, hidden),
            Linear("mlp.up_proj", intermediate, hidden),
        ],
        [Linear("mlp.down_proj", hidden, intermediate)],
    ]
