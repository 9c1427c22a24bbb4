"""Models of transformers on meta, as small as they can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def settings(kind: str, **more: Any) -> dict[str, Any]:
    """The sizes that a family's configuration has."""
    import dataclasses

    import transformers

    known = {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    return {**{k: v for k, v in SIZES.items() if k in known}, **more}


def small(kind: str, **more: Any) -> nn.Module:
    """A causal language model of a family on meta."""
    from parallelizer.hugging_face import causal_lm

    with torch.device("meta"):
        return causal_lm(config={"model_type": kind, **settings(kind, **more)})
