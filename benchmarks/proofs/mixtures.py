"""The mixtures of experts of transformers: every architecture with an `ep_plan`, with a tiny configuration of each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SIZES: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
"""What the configurations that have the setting are given."""

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

_LATENT = {"num_key_value_heads": 4}

MORE: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
        ),
        _LATENT,
    ),
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "head_dim": None,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 256,
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "zaya": {"num_experts_per_tok": 1},
}
"""What single architectures need beside `SIZES`, so that they have experts among others; None leaves a setting out."""


DRAWN = {
    "phimoe": "its router draws the experts of a token at random while it trains, so that no run repeats"
}
"""Why single architectures cannot be proven."""


def architectures(asked: Callable[[str], bool] = lambda kind: True) -> dict[str, str]:
    """The `model_type` of every configuration with an `ep_plan`, of those asked for, in alphabetical order, with the reason
    why it makes no causal language model, or cannot be proven; an empty text where it can. Each is imported, which takes seconds
    for all.
    """
    import transformers

    causal = transformers.AutoModelForCausalLM._model_mapping
    found = {}
    for kind in sorted(filter(asked, transformers.CONFIG_MAPPING.keys())):
        config = transformers.CONFIG_MAPPING[kind]
        if getattr(config, "base_model_ep_plan", None):
            alone = causal.get(config, None) is not None
            found[kind] = (
                DRAWN.get(kind, "")
                if alone
                else "a part of a larger model: transformers has no causal language model of it alone"
            )
    return found


def settings(kind: str) -> dict[str, Any]:
    """The tiny configuration of an architecture."""
    import transformers

    known = {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    given = {**{key: value for key, value in SIZES.items() if key in known}, **MORE.get(kind, {})}
    return {"model_type": kind, **{key: value for key, value in given.items() if value is not None}}


def override(kind: str) -> str:
    """The configuration as an override of the command line."""
    return f"model.config={_word(settings(kind))}"


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_word(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
