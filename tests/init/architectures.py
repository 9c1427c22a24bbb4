"""The architectures of the survey: what the command line says of each."""

from __future__ import annotations

from pathlib import Path

SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Sizes that most of transformers' configurations call so."""

_GATED = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 256}
_GROUPED = {**_GATED, "num_key_value_heads": 2}

OWN = {
    "Llama of the recipes": "llama_debug",
    "GPT, fused qkv, tied head": "gpt",
    "norms over heads, fused gate": "qwen_like",
    "parallel residual": "parallel",
    "post-norm encoder": "encoder",
    "linears in the block itself": "flat",
    "T5-like encoder and decoder": "t5_like",
    "ViT": "vit",
    "MLP mixer": "mixer",
    "nanoGPT": "nanogpt",
    "experts in a list": "mixture",
}
"""Modules of one's own: their model configs, in `CONF` or shipped."""

CONF = str(Path(__file__).parent / "conf")

_NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_SHARED_HEADS = {**_GROUPED, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip

HUGGING_FACE: dict[str, dict[str, object]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _SHARED_HEADS,
    "mistral": {**_GROUPED, "sliding_window": 8},
    "gemma2": {**_SHARED_HEADS, "sliding_window": 8},
    "gemma3_text": {**_SHARED_HEADS, "sliding_window": 8},
    "phi3": {**_GROUPED, "pad_token_id": 0, "original_max_position_embeddings": 256},
    "gpt2": {
        "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **_NO_DROPOUT,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt_neox": _GATED,
    "opt": {
        **SMALL, "ffn_dim": 64, "max_position_embeddings": 256, "word_embed_proj_dim": 32, "pad_token_id": 1,
        "dropout": 0, "attention_dropout": 0,
    },
    "bloom": {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_SHARED_HEADS, "num_experts": 4, **_EXPERTS},
    "llama4_text": {
        **_SHARED_HEADS, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "pad_token_id": 0,
    },
    "gpt_oss": {**_SHARED_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {
        **_GATED, **_LATENT, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
    "olmo2": _GROUPED,
    "granite": _GROUPED,
    "cohere": _GROUPED,
    "stablelm": _GROUPED,
    "starcoder2": {**_GROUPED, "sliding_window": None, "residual_dropout": 0, "embedding_dropout": 0},
    "falcon": {**SMALL, "alibi": False, "hidden_dropout": 0, "attention_dropout": 0},
    "mpt": {
        "vocab_size": 256, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256,
        "attn_config": "{clip_qkv: 2.0, attn_pdrop: 0}",
    },
    "codegen": {
        "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 256, "n_ctx": 256, "rotary_dim": 4,
        **_NO_DROPOUT, "bos_token_id": 0, "eos_token_id": 0,
    },
    "glm4": {**_SHARED_HEADS, "pad_token_id": 0},
    "smollm3": {**_GROUPED, "pad_token_id": 0},
    "phi": {**_GATED, "resid_pdrop": 0},
    "helium": _SHARED_HEADS,
    "bert": {**_GATED, "is_decoder": True, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
}  # fmt: skip
"""Configurations of transformers, by model_type; without dropout, which would make two runs differ."""


_IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
_SOUND = {key: value for key, value in _IMAGES.items() if key != "image_size"}
_ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_NO_DROPOUT_ENCODER = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_PAIRS = {"vocab_size": 256, "d_model": 32, "dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
for _part in ("encoder", "decoder"):
    _PAIRS |= {
        f"{_part}_layers": 2,
        f"{_part}_attention_heads": 4,
        f"{_part}_ffn_dim": 48,
        f"{_part}_layerdrop": 0.0,
    }

UNSEEN: dict[str, dict[str, object]] = {
    "gptj": {
        "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4, **_NO_DROPOUT,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt_bigcode": {
        "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **_NO_DROPOUT,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "hunyuan_v1_dense": {**_SHARED_HEADS, **_ENDS},
    "modernbert": {
        **_GATED, **_ENDS, "cls_token_id": 0, "sep_token_id": 0, "local_attention": 16, "auto": "AutoModelForMaskedLM",
    },
    "vit": {**_IMAGES, **_NO_DROPOUT_ENCODER, "auto": "AutoModelForImageClassification"},
    "siglip_vision_model": {**_IMAGES, "auto": "AutoModel"},
    "audio-spectrogram-transformer": {
        **_SOUND, **_NO_DROPOUT_ENCODER, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4,
        "auto": "AutoModelForAudioClassification",
    },
    "umt5": {
        "vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
        "auto": "AutoModelForSeq2SeqLM",
    },
    "pegasus": {
        **_PAIRS, "max_position_embeddings": 256, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_eos_token_id": 2, "auto": "AutoModelForSeq2SeqLM",
    },
    "jetmoe": {
        **{key: value for key, value in _GATED.items() if key != "num_attention_heads"}, "num_key_value_heads": 2,
        "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "ernie4_5_moe": {
        **_GROUPED, **_ENDS, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    },
    "falcon_h1": {
        **_SHARED_HEADS, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 8, "mamba_chunk_size": 8, "pad_token_id": 0,
    },
    "lfm2": {**_GROUPED, **_ENDS, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}  # fmt: skip
"""Architectures that nothing was tuned to, of all kinds: the project names them nowhere else. `auto` is the class of
transformers that chooses the model.
"""


_FEW = {"num_experts": 4, **_EXPERTS}
_DROPS = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}

NEXT: dict[str, dict[str, object]] = {
    # dense decoders
    "apertus": _GROUPED,
    "arcee": _GROUPED,
    "cohere2": {**_SHARED_HEADS, "sliding_window": 8},
    "cwm": {**_SHARED_HEADS, **_ENDS, "sliding_window": 8},
    "doge": {**_GROUPED, "keep_window_size": 8},
    "hunyuan_v1_dense": {**_SHARED_HEADS, **_ENDS},
    "gemma": _SHARED_HEADS,
    "glm": {**_SHARED_HEADS, **_ENDS},
    "internlm3": _SHARED_HEADS,
    "jais2": {**_SHARED_HEADS, **_ENDS},
    "hyperclovax": {**_SHARED_HEADS, **_ENDS},
    "mellum": {**_SHARED_HEADS, **_FEW, "sliding_window": 8},
    "nanochat": {**_GROUPED, **_ENDS},
    "gpt_neo": {
        "vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 256, "attention_types": "[[[global, local], 1]]", "window_size": 8,
        "resid_dropout": 0, "embed_dropout": 0, "attention_dropout": 0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "olmo": {**_GROUPED, **_ENDS},
    "persimmon": {**_GATED, "hidden_dropout": 0, "attention_dropout": 0},
    "biogpt": {
        **_GATED, **_ENDS, **_NO_DROPOUT_ENCODER, "layerdrop": 0, "activation_dropout": 0,
    },
    "xglm": {
        "vocab_size": 256, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "layerdrop": 0, **_DROPS,
        "max_position_embeddings": 256,
    },
    "ministral": {**_SHARED_HEADS, "sliding_window": 8},
    "vaultgemma": {**_SHARED_HEADS, "sliding_window": 8},
    # mixtures
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_GROUPED, **_FEW, "shared_expert_intermediate_size": 16},
    "phimoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "dots1": {
        **_SHARED_HEADS, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe": {
        **_SHARED_HEADS, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_moe": {**_SHARED_HEADS, **_ENDS, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {**_SHARED_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "deepseek_v2": {
        **_GATED, **_LATENT, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "flex_olmo": {**_GROUPED, **_ENDS, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "afmoe": {
        **_SHARED_HEADS, **_FEW, "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": 8,
        "global_attn_every_n_layers": 2,
    },
    # encoders
    "distilbert": {
        "vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 256,
        "dropout": 0, "attention_dropout": 0, "auto": "AutoModelForMaskedLM",
    },
    "electra": {**_GATED, **_NO_DROPOUT_ENCODER, "embedding_size": 32, "auto": "AutoModelForMaskedLM"},
    "xlm-roberta": {**_GATED, **_NO_DROPOUT_ENCODER, "pad_token_id": 1, "auto": "AutoModelForMaskedLM"},
    "eurobert": {**_GROUPED, **_ENDS, "mask_token_id": 3, "auto": "AutoModelForMaskedLM"},
    "albert": {**_GATED, **_NO_DROPOUT_ENCODER, "embedding_size": 16, "auto": "AutoModelForMaskedLM"},
    # encoders with a decoder
    "bart": {**_PAIRS, "max_position_embeddings": 256, "auto": "AutoModelForSeq2SeqLM"},
    "m2m_100": {**_PAIRS, "max_position_embeddings": 256, "auto": "AutoModelForSeq2SeqLM"},
    "mt5": {
        "vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
        "auto": "AutoModelForSeq2SeqLM",
    },
    "blenderbot": {**_PAIRS, "max_position_embeddings": 256, "auto": "AutoModelForSeq2SeqLM"},
    # images
    "deit": {**_IMAGES, **_NO_DROPOUT_ENCODER, "auto": "AutoModelForImageClassification"},
    "ijepa": {**_IMAGES, **_NO_DROPOUT_ENCODER, "auto": "AutoModelForImageClassification"},
    "beit": {**_IMAGES, **_NO_DROPOUT_ENCODER, "drop_path_rate": 0, "auto": "AutoModelForImageClassification"},
    # hybrids
    "granitemoehybrid": {
        **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {
        **SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "lru_width": 32,
        "attention_window_size": 16, "block_types": ["recurrent", "attention"],
    },
}  # fmt: skip
"""45 more, which were listed before any change was made for them."""


_TEXT = {**_GATED, **_ENDS, "attention_dropout": 0}

NAMED: dict[str, dict[str, object]] = {
    # norms over a width that is split
    "olmo3": {**_GROUPED, **_ENDS, "sliding_window": 8},
    "stablelm, norms of heads": {"model_type": "stablelm", **_GROUPED, **_ENDS, "qk_layernorm": True, "hidden_dropout": 0},
    "cohere, norms of heads": {"model_type": "cohere", **_GROUPED, **_ENDS, "use_qk_norm": True},
    # mixtures
    "granitemoe": {**_GROUPED, **_ENDS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax": {
        **_SHARED_HEADS, **_ENDS, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "dbrx": {
        "vocab_size": 256, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256,
        "attn_config": "{kv_n_heads: 2, rope_theta: 10000.0, clip_qkv: 8.0}",
        "ffn_config": "{hidden_size: 32, ffn_hidden_size: 16, moe_num_experts: 4, moe_top_k: 2}",
    },
    # encoders, and models whose first input is no token
    "roberta": {**_GATED, **_NO_DROPOUT_ENCODER, "pad_token_id": 1, "auto": "AutoModelForMaskedLM"},
    "dinov2": {
        **{key: value for key, value in _IMAGES.items() if key != "intermediate_size"}, **_NO_DROPOUT_ENCODER,
        "mlp_ratio": 2, "auto": "AutoModelForImageClassification",
    },
    "clip_vision_model": {**_IMAGES, "auto": "AutoModel"},
    "clip_text_model": {**_TEXT, "auto": "AutoModel"},
    "whisper": {
        **_PAIRS, **_ENDS, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 256,
        "decoder_start_token_id": 2, "auto": "AutoModelForSpeechSeq2Seq",
    },
    "t5": {
        "vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
        "decoder_start_token_id": 0, "auto": "AutoModelForSeq2SeqLM",
    },
    # hybrids
    "bamba": {
        **_GROUPED, **_ENDS, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "jamba": {
        **_GROUPED, **_ENDS, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "mamba2": {
        "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8,
        "n_groups": 1, "chunk_size": 8, **_ENDS,
    },
    "qwen3_next": {
        **_SHARED_HEADS, **_FEW, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
"""Architectures that are known to be hard, for one reason each."""


def overrides(name: str) -> list[str]:
    """The overrides that configure an architecture, without its plan."""
    sizes = ["train.batch_size=8", "train.seq_len=64"]
    if name in OWN:
        return [f"model={OWN[name]}", *sizes]
    settings = {**(HUGGING_FACE.get(name) or UNSEEN.get(name) or NAMED.get(name) or NEXT[name])}
    auto, kind = settings.pop("auto", None), settings.pop("model_type", name)
    config = ", ".join(f"{key}: {_word(value)}" for key, value in settings.items())
    chosen = [f"model.auto={auto}"] if auto else []
    return ["model=hf", f"model.config={{model_type: {kind}, {config}}}", *chosen, *sizes]


def _word(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


NAMES = (*OWN, *HUGGING_FACE)
